//! Why the engine could not be started, or a request not be answered.

use std::time::Duration;

/// Everything that can go wrong, as far as a caller can act on it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The prompt has no token.
    #[error("the prompt is empty: expected at least 1 token")]
    EmptyPrompt,
    /// The prompt does not fit the model's context or the KV pool, even alone.
    #[error("the prompt is too long: it has {got} tokens, at most {limit} fit ({bound})")]
    PromptTooLong {
        /// Tokens of the prompt.
        got: usize,
        /// Most tokens a prompt may have, with room for one generated token.
        limit: usize,
        /// What sets the limit: the model's context or the KV pool, with its size.
        bound: String,
    },
    /// A token id that the model does not have.
    #[error("token id {got} at index {index}: expected an id below {vocab_size}")]
    TokenOutOfRange {
        /// Where in the prompt.
        index: usize,
        /// The id.
        got: u32,
        /// Ids are below it.
        vocab_size: usize,
    },
    /// A parameter of a request or of the builder has an impossible value.
    #[error("{name}: expected {expected}, got {got}")]
    InvalidParameter {
        /// Which.
        name: String,
        /// What would have done.
        expected: String,
        /// What came.
        got: String,
    },
    /// The engine has as much waiting work as it was told to hold.
    #[error(
        "overloaded: {queued_requests} requests with {queued_tokens} uncached tokens wait; try again in {retry_after:?}"
    )]
    Overloaded {
        /// When it may be worth trying again.
        retry_after: Duration,
        /// Requests waiting.
        queued_requests: usize,
        /// Uncached prompt tokens waiting.
        queued_tokens: usize,
    },
    /// The request waited longer than its `queue_timeout`.
    #[error("timed out in the queue after {waited:?}")]
    QueueTimeout {
        /// How long it waited.
        waited: Duration,
    },
    /// The request took longer than its `timeout`.
    #[error("timed out after {elapsed:?}")]
    Timeout {
        /// How long it took.
        elapsed: Duration,
    },
    /// A part of the engine failed while the request was in flight. The engine starts again by
    /// itself; the request may be sent again.
    #[error("the engine failed while the request was in flight and is starting again: {reason}")]
    Interrupted {
        /// What failed.
        reason: String,
    },
    /// The engine was shut down.
    #[error("the engine has stopped")]
    EngineStopped,
    /// The model could not be loaded.
    #[error("cannot load the model: {0}")]
    Load(String),
    /// The KV cache does not fit.
    #[error(
        "no room for the KV cache: {needed} bytes needed for {blocks} blocks, {available} there"
    )]
    OutOfMemory {
        /// Bytes needed.
        needed: u64,
        /// Blocks they would hold.
        blocks: usize,
        /// Bytes there are.
        available: u64,
    },
    /// The model has no chat template, or the template refuses the conversation.
    #[error("chat template: {0}")]
    ChatTemplate(String),
    /// The text could not be tokenised.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The model was asked for text and there is no tokenizer: a custom backend without one.
    #[error("this engine has no tokenizer: expected a prompt of token ids, got text")]
    NoTokenizer,
    /// The engine's bookkeeping is wrong: a bug, worth a report.
    #[error("audit failed: {0}")]
    Audit(String),
}
