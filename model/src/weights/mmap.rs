//! The bytes that weights are read from: a mapped file, the binary itself, or a buffer.
//!
//! The only file of the loader with unsafe code. A map lives as long as the [`Bytes`] that holds
//! it, which the model's [`Weights`](super::Weights) own.
#![allow(unsafe_code, reason = "mapping a file into memory")]

use std::fmt;
use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use crate::error::ModelError;

/// Bytes that stay where they are.
pub(crate) enum Bytes {
    /// A file, mapped read-only; pages are read when they are first touched.
    Mapped(Mmap),
    /// Part of the binary.
    #[cfg_attr(not(feature = "demo-model"), allow(dead_code, reason = "the demo model's"))]
    Static(&'static [u8]),
    /// Made in memory.
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps the file at `path`. An empty file gives empty bytes.
    ///
    /// # Errors
    /// [`ModelError::Io`].
    pub(crate) fn map(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(io(std::io::Error::other("expected a regular file")));
        }
        if metadata.len() == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: the map is read-only and private to this process. What no program can rule
        // out is that another one cuts the file short meanwhile (the access then faults), as
        // with every mapped model file; downloads go to a new file that is renamed when
        // complete, so ordinary updates do not do that.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self::Mapped(map))
    }
}

impl Bytes {
    /// If `part` is a part of a mapped file, gives the memory of its pages back. They are read again
    /// when they are touched again.
    pub(super) fn release(&self, part: &[u8]) {
        #[cfg(unix)]
        if let Self::Mapped(map) = self {
            let ends = part.as_ptr_range();
            let all = map.as_ptr_range();
            if part.is_empty() || ends.start < all.start || ends.end > all.end {
                return;
            }
            let offset = ends.start.addr() - all.start.addr();
            // SAFETY: the map is read-only and of a file, so that a page that was given back
            // reads the same the next time; borrowed slices stay valid.
            let advised = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                map.unchecked_advise_range(advice, offset, part.len())
            };
            // A refusal costs memory only.
            if let Err(error) = advised {
                tracing::debug!(%error, "the pages of weights that are packed were not given back");
            }
        }
        #[cfg(not(unix))]
        let _ = part;
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Bytes {
    /// Where the bytes are and how many, not the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self {
            Self::Mapped(_) => "Mapped",
            Self::Static(_) => "Static",
            Self::Owned(_) => "Owned",
        };
        write!(f, "{place}({} bytes)", self.len())
    }
}
