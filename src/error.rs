//! Why the engine could not be started, or a request not be answered.

use std::time::Duration;

use stolon_actors::CoreError;
use stolon_kvcache::PinError;
use stolon_model::ModelError;
use stolon_model::sampling::SamplingError;

/// Everything that can go wrong, as far as a caller can act on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The prompt has no token.
    #[error("the prompt is empty: expected at least 1 token")]
    EmptyPrompt,
    /// The prompt does not fit the model's context or the KV pool, even alone.
    #[error("the prompt is too long: expected at most {limit} tokens, got {got} ({bound})")]
    PromptTooLong {
        /// Tokens of the prompt.
        got: usize,
        /// Most tokens a prompt may have.
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
        "overloaded: {queued_requests} requests with {queued_tokens} uncached tokens wait; try \
         again in {retry_after:?}"
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
    #[error("the engine failed while the request was in flight and starts again: {reason}")]
    Interrupted {
        /// What failed.
        reason: String,
    },
    /// A forward pass took longer than [`EngineBuilder::step_timeout`](crate::EngineBuilder::step_timeout).
    /// The engine serves again when, and if, the backend comes back.
    #[error("the backend hangs: a step took more than {limit:?}")]
    BackendHung {
        /// The longest time a step may take.
        limit: Duration,
    },
    /// The engine was shut down.
    #[error("the engine has stopped")]
    EngineStopped,
    /// The model could not be loaded, or its KV cache not be allocated.
    #[error("cannot load the model: {0}")]
    Load(#[from] ModelError),
    /// The chat template refuses the conversation, or there is none.
    #[error(transparent)]
    ChatTemplate(#[from] stolon_model::chat_template::ChatTemplateError),
    /// The text could not be tokenised.
    #[error(transparent)]
    Tokenizer(#[from] stolon_model::TokenizerError),
    /// Text was given to, or asked of, an engine on a custom backend without a tokenizer.
    #[error("this engine has no tokenizer: expected token ids, got text")]
    NoTokenizer,
    /// A prompt could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The engine's bookkeeping is wrong: a bug, worth a report.
    #[error("audit failed: {0}")]
    Audit(String),
}

impl Error {
    pub(crate) fn invalid(
        name: impl Into<String>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Error {
        Error::InvalidParameter {
            name: name.into(),
            expected: expected.into(),
            got: got.to_string(),
        }
    }
}

impl From<CoreError> for Error {
    fn from(error: CoreError) -> Error {
        match error {
            CoreError::EmptyPrompt => Error::EmptyPrompt,
            CoreError::PromptTooLong { got, limit, bound } => {
                Error::PromptTooLong { got, limit, bound: bound.to_string() }
            }
            CoreError::TokenOutOfRange { index, got, vocab_size } => {
                Error::TokenOutOfRange { index, got, vocab_size }
            }
            CoreError::InvalidParameter { name, expected, got } => {
                Error::invalid(name, expected, got)
            }
            CoreError::Overloaded { retry_after, queued_requests, queued_tokens } => {
                Error::Overloaded { retry_after, queued_requests, queued_tokens }
            }
            CoreError::QueueTimeout { waited } => Error::QueueTimeout { waited },
            CoreError::Timeout { elapsed } => Error::Timeout { elapsed },
            CoreError::Interrupted { reason } => Error::Interrupted { reason },
            CoreError::BackendHung { limit } => Error::BackendHung { limit },
            CoreError::Stopped => Error::EngineStopped,
            CoreError::Pin(error) => Error::Pin(error),
            CoreError::Audit(problem) => Error::Audit(problem),
            other => Error::Interrupted { reason: other.to_string() },
        }
    }
}

impl From<SamplingError> for Error {
    fn from(error: SamplingError) -> Error {
        match error {
            SamplingError::InvalidParameter { name, expected, got } => {
                Error::invalid(name, expected, got)
            }
            other => Error::invalid("sampling", "usable parameters", other),
        }
    }
}
