//! Why the engine could not start, or could not complete a request.

use std::borrow::Cow;
use std::time::Duration;

use stolon_backend::SamplingError;
use stolon_kvcache::PinError;

use crate::pin_budget::Pinned;
use crate::session::SessionError;

/// What limits the length of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LengthBound {
    /// The model's context length, in positions.
    Context(usize),
    /// The KV pool.
    Pool {
        /// Number of blocks that requests can use.
        blocks: usize,
        /// Positions per block.
        block_size: usize,
    },
    /// The part of the KV pool in which nothing is pinned.
    Pins {
        /// Number of blocks that requests can use next to the pins.
        blocks: usize,
        /// Positions per block.
        block_size: usize,
        /// What the pins occupy.
        pinned: Pinned,
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
            LengthBound::Pins { blocks, block_size, pinned: Pinned { blocks: held, pins } } => {
                write!(
                    f,
                    "{blocks} blocks of {block_size} positions are left in the KV pool, because \
                     {held} are pinned, by {pins} {pin}; unpin prefixes to make room",
                    pin = if *pins == 1 { "pin" } else { "pins" }
                )
            }
        }
    }
}

/// Every error of a running engine.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The prompt has no tokens.
    #[error("the prompt is empty: expected at least 1 token")]
    EmptyPrompt,
    /// The prompt does not fit the context or the KV pool, even if nothing else runs.
    #[error("the prompt is too long: expected at most {limit} tokens, got {got} ({bound})")]
    PromptTooLong {
        /// Number of tokens of the prompt. If its text alone is too long, it is not tokenized, and
        /// this is the least number of tokens that such a text can have.
        got: usize,
        /// Maximum number of tokens of a prompt.
        limit: usize,
        /// What sets the limit.
        bound: LengthBound,
    },
    /// The prompt contains a token id that the model does not have.
    #[error("token id {got} at index {index}: expected an id below {vocab_size}")]
    TokenOutOfRange {
        /// Index in the prompt.
        index: usize,
        /// The token id.
        got: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A setting of the engine, or a parameter of a request, has an impossible value.
    #[error("{name}: expected {expected}, got {got}")]
    InvalidParameter {
        /// Name of the setting or parameter.
        name: Cow<'static, str>,
        /// What is accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// The admission queue is full.
    #[error(
        "overloaded: {queued_requests} requests with {queued_tokens} uncached tokens are waiting; \
         try again in {retry_after:?}"
    )]
    Overloaded {
        /// Estimated time until a retry can succeed.
        retry_after: Duration,
        /// Number of requests in the admission queue. If the request's tenant has as many there as
        /// one tenant may have, the number of this tenant's requests.
        queued_requests: usize,
        /// Number of uncached prompt tokens of these requests.
        queued_tokens: usize,
    },
    /// The images of waiting requests take too much memory.
    #[error(
        "overloaded: the images of waiting requests have {queued_bytes} bytes of pixels and those \
         of the request {bytes}, expected at most {limit} together; try again in {retry_after:?}"
    )]
    ImagesOverloaded {
        /// Estimated time until a retry can succeed.
        retry_after: Duration,
        /// Number of bytes of the pixels of waiting requests.
        queued_bytes: usize,
        /// Number of bytes of the pixels of the refused request.
        bytes: usize,
        /// Maximum number of bytes of waiting requests.
        limit: usize,
    },
    /// The requests with the same quota have too many tokens in flight.
    #[error(
        "the quota is used up: {tokens_in_flight} tokens are in flight and the request has \
         {tokens}, expected at most {running_tokens} that run and {queued_tokens} that wait"
    )]
    QuotaExceeded {
        /// Estimated time until a retry can succeed.
        retry_after: Duration,
        /// Number of tokens of the requests with the same quota that run or wait.
        tokens_in_flight: usize,
        /// Number of tokens of the refused request: its prompt and the maximum of its answer.
        tokens: usize,
        /// Maximum number of tokens of running requests.
        running_tokens: usize,
        /// Maximum number of tokens of waiting requests.
        queued_tokens: usize,
    },
    /// The request waited in the admission queue for longer than its `queue_timeout`.
    #[error("timed out in the queue after {waited:?}")]
    QueueTimeout {
        /// The time that it waited.
        waited: Duration,
    },
    /// The request took longer than its `timeout`.
    #[error("timed out after {elapsed:?}")]
    Timeout {
        /// Time since submission.
        elapsed: Duration,
    },
    /// The backend returned an error for a step that the request was part of. The engine continues
    /// with an empty cache. Whether another attempt would succeed is not known: the cause may be
    /// temporary, this request, or another request of the same step.
    #[error("the backend failed in a step of the request: {reason}")]
    StepFailed {
        /// The backend's error.
        reason: String,
    },
    /// The model computed NaN or infinity for the embedding of this request. The same request fails
    /// again.
    #[error("the model computed no embedding: expected finite hidden states, got {value}")]
    InvalidEmbedding {
        /// The first value that is not finite.
        value: f32,
    },
    /// No token could be chosen from the logits of this request: the model computed NaN, for
    /// example, or the request's logits processor panicked. The same request fails again.
    #[error("no token can be chosen from the logits of the request: {reason}")]
    InvalidLogits {
        /// The first unusable logit.
        reason: String,
    },
    /// The request's logits processor cannot continue, for example because its grammar has become
    /// too complex. The same request fails again.
    #[error("the answer cannot be continued: {reason}")]
    LogitsProcessor {
        /// The processor's error.
        reason: String,
    },
    /// The machine was too busy for the request's logits processor, such as the parser of its
    /// grammar. The request may be sent again.
    #[error("the server is too busy to continue the answer: {reason}")]
    ProcessorBusy {
        /// The work that was not done.
        reason: String,
    },
    /// Part of the engine failed while the request was in flight. The engine restarts by itself
    /// with an empty cache, and the request may be sent again.
    #[error("a part of the engine failed, and it restarts: {reason}")]
    Interrupted {
        /// What failed.
        reason: String,
    },
    /// A step took longer than the configured `step_timeout`. The engine restarts if and when the
    /// backend returns.
    #[error("the backend hangs: a step took more than {limit:?}")]
    BackendHung {
        /// The configured maximum duration of a step.
        limit: Duration,
    },
    /// Parts of the engine, such as its backend, have failed again and again without completing a
    /// step. The engine has stopped and does not start again.
    #[error(
        "the engine has stopped after {failures} failures in a row without a completed step; the \
         last one: {last}"
    )]
    GaveUp {
        /// Number of failures.
        failures: u32,
        /// The last one.
        last: String,
    },
    /// The engine could not start: its backend could not be made, or there is no tokio runtime
    /// that it can run on.
    #[error("the engine cannot start: {reason}")]
    StartFailed {
        /// What was expected, and what was found.
        reason: String,
    },
    /// The engine is about to stop: it completes the requests that it has and refuses new ones.
    #[error("the engine is about to stop and accepts no new requests")]
    Draining,
    /// The engine was shut down, or the tokio runtime that it ran on was. It does not start again.
    #[error("the engine has stopped")]
    Stopped,
    /// A prefix could not be pinned. The budget is `pin_budget` of the engine's settings.
    #[error("{0}{hint}", hint = pin_hint(.0))]
    Pin(PinError),
    /// A prefix could not be pinned now, because a long request that is in flight needs the blocks
    /// that pins may occupy.
    #[error(
        "pin: a long request that is in flight needs the blocks of the pin budget; try again when \
         it has ended"
    )]
    PinBudgetInUse,
    /// A session could not be opened or used.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The block accounting is inconsistent. This is a bug.
    #[error("audit failed: {0}")]
    Audit(String),
}

/// When to send a request again if its error has no estimate: a restart takes milliseconds, unless
/// the backend hangs.
const RETRY_AFTER: Duration = Duration::from_secs(1);

impl EngineError {
    /// When the same request may be sent to the same engine again. `None` if that cannot help: the
    /// request is invalid, its time is over, the engine has stopped, or the cause is not known to
    /// be temporary.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            EngineError::Overloaded { retry_after, .. }
            | EngineError::ImagesOverloaded { retry_after, .. }
            | EngineError::QuotaExceeded { retry_after, .. } => Some(*retry_after),
            EngineError::QueueTimeout { .. }
            | EngineError::PinBudgetInUse
            | EngineError::PromptTooLong { bound: LengthBound::Pins { .. }, .. }
            | EngineError::Session(SessionError::Busy { .. })
            | EngineError::Interrupted { .. }
            | EngineError::ProcessorBusy { .. }
            | EngineError::BackendHung { .. } => Some(RETRY_AFTER),
            _ => None,
        }
    }

    /// Whether the same request may succeed later on the same engine; see
    /// [`retry_after`](EngineError::retry_after).
    pub fn is_retryable(&self) -> bool {
        self.retry_after().is_some()
    }

    /// An [`EngineError::InvalidParameter`].
    pub fn invalid(
        name: impl Into<Cow<'static, str>>,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> EngineError {
        EngineError::InvalidParameter {
            name: name.into(),
            expected: expected.into(),
            got: got.to_string(),
        }
    }
}

/// Names the setting that limits pins, which the tree's error does not know.
fn pin_hint(error: &PinError) -> &'static str {
    match error {
        PinError::OverBudget { .. } => "; the limit is the setting `pin_budget`",
        _ => "",
    }
}

impl From<PinError> for EngineError {
    fn from(error: PinError) -> EngineError {
        EngineError::Pin(error)
    }
}

impl From<SamplingError> for EngineError {
    fn from(error: SamplingError) -> EngineError {
        match error {
            SamplingError::InvalidParameter { name, expected, got } => {
                EngineError::invalid(name, expected, got)
            }
            other => EngineError::invalid("sampling", "usable parameters", other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the error of a pin over the budget names the setting.
    #[test]
    fn a_pin_over_the_budget_names_the_setting() {
        let error = EngineError::from(PinError::OverBudget { budget: 0, pinned: 0, requested: 6 });
        assert!(error.to_string().contains("`pin_budget`"), "{error}");
    }

    /// Goal: exactly the errors whose cause passes are retryable.
    #[test]
    fn errors_whose_cause_passes_are_retryable() {
        let second = Duration::from_secs(1);
        let reason = || "x".to_owned();
        let too_long = |bound| EngineError::PromptTooLong { got: 40, limit: 16, bound };
        let overloaded = EngineError::Overloaded {
            retry_after: 3 * second,
            queued_requests: 1,
            queued_tokens: 1,
        };
        let over_quota = EngineError::QuotaExceeded {
            retry_after: 3 * second,
            tokens_in_flight: 9,
            tokens: 5,
            running_tokens: 8,
            queued_tokens: 4,
        };
        for error in [overloaded, over_quota] {
            assert_eq!(error.retry_after(), Some(3 * second), "{error}");
        }
        for error in [
            EngineError::QueueTimeout { waited: second },
            EngineError::Interrupted { reason: reason() },
            EngineError::ProcessorBusy { reason: reason() },
            EngineError::BackendHung { limit: second },
            SessionError::Busy { id: "x".into() }.into(),
            too_long(LengthBound::Pins { blocks: 1, block_size: 16, pinned: Pinned::default() }),
        ] {
            assert_eq!(error.retry_after(), Some(second), "{error}");
            assert!(error.is_retryable());
        }
        for error in [
            EngineError::EmptyPrompt,
            too_long(LengthBound::Pool { blocks: 1, block_size: 16 }),
            EngineError::Timeout { elapsed: second },
            EngineError::StepFailed { reason: reason() },
            EngineError::InvalidLogits { reason: reason() },
            EngineError::InvalidEmbedding { value: f32::INFINITY },
            EngineError::LogitsProcessor { reason: reason() },
            EngineError::GaveUp { failures: 10, last: reason() },
            EngineError::StartFailed { reason: reason() },
            EngineError::Draining,
            EngineError::Stopped,
            EngineError::Audit(reason()),
            SessionError::Unknown { id: "x".into() }.into(),
        ] {
            assert_eq!(error.retry_after(), None, "{error}");
            assert!(!error.is_retryable());
        }
    }
}
