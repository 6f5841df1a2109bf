//! [`Estimate`]: the numbers that a router needs before it sends a request to an engine.

use std::time::Duration;

use serde::Serialize;

/// The work that an engine would have to do for a request, from [`Engine::estimate`].
///
/// [`Engine::estimate`]: crate::Engine::estimate
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Estimate {
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of them that do not have to be computed, because they are in the prefix cache now.
    pub cached_tokens: usize,
    /// Number of further tokens that do not have to be computed twice: another request that waits or
    /// runs has them, and this one would use its KV. A router that counts them sends requests with a
    /// common prefix to the same engine, also before that prefix is cached. 0 for a model with a
    /// recurrent state.
    pub pending_tokens: usize,
    /// Number of further tokens, after the cached ones, whose KV is on the disk or in the object
    /// store. Reading it takes less time than computing them.
    pub stored_tokens: usize,
    /// Number of uncached prompt tokens of the requests in the admission queue.
    pub queued_tokens: usize,
    /// Expected time until the first token of the answer, if the request is submitted now, without
    /// the time to render and tokenize its prompt or to read stored KV. `None` before the engine has
    /// computed anything.
    ///
    /// It follows from the requests that run and wait, the expected lengths of their answers, the
    /// recent speed of prompts and answers, and the rate at which requests have arrived. Up to 1.4
    /// times the capacity of a simulated engine, half of the estimates are right within a factor of
    /// 1.5 (`crates/engine/scheduler/src/tests/estimates.rs`).
    pub expected_first_token: Option<Duration>,
    /// The part of `expected_first_token` that the request waits for others, and does not take for
    /// its own prompt.
    pub expected_wait: Option<Duration>,
}
