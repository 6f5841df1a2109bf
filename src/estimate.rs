//! [`Estimate`]: what a router needs to know before it sends a request to an engine.

use std::time::Duration;

use serde::Serialize;

/// What an engine would have to do for a request, from [`Engine::estimate`].
///
/// [`Engine::estimate`]: crate::Engine::estimate
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Estimate {
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many of them are in the prefix cache now.
    pub cached_tokens: usize,
    /// Number of uncached prompt tokens of the requests in the admission queue.
    pub queued_tokens: usize,
    /// Time to compute the queued tokens at the recent throughput. `None` before the engine has
    /// computed anything.
    pub expected_wait: Option<Duration>,
}
