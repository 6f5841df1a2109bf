//! Export and import of cached prefixes: a prepared document can be shipped with an application and
//! is served from the cache from the first request on.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stolon_kvcache::Namespace;
use stolon_scheduler::{SequenceRequest, StoredKv};
use stolon_tiers::{KvShape, PrefixReader, PrefixWriter, StoredPrefix, write_atomically};

use super::Engine;
use crate::{Error, Request};

/// Bytes of a file that are read at a time.
const PIECE_BYTES: usize = 1 << 20;

impl Engine {
    /// Computes what is not cached of a prompt and copies its keys and values out of the KV pool:
    /// those of all full blocks. [`Engine::import_prefix`] puts them into the cache of an engine
    /// with the same model and settings, which then answers as if it had computed them itself, bit
    /// for bit.
    ///
    /// The copy takes as much memory as the prompt's KV does.
    ///
    /// # Errors
    /// Those of [`Engine::warm`]; `InvalidParameter` for a request with a cache salt, whose
    /// namespace no other process has; [`Error::NoKvCopies`], [`Error::NotCached`].
    pub async fn export_prefix(&self, request: &Request) -> Result<ExportedPrefix, Error> {
        let shape = self.kv_shape()?;
        if self.namespace(request)? != Namespace::default() {
            let expected = "a prompt without a cache salt or tenant, because salts have another \
                            key in each process";
            return Err(Error::invalid("cache_salt", expected, "a prompt with one"));
        }
        let mut tokens = self.prompt_tokens(request).await?;
        let block_count = tokens.len() / shape.block_size;
        let expected = block_count.max(1) * shape.block_size;
        tokens.truncate(block_count * shape.block_size);
        if tokens.is_empty() {
            return Err(Error::NotCached { expected, got: 0 });
        }
        let request = request.clone().with_tokens(tokens.clone());
        if self.query_match_len(&request)? < tokens.len() {
            self.warm(request).await?;
        }
        let handle = &self.inner.handle;
        let shared = Arc::new(tokens.clone());
        let saved = handle.save_blocks(Namespace::default(), shared, 0..block_count).await?;
        let bytes = saved.unwrap_or_default();
        let got = bytes.len() / shape.block_bytes * shape.block_size;
        if got < expected {
            return Err(Error::NotCached { expected, got });
        }
        let writer = PrefixWriter::new(shape, Namespace::default(), tokens);
        Ok(ExportedPrefix { writer, bytes, next: 0, block_bytes: shape.block_bytes })
    }

    /// [`Engine::export_prefix`] to a file, which is written atomically on a blocking thread.
    /// Returns the number of exported tokens.
    ///
    /// # Errors
    /// Those of [`Engine::export_prefix`], and [`Error::File`].
    pub async fn export_prefix_to(
        &self,
        request: &Request,
        path: impl Into<PathBuf>,
    ) -> Result<usize, Error> {
        let (path, prefix) = (path.into(), self.export_prefix(request).await?);
        let tokens = prefix.token_count();
        let target = path.clone();
        let write = move || {
            write_atomically(&target, |file| {
                for record in prefix {
                    file.write_all(&record)?;
                }
                Ok(())
            })
        };
        self.blocking(write).await?.map_err(|error| file_error(&path, error))?;
        Ok(tokens)
    }

    /// Begins to import a prefix that [`Engine::export_prefix`] has exported.
    ///
    /// # Errors
    /// [`Error::NoKvCopies`].
    pub fn import_prefix(&self) -> Result<PrefixImport, Error> {
        let shape = self.kv_shape()?;
        let positions_max = self.inner.handle.prompt_limit().tokens;
        let reader = PrefixReader::new(shape, Namespace::default(), positions_max);
        Ok(PrefixImport { engine: self.clone(), shape, reader })
    }

    /// [`Engine::import_prefix`] from a file. Returns the number of tokens that are cached then.
    ///
    /// # Errors
    /// Those of [`PrefixImport`], [`Error::NoKvCopies`], and [`Error::File`].
    pub async fn import_prefix_from(&self, path: impl Into<PathBuf>) -> Result<usize, Error> {
        let (path, mut import) = (path.into(), self.import_prefix()?);
        let read = move || {
            let failed = |error| file_error(&path, error);
            let mut file = std::fs::File::open(&path).map_err(failed)?;
            if !file.metadata().map_err(failed)?.is_file() {
                return Err(failed(io::Error::other("expected a regular file")));
            }
            let mut piece = vec![0; PIECE_BYTES];
            loop {
                match file.read(&mut piece).map_err(failed)? {
                    0 => return Ok(import),
                    count => import.push(&piece[..count])?,
                }
            }
        };
        self.blocking(read).await??.finish().await
    }

    /// The format of this engine's KV.
    pub(super) fn kv_shape(&self) -> Result<KvShape, Error> {
        let handle = &self.inner.handle;
        let format = handle.kv_format().ok_or(Error::NoKvCopies)?;
        let (block_size, block_bytes) = (handle.spec().block_size, handle.spec().block_bytes);
        Ok(KvShape { fingerprint: format.fingerprint, block_size, block_bytes })
    }

    /// Runs work that may block on a thread of the engine's runtime that may.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let job = self.inner.handle.runtime().spawn_blocking(work);
        job.await.map_err(|_| stolon_scheduler::EngineError::Stopped.into())
    }
}

/// A copy of a prefix, as an iterator over the records of its file.
#[derive(Debug)]
pub struct ExportedPrefix {
    writer: PrefixWriter,
    /// The bytes of all blocks.
    bytes: Vec<u8>,
    /// Number of bytes that were written.
    next: usize,
    block_bytes: usize,
}

impl ExportedPrefix {
    /// Number of tokens: those of the prompt's full blocks.
    pub fn token_count(&self) -> usize {
        self.writer.token_count()
    }

    /// Size of the file in bytes.
    pub fn file_bytes(&self) -> usize {
        self.writer.file_bytes()
    }
}

impl Iterator for ExportedPrefix {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let blocks = self.writer.next_blocks();
        if blocks == 0 {
            return None;
        }
        let end = self.next + blocks * self.block_bytes;
        let record = self.writer.record(&self.bytes[self.next..end]);
        self.next = end;
        Some(record)
    }
}

/// A prefix that is being imported. The bytes of its file are pushed in pieces of any length, and
/// every record is verified as soon as it is complete. Nothing of it is used before
/// [`PrefixImport::finish`].
#[derive(Debug)]
pub struct PrefixImport {
    engine: Engine,
    shape: KvShape,
    reader: PrefixReader,
}

impl PrefixImport {
    /// Takes the next bytes of the file.
    ///
    /// # Errors
    /// [`Error::StoredKv`] for the first thing that is not as expected. The import must not be used
    /// any more then.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.reader.push(bytes)?)
    }

    /// Copies the prefix into the KV pool and adds it to the cache, where it can be evicted like
    /// any other. Returns the number of tokens that are cached then. It is a request like any
    /// other, which waits in the admission queue and evicts what it must.
    ///
    /// # Errors
    /// [`Error::StoredKv`] if the file is not complete; the errors of [`Engine::generate`];
    /// [`Error::NotCached`] if the prefix was not in the cache afterwards.
    pub async fn finish(self) -> Result<usize, Error> {
        let StoredPrefix { tokens, blocks } = self.reader.finish()?;
        let expected = tokens.len();
        let handle = &self.engine.inner.handle;
        let request = SequenceRequest {
            stored: Some(StoredKv::new(self.shape.block_size, 0, blocks)),
            ..SequenceRequest::new(tokens.clone(), 1)
        };
        let mut stream = handle.submit(request)?;
        while let Some(event) = stream.next().await {
            event?;
        }
        let got = handle.query_match_len(&Namespace::default(), &tokens);
        if got < expected { Err(Error::NotCached { expected, got }) } else { Ok(got) }
    }
}

fn file_error(path: &Path, error: io::Error) -> Error {
    Error::File { path: path.to_owned(), error: Arc::new(error) }
}
