//! The directory of a disk tier: its lock, its key of namespaces, and the names of its files.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use stolon_kvcache::EvictionOrder;

use crate::disk_index::{EXTENSION, Index};
use crate::files::{self, Links, write_atomically};
use crate::key::ChainKey;

/// The folder of the files of this version of the format.
const FOLDER: &str = "v1";
/// The file with the key of namespaces.
const KEY_FILE: &str = "namespace-key";

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// Another engine uses it, in this process or in another one.
    #[error(
        "{}: another engine, of this process or another one, uses this directory of stored KV: give \
         each engine its own",
        .directory.display()
    )]
    Locked {
        /// The directory.
        directory: PathBuf,
    },
    /// It cannot be read or written.
    #[error("{}: {error}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
}

/// A directory that this process owns.
#[derive(Debug)]
pub(super) struct Directory {
    /// The folder with the records.
    pub(super) folder: PathBuf,
    pub(super) namespace_key: [u8; 32],
    /// Locked as long as it is open, until [`Directory::unlock`].
    lock: File,
}

impl Directory {
    /// Makes the directory if it does not exist, and locks it.
    pub(super) fn open(path: &Path) -> Result<Directory, DiskError> {
        let folder = path.join(FOLDER);
        // Stored KV reveals the prompts.
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&folder).map_err(failed(&folder))?;
        let file = path.join("lock");
        let mut options = File::options();
        options.create(true).truncate(false).read(true).write(true);
        let lock = files::open_with(&mut options, &file, Links::Refuse);
        let lock = lock.map_err(failed(&file))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(DiskError::Locked { directory: path.to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(failed(&file)(error)),
        }
        let file = folder.join(KEY_FILE);
        let namespace_key = namespace_key(&file).map_err(failed(&file))?;
        Ok(Directory { folder, namespace_key, lock })
    }

    /// The records in it.
    pub(super) fn scan(&self, eviction: Box<dyn EvictionOrder>) -> Result<Index, DiskError> {
        Index::scan(&self.folder, eviction).map_err(failed(&self.folder))
    }

    /// Unlocks the directory, so that another process can open it.
    pub(super) fn unlock(&self) {
        // If this fails, the directory is free when this process ends.
        let _ = self.lock.unlock();
    }

    /// The file of a record.
    pub(super) fn record(&self, key: &ChainKey) -> PathBuf {
        let name = key.to_hex();
        self.folder.join(&name[..2]).join(name).with_extension(EXTENSION)
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> DiskError + use<> {
    let path = path.to_owned();
    |error| DiskError::Io { path, error }
}

/// The key in a file. It is made if it does not exist; if it has another size, it is made again.
fn namespace_key(path: &Path) -> io::Result<[u8; 32]> {
    let mut bytes = Vec::new();
    let read =
        files::open(path, Links::Refuse).and_then(|file| file.take(33).read_to_end(&mut bytes));
    let read = match read {
        Ok(_) => <[u8; 32]>::try_from(bytes).ok(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    if let Some(key) = read {
        return Ok(key);
    }
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(io::Error::other)?;
    write_atomically(path, |file| file.write_all(&key))?;
    Ok(key)
}
