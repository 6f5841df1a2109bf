//! Settings of the core: sizes and limits, checked once when it starts.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use stolon_kvcache::Policy;

use crate::error::CoreError;

/// Which waiting request runs next. Under each, no request is overtaken by more later work than
/// waited when it came, and [`CoreConfig::max_overtake_tokens`] beside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdmissionPolicy {
    /// In order of arrival.
    Fcfs,
    /// The longest cached prefix first.
    LongestPrefix,
    /// The fewest uncached prompt tokens first.
    #[default]
    Cost,
    /// The largest priority first, in order of arrival among equals.
    Priority,
}

impl fmt::Display for AdmissionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdmissionPolicy::Fcfs => "fcfs",
            AdmissionPolicy::LongestPrefix => "longest-prefix",
            AdmissionPolicy::Cost => "cost",
            AdmissionPolicy::Priority => "priority",
        })
    }
}

/// A name that is no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("admission policy: expected fcfs, longest-prefix, cost or priority, got `{got}`")]
pub struct UnknownPolicy {
    /// The name.
    pub got: String,
}

impl FromStr for AdmissionPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<AdmissionPolicy, UnknownPolicy> {
        match text {
            "fcfs" => Ok(AdmissionPolicy::Fcfs),
            "longest-prefix" => Ok(AdmissionPolicy::LongestPrefix),
            "cost" => Ok(AdmissionPolicy::Cost),
            "priority" => Ok(AdmissionPolicy::Priority),
            other => Err(UnknownPolicy { got: other.to_owned() }),
        }
    }
}

/// Settings of the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreConfig {
    /// Most tokens one step computes, prompt chunks and decodes together; at least 1.
    pub max_batched_tokens: usize,
    /// Most requests that run at the same time; at least 1.
    pub max_running: usize,
    /// Most requests that wait; at least 1.
    pub max_queued_requests: usize,
    /// Most uncached prompt tokens that wait; one request is let in whatever it needs.
    pub max_queued_tokens: usize,
    /// Whether computed positions are kept and shared.
    pub prefix_caching: bool,
    /// Which cached blocks are given up first when room is needed.
    pub eviction_policy: Policy,
    /// Most blocks that pins may hold together. So many fewer are there for a request, since a
    /// request that was let in must be able to end.
    pub pin_budget: usize,
    /// The policy at the start.
    pub policy: AdmissionPolicy,
    /// Charge whole prompts and whole `max_tokens`, as if nothing were cached.
    pub conservative: bool,
    /// How many waiting requests are tried past one that does not fit; at least 1.
    pub look_ahead: usize,
    /// Uncached prompt tokens of later requests that may be admitted before an earlier one, over
    /// and above what waited when that one came; 0 is strictly in order of arrival.
    pub max_overtake_tokens: usize,
    /// Bytes for the last rows of logits of cached prompts, which give the first token of a
    /// repeated prompt without a forward pass; 0 keeps none.
    pub kept_logit_bytes: usize,
    /// Longest time that one step may take: a backend that takes longer counts as hung. `None`
    /// waits for ever. Needs a runtime with its time driver on.
    pub step_timeout: Option<Duration>,
    /// Events a stream holds before its sequence pauses; at least 8.
    pub event_capacity: usize,
}

impl Default for CoreConfig {
    fn default() -> CoreConfig {
        CoreConfig {
            max_batched_tokens: 512,
            max_running: 32,
            max_queued_requests: 1024,
            max_queued_tokens: 1 << 20,
            prefix_caching: true,
            eviction_policy: Policy::default(),
            pin_budget: 0,
            policy: AdmissionPolicy::default(),
            conservative: false,
            look_ahead: 16,
            max_overtake_tokens: 4_096,
            kept_logit_bytes: 32 << 20,
            step_timeout: None,
            event_capacity: 256,
        }
    }
}

impl CoreConfig {
    /// Checks every setting.
    ///
    /// # Errors
    /// [`CoreError::InvalidParameter`] names the first that is impossible.
    pub fn validate(&self) -> Result<(), CoreError> {
        let at_least = [
            ("max_batched_tokens", self.max_batched_tokens, 1),
            ("max_running", self.max_running, 1),
            ("max_queued_requests", self.max_queued_requests, 1),
            ("max_queued_tokens", self.max_queued_tokens, 1),
            ("look_ahead", self.look_ahead, 1),
            ("event_capacity", self.event_capacity, 8),
        ];
        for (name, got, least) in at_least {
            if got < least {
                return Err(CoreError::invalid(name, format!("at least {least}"), got));
            }
        }
        Ok(())
    }
}
