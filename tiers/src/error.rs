//! Why stored KV was refused.

/// Why stored KV cannot be used. The caller computes it again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// It does not begin as a record does.
    #[error("not a file of stored KV: expected it to begin with `stolonKV`")]
    NotStoredKv,
    /// It has another version of the format.
    #[error("stored KV: expected version {expected} of the format, got {got}")]
    Version {
        /// The version that this program reads.
        expected: u32,
        /// The version of the file.
        got: u32,
    },
    /// It was computed by another model, or on other terms.
    #[error(
        "the stored KV is that of another model, of other weights or options, or of another \
         instruction set (the fingerprints differ)"
    )]
    Fingerprint,
    /// It belongs to another namespace.
    #[error("the stored KV belongs to another namespace (cache salt or tenant)")]
    Namespace,
    /// A number is out of range.
    #[error("stored KV: {what}: expected {expected}, got {got}")]
    Number {
        /// What the number is.
        what: &'static str,
        /// The range.
        expected: String,
        /// The number in the file.
        got: u64,
    },
    /// Its key does not follow from the key before it and its tokens.
    #[error("stored KV: a record does not continue the prefix before it")]
    BrokenChain,
    /// Its bytes were changed.
    #[error("stored KV: the checksum is wrong, so the data are damaged")]
    Checksum,
    /// It ends too early.
    #[error("stored KV: it ends after {got} bytes of a record, expected {expected}")]
    Truncated {
        /// The size of the record, or of its header, in bytes.
        expected: usize,
        /// Number of bytes before the end.
        got: usize,
    },
    /// There are bytes after its end.
    #[error("stored KV: bytes follow after the end of the prefix")]
    TrailingBytes,
}
