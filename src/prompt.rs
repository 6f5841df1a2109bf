//! Turns prompts into token ids without blocking the caller's runtime.
//!
//! Tokenizing takes time in proportion to the prompt's length: roughly a millisecond for 4 KiB,
//! seconds for several megabytes. Short texts are tokenized where the caller runs, because the
//! change to another thread would take longer. All others are tokenized on the blocking threads of
//! the engine's runtime. A prompt whose text is so long that its tokens cannot fit the context or
//! the KV pool is refused before any of this.
//!
//! How much work a chat template does cannot be seen from the conversation: a variable of the
//! request may make it count to a million. So conversations are always rendered on the blocking
//! threads, first with limits that permit about a millisecond of work. If that is not enough, the
//! work is long.
//!
//! A [`FairLane`] bounds how many texts are tokenized at the same time, so that tokenizing leaves
//! cores to the model, and clients share it fairly. Long work goes to the threads of [`LongWork`]
//! instead.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::Value;
use stolon_scheduler::{EngineContext, EngineError, PromptLimit, SessionContent};
use tokio::runtime::Handle;

use crate::images::Images;
use crate::long_work::{Client, FairLane, LongWork};
use crate::request::{Prompt, part_tokens};
use crate::text::{Exchange, Text, chat_values};
use crate::{Error, Grammar, Request, SharedProcessor};

/// Size in bytes of everything that may become text. The time of tokenizing depends on it.
fn work_bytes(request: &Request) -> usize {
    let messages = match request.prompt() {
        Prompt::Chat(messages) => messages.as_slice(),
        _ => &[],
    };
    let extra = messages.iter().flat_map(|message| message.extra.values());
    let extra = extra.chain(chat_values(&request.chat)).chain(request.tools.as_deref());
    let instruction = request.instruction.as_ref().map_or(0, |instruction| instruction.len());
    extra.map(json_bytes).sum::<usize>() + request.prompt().len_bytes() + instruction
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

/// Size up to which a prompt is tokenized in the calling task, in bytes.
const INLINE_BYTES_MAX: usize = 2 << 10;
/// Size from which tokenizing a prompt is long work, in bytes.
const LARGE_BYTES: usize = 128 << 10;

/// The token ids of a request's prompt.
#[derive(Debug)]
pub(crate) struct PromptTokens {
    pub(crate) tokens: Vec<u32>,
    /// What the history keeps of the request; `None` for prompts that are not conversations.
    pub(crate) exchange: Option<Arc<Exchange>>,
}

impl PromptTokens {
    /// The tokens of a request whose prompt is tokens.
    pub(crate) fn given(tokens: Vec<u32>, request: &Request) -> PromptTokens {
        PromptTokens { tokens, exchange: request.exchange.clone() }
    }
}

/// Number of leading tokens that are equal.
pub(crate) fn common_len(left: &[u32], right: &[u32]) -> usize {
    left.iter().zip(right).take_while(|(left, right)| left == right).count()
}

/// The text layer of an engine, and the threads on which it runs.
#[derive(Debug)]
pub(crate) struct Prompts {
    pub(crate) text: Text,
    images: Images,
    context: EngineContext,
    limit: PromptLimit,
    runtime: Handle,
    /// Bounds the short work.
    lane: Arc<FairLane>,
    /// Threads for long work, so that short work does not wait for it.
    pub(crate) long_work: LongWork,
}

/// How long some work on a text may take.
enum Work {
    /// It takes less time than the change to another thread.
    Tiny,
    /// A few milliseconds, for this client.
    Short(Client),
    /// Up to seconds, for this client.
    Long(Client),
}

impl Work {
    /// Tokenizing a text of `bytes` bytes for a client.
    fn of_text(bytes: usize, client: Client) -> Work {
        if bytes <= INLINE_BYTES_MAX {
            Work::Tiny
        } else if bytes < LARGE_BYTES {
            Work::Short(client)
        } else {
            Work::Long(client)
        }
    }
}

impl Prompts {
    /// The prompts of the engine with this `context`. They are tokenized on the blocking threads of
    /// `runtime`.
    pub(crate) fn new(
        text: Text,
        images: Images,
        context: EngineContext,
        runtime: Handle,
    ) -> Result<Prompts, Error> {
        let limit = context.prompt_limit();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // One client may use half of the cores. The last slot is for others.
        let of_client = (cores / 2).max(1);
        let lane = FairLane::new(of_client + 1, of_client);
        let long_work = LongWork::start()?;
        Ok(Prompts { text, images, context, limit, runtime, lane, long_work })
    }

    /// The request with its images among the tokens of its prompt. Decoding images is long work.
    pub(crate) fn placed(&self, request: Request) -> BoxFuture<'_, Result<Request, Error>> {
        async move {
            match request.has_images() {
                true => self.placed_after(request, SessionContent::default()).await,
                false => Ok(request),
            }
        }
        .boxed()
    }

    /// The request with its tokens after those of a session, with the images of both.
    pub(crate) async fn placed_after(
        &self,
        request: Request,
        before: SessionContent,
    ) -> Result<Request, Error> {
        let client = request.options.tenant.clone();
        if request.has_images() {
            return self.with_images(request, before).await;
        }
        let begins = before.tokens.is_empty();
        let prompt = self.continuation(request.prompt(), begins, client).await?;
        let tokens = [&before.tokens[..], &prompt].concat();
        Ok(Request { placed: before.images, ..request.with_tokens(tokens) })
    }

    /// The request with its images and tokens after the content of a session. Each image is a piece
    /// of long work of its own.
    async fn with_images(
        &self,
        request: Request,
        before: SessionContent,
    ) -> Result<Request, Error> {
        let client = request.options.tenant.clone();
        let (images, limit) = (self.images.clone(), self.limit);
        // The work itself holds the fetched files, because it may continue after this future was
        // dropped.
        let (request, held) = self.images.fetched(request).await?;
        let open = move |_: &Text| Ok((images.open(request)?, held));
        let (mut placement, mut held) = self.run(Work::Long(client.clone()), open).await?;
        while placement.has_files() {
            let decode = move |_: &Text| {
                placement.decode_next(limit)?;
                Ok((placement, held))
            };
            (placement, held) = self.run(Work::Long(client.clone()), decode).await?;
        }
        drop(held);
        let context = self.context.clone();
        let place = move |text: &Text| placement.place(&before, text, &context);
        self.run(Work::Long(client), place).await
    }

    /// The token ids of a prompt, computed on the calling thread.
    pub(crate) fn tokens_here(&self, request: &Request) -> Result<Vec<u32>, Error> {
        if request.has_images() {
            let mut placement = self.images.open(request.clone())?;
            while placement.has_files() {
                placement.decode_next(self.limit)?;
            }
            let before = SessionContent::default();
            let request = placement.place(&before, &self.text, &self.context)?;
            return Ok(self.text.prompt_tokens(&request, self.limit)?.tokens);
        }
        Ok(self.text.prompt_tokens(request, self.limit)?.tokens)
    }

    /// The token ids of a prompt. If the future is dropped while another thread computes, the
    /// result is discarded.
    pub(crate) fn tokens<'a>(
        &'a self,
        request: &'a Request,
    ) -> BoxFuture<'a, Result<PromptTokens, Error>> {
        async move {
            if let Prompt::Tokens(tokens) = request.prompt() {
                return Ok(PromptTokens::given(tokens.clone(), request));
            }
            if request.truncate.is_none() {
                self.text.check_len(request.prompt().len_bytes(), self.limit)?;
            }
            let (bytes, client) = (work_bytes(request), request.options.tenant.clone());
            // A clone of a request shares its prompt.
            let (request, limit) = (request.clone(), self.limit);
            let is_chat = matches!(request.prompt(), Prompt::Chat(_));
            if is_chat && bytes < LARGE_BYTES {
                let request = request.clone();
                let quick = move |text: &Text| text.quick_tokens(&request, limit);
                if let Some(tokens) = self.run(Work::Short(client.clone()), quick).await? {
                    return Ok(tokens);
                }
            }
            let work = if is_chat { Work::Long(client) } else { Work::of_text(bytes, client) };
            self.run(work, move |text| text.prompt_tokens(&request, limit)).await
        }
        .boxed()
    }

    /// The token ids of the prompt of `first`, and how many of them the prompt of `second` begins
    /// with, too. Always long work, because nobody waits for it.
    pub(crate) async fn common(
        &self,
        first: Request,
        second: Request,
    ) -> Result<(Vec<u32>, usize), Error> {
        let (client, limit) = (first.options.tenant.clone(), self.limit);
        let common = move |text: &Text| {
            let first = text.prompt_tokens(&first, limit)?.tokens;
            let second = text.prompt_tokens(&second, limit)?.tokens;
            let len = common_len(&first, &second);
            Ok((first, len))
        };
        self.run(Work::Long(client), common).await
    }

    /// As [`Prompts::tokens`], for a request whose prompt is not needed any longer. Token ids that the
    /// caller has not kept are moved, not copied.
    pub(crate) async fn take_tokens(&self, request: &mut Request) -> Result<PromptTokens, Error> {
        match Arc::get_mut(&mut request.prompt) {
            Some(Prompt::Tokens(tokens)) => {
                Ok(PromptTokens::given(std::mem::take(tokens), request))
            }
            _ => self.tokens(request).await,
        }
    }

    /// The token ids of a client's prompt that follows others, or that begins a text.
    async fn continuation(
        &self,
        prompt: &Prompt,
        begins: bool,
        client: Client,
    ) -> Result<Vec<u32>, Error> {
        match prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => {
                self.text.check_len(text.len(), self.limit)?;
                self.encode(text.clone(), begins, client).await
            }
            Prompt::Parts(parts) => {
                self.text.check_len(prompt.len_bytes(), self.limit)?;
                let (work, parts) = (Work::of_text(prompt.len_bytes(), client), parts.clone());
                self.run(work, move |text| part_tokens(&parts, &[], begins, text)).await
            }
            Prompt::Chat(_) | Prompt::Skill(_) | Prompt::Infill(_) | Prompt::Pair(..) => {
                let expected = "a text, token ids or parts to follow those of a session";
                Err(Error::invalid("append", expected, "another prompt"))
            }
        }
    }

    /// The token ids of a client's text.
    pub(crate) async fn encode(
        &self,
        input: String,
        add_special: bool,
        client: Client,
    ) -> Result<Vec<u32>, Error> {
        let work = Work::of_text(input.len(), client);
        self.run(work, move |text| text.encode(&input, add_special)).await
    }

    /// A processor that keeps the answer to a client's request to `grammar`. It runs after `inner`.
    /// `ends` are the tokens that end the answer.
    pub(crate) async fn grammar_processor(
        &self,
        grammar: Arc<Grammar>,
        ends: &[u32],
        inner: Option<SharedProcessor>,
        client: Client,
    ) -> Result<SharedProcessor, Error> {
        let ends: Arc<[u32]> = ends.into();
        let of_client = client.clone();
        let processor = move |text: &Text| text.grammar_processor(&grammar, ends, inner, of_client);
        // It may have to be compiled.
        self.run(Work::Long(client), processor).await
    }

    /// Runs work on a text, in the calling task or on another thread.
    async fn run<T: Send + 'static>(
        &self,
        kind: Work,
        work: impl FnOnce(&Text) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let text = self.text.clone();
        let client = match kind {
            Work::Tiny => return work(&self.text),
            Work::Short(client) => client,
            Work::Long(client) => return self.long_work.run(client, move || work(&text)).await?,
        };
        let slot = self.lane.slot(client).await;
        let job = self.runtime.spawn_blocking(move || {
            // The slot is returned when the work is done, even if the caller has gone away.
            let _returned = slot;
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
