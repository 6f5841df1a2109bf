//! [`Contents`] are what a model's files contain, for a hash of all of it.

use std::sync::Arc;

use crate::error::ModelError;
use crate::mmap::Bytes;

/// Size in bytes of the pieces that are hashed at once.
const PIECE_BYTES: usize = 16 << 20;

/// The contents of all files of [`Weights`](super::Weights), as they were when these were loaded. The
/// files stay mapped, which takes no memory.
#[derive(Debug)]
pub struct Contents(Vec<Content>);

#[derive(Debug)]
struct Content {
    /// The file, for errors.
    file: String,
    len: usize,
    bytes: Source,
}

#[derive(Debug)]
enum Source {
    /// A file that is mapped.
    Mapped(Arc<Bytes>),
    /// The hashes of the pieces of other bytes.
    Hashed(Vec<[u8; 32]>),
}

impl Contents {
    pub(super) fn of<'a>(
        regions: impl Iterator<Item = (&'a str, &'a Arc<Bytes>)>,
        threads: usize,
    ) -> Self {
        let content = |(file, bytes): (&str, &Arc<Bytes>)| Content {
            file: file.to_owned(),
            len: bytes.len(),
            bytes: match bytes.are_mapped() {
                true => Source::Mapped(Arc::clone(bytes)),
                false => Source::Hashed(hashes(bytes, threads)),
            },
        };
        Self(regions.map(content).collect())
    }

    /// A hash of everything. Pieces of the files are hashed on `threads` threads, and their memory
    /// pages are released.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if a file was changed after it was loaded.
    pub fn hash(&self, threads: usize) -> Result<[u8; 32], ModelError> {
        let mut all = blake3::Hasher::new();
        // The lengths keep files with the same concatenation apart.
        for Content { len, .. } in &self.0 {
            all.update(&(*len as u64).to_le_bytes());
        }
        for Content { file, bytes, .. } in &self.0 {
            match bytes {
                Source::Hashed(hashes) => all.update(hashes.as_flattened()),
                Source::Mapped(bytes) => {
                    let changed = || {
                        let reason = "the file was changed after it was loaded";
                        ModelError::malformed(file.clone(), reason)
                    };
                    // A part that was cut off cannot be read.
                    if !bytes.are_of_unchanged_file() {
                        return Err(changed());
                    }
                    let hashes = hashes(bytes, threads);
                    if !bytes.are_of_unchanged_file() {
                        return Err(changed());
                    }
                    all.update(hashes.as_flattened())
                }
            };
        }
        Ok(*all.finalize().as_bytes())
    }
}

/// The hashes of the pieces of `bytes`.
fn hashes(bytes: &Bytes, threads: usize) -> Vec<[u8; 32]> {
    let pieces: Vec<&[u8]> = bytes.chunks(PIECE_BYTES).collect();
    let mut hashes = vec![[0; 32]; pieces.len()];
    let per_thread = pieces.len().div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        for (pieces, hashes) in pieces.chunks(per_thread).zip(hashes.chunks_mut(per_thread)) {
            scope.spawn(move || {
                for (piece, hash) in pieces.iter().zip(hashes) {
                    *hash = *blake3::hash(piece).as_bytes();
                    bytes.release(piece);
                }
            });
        }
    });
    hashes
}
