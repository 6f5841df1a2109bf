//! KV outside of the pool: loads stored KV for a request, and copies blocks out of the pool.

use std::ops::Range;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use stolon_kvcache::Namespace;
use stolon_scheduler::{EngineError, Prefetch, SaveRequest, SequenceRequest};
use tokio::sync::oneshot;

use super::EngineHandle;
use crate::admission::AdmissionMessage;
use crate::stored::read;
use crate::supervisor::end_error;

impl EngineHandle {
    /// Adds stored KV of its prompt to a request, if there is an
    /// [`EngineConfig::kv_source`](stolon_scheduler::EngineConfig::kv_source) that has some and
    /// reads it in time.
    pub fn with_stored(&self, mut request: SequenceRequest) -> BoxFuture<'_, SequenceRequest> {
        async move {
            let context = self.context();
            let source = context.config.kv_source.as_ref();
            let Some(source) = source.filter(|_| !request.options.needs_whole_prompt()) else {
                return request;
            };
            let found = self.query_resume(&request.namespace, &request.tokens);
            // Nothing is read for a request that is going to be refused.
            if context.queue_is_full(request.tokens.len() - found.resume) {
                return request;
            }
            let (namespace, tokens) = (request.namespace, Arc::clone(&request.tokens));
            let priority = request.options.priority;
            let prompt = context.prompt_lookup(namespace, tokens, found, priority);
            let Prefetch { save, load } = source.prefetch(&prompt);
            if let (Some(save), Ok(generation)) = (save, self.common().current()) {
                // If the generation has just ended, the request is dropped here.
                let _ = generation.admission.cast(AdmissionMessage::Save(Box::new(save)));
            }
            if let Some(load) = load {
                // The timer needs the engine's runtime; the caller may have another one.
                let read = self.shared.runtime.spawn(read(load));
                // Fails only if the runtime has ended.
                request.stored = read.await.ok().flatten();
            }
            request
        }
        .boxed()
    }

    /// Copies the cached ones of these blocks of a prompt out of the KV pool, from the first one
    /// on. Returns their bytes one after another,
    /// [`BackendSpec::block_bytes`](stolon_backend::BackendSpec::block_bytes) for each; `None` if
    /// nothing is cached or the copy failed. The blocks are not evicted before they are copied.
    ///
    /// # Errors
    /// [`EngineError::Interrupted`], [`EngineError::Stopped`].
    pub fn save_blocks(
        &self,
        namespace: Namespace,
        tokens: Arc<Vec<u32>>,
        blocks: Range<usize>,
    ) -> BoxFuture<'_, Result<Option<Vec<u8>>, EngineError>> {
        async move {
            let generation = self.common().current()?;
            let (sender, saved) = oneshot::channel();
            // Fails only if the caller does not wait for the copy any longer.
            let done = Box::new(move |bytes| drop(sender.send(bytes)));
            let request = SaveRequest { namespace, tokens, blocks, done };
            // If the generation has just ended, the request is dropped here.
            let _ = generation.admission.cast(AdmissionMessage::Save(Box::new(request)));
            match saved.await {
                Ok(bytes) => Ok(Some(bytes)),
                Err(_) => match generation.end.clone().now_or_never() {
                    Some(end) => Err(end_error(end)),
                    None => Ok(None),
                },
            }
        }
        .boxed()
    }
}
