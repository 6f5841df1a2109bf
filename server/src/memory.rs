//! Sizes in bytes: reading them from flags, printing them, and asking the system how much memory
//! this process holds.

/// Parses `1048576`, `512K`, `512M`, `1.5G`, with or without an `iB` or `B` after the letter;
/// powers of 1,024.
///
/// # Errors
/// What was expected and what came.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("expected a size such as 1048576, 512M or 1.5G, got `{text}`");
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits_end);
    let exponent = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 1,
        "m" | "mb" | "mib" => 2,
        "g" | "gb" | "gib" => 3,
        "t" | "tb" | "tib" => 4,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = number * 1024f64.powi(exponent);
    if bytes >= 1.0 && bytes < 2f64.powi(63) { Ok(bytes as u64) } else { Err(wrong()) }
}

/// A size for people: `1.5 GiB`.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            let decimals = usize::from(unit != "B" && value < 100.0);
            return format!("{value:.decimals$} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// Memory this process holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Resident {
    /// All resident pages.
    pub total: u64,
    /// Those of them that belong to no file: heap, stacks, the KV cache.
    pub anonymous: u64,
    /// Those that are parts of mapped files: weights and the program itself.
    pub file: u64,
}

/// What `/proc/self/status` says; `None` where there is no such file.
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

    /// Goal: every form of a size is read, and what is none is refused.
    #[test]
    fn sizes_parse() {
        for (text, bytes) in [
            ("1048576", 1 << 20),
            ("512K", 512 << 10),
            ("64MiB", 64 << 20),
            ("1.5G", 3 << 29),
            ("2 gb", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for bad in ["", "M", "-1", "1X", "1e9", "0", "9999999999T"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    /// Goal: sizes are printed short.
    #[test]
    fn sizes_print() {
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

    /// Goal: the kernel's table is read by its names and in its unit.
    #[test]
    fn status_is_read() {
        let status = "Name:\tstolon\nVmRSS:\t    2048 kB\nRssAnon:\t    1024 kB\n\
                      RssFile:\t    1000 kB\nRssShmem:\t      24 kB\nThreads:\t3\n";
        let expected = Resident { total: 2 << 20, anonymous: 1 << 20, file: 1 << 20 };
        assert_eq!(parse_status(status), Some(expected));
        assert_eq!(parse_status("Name: x"), None);
    }
}
