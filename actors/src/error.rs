//! Why the core could not start, or a sequence not be finished.

use std::time::Duration;

use stolon_kvcache::PinError;

/// What limits a prompt's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthBound {
    /// The model's context, in positions.
    Context(usize),
    /// All blocks of the KV pool together, those kept for pins left out.
    Pool {
        /// Blocks for requests.
        blocks: usize,
        /// Positions a block.
        block_size: usize,
    },
}

impl std::fmt::Display for LengthBound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LengthBound::Context(positions) => {
                write!(f, "the model's context has {positions} positions")
            }
            LengthBound::Pool { blocks, block_size } => write!(
                f,
                "the KV pool has {blocks} blocks of {block_size} positions, {} in all",
                blocks * block_size
            ),
        }
    }
}

/// Everything that can go wrong in the core.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CoreError {
    /// The prompt has no token.
    #[error("the prompt is empty: expected at least 1 token")]
    EmptyPrompt,
    /// The prompt does not fit, even alone.
    #[error("the prompt is too long: expected at most {limit} tokens, got {got} ({bound})")]
    PromptTooLong {
        /// Tokens of the prompt.
        got: usize,
        /// Most tokens a prompt may have.
        limit: usize,
        /// What sets the limit.
        bound: LengthBound,
    },
    /// A token id the model does not have.
    #[error("token id {got} at index {index}: expected an id below {vocab_size}")]
    TokenOutOfRange {
        /// Where in the prompt.
        index: usize,
        /// The id.
        got: u32,
        /// Ids are below it.
        vocab_size: usize,
    },
    /// A setting or a parameter of a request is impossible.
    #[error("{name}: expected {expected}, got {got}")]
    InvalidParameter {
        /// Which.
        name: &'static str,
        /// What would have done.
        expected: String,
        /// What came.
        got: String,
    },
    /// As much work waits as the core was told to hold.
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
    /// The sequence waited longer than it wanted to.
    #[error("timed out in the queue after {waited:?}")]
    QueueTimeout {
        /// How long it waited.
        waited: Duration,
    },
    /// The sequence took longer than it wanted to.
    #[error("timed out after {elapsed:?}")]
    Timeout {
        /// How long it took.
        elapsed: Duration,
    },
    /// A part of the core failed while the sequence was in flight; the core starts again.
    #[error("a part of the engine failed while the request was in flight: {reason}")]
    Interrupted {
        /// What failed.
        reason: String,
    },
    /// A step took longer than the backend was given. The core starts again when, and if, the
    /// backend comes back.
    #[error("the backend hangs: a step took more than {limit:?}")]
    BackendHung {
        /// The longest time a step may take.
        limit: Duration,
    },
    /// The core was shut down.
    #[error("the engine has stopped")]
    Stopped,
    /// A prefix could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The core's bookkeeping is wrong: a bug.
    #[error("audit failed: {0}")]
    Audit(String),
}

impl CoreError {
    pub(crate) fn invalid(
        name: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> CoreError {
        CoreError::InvalidParameter { name, expected: expected.into(), got: got.to_string() }
    }
}
