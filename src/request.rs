//! What a caller asks for: a prompt and how to continue it.
//!
//! A [`Request`] is plain data. Nothing is checked while it is built; [`Engine::generate`]
//! checks all of it before any message is sent or block is taken.
//!
//! [`Engine::generate`]: crate::Engine::generate

use std::time::Duration;

use crate::{ChatMessage, SamplingParams};

/// The prompt, in one of the forms the engine understands.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Prompt {
    /// Text, tokenised as the model wants it (with its beginning-of-sequence token, if any).
    Text(String),
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
    /// A conversation, rendered with the model's chat template.
    Chat(Vec<ChatMessage>),
}

/// One generation to run. Built from [`Request::text`], [`Request::tokens`] or
/// [`Request::chat`] and the setters, each of which may be left out.
#[derive(Clone, Debug)]
pub struct Request {
    pub(crate) prompt: Prompt,
    pub(crate) tools: Option<serde_json::Value>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) sampling: SamplingParams,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) logprobs: Option<usize>,
    pub(crate) prompt_logprobs: Option<usize>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) priority: i32,
    pub(crate) queue_timeout: Option<Duration>,
    pub(crate) timeout: Option<Duration>,
}

impl Request {
    /// A request to continue `prompt`.
    pub fn new(prompt: Prompt) -> Request {
        Request {
            prompt,
            tools: None,
            max_tokens: None,
            sampling: SamplingParams::default(),
            stop: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            cache_salt: None,
            priority: 0,
            queue_timeout: None,
            timeout: None,
        }
    }

    /// Continues a text.
    pub fn text(text: impl Into<String>) -> Request {
        Request::new(Prompt::Text(text.into()))
    }

    /// Continues a sequence of token ids, each below the model's vocabulary size.
    pub fn tokens(tokens: impl Into<Vec<u32>>) -> Request {
        Request::new(Prompt::Tokens(tokens.into()))
    }

    /// Answers a conversation.
    pub fn chat(messages: impl Into<Vec<ChatMessage>>) -> Request {
        Request::new(Prompt::Chat(messages.into()))
    }

    /// The chat template's `tools` variable: a list of function schemas. Used by chat prompts only.
    pub fn tools(mut self, tools: serde_json::Value) -> Request {
        self.tools = Some(tools);
        self
    }

    /// Most tokens to generate, at least 1. Default: [`DEFAULT_MAX_TOKENS`], or less where
    /// the model's context or the KV pool ends before.
    ///
    /// [`DEFAULT_MAX_TOKENS`]: Request::DEFAULT_MAX_TOKENS
    pub fn max_tokens(mut self, max_tokens: usize) -> Request {
        self.max_tokens = Some(max_tokens);
        self
    }

    /// Tokens generated at most when [`Request::max_tokens`] is not called.
    pub const DEFAULT_MAX_TOKENS: usize = 256;

    /// How tokens are chosen. Default: greedy.
    pub fn sampling(mut self, sampling: SamplingParams) -> Request {
        self.sampling = sampling;
        self
    }

    /// Strings that end the text when they appear in it; they are not part of the text. None may
    /// be empty.
    pub fn stop<S: Into<String>>(mut self, stop: impl IntoIterator<Item = S>) -> Request {
        self.stop = stop.into_iter().map(Into::into).collect();
        self
    }

    /// Token ids that end the generation, besides the model's own end-of-sequence ids.
    pub fn stop_ids(mut self, ids: impl IntoIterator<Item = u32>) -> Request {
        self.stop_ids = ids.into_iter().collect();
        self
    }

    /// Generates on past the model's end-of-sequence ids.
    pub fn ignore_eos(mut self, ignore: bool) -> Request {
        self.ignore_eos = ignore;
        self
    }

    /// Reports the log-probability of each generated token, and of the `top` likeliest ones
    /// (0 for the token's own alone).
    pub fn logprobs(mut self, top: usize) -> Request {
        self.logprobs = Some(top);
        self
    }

    /// Reports the log-probability of each prompt token, and of the `top` likeliest ones (0 for the
    /// token's own alone) at its place. Such a request computes its whole prompt: what is cached has no logits.
    pub fn prompt_logprobs(mut self, top: usize) -> Request {
        self.prompt_logprobs = Some(top);
        self
    }

    /// Shares cached prefixes only with requests of the same salt: keeps tenants from probing
    /// each other's prompts by timing.
    pub fn cache_salt(mut self, salt: impl Into<String>) -> Request {
        self.cache_salt = Some(salt.into());
        self
    }

    /// Larger runs earlier under [`AdmissionPolicy::Priority`](crate::AdmissionPolicy). Default 0.
    pub fn priority(mut self, priority: i32) -> Request {
        self.priority = priority;
        self
    }

    /// Longest wait in the queue; past it the stream ends with
    /// [`Error::QueueTimeout`](crate::Error::QueueTimeout). Needs a runtime with its time driver on.
    pub fn queue_timeout(mut self, timeout: Duration) -> Request {
        self.queue_timeout = Some(timeout);
        self
    }

    /// Longest time from submission to the last token; past it the stream ends with
    /// [`Error::Timeout`](crate::Error::Timeout). Needs a runtime with its time driver on.
    pub fn timeout(mut self, timeout: Duration) -> Request {
        self.timeout = Some(timeout);
        self
    }
}
