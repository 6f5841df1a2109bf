//! Sizes in bytes: parsing them from flags, printing them, and this process's resident memory.

use bytesize::ByteSize;

/// Parses a number of bytes such as `1048576`, or a number with a unit such as `512M` or `1.5G`.
/// The units K, M, G and T are powers of 1,024, in upper or lower case; `KB` and `KiB` mean the
/// same as `K`, and so on.
///
/// # Errors
/// A message with the accepted forms and the text, if it is not a size or is below 1 byte.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    parse_bytes_from(1, text)
}

/// As [`parse_bytes`], but 0 is also a size.
///
/// # Errors
/// A message with the accepted forms and the text, if it is not a size.
pub fn parse_bytes_or_zero(text: &str) -> Result<u64, String> {
    parse_bytes_from(0, text)
}

fn parse_bytes_from(least: u64, text: &str) -> Result<u64, String> {
    let text = text.trim();
    // `bytesize` takes `K` and `KB` for 1,000 bytes. Sizes of memory are powers of 1,024.
    let number = text.trim_end_matches(['b', 'B']).trim_end_matches(['i', 'I']);
    let binary = match number.ends_with(|last: char| last.is_ascii_alphabetic()) {
        true => format!("{number}iB"),
        false => text.to_owned(),
    };
    match binary.parse::<ByteSize>() {
        Ok(ByteSize(bytes)) if (least..u64::MAX).contains(&bytes) => Ok(bytes),
        _ => Err(format!("expected a size such as 1048576, 512M or 1.5G, got `{text}`")),
    }
}

/// A size with a binary unit and at most one decimal: `1.5 GiB`, `512 MiB`.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string().replace(".0 ", " ")
}

/// Resident memory of this process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Resident {
    /// All resident pages.
    pub total: u64,
    /// Anonymous pages: heap, stacks and the KV cache.
    pub anonymous: u64,
    /// File-backed pages: mapped weights and the program itself.
    pub file: u64,
}

/// Reads `/proc/self/status`; `None` on systems without that file.
#[must_use]
pub fn resident() -> Option<Resident> {
    parse_status(&std::fs::read_to_string("/proc/self/status").ok()?)
}

fn parse_status(status: &str) -> Option<Resident> {
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(kib * 1024)
    };
    Some(Resident {
        total: field("VmRSS:")?,
        anonymous: field("RssAnon:")?,
        file: field("RssFile:")? + field("RssShmem:").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: every form of a size is parsed, and anything else is refused.
    #[test]
    fn sizes_are_parsed() {
        for (text, bytes) in [
            ("1048576", 1 << 20),
            ("512K", 512 << 10),
            ("64MiB", 64 << 20),
            ("1.5G", 3 << 29),
            ("2 gb", 2 << 30),
            ("1T", 1 << 40),
            ("64m", 64 << 20),
            ("16B", 16),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for bad in ["", "M", "-1", "1X", "1e9", "0", "9999999999T"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        for (text, bytes) in [("0", Ok(0)), ("0M", Ok(0)), (" 2K", Ok(2048))] {
            assert_eq!(parse_bytes_or_zero(text), bytes, "{text}");
        }
        assert!(parse_bytes_or_zero("-1").is_err() && parse_bytes_or_zero("").is_err());
    }

    /// Goal: sizes are printed with a binary unit and at most one decimal.
    #[test]
    fn sizes_are_printed() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (512 << 20, "512 MiB"),
            (3 << 29, "1.5 GiB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }

    /// Goal: the kernel's fields are found by name and converted from KiB.
    #[test]
    fn process_status_is_parsed() {
        let status = "Name:\tstolon\nVmRSS:\t    2048 kB\nRssAnon:\t    1024 kB\n\
                      RssFile:\t    1000 kB\nRssShmem:\t      24 kB\nThreads:\t3\n";
        let expected = Resident { total: 2 << 20, anonymous: 1 << 20, file: 1 << 20 };
        assert_eq!(parse_status(status), Some(expected));
        assert_eq!(parse_status("Name: x"), None);
    }
}
