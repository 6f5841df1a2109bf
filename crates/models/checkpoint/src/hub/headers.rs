//! Reads the headers of a model's weights without downloading the weights.

use std::io::{Error, Write};
use std::path::PathBuf;

use super::client::{self, Failure};
use super::{HubOptions, ModelRef, Snapshot, WEIGHT_BYTES_MAX, cached, with_snapshot};
use crate::error::ModelError;
use crate::gguf;
use crate::mmap::Bytes;
use crate::weights::safetensors;

/// Number of bytes of a file after which its header is parsed for the first time. Each further
/// attempt has twice as many bytes.
const FIRST_ATTEMPT: usize = 64 << 10;
/// Maximum number of bytes of a file that are requested. It is above the maximum length of a
/// header.
const HEAD_BYTES_MAX: usize = 132 << 20;

/// The known parts of the weights of a model on the hub.
#[derive(Debug)]
pub(crate) enum Remote {
    /// All files are in the cache. The path is the snapshot or a GGUF file.
    Cached(PathBuf),
    /// The parts of a GGUF model with their headers, and the directory of the snapshot.
    Gguf { directory: PathBuf, files: Vec<(String, Bytes)> },
    /// The safetensors files with their headers, and the directory of the snapshot, which contains
    /// all other files.
    Safetensors { directory: PathBuf, files: Vec<(String, Bytes)> },
}

/// Downloads all files of the model except its weights, and the headers of the weights. The
/// arguments are the same as for [`fetch`](super::fetch).
///
/// # Errors
/// [`ModelError::Hub`], and errors of files in the cache.
pub(crate) fn headers(
    id: &str,
    revision: &str,
    file: Option<&str>,
    options: &HubOptions,
) -> Result<Remote, ModelError> {
    let model = ModelRef { id, revision, file };
    with_snapshot(
        &model,
        options,
        |path| Ok(Remote::Cached(path)),
        |snapshot, available| {
            let at_commit = ModelRef { revision: snapshot.commit, ..model };
            if let Some(path) = cached(&at_commit, snapshot.cache) {
                return Ok(Remote::Cached(path));
            }
            let files = snapshot.files(available)?;
            let is_gguf = files.path != snapshot.directory;
            let files = files.weights.into_iter().map(|name| {
                let bytes = snapshot.header(&name, is_gguf)?;
                Ok((name, bytes))
            });
            let files = files.collect::<Result<_, ModelError>>()?;
            let directory = snapshot.directory.clone();
            Ok(match is_gguf {
                true => Remote::Gguf { directory, files },
                false => Remote::Safetensors { directory, files },
            })
        },
    )
}

impl Snapshot<'_> {
    /// The header of the file `name`, from the cache if it is there, and otherwise from the hub.
    fn header(&self, name: &str, is_gguf: bool) -> Result<Bytes, ModelError> {
        let path = self.path(name)?;
        if path.exists() {
            return Bytes::map(&path);
        }
        let failed = |failure: Failure| failure.explain(self.model, name, self.options);
        self.request_header(name, is_gguf).map_err(failed)
    }

    fn request_header(&self, name: &str, is_gguf: bool) -> Result<Bytes, Failure> {
        let answer = self.client.get(&self.url(name), 0)?;
        let Some(size) = answer.size.filter(|_| answer.start == 0) else {
            return Err(Failure::answer(answer.status, "expected the file with its size"));
        };
        if size > WEIGHT_BYTES_MAX {
            let text = format!("expected at most {WEIGHT_BYTES_MAX} bytes, got {size}");
            return Err(Failure::answer(answer.status, text));
        }
        let has_header = if is_gguf { gguf::has_header } else { safetensors::has_header };
        let mut head =
            Head { bytes: Vec::new(), next: FIRST_ATTEMPT, size, has_header, done: false };
        let copied = client::copy(answer.body, &mut head, size, self.client.window(), |_| {});
        match copied {
            Err(error) if !head.done => Err(Failure::new(error)),
            _ => Ok(Bytes::Head(head.bytes, size)),
        }
    }
}

/// Receives the beginning of a file, and returns an error once it contains the header, so that the
/// rest is not sent. The parsers bound the length of headers.
struct Head {
    bytes: Vec<u8>,
    /// Number of bytes after which the header is parsed next.
    next: usize,
    /// Size of the whole file in bytes.
    size: u64,
    has_header: fn(&[u8], u64) -> bool,
    done: bool,
}

impl Write for Head {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() >= self.next {
            self.next = (2 * self.bytes.len()).min(HEAD_BYTES_MAX);
            self.done =
                self.bytes.len() >= HEAD_BYTES_MAX || (self.has_header)(&self.bytes, self.size);
        }
        match self.done {
            true => Err(Error::other("the header is complete")),
            false => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
