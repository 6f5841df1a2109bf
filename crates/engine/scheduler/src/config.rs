//! Settings of an engine: sizes and limits, validated once when it starts.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use stolon_kvcache::{EvictionOrder, EvictionPolicy};

use crate::error::EngineError;
use crate::session::Sessions;
use crate::speculation::Speculation;
use crate::transfer::{KvSink, KvSource};

/// Which waiting request is admitted next. Under every policy, requests with a larger priority
/// come before those with a smaller one, and the policy orders requests of equal priority. Requests
/// of tenants that have fewer running requests than their share come before all others. The
/// amount of later work that is admitted before a request is bounded: see
/// [`EngineConfig::max_overtake_tokens`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdmissionPolicy {
    /// First come, first served.
    Fcfs,
    /// The request with the longest cached prefix first.
    LongestPrefix,
    /// The request with the fewest uncached prompt tokens first; requests age while they wait.
    #[default]
    Cost,
}

impl fmt::Display for AdmissionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdmissionPolicy::Fcfs => "fcfs",
            AdmissionPolicy::LongestPrefix => "longest-prefix",
            AdmissionPolicy::Cost => "cost",
        })
    }
}

/// The string is not the name of an admission policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "admission policy: expected fcfs, longest-prefix or cost, got `{got}` (requests with a larger \
     priority come first under each of them)"
)]
pub struct UnknownPolicy {
    /// The name that was given.
    pub got: String,
}

impl FromStr for AdmissionPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<AdmissionPolicy, UnknownPolicy> {
        match text {
            "fcfs" => Ok(AdmissionPolicy::Fcfs),
            "longest-prefix" => Ok(AdmissionPolicy::LongestPrefix),
            "cost" => Ok(AdmissionPolicy::Cost),
            other => Err(UnknownPolicy { got: other.to_owned() }),
        }
    }
}

/// Makes a custom eviction order. It is called once at startup and again after each restart,
/// because a restarted engine has a new, empty cache.
#[derive(Clone)]
pub struct EvictionOrderFactory(Arc<dyn Fn() -> Box<dyn EvictionOrder> + Send + Sync>);

impl EvictionOrderFactory {
    /// A factory that calls `make`.
    pub fn new(make: impl Fn() -> Box<dyn EvictionOrder> + Send + Sync + 'static) -> Self {
        EvictionOrderFactory(Arc::new(make))
    }

    fn make(&self) -> Box<dyn EvictionOrder> {
        (self.0)()
    }
}

impl fmt::Debug for EvictionOrderFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EvictionOrderFactory")
    }
}

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Maximum number of tokens of one step, prefill chunks and decodes together; at least 1.
    pub max_batched_tokens: usize,
    /// Aim for the duration of a step while other requests decode or wait: prefill chunks become
    /// small enough for it at the recent speed, but not smaller than 64 tokens together. `None` for
    /// steps of any duration. The size of chunks changes no answer.
    pub step_time_target: Option<Duration>,
    /// Maximum number of requests that run at the same time; at least 1.
    pub max_running: usize,
    /// Maximum number of requests in the admission queue; at least 1. A tenant with a name has at most
    /// three quarters of them, and of the tokens.
    pub max_queued_requests: usize,
    /// Maximum number of uncached prompt tokens in the admission queue, at least 1. While the queue
    /// is empty, a request of any size is accepted.
    pub max_queued_tokens: usize,
    /// Maximum number of tokens to generate for a request without `max_tokens`, at least 1. `None`
    /// means as many as the context and the KV pool can hold.
    pub default_max_tokens: Option<usize>,
    /// Maximum number of tokens of a request, prompt and answer together: from 2 to the backend's
    /// context length. `None` means the context length.
    pub max_positions: Option<usize>,
    /// Whether computed prefixes are cached and shared.
    pub prefix_caching: bool,
    /// Which cached blocks are evicted first. `None` means the least recently used, or, for a model
    /// with a recurrent state, [`EvictionPolicy::CostAware`].
    pub eviction_policy: Option<EvictionPolicy>,
    /// A custom order of eviction, used instead of `eviction_policy`.
    pub eviction_order: Option<EvictionOrderFactory>,
    /// Maximum number of KV blocks that pinned prefixes may occupy; less than the number of blocks.
    /// `None` means a quarter of them, or less where a request of the context length would not fit
    /// next to the budget. These blocks are not available to running requests, so that every
    /// admitted request can complete. A prompt that needs the part in which nothing is pinned may
    /// use it, and nothing can be pinned until its request has ended. If `kv_sink` stores pins, all
    /// blocks are available to requests, and `None` means a quarter of the blocks. Marks protect at
    /// most as many blocks, in addition, and with `None` a quarter of the blocks.
    pub pin_budget: Option<usize>,
    /// Number of blocks that each namespace but the default one may keep in the prefix cache, at
    /// most the number of blocks; 0 keeps nothing that is not in use. `None` means no limit. What
    /// requests, pins and sessions hold counts, and may exceed it. See
    /// [`TreeBuilder::namespace_quota`](stolon_kvcache::TreeBuilder::namespace_quota).
    pub namespace_quota: Option<usize>,
    /// Maximum number of KV blocks that sessions keep from being evicted between their turns; at
    /// most the number of blocks. `None` means half of them. Sessions release blocks when a running
    /// request finds no others. 0 means that sessions hold nothing.
    pub session_budget: Option<usize>,
    /// Maximum number of open sessions, from 1 to [`EngineConfig::MAX_SESSIONS`]. Their token ids
    /// are kept in memory, 4 bytes per token.
    pub max_sessions: usize,
    /// Default of the time without a turn after which a session is closed, at most
    /// [`Sessions::MAX_TTL`].
    pub session_ttl: Duration,
    /// The admission policy at startup.
    pub policy: AdmissionPolicy,
    /// Reserve room for the whole prompt and `max_tokens` of every running request, as if nothing
    /// were cached. For comparisons.
    pub conservative: bool,
    /// Number of requests that are tried in each round if the first ones do not fit; at least 1.
    pub look_ahead: usize,
    /// Bound on overtaking: before a request is admitted, at most this many uncached prompt tokens
    /// of later requests are admitted, plus as many as were waiting when the request arrived. 0
    /// means strictly in order of arrival.
    pub max_overtake_tokens: usize,
    /// Memory in bytes for cached logits of the last position of prompts, which yield the first
    /// token of a repeated prompt without a forward pass. 0 disables it.
    pub logit_cache_bytes: usize,
    /// Maximum duration of one step. A backend that takes longer is treated as hung. `None` means
    /// no limit. Requires a tokio runtime with a time driver.
    pub step_timeout: Option<Duration>,
    /// Maximum size in bytes of the embeddings of images that are kept after their use, for the same
    /// image behind another prefix; 0 for none.
    pub encoder_cache_bytes: usize,
    /// Maximum number of bytes of the pixels of images that waiting requests hold, at least 1. A
    /// request is accepted in any case if none waits.
    pub max_queued_pixel_bytes: usize,
    /// Whether tokens are proposed to follow the sequences that decode (speculative decoding). The
    /// backend must take proposals ([`BackendSpec::proposals`](stolon_backend::BackendSpec)); nothing
    /// is proposed otherwise.
    pub speculation: Speculation,
    /// Number of unread events after which a request is paused; at least 8.
    pub event_capacity: usize,
    /// Stores KV outside of the pool. It is told of blocks that are added to the prefix tree.
    pub kv_sink: Option<Arc<dyn KvSink>>,
    /// Finds stored KV of a prompt before its request is submitted, and again if what was cached of
    /// it was evicted while the request waited.
    pub kv_source: Option<Arc<dyn KvSource>>,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            max_batched_tokens: 512,
            step_time_target: Some(Duration::from_millis(100)),
            max_running: 32,
            max_queued_requests: 1024,
            max_queued_tokens: 1 << 20,
            default_max_tokens: None,
            max_positions: None,
            prefix_caching: true,
            eviction_policy: None,
            eviction_order: None,
            pin_budget: None,
            namespace_quota: None,
            session_budget: None,
            max_sessions: 1024,
            session_ttl: Duration::from_secs(30 * 60),
            policy: AdmissionPolicy::default(),
            conservative: false,
            look_ahead: 16,
            max_overtake_tokens: 4_096,
            logit_cache_bytes: 32 << 20,
            step_timeout: None,
            encoder_cache_bytes: 64 << 20,
            max_queued_pixel_bytes: 1 << 30,
            speculation: Speculation::default(),
            event_capacity: 256,
            kv_sink: None,
            kv_source: None,
        }
    }
}

impl EngineConfig {
    /// Largest value of [`EngineConfig::max_sessions`].
    pub const MAX_SESSIONS: usize = 65_536;

    /// A new eviction order, as it is at startup.
    pub fn new_eviction_order(&self) -> Box<dyn EvictionOrder> {
        match &self.eviction_order {
            Some(custom) => custom.make(),
            None => self.eviction_policy.unwrap_or_default().order(),
        }
    }

    /// The sink that also stores pinned prefixes, if one is configured.
    pub fn sink_of_pins(&self) -> Option<&Arc<dyn KvSink>> {
        self.kv_sink.as_ref().filter(|sink| sink.stores_pins())
    }

    /// Validates every setting that does not depend on the backend.
    ///
    /// # Errors
    /// [`EngineError::InvalidParameter`] for the first impossible value.
    pub fn validate(&self) -> Result<(), EngineError> {
        let at_least = [
            ("max_batched_tokens", self.max_batched_tokens, 1),
            ("max_running", self.max_running, 1),
            ("max_queued_requests", self.max_queued_requests, 1),
            ("max_queued_tokens", self.max_queued_tokens, 1),
            ("max_queued_pixel_bytes", self.max_queued_pixel_bytes, 1),
            ("look_ahead", self.look_ahead, 1),
            ("event_capacity", self.event_capacity, 8),
            ("default_max_tokens", self.default_max_tokens.unwrap_or(usize::MAX), 1),
        ];
        if self.max_sessions == 0 || self.max_sessions > EngineConfig::MAX_SESSIONS {
            let expected = format!("from 1 to {}", EngineConfig::MAX_SESSIONS);
            return Err(EngineError::invalid("max_sessions", expected, self.max_sessions));
        }
        if self.session_ttl.is_zero() || self.session_ttl > Sessions::MAX_TTL {
            let expected = format!("more than 0 and at most {:?}", Sessions::MAX_TTL);
            let got = format!("{:?}", self.session_ttl);
            return Err(EngineError::invalid("session_ttl", expected, got));
        }
        let (got, most) = (self.speculation.max_tokens, Speculation::MAX_TOKENS);
        if got > most {
            return Err(EngineError::invalid("speculation", format!("at most {most} tokens"), got));
        }
        for (name, got, least) in at_least {
            if got < least {
                return Err(EngineError::invalid(name, format!("at least {least}"), got));
            }
        }
        Ok(())
    }
}
