//! [`Cursor`] reads values from bytes in order, with errors that say what was being read.

use crate::error::ModelError;

/// Maximum size of a header in bytes. The largest known ones contain a vocabulary of 10 MB, and
/// some a whole `tokenizer.json` of 35 MB.
const HEADER_BYTES_MAX: u64 = 128 << 20;
/// Maximum number of elements of all arrays together. Known headers have up to 1.5 million.
const ELEMENTS_MAX: u64 = 1 << 23;

/// Maximum length of a metadata key or of a tensor's name in bytes. Known ones have up to 80.
const NAME_BYTES_MAX: usize = 1024;

/// A read position in the bytes of a file.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    position: usize,
    /// Number of elements that further arrays may have in total.
    elements_left: u64,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a str, bytes: &'a [u8]) -> Self {
        Self { file, bytes, position: 0, elements_left: ELEMENTS_MAX }
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
        self.check_header(count)?;
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

    /// Reads a name: a string of at most 1,024 bytes.
    pub(super) fn name(&mut self, what: &str) -> Result<String, ModelError> {
        let name = self.string(what)?;
        if name.len() > NAME_BYTES_MAX {
            return Err(self.too_many(what, "bytes", NAME_BYTES_MAX as u64, name.len() as u64));
        }
        Ok(name)
    }

    /// Reads a string: its length in bytes, followed by UTF-8.
    pub(super) fn string(&mut self, what: &str) -> Result<String, ModelError> {
        let length = self.u64(what)?;
        let bytes = self.take(what, length)?;
        let text = std::str::from_utf8(bytes)
            .map_err(|e| ModelError::malformed(self.file, format!("{what}: {e}")))?;
        Ok(text.to_owned())
    }

    /// Returns an error if the header would be too long with `count` more bytes.
    fn check_header(&self, count: u64) -> Result<(), ModelError> {
        let length = self.position().saturating_add(count);
        if length > HEADER_BYTES_MAX && length <= self.bytes.len() as u64 {
            return Err(self.too_many("the header", "bytes", HEADER_BYTES_MAX, length));
        }
        Ok(())
    }

    fn too_many(&self, what: &str, unit: &str, max: u64, got: u64) -> ModelError {
        let reason = format!("{what}: expected at most {max} {unit}, got {got}");
        ModelError::malformed(self.file, reason)
    }

    /// Counts an array of `count` elements. Returns an error if all arrays together have too many.
    pub(super) fn count_elements(&mut self, what: &str, count: u64) -> Result<(), ModelError> {
        let Some(left) = self.elements_left.checked_sub(count) else {
            return Err(self.too_many(what, "elements", self.elements_left, count));
        };
        self.elements_left = left;
        Ok(())
    }

    /// Returns an error if the remaining bytes are too few for `count` entries of at least
    /// `bytes_min` bytes each, or if `count` is more than `max`.
    pub(super) fn check_count(
        &self,
        what: &str,
        count: u64,
        bytes_min: u64,
        max: u64,
    ) -> Result<(), ModelError> {
        let needed = count.saturating_mul(bytes_min);
        if needed > (self.bytes.len() - self.position) as u64 {
            return Err(self.truncated(&format!("{count} {what}"), needed));
        }
        if count > max {
            return Err(self.too_many("the header", what, max, count));
        }
        Ok(())
    }
}
