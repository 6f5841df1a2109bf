//! Opens and reads the files of a model. Only regular files are opened, and small files are read
//! up to a maximum size, so that no file can block the loader or fill the memory.

use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::path::Path;

use serde_json::Value;

use crate::error::ModelError;

/// Maximum size in bytes of a JSON file other than `tokenizer.json`. The largest known one, the
/// index of a model in 163 files, has 9 MB.
pub(crate) const JSON_BYTES_MAX: u64 = 16 << 20;
/// Maximum size in bytes of `tokenizer.json`. The largest known ones have 35 MB.
pub(crate) const TOKENIZER_BYTES_MAX: u64 = 128 << 20;
/// Maximum size in bytes of a chat template. Known ones have up to 20 kB.
pub(crate) const TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// Opens the file `path` for reading. Symbolic links are followed, because the hub's cache consists
/// of them.
///
/// # Errors
/// [`ModelError::Io`] if the file cannot be opened or is not a regular file.
pub(crate) fn open(path: &Path) -> Result<File, ModelError> {
    let io = |error| ModelError::Io { path: path.to_owned(), error };
    let check = |metadata: std::fs::Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(Error::other("expected a regular file")),
    };
    // Opening a pipe blocks until there is a writer, so the type is checked before.
    std::fs::metadata(path).and_then(check).map_err(io)?;
    let file = File::open(path).map_err(io)?;
    file.metadata().and_then(check).map_err(io)?;
    Ok(file)
}

/// Reads the file `path` of at most `bytes_max` bytes.
///
/// # Errors
/// [`ModelError::Io`], and [`ModelError::TooLarge`] for a larger file.
pub(crate) fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>, ModelError> {
    let io = |error| ModelError::Io { path: path.to_owned(), error };
    let too_large = || ModelError::TooLarge { file: path.display().to_string(), bytes_max };
    let file = open(path)?;
    let size = file.metadata().map_err(io)?.len();
    if size > bytes_max {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(size as usize);
    // The file may grow while it is read.
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > bytes_max {
        return Err(too_large());
    }
    Ok(bytes)
}

/// Reads and parses a JSON file of at most [`JSON_BYTES_MAX`] bytes.
pub(crate) fn read_json(path: &Path) -> Result<Value, ModelError> {
    let bytes = read(path, JSON_BYTES_MAX)?;
    serde_json::from_slice(&bytes).map_err(|e| ModelError::malformed(path.display().to_string(), e))
}

/// The result of reading a file, or `None` if the file does not exist.
pub(crate) fn optional<T>(result: Result<T, ModelError>) -> Result<Option<T>, ModelError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ModelError::Io { error, .. }) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
