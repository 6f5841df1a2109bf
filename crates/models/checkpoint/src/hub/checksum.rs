//! [`Checksum`] verifies the content of a file against the hash that the hub sends as its ETag.
//!
//! The ETag of a large file (Git LFS) is the SHA-256 of its content. The ETag of any other file is
//! the name of its Git object, the SHA-1 of `blob SIZE\0` and the content. Mirrors may send other
//! ETags; such files are not verified.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// The hash of a file's beginning, and the expected hash of the whole file.
pub(super) struct Checksum {
    name: &'static str,
    context: Context,
    expected: String,
}

impl Checksum {
    /// Starts the hash of a file with the ETag `etag` and the size `size`. Returns `None` if the
    /// ETag is not a hash.
    pub(super) fn start(etag: &str, size: Option<u64>) -> Option<Self> {
        let is_hex = etag.bytes().all(|b| b.is_ascii_hexdigit());
        let (name, context) = match (etag.len(), size) {
            (64, _) if is_hex => ("SHA-256", Context::new(&SHA256)),
            (40, Some(size)) if is_hex => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                ("SHA-1 of the Git object", context)
            }
            _ => return None,
        };
        Some(Self { name, context, expected: etag.to_ascii_lowercase() })
    }

    /// Adds the next bytes of the file.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
    }

    /// Compares the hash of all bytes with the expected one.
    ///
    /// # Errors
    /// Both hashes in a string, if they differ.
    pub(super) fn finish(self) -> Result<(), String> {
        let digest = self.context.finish();
        let got: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        match got == self.expected {
            true => Ok(()),
            false => Err(format!("{}: expected {}, got {got}", self.name, self.expected)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(etag: &str, content: &[u8]) -> Option<Result<(), String>> {
        let mut checksum = Checksum::start(etag, Some(content.len() as u64))?;
        content.chunks(3).for_each(|part| checksum.update(part));
        Some(checksum.finish())
    }

    /// Goal: hashes are the same as the ones of `sha256sum` and `git hash-object`.
    #[test]
    fn hashes_are_those_of_git() {
        let sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        assert_eq!(check(sha256, b"hello"), Some(Ok(())));
        assert_eq!(check("b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0", b"hello"), Some(Ok(())));
        assert_eq!(check("B6FC4C620B67D95F953A5C1C1230AAAB5DB5A1B0", b"hello"), Some(Ok(())));
        let error = check(sha256, b"hellp").unwrap().unwrap_err();
        assert!(error.starts_with(&format!("SHA-256: expected {sha256}, got ")), "{error}");
        for other in ["", "abc", &"g".repeat(64), &"0".repeat(41)] {
            assert_eq!(check(other, b"hello"), None, "{other}");
        }
    }
}
