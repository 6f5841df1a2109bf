//! Why KV cannot be stored, or stored KV not be used.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::DiskError;
use crate::object_error::ObjectError;

/// Why tiers cannot be used, or a prefix not be exported or imported.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// A stored prefix cannot be used: its data are damaged, or it was computed by another model or
    /// with other options.
    #[error(transparent)]
    StoredKv(#[from] FormatError),
    /// The backend cannot copy KV out of and into its pool.
    #[error("this engine's backend cannot copy KV blocks")]
    NoKvCopies,
    /// The fingerprint of the KV cannot be computed: a file of the model was changed after it was
    /// loaded, for example.
    #[error("KV cannot be stored or read: {0}")]
    KvFormat(Arc<str>),
    /// The prompt was computed, but not all of its full blocks were in the cache when they were to
    /// be copied: the prompt has no full block, the pool is too small for it and the running
    /// requests, or prefix caching is off.
    #[error("expected {expected} tokens of the prompt in the cache, got {got}")]
    NotCached {
        /// Number of tokens of the prompt's full blocks, at least one block.
        expected: usize,
        /// Number of cached tokens.
        got: usize,
    },
    /// The directory of the disk tier cannot be used.
    #[error(transparent)]
    Disk(Arc<DiskError>),
    /// The object store behind the disk tier cannot be used.
    #[error(transparent)]
    ObjectStore(Arc<ObjectError>),
    /// A file could not be read or written.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        error: Arc<io::Error>,
    },
}

impl TierError {
    pub(crate) fn file(path: &Path, error: io::Error) -> TierError {
        TierError::File { path: path.to_owned(), error: Arc::new(error) }
    }
}

/// Why stored KV cannot be used. The caller computes the prompt instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// It does not begin as a record does.
    #[error("not a file of stored KV: expected it to begin with `stolonKV`")]
    NotStoredKv,
    /// It has another version of the format.
    #[error("stored KV: expected version {expected} of the format or an earlier one, got {got}")]
    Version {
        /// The latest version that this program reads.
        expected: u32,
        /// The version of the file.
        got: u32,
    },
    /// It was computed by another model, or with other options.
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
        /// The name of the number.
        what: &'static str,
        /// The range.
        expected: String,
        /// The number in the file.
        got: u64,
    },
    /// Its key does not follow from the key before it and its tokens.
    #[error("stored KV: a record does not continue the prefix before it")]
    BrokenChain,
    /// The numbers in a record do not name its images in their order.
    #[error(
        "stored KV: expected each image of a record to be named once, in the order of their \
         positions"
    )]
    Images,
    /// The positions of an image do not fill the rows of its grid.
    #[error("stored KV: expected positions of an image in rows of {columns}, got {got} positions")]
    ImageGrid {
        /// Number of columns of the grid.
        columns: u32,
        /// Number of positions.
        got: usize,
    },
    /// An image has fewer or more positions than its name says.
    #[error("stored KV: expected {expected} positions of an image, got {got}")]
    ImageLength {
        /// The number of positions of the image.
        expected: u32,
        /// The number of consecutive positions in the prefix.
        got: usize,
    },
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
