//! [`Cursor`]: reads values from bytes in order, with errors that say what was being read.

use crate::error::ModelError;

/// Maximum length of a string in bytes. Chat templates have some ten thousand bytes.
const STRING_BYTES_MAX: u64 = 1 << 26;

/// A read position in the bytes of a file.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a str, bytes: &'a [u8]) -> Self {
        Self { file, bytes, position: 0 }
    }

    pub(super) fn file(&self) -> &'a str {
        self.file
    }

    /// Number of bytes read so far.
    pub(super) fn position(&self) -> u64 {
        self.position as u64
    }

    /// Reads the next `count` bytes. `what` describes them in errors.
    pub(super) fn take(&mut self, what: &str, count: u64) -> Result<&'a [u8], ModelError> {
        let rest = &self.bytes[self.position..];
        match usize::try_from(count).ok().and_then(|count| rest.get(..count)) {
            Some(taken) => {
                self.position += taken.len();
                Ok(taken)
            }
            None => Err(self.truncated(what, count)),
        }
    }

    fn truncated(&self, what: &str, count: u64) -> ModelError {
        ModelError::Truncated {
            file: self.file.into(),
            what: what.into(),
            expected: self.position().saturating_add(count),
            got: self.bytes.len() as u64,
        }
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(what, N as u64)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a string: its length in bytes, followed by UTF-8.
    pub(super) fn string(&mut self, what: &str) -> Result<String, ModelError> {
        let length = self.u64(what)?;
        if length > STRING_BYTES_MAX {
            let reason = format!("{what}: expected at most {STRING_BYTES_MAX} bytes, got {length}");
            return Err(ModelError::malformed(self.file, reason));
        }
        let bytes = self.take(what, length)?;
        let text = std::str::from_utf8(bytes)
            .map_err(|e| ModelError::malformed(self.file, format!("{what}: {e}")))?;
        Ok(text.to_owned())
    }

    /// Returns an error if the remaining bytes are too few for `count` entries of at least
    /// `bytes_min` bytes each.
    pub(super) fn check_count(
        &self,
        what: &str,
        count: u64,
        bytes_min: u64,
    ) -> Result<(), ModelError> {
        let needed = count.saturating_mul(bytes_min);
        if needed > (self.bytes.len() - self.position) as u64 {
            return Err(self.truncated(&format!("{count} {what}"), needed));
        }
        Ok(())
    }
}
