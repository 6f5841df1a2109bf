//! Settings of admission and of steps, and limits of requests.

use std::time::Duration;

use stolon_scheduler::{AdmissionPolicy, Speculation};

use crate::EngineBuilder;

impl EngineBuilder {
    /// Maximum number of tokens in one forward pass, prefill chunks and decodes together; at least
    /// 1. Default: 512.
    ///
    /// A longer prompt is computed in several chunks. While other requests decode or wait, chunks
    /// are smaller if a step would take longer than
    /// [`step_time_target`](EngineBuilder::step_time_target).
    pub fn max_batched_tokens(mut self, tokens: usize) -> Self {
        self.config.max_batched_tokens = tokens;
        self
    }

    /// Aim for the duration of a step while other requests decode or wait. Default: 100 ms. `None`
    /// allows steps of any duration.
    ///
    /// The engine measures how fast prompts are computed, and computes as many of their tokens in a
    /// step as this time allows, but at least 64. It changes no answer.
    pub fn step_time_target(mut self, target: impl Into<Option<Duration>>) -> Self {
        self.config.step_time_target = target.into();
        self
    }

    /// Maximum number of requests that run at the same time; at least 1. Default: 32.
    pub fn max_running(mut self, requests: usize) -> Self {
        self.config.max_running = requests;
        self
    }

    /// Maximum number of requests in the admission queue; at least 1. Default: 1,024.
    ///
    /// If the queue is full, [`Engine::generate`](crate::Engine::generate) fails with
    /// [`EngineError::Overloaded`](crate::EngineError::Overloaded). The requests of one
    /// [tenant](crate::Request::tenant) may be three quarters of them, so that others find room.
    pub fn max_queued_requests(mut self, requests: usize) -> Self {
        self.config.max_queued_requests = requests;
        self
    }

    /// Maximum number of tokens to generate for a request that does not call
    /// [`Request::max_tokens`](crate::Request::max_tokens); at least 1. Default: none, as many as
    /// the context and the KV cache can hold.
    ///
    /// Without a number in the request, admission expects an answer as long as those of earlier
    /// requests without one, regardless of this setting.
    pub fn default_max_tokens(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.config.default_max_tokens = tokens.into();
        self
    }

    /// Maximum number of uncached prompt tokens in the admission queue; at least 1. Default:
    /// 1,048,576.
    ///
    /// If a request would exceed it, [`Engine::generate`](crate::Engine::generate) fails with
    /// [`EngineError::Overloaded`](crate::EngineError::Overloaded). While the queue is empty, a
    /// request of any size is accepted. Tokens of one tenant may be three quarters of this number.
    ///
    /// Cached tokens do not count. A limit of a few thousand therefore accepts conversations whose
    /// history is cached and refuses those whose history was evicted, instead of letting them evict
    /// each other from a cache that is too small for all.
    pub fn max_queued_tokens(mut self, tokens: usize) -> Self {
        self.config.max_queued_tokens = tokens;
        self
    }

    /// Maximum number of bytes of the pixels of images that waiting requests hold, at least 1; others
    /// are refused with [`EngineError::ImagesOverloaded`](crate::EngineError::ImagesOverloaded). A
    /// request is accepted in any case if none waits. Default: 1 GiB. A tile of 512 x 512 pixels
    /// takes 768 KiB.
    pub fn max_queued_pixel_bytes(mut self, bytes: usize) -> Self {
        self.config.max_queued_pixel_bytes = bytes;
        self
    }

    /// Bound on overtaking, in uncached prompt tokens. Default: 4,096.
    ///
    /// Under every admission policy, before a request is admitted, at most this many uncached
    /// prompt tokens of later requests are admitted, plus as many as were waiting when the request
    /// arrived. 0 means strictly in order of arrival.
    pub fn max_overtake_tokens(mut self, tokens: usize) -> Self {
        self.config.max_overtake_tokens = tokens;
        self
    }

    /// Whether several tokens of an answer may be computed in one step (speculative decoding).
    /// Default: up to 8 where it saves time.
    ///
    /// Tokens are guessed from what the engine knows: what other requests of the same namespace went
    /// on with, repetitions of the prompt, forced parts of a grammar and
    /// [`Request::prediction`](crate::Request::prediction). Answers have the same bits with and
    /// without. Nothing is guessed on GPUs.
    pub fn speculation(mut self, speculation: Speculation) -> Self {
        self.config.speculation = speculation;
        self
    }

    /// Number of unread events of a [`TokenStream`](crate::TokenStream) after which its request is
    /// paused; at least 8. Default: 256.
    ///
    /// A paused request continues when its events are read. Other requests are not affected.
    pub fn event_capacity(mut self, events: usize) -> Self {
        self.config.event_capacity = events;
        self
    }

    /// Maximum number of tokens of a request, prompt and answer together; at least 2 and at most
    /// the context length of the model. Default: the context length.
    pub fn max_positions(mut self, tokens: usize) -> Self {
        self.config.max_positions = Some(tokens);
        self
    }

    /// Maximum duration of one forward pass. Default: no limit.
    ///
    /// A backend that takes longer is treated as hung: requests in flight and new requests fail
    /// with [`EngineError::BackendHung`](crate::EngineError::BackendHung) until the backend
    /// returns. Without a limit, [`Engine::shutdown`](crate::Engine::shutdown) waits for a backend
    /// that hangs forever.
    pub fn step_timeout(mut self, limit: Duration) -> Self {
        self.config.step_timeout = Some(limit);
        self
    }

    /// Which waiting request is admitted next. Default: [`AdmissionPolicy::Cost`]. Can be changed
    /// later with [`Engine::set_admission`](crate::Engine::set_admission).
    pub fn admission(mut self, policy: AdmissionPolicy) -> Self {
        self.config.policy = policy;
        self
    }
}
