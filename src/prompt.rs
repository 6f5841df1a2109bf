//! Turns prompts into token ids without blocking the caller's runtime.
//!
//! Rendering and tokenising take time in proportion to the prompt's length: roughly a millisecond
//! for 4 KiB, seconds for several megabytes. Short prompts are tokenised where the caller runs,
//! because the change to another thread would take longer. All others are tokenised on the blocking
//! threads of the engine's runtime. Semaphores bound how many of them compute at the same time, so
//! that tokenising leaves cores to the model. A prompt whose text is so long that its tokens
//! cannot fit the context or the KV pool is refused before any of this.

use std::sync::Arc;

use serde_json::Value;
use stolon_scheduler::{EngineError, PromptLimit};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::request::Prompt;
use crate::text::{Text, chat_values};
use crate::{Error, Grammar, Request, SharedProcessor};

/// Size in bytes of everything that may become text, which is what tokenising takes time for.
fn work_bytes(request: &Request) -> usize {
    let messages = match request.prompt() {
        Prompt::Chat(messages) => messages.as_slice(),
        _ => &[],
    };
    let extra = messages.iter().flat_map(|message| message.extra.values());
    let extra = extra.chain(chat_values(&request.chat)).chain(request.tools.as_deref());
    extra.map(json_bytes).sum::<usize>() + request.prompt().len_bytes()
}

/// Approximate size of a value as JSON, in bytes.
fn json_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => 2 + text.len(),
        Value::Array(items) => 2 + items.iter().map(json_bytes).sum::<usize>(),
        Value::Object(fields) => {
            2 + fields.iter().map(|(key, value)| 4 + key.len() + json_bytes(value)).sum::<usize>()
        }
        _ => 8,
    }
}

/// Size up to which a prompt is tokenised in the calling task, in bytes.
const INLINE_BYTES_MAX: usize = 2 << 10;
/// Size from which a prompt counts as large, in bytes.
const LARGE_BYTES: usize = 128 << 10;

/// The text layer of an engine, and the threads on which it runs.
#[derive(Debug)]
pub(crate) struct Prompts {
    pub(crate) text: Text,
    limit: PromptLimit,
    runtime: Handle,
    permits: Arc<Semaphore>,
    /// Large prompts have permits of their own, so that others do not wait for them.
    large_permits: Arc<Semaphore>,
}

impl Prompts {
    /// Prompts of at most `limit` are tokenised on the blocking threads of `runtime`.
    pub(crate) fn new(text: Text, limit: PromptLimit, runtime: Handle) -> Prompts {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let permits = |count: usize| Arc::new(Semaphore::new(count.max(1)));
        Prompts {
            text,
            limit,
            runtime,
            permits: permits(cores / 2),
            large_permits: permits(cores / 4),
        }
    }

    /// The token ids of a prompt, computed on the calling thread.
    pub(crate) fn tokens_here(&self, request: &Request) -> Result<Vec<u32>, Error> {
        self.text.prompt_tokens(request, self.limit)
    }

    /// The token ids of a prompt. If the future is dropped while another thread computes, the
    /// result is discarded.
    pub(crate) async fn tokens(&self, request: &Request) -> Result<Vec<u32>, Error> {
        if let Prompt::Tokens(tokens) = request.prompt() {
            return Ok(tokens.clone());
        }
        self.text.check_len(request.prompt().len_bytes(), self.limit)?;
        // A clone of a request shares its prompt.
        let (request, limit) = (request.clone(), self.limit);
        self.run(work_bytes(&request), move |text| text.prompt_tokens(&request, limit)).await
    }

    /// The token ids of a prompt that follows others, or that begins a text.
    pub(crate) async fn continuation(
        &self,
        prompt: &Prompt,
        begins: bool,
    ) -> Result<Vec<u32>, Error> {
        match prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => {
                self.text.check_len(text.len(), self.limit)?;
                self.encode(text.clone(), begins).await
            }
            Prompt::Chat(_) => {
                let expected = "a text or token ids to follow those of a session";
                Err(Error::invalid("append", expected, "a conversation"))
            }
        }
    }

    /// The token ids of a text.
    pub(crate) async fn encode(&self, input: String, add_special: bool) -> Result<Vec<u32>, Error> {
        self.run(input.len(), move |text| text.encode(&input, add_special)).await
    }

    /// A processor that keeps an answer to `grammar`. It runs after `inner`. `ends` are the tokens
    /// that end the answer.
    pub(crate) async fn grammar_processor(
        &self,
        grammar: Arc<Grammar>,
        ends: &[u32],
        inner: Option<SharedProcessor>,
    ) -> Result<SharedProcessor, Error> {
        let ends: Arc<[u32]> = ends.into();
        // Compiling takes as long as tokenising a large prompt.
        let processor = move |text: &Text| text.grammar_processor(&grammar, ends, inner);
        self.run(LARGE_BYTES, processor).await
    }

    /// Runs `work` on a prompt of `bytes` bytes, in the calling task or on a blocking thread.
    async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&Text) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        if bytes <= INLINE_BYTES_MAX {
            return work(&self.text);
        }
        let permits = if bytes < LARGE_BYTES { &self.permits } else { &self.large_permits };
        // The semaphores are never closed.
        let permit = Arc::clone(permits).acquire_owned().await.map_err(|_| EngineError::Stopped)?;
        let text = self.text.clone();
        let job = self.runtime.spawn_blocking(move || {
            // Returned when the work is done, even if the caller has gone.
            let _permit = permit;
            work(&text)
        });
        match job.await {
            Ok(result) => result,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The engine's runtime has been shut down.
            Err(_) => Err(EngineError::Stopped.into()),
        }
    }
}
