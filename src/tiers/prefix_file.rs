//! Export and import of cached prefixes: a prepared document can be shipped with an application and
//! is served from the cache from the first request on.

use std::path::PathBuf;
use std::sync::Arc;

use stolon_backend::ImageInput;
use stolon_kvcache::{
    ImageSpan, Namespace, TokenSpan, checkpoint_positions, len_before_checkpoint,
};
use stolon_scheduler::{EngineContext, EngineError, PromptImage, SequenceRequest, StoredKv};
use stolon_tiers::{
    ExportedPrefix, NamedTokens, PrefixReader, RecordShape, StoredPrefix, TierError,
};

use super::{blocking, record_shape};
use crate::{Cache, Engine, Error, Request};

impl Cache<'_> {
    /// Computes the part of a prompt that is not cached, and copies the keys and values of all its
    /// full blocks out of the KV pool. [`Cache::import`] puts them into the cache of an engine with
    /// the same model and settings, which then answers as if it had computed them itself, bit for
    /// bit. Images are exported as their KV and a hash of their content, and only as a whole.
    ///
    /// The copy takes as much memory as the prompt's KV does. The first export or import of an engine
    /// without a disk tier reads all weights, for the hash of the model that the export has.
    ///
    /// # Errors
    /// The errors of [`Cache::warm`]; `InvalidParameter` for a request with a cache salt, for which
    /// other processes may have another key; [`TierError::NoKvCopies`], [`TierError::NotCached`].
    pub async fn export(self, request: &Request) -> Result<ExportedPrefix, Error> {
        let shape = record_shape(&self.0.inner.handle).await?;
        if self.0.namespace(request)? != Namespace::default() {
            let expected = "a prompt without a cache salt or tenant, because other processes may \
                            have another key for salts";
            return Err(Error::invalid("cache_salt", expected, "a prompt with one"));
        }
        let prompt = self.0.tokenized(request.clone()).await?;
        let mut tokens = self.0.prompt_tokens(&prompt).await?;
        let block_count = tokens.len() / shape.block_size;
        let expected = block_count.max(1) * shape.block_size;
        tokens.truncate(block_count * shape.block_size);
        while tokens.last().is_some_and(|&position| !TokenSpan::may_end_after(position)) {
            tokens.truncate(tokens.len() - shape.block_size);
        }
        if tokens.is_empty() {
            return Err(TierError::NotCached { expected, got: 0 }.into());
        }
        let request = match prompt.placed.is_empty() {
            true => prompt.with_tokens(tokens.clone()),
            // The prompt has to continue after its last image.
            false => prompt,
        };
        let handle = &self.0.inner.handle;
        let checkpoint_blocks = handle.context().spec.checkpoint_blocks();
        if !self.0.cache().is_warm(&request)? {
            self.warm(request.clone()).await?;
        }
        if checkpoint_blocks > 0 {
            tokens.truncate(self.query_resume(&request)?.resume);
            if tokens.is_empty() {
                return Err(TierError::NotCached { expected, got: 0 }.into());
            }
            tokens.extend(checkpoint_positions(checkpoint_blocks * shape.block_size));
        }
        let (block_count, expected) = (tokens.len() / shape.block_size, tokens.len());
        let shared = Arc::new(tokens.clone());
        let saved = handle.save_blocks(Namespace::default(), shared, 0..block_count).await?;
        let bytes = saved.unwrap_or_default();
        let got = bytes.len() / shape.block_bytes * shape.block_size;
        if got < expected {
            return Err(TierError::NotCached { expected, got }.into());
        }
        let tokens = NamedTokens::new(Arc::new(tokens), handle.context().spans());
        if !tokens.are_all_named() {
            return Err(TierError::NotCached { expected, got: 0 }.into());
        }
        Ok(ExportedPrefix::new(shape, Namespace::default(), tokens, bytes))
    }

    /// [`Cache::export`] to a file, which is written atomically on a blocking thread.
    /// Returns the number of exported tokens.
    ///
    /// # Errors
    /// The errors of [`Cache::export`], and [`TierError::File`].
    pub async fn export_to(
        self,
        request: &Request,
        path: impl Into<PathBuf>,
    ) -> Result<usize, Error> {
        let (path, prefix) = (path.into(), self.export(request).await?);
        let tokens = prefix.token_count();
        blocking(&self.0.inner.handle, move || prefix.write(&path)).await??;
        Ok(tokens)
    }

    /// Begins to import a prefix that [`Cache::export`] has exported.
    ///
    /// # Errors
    /// [`TierError::NoKvCopies`].
    pub async fn import(self) -> Result<PrefixImport, Error> {
        let shape = record_shape(&self.0.inner.handle).await?;
        let context = self.0.inner.handle.context();
        let checkpoint = context.spec.checkpoint_blocks() * shape.block_size;
        let positions_max = context.prompt_limit().tokens + checkpoint;
        let reader = PrefixReader::new(shape, Namespace::default(), positions_max);
        Ok(PrefixImport { engine: self.0.clone(), shape, reader })
    }

    /// [`Cache::import`] from a file. Returns the number of tokens that are then in the cache.
    ///
    /// # Errors
    /// The errors of [`PrefixImport`], [`TierError::NoKvCopies`], and [`TierError::File`].
    pub async fn import_from(self, path: impl Into<PathBuf>) -> Result<usize, Error> {
        let (path, mut import) = (path.into(), self.import().await?);
        let read = move || import.reader.read(&path).map(|()| import);
        blocking(&self.0.inner.handle, read).await??.finish().await
    }
}

/// A prefix that is being imported. The bytes of its file are pushed in pieces of any length, and
/// every record is verified as soon as it is complete. Nothing of it is used before
/// [`PrefixImport::finish`].
#[derive(Debug)]
pub struct PrefixImport {
    engine: Engine,
    shape: RecordShape,
    reader: PrefixReader,
}

impl PrefixImport {
    /// Takes the next bytes of the file.
    ///
    /// # Errors
    /// [`TierError::StoredKv`] for the first thing that is not as expected. After an error the
    /// import must not be used any longer.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.reader.push(bytes).map_err(TierError::from)?)
    }

    /// Copies the prefix into the KV pool and adds it to the cache, where it can be evicted like
    /// any other. Returns the number of tokens that are cached afterward. It is a request like any
    /// other, which waits in the admission queue and evicts other blocks if it has to.
    ///
    /// # Errors
    /// [`TierError::StoredKv`] if the file is not complete; the errors of [`Engine::generate`];
    /// [`TierError::NotCached`] if the prefix was not in the cache afterward.
    pub async fn finish(self) -> Result<usize, Error> {
        let StoredPrefix { tokens, images, blocks } =
            self.reader.finish().map_err(TierError::from)?;
        let handle = &self.engine.inner.handle;
        let (mut tokens, images) = place_images(&tokens, &images, handle.context())?;
        let expected = len_before_checkpoint(&tokens);
        let mut stored = StoredKv::new(self.shape.block_size, 0, blocks);
        if expected < tokens.len() {
            stored = stored.with_checkpoint((tokens.len() - expected) / self.shape.block_size);
            // A request resumes before its last position, which may have any token.
            tokens.truncate(expected);
            tokens.push(0);
        } else if tokens.last().is_some_and(|&position| TokenSpan::is_image(position)) {
            // A prompt has to continue after its last image.
            tokens.push(0);
        }
        let stored = Some(stored);
        let request = SequenceRequest { images, stored, ..SequenceRequest::new(tokens.clone(), 1) };
        let mut stream = handle.submit(request)?;
        while let Some(event) = stream.next().await {
            event?;
        }
        let got = handle.query_resume(&Namespace::default(), &tokens).resume;
        match got < expected {
            true => Err(TierError::NotCached { expected, got }.into()),
            false => Ok(got),
        }
    }
}

/// The tokens of a stored prefix with the numbers that images have in this process, and the images.
/// Only their KV is known, so they cannot be encoded.
fn place_images(
    tokens: &[u32],
    images: &[ImageSpan],
    context: &EngineContext,
) -> Result<(Vec<u32>, Arc<[PromptImage]>), EngineError> {
    let (mut placed, mut found) = (Vec::with_capacity(tokens.len()), Vec::new());
    while let Some(&position) = tokens.get(placed.len()) {
        let number = TokenSpan::image_number(position);
        let Some(image) = number.and_then(|number| images.get(number as usize)) else {
            placed.push(position);
            continue;
        };
        let input = ImageInput {
            content_hash: image.content_hash,
            kv_len: image.kv_len as usize,
            full_attention: false,
            columns: image.columns as usize,
            size: [0, 0],
            tiles: [0, 0],
            pixels: Vec::new(),
        };
        found.push(context.append_image(Arc::new(input), &mut placed)?);
    }
    Ok((placed, found.into()))
}
