//! What the core is asked to compute, and what it tells while it does.

use std::time::Duration;

use stolon_kvcache::Namespace;
use stolon_model::sampling::{SamplingParams, TokenLogprob};

/// A sequence to continue.
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    /// The prompt; not empty, ids below the vocabulary's size.
    pub tokens: Vec<u32>,
    /// Sequences share cached positions within a namespace only.
    pub namespace: Namespace,
    /// How tokens are chosen, and which log-probabilities are told.
    pub sampling: SamplingParams,
    /// Most tokens to generate; at least 1. Less come where the context or the pool ends.
    pub max_tokens: usize,
    /// Generation ends after any of these.
    pub stop_ids: Vec<u32>,
    /// Tell the log-probability of each prompt token, and of so many likeliest ones in its place.
    pub prompt_logprobs: Option<usize>,
    /// Larger runs earlier, where the policy heeds it.
    pub priority: i32,
    /// Longest wait before it runs.
    pub queue_timeout: Option<Duration>,
    /// Longest time from submission to end.
    pub timeout: Option<Duration>,
}

impl SequenceRequest {
    /// A greedy continuation of `tokens` by at most `max_tokens`.
    pub fn new(tokens: Vec<u32>, max_tokens: usize) -> SequenceRequest {
        SequenceRequest {
            tokens,
            namespace: Namespace::default(),
            sampling: SamplingParams::default(),
            max_tokens,
            stop_ids: Vec::new(),
            prompt_logprobs: None,
            priority: 0,
            queue_timeout: None,
            timeout: None,
        }
    }
}

/// One thing that happened to a sequence, in order: `Started`, `PromptLogprobs` if asked for,
/// `Token`s, `Finished`.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceEvent {
    /// It left the queue.
    Started {
        /// Prompt positions found in the cache.
        cached_tokens: usize,
    },
    /// One entry a prompt token; the first has none.
    PromptLogprobs(Vec<Option<TokenLogprob>>),
    /// A token was sampled.
    Token {
        /// Its id.
        id: u32,
        /// Present when asked for.
        logprob: Option<TokenLogprob>,
    },
    /// It ended well; nothing follows.
    Finished(SequenceFinish),
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceEnd {
    /// A stop id was sampled.
    StopId(u32),
    /// `max_tokens`, the context or the pool was reached.
    Length,
}

/// How a sequence ended, and what it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceFinish {
    /// Why.
    pub end: SequenceEnd,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many of them were read from the cache.
    pub cached_tokens: usize,
    /// Tokens generated, a stop id included.
    pub completion_tokens: usize,
    /// From submission until it began to run.
    pub queue: Duration,
    /// From submission until its first token.
    pub ttft: Duration,
    /// From submission until its end.
    pub total: Duration,
}
