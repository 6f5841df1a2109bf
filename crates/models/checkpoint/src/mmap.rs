//! [`Bytes`] is the memory that weights are read from: a mapped file, a part of the binary, or a
//! buffer.
//!
//! This is the only file of the crate with unsafe code. A mapping lives as long as its [`Bytes`],
//! which the model's [`Weights`](crate::Weights) own.
#![allow(unsafe_code, reason = "mapping a file into memory")]

use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Deref;
use std::path::Path;
use std::time::SystemTime;

use memmap2::Mmap;

use crate::error::ModelError;
use crate::files;
use crate::memory::out_of_memory;

/// Immutable bytes at a stable address.
pub(crate) enum Bytes {
    /// A file mapped read-only. Pages are read from disk on first access.
    Mapped(MappedFile),
    /// A part of the binary.
    #[cfg_attr(
        not(feature = "demo-model"),
        allow(dead_code, reason = "only the demo model is embedded in the binary")
    )]
    Static(&'static [u8]),
    /// A buffer.
    Owned(Vec<u8>),
    /// The beginning of a file on the hub, with at least its header, and the size of the whole file
    /// in bytes. Only inspection uses it; see [`inspect`](crate::inspect).
    #[cfg(feature = "hub")]
    Head(Vec<u8>, u64),
}

/// A file mapped read-only.
pub(crate) struct MappedFile {
    map: Mmap,
    file: File,
    /// When it was changed last before it was mapped, where the system knows it.
    modified: Option<SystemTime>,
}

impl MappedFile {
    /// Whether the file has the content that it had when it was mapped, as far as the system tells.
    /// Files that replace it under its name do not matter: the mapping keeps the content.
    fn is_unchanged(&self) -> bool {
        let now = self.file.metadata();
        now.is_ok_and(|now| {
            now.len() == self.map.len() as u64 && now.modified().ok() == self.modified
        })
    }
}

impl Bytes {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// [`ModelError::Io`] if the file cannot be opened or mapped or is not a regular file, and
    /// [`ModelError::OutOfMemory`] if the process has no address space for it.
    pub(crate) fn map(path: &Path) -> Result<Self, ModelError> {
        let io = |error| ModelError::Io { path: path.to_owned(), error };
        let file = files::open(path)?;
        let metadata = file.metadata().map_err(io)?;
        let size = metadata.len();
        if size == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        let not_mapped = |error: std::io::Error| match error.kind() {
            // The process lacks address space. Nothing is wrong with the file.
            ErrorKind::OutOfMemory => {
                out_of_memory(&format!("the address space for {}", path.display()), size)
            }
            _ => io(error),
        };
        // SAFETY: The mapping is read-only. `Mmap::map` requires that the file is not modified or
        // truncated while it is mapped. No program can prevent other processes from doing that (an
        // access to a truncated part then faults), as with every mapped model file. Ordinary
        // updates do not do it: downloads write a new file and rename it when it is complete.
        let map = unsafe { Mmap::map(&file) }.map_err(not_mapped)?;
        Ok(Self::Mapped(MappedFile { map, file, modified: metadata.modified().ok() }))
    }

    /// Whether the bytes are those of a file, as it is now.
    pub(crate) fn are_of_unchanged_file(&self) -> bool {
        matches!(self, Self::Mapped(mapped) if mapped.is_unchanged())
    }

    /// Whether the bytes are those of a file, which may be changed later.
    pub(crate) fn are_mapped(&self) -> bool {
        matches!(self, Self::Mapped(_))
    }

    /// Size of the whole file in bytes. `Bytes` may have only its beginning.
    pub(crate) fn file_bytes(&self) -> u64 {
        match self {
            #[cfg(feature = "hub")]
            Self::Head(_, file_bytes) => *file_bytes,
            bytes => bytes.len() as u64,
        }
    }
}

impl Bytes {
    /// Releases the memory pages of `part` if it is part of a mapped file. The pages are read from
    /// disk again on the next access.
    pub(super) fn release(&self, part: &[u8]) {
        #[cfg(unix)]
        if let Self::Mapped(MappedFile { map, .. }) = self {
            let ends = part.as_ptr_range();
            let all = map.as_ptr_range();
            if part.is_empty() || ends.start < all.start || ends.end > all.end {
                return;
            }
            let offset = ends.start.addr() - all.start.addr();
            // SAFETY: The mapping is read-only and backed by a file, so a released page has the
            // same content when it is read again, and borrowed slices remain valid.
            let advised = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                map.unchecked_advise_range(advice, offset, part.len())
            };
            // If this fails, the pages stay in memory, but the results are the same.
            if let Err(error) = advised {
                tracing::debug!(%error, "cannot release the pages of weights that are packed");
            }
        }
        #[cfg(not(unix))]
        let _ = part;
    }
}

impl Bytes {
    /// Tells the system that the bytes in `range` are read in small pieces at random places, so that
    /// it does not read what lies behind them.
    pub(crate) fn expect_random_reads(&self, range: std::ops::Range<usize>) {
        #[cfg(unix)]
        if let Self::Mapped(MappedFile { map, .. }) = self
            && let Err(error) = map.advise_range(memmap2::Advice::Random, range.start, range.len())
        {
            tracing::debug!(%error, "cannot tell how rows of a table are read");
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(mapped) => &mapped.map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            #[cfg(feature = "hub")]
            Self::Head(bytes, _) => bytes,
        }
    }
}

impl fmt::Debug for Bytes {
    /// Shows the variant and the length instead of the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let variant = match self {
            Self::Mapped(_) => "Mapped",
            Self::Static(_) => "Static",
            Self::Owned(_) => "Owned",
            #[cfg(feature = "hub")]
            Self::Head(..) => "Head",
        };
        write!(f, "{variant}({} bytes)", self.len())
    }
}
