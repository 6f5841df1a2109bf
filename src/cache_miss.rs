//! [`CacheMiss`]: why a part of a prompt was not in the prefix cache.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde::Serialize;

/// Maximum number of misses that the log keeps.
const LOGGED: usize = 256;

/// Why a part of a prompt is not in the prefix cache, from
/// [`Cache::explain`](crate::Cache::explain). The prompt was compared with the requests of the same
/// [`tenant`](crate::Request::tenant) that the engine remembers
/// ([`EngineBuilder::history_bytes`](crate::EngineBuilder::history_bytes)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CacheMiss {
    /// The reason.
    pub reason: MissReason,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of them that are not computed, because they are cached.
    pub cached_tokens: usize,
    /// Number of further tokens that would be cached without the reason: at most as many as the
    /// nearest earlier request has, in whole blocks.
    pub lost_tokens: usize,
    /// The time to compute `lost_tokens` at the recent speed of prompts; `None` before the engine
    /// has computed anything.
    pub lost_time: Option<Duration>,
    /// Number of tokens at the beginning that the prompt has in common with the nearest earlier
    /// request and its answer. It may be more than `cached_tokens`.
    pub common_tokens: usize,
    /// The first message that differs, for reasons about messages.
    pub message: Option<MissMessage>,
    /// The beginning of what follows the common tokens in the prompt, as text; empty if there is no
    /// tokenizer.
    pub prompt_text: String,
    /// The beginning of what follows the common tokens in the nearest earlier request and its
    /// answer, as text.
    pub earlier_text: String,
}

/// The message that a [`CacheMiss`] is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MissMessage {
    /// Its index in the conversation, from 0: in the earlier one if the message was removed.
    pub index: usize,
    /// Its role.
    pub role: String,
}

/// The reason of a [`CacheMiss`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MissReason {
    /// What is not cached is new: no earlier request has it.
    New,
    /// The same prompt was computed with another cache salt.
    OtherSalt,
    /// The same prompt was computed with another adapter, or without one.
    OtherAdapter,
    /// The prompt was cached, and blocks have been evicted since then.
    Evicted,
    /// The same prompt was submitted before, but is not cached: its request was canceled, has
    /// failed or is still being computed.
    NotComputed,
    /// Its keys and values are cached, but the model has a recurrent state, and no checkpoint of it
    /// is at this place.
    NoCheckpoint,
    /// The tools are others.
    ToolsChanged,
    /// The variables or options of the chat template are others.
    OptionsChanged,
    /// A message has another content or role.
    MessageChanged,
    /// A message of the earlier request is missing.
    MessageRemoved,
    /// A message was inserted before messages of the earlier request.
    MessageInserted,
    /// An answer came back with a content that is not what was sampled.
    AnswerChanged,
    /// An answer came back with reasoning that is not what was sampled.
    ReasoningChanged,
    /// The chat template has rendered the same messages to another text: it strips the reasoning of
    /// earlier turns, for example, or prints the time.
    TemplateChanged,
    /// The text is the same, but its tokens are others.
    OtherTokens,
    /// The prompt is not a conversation, and its text is another one.
    TextChanged,
}

impl MissReason {
    /// All reasons.
    pub const ALL: [MissReason; 16] = [
        MissReason::New,
        MissReason::OtherSalt,
        MissReason::OtherAdapter,
        MissReason::Evicted,
        MissReason::NotComputed,
        MissReason::NoCheckpoint,
        MissReason::ToolsChanged,
        MissReason::OptionsChanged,
        MissReason::MessageChanged,
        MissReason::MessageRemoved,
        MissReason::MessageInserted,
        MissReason::AnswerChanged,
        MissReason::ReasoningChanged,
        MissReason::TemplateChanged,
        MissReason::OtherTokens,
        MissReason::TextChanged,
    ];

    /// The name, as in JSON and in metrics: `message_changed`, for example.
    pub fn as_str(self) -> &'static str {
        match self {
            MissReason::New => "new",
            MissReason::OtherSalt => "other_salt",
            MissReason::OtherAdapter => "other_adapter",
            MissReason::Evicted => "evicted",
            MissReason::NotComputed => "not_computed",
            MissReason::NoCheckpoint => "no_checkpoint",
            MissReason::ToolsChanged => "tools_changed",
            MissReason::OptionsChanged => "options_changed",
            MissReason::MessageChanged => "message_changed",
            MissReason::MessageRemoved => "message_removed",
            MissReason::MessageInserted => "message_inserted",
            MissReason::AnswerChanged => "answer_changed",
            MissReason::ReasoningChanged => "reasoning_changed",
            MissReason::TemplateChanged => "template_changed",
            MissReason::OtherTokens => "other_tokens",
            MissReason::TextChanged => "text_changed",
        }
    }
}

/// A miss of a request that was submitted, from [`Cache::misses`](crate::Cache::misses).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoggedMiss {
    /// When the request was submitted.
    pub at: SystemTime,
    /// The [`tenant`](crate::Request::tenant) of the request.
    pub tenant: Option<Arc<str>>,
    /// The reason, and what it costs.
    pub miss: Arc<CacheMiss>,
}

/// How often a reason was found, from [`Cache::miss_counts`](crate::Cache::miss_counts).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MissCount {
    /// The reason.
    pub reason: MissReason,
    /// Number of requests.
    pub requests: u64,
    /// Sum of their [`CacheMiss::lost_tokens`].
    pub lost_tokens: u64,
}

/// The misses of an engine: the newest ones, and counters of all.
#[derive(Debug, Default)]
pub(crate) struct MissLog {
    newest: Mutex<VecDeque<LoggedMiss>>,
    /// Requests and lost tokens, by the number of the reason.
    counts: [(AtomicU64, AtomicU64); MissReason::ALL.len()],
}

impl MissLog {
    /// Adds a miss.
    fn note(&self, miss: &Arc<CacheMiss>, tenant: Option<Arc<str>>) {
        let (requests, tokens) = &self.counts[miss.reason as usize];
        requests.fetch_add(1, Ordering::Relaxed);
        tokens.fetch_add(miss.lost_tokens as u64, Ordering::Relaxed);
        if miss.lost_tokens == 0 {
            return;
        }
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.truncate(LOGGED - 1);
        let (at, miss) = (SystemTime::now(), Arc::clone(miss));
        newest.push_front(LoggedMiss { at, tenant, miss });
    }

    /// The newest misses that have lost tokens, the newest first.
    pub(crate) fn newest(&self) -> Vec<LoggedMiss> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// The counters of all reasons.
    pub(crate) fn counts(&self) -> Vec<MissCount> {
        let count = |reason: MissReason| {
            let (requests, tokens) = &self.counts[reason as usize];
            let (requests, lost_tokens) =
                (requests.load(Ordering::Relaxed), tokens.load(Ordering::Relaxed));
            MissCount { reason, requests, lost_tokens }
        };
        MissReason::ALL.map(count).to_vec()
    }
}

/// The miss of a request that was submitted.
#[derive(Clone, Debug)]
pub(crate) struct Missed {
    pub(crate) miss: Arc<CacheMiss>,
    /// Where the miss is noted, and its tenant; `None` when the request has been started.
    unnoted: Option<(Arc<MissLog>, Option<Arc<str>>)>,
}

impl Missed {
    pub(crate) fn new(miss: CacheMiss, log: &Arc<MissLog>, tenant: &Option<Arc<str>>) -> Missed {
        Missed { miss: Arc::new(miss), unnoted: Some((Arc::clone(log), tenant.clone())) }
    }

    /// Adds the miss to the log when its request starts with `cached` cached tokens: while it
    /// waited, another request may have computed them. A request that was preempted starts again,
    /// and is not added again.
    pub(crate) fn started(&mut self, cached: usize) {
        let Some((log, tenant)) = self.unnoted.take() else { return };
        let since = cached.saturating_sub(self.miss.cached_tokens);
        if since == 0 || since < self.miss.lost_tokens {
            log.note(&self.miss, tenant);
        }
    }
}
