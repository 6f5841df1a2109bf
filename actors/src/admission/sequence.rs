//! One request's state, from the door to its end.
//!
//! 1. **Waiting**: it has tokens and a place in the queue, but no lease and no block.
//! 2. **Running**: its prefix is leased, its other blocks are reserved, and step by step
//!    `computed` catches up with `tokens`; whenever it does, a token is sampled and appended.
//! 3. **Preempted**: back to waiting, with its generated tokens as part of what is to be
//!    computed; nothing that was told to the caller is told again.
//! 4. **Ended**: dropped. Dropping returns every lease, on every path.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use stolon_kvcache::{BlockId, BlockLease, Namespace, PrefixLease};
use stolon_model::sampling::{SamplerState, TokenLogprob};

use super::schedule::View;
use crate::error::CoreError;
use crate::executor::plan::{PromptTargets, RowTask};
use crate::request::{SequenceEnd, SequenceEvent, SequenceFinish, SequenceRequest};
use crate::stream::EventSender;

/// Rows of logits a step computes at most of a sequence whose every row has logits: a row is
/// as wide as the vocabulary.
const LOGIT_ROWS_MAX: usize = 64;

/// A request's state. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Sequence {
    /// Unique in an engine.
    pub(crate) id: u64,
    /// Prompt and generated tokens.
    pub(crate) tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub(crate) prompt_len: usize,
    pub(crate) namespace: Namespace,
    /// Equal for requests of one namespace that begin with the same block; a hint.
    pub(crate) family: u64,
    /// Away with the step plan while a token is being sampled.
    pub(crate) sampler: Option<SamplerState>,
    /// Most tokens to generate, such that they fit context and pool.
    pub(crate) max_tokens: usize,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) priority: i32,
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    pub(crate) events: EventSender,
    pub(crate) times: Times,
    /// Prompt tokens found cached when it first ran; `None` before.
    pub(crate) cached_tokens: Option<usize>,
    /// What it holds while it runs.
    pub(crate) held: Held,
    /// It is part of the step being computed.
    pub(crate) in_step: bool,
    /// Its caller is gone, or it is to fail with this.
    pub(crate) end: Option<Ending>,
}

/// Why a sequence is to end before it is done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ending {
    /// Nobody reads its events.
    Cancelled,
    /// It cannot go on.
    Failed(CoreError),
}

/// The moments of a request's life.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) submitted: Instant,
    pub(crate) queue_deadline: Option<Instant>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) started: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
}

/// Prompt log-probabilities, gathered over the prompt's chunks until they are told.
#[derive(Debug)]
pub(crate) struct PromptLogprobs {
    pub(crate) top: usize,
    pub(crate) gathered: Vec<Option<TokenLogprob>>,
}

/// Blocks and positions of a running sequence.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// The committed positions it reads; `None` without a prefix cache.
    pub(crate) lease: Option<PrefixLease>,
    /// Its private blocks, those after the lease.
    pub(crate) reserved: Option<BlockLease>,
    /// Both, in order of position.
    pub(crate) table: Vec<BlockId>,
    /// Positions whose keys and values are there.
    pub(crate) computed: usize,
    /// The step it was last part of.
    pub(crate) last_step: u64,
}

impl Held {
    /// Positions that others can match.
    pub(crate) fn committed(&self) -> usize {
        self.lease.as_ref().map_or(0, PrefixLease::len)
    }

    /// Makes the table anew from the leases.
    pub(crate) fn rebuild_table(&mut self) {
        self.table.clear();
        if let Some(lease) = &self.lease {
            self.table.extend_from_slice(lease.blocks());
        }
        if let Some(reserved) = &self.reserved {
            self.table.extend_from_slice(reserved.blocks());
        }
    }

    /// Adds private blocks at the end.
    pub(crate) fn add_reserved(&mut self, blocks: BlockLease) {
        self.table.extend_from_slice(blocks.blocks());
        match &mut self.reserved {
            Some(reserved) => reserved.append(blocks),
            None => self.reserved = Some(blocks),
        }
    }
}

impl Sequence {
    /// A request that waits. `max_tokens` is what context and pool leave of those asked for.
    pub(crate) fn new(
        id: u64,
        request: SequenceRequest,
        max_tokens: usize,
        block_size: usize,
        events: EventSender,
        submitted: Instant,
    ) -> Sequence {
        let mut family = DefaultHasher::new();
        request.namespace.hash(&mut family);
        request.tokens[..request.tokens.len().min(block_size)].hash(&mut family);
        let gathered = |top| PromptLogprobs { top, gathered: Vec::new() };
        Sequence {
            id,
            prompt_len: request.tokens.len(),
            sampler: Some(SamplerState::new(request.sampling, &request.tokens)),
            tokens: request.tokens,
            namespace: request.namespace,
            family: family.finish(),
            max_tokens,
            stop_ids: request.stop_ids,
            priority: request.priority,
            prompt_logprobs: request.prompt_logprobs.map(gathered),
            events,
            times: Times {
                submitted,
                queue_deadline: request.queue_timeout.and_then(|t| submitted.checked_add(t)),
                deadline: request.timeout.and_then(|t| submitted.checked_add(t)),
                started: None,
                first_token: None,
            },
            cached_tokens: None,
            held: Held::default(),
            in_step: false,
            end: None,
        }
    }

    /// Tokens generated so far.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens it may still generate.
    pub(crate) fn remaining(&self) -> usize {
        self.max_tokens.saturating_sub(self.generated())
    }

    /// Whether every prompt row must be computed, cached or not.
    pub(crate) fn bypasses_match(&self) -> bool {
        self.prompt_logprobs.is_some()
    }

    /// Whether its reader keeps it from taking part in a step.
    pub(crate) fn is_paused(&self) -> bool {
        !self.events.has_room()
    }

    /// What the step plan needs to know of it.
    pub(crate) fn view(&self, block_size: usize) -> View {
        let all_rows = self.prompt_logprobs.is_some();
        View {
            computed: self.held.computed,
            tokens: self.tokens.len(),
            covered: self.held.table.len() * block_size,
            last_step: self.held.last_step,
            chunk_max: if all_rows { LOGIT_ROWS_MAX } else { usize::MAX },
            all_rows,
            paused: self.end.is_some() || self.is_paused(),
        }
    }

    /// The task that goes with its tokens `start..start + count`.
    /// `keep_row` asks for the prompt's last row back.
    pub(crate) fn row_task(&mut self, start: usize, count: usize, keep_row: bool) -> RowTask {
        let end = start + count;
        let keep_row = keep_row && end == self.prompt_len && self.generated() == 0;
        let sampler = if end == self.tokens.len() { self.sampler.take() } else { None };
        let prompt = self.prompt_logprobs.as_ref().map(|wanted| PromptTargets {
            tokens: self.tokens[start + 1..self.tokens.len().min(end + 1)].to_vec(),
            top: wanted.top,
        });
        RowTask { sampler, keep_row, prompt }
    }

    /// Gathers a chunk's prompt log-probabilities and tells them when the prompt is complete.
    pub(crate) fn gather_prompt_logprobs(&mut self, rows: Vec<TokenLogprob>) {
        let Some(wanted) = &mut self.prompt_logprobs else { return };
        if wanted.gathered.is_empty() {
            wanted.gathered.push(None);
        }
        wanted.gathered.extend(rows.into_iter().map(Some));
        if self.held.computed >= self.prompt_len {
            let gathered = std::mem::take(&mut wanted.gathered);
            self.prompt_logprobs = None;
            self.tell(SequenceEvent::PromptLogprobs(gathered));
        }
    }

    /// Appends a sampled token and says whether the sequence is done with it.
    pub(crate) fn push(
        &mut self,
        id: u32,
        logprob: Option<TokenLogprob>,
        now: Instant,
    ) -> Option<SequenceEnd> {
        self.tokens.push(id);
        self.times.first_token.get_or_insert(now);
        self.tell(SequenceEvent::Token { id, logprob });
        if self.stop_ids.contains(&id) {
            Some(SequenceEnd::StopId(id))
        } else if self.remaining() == 0 {
            Some(SequenceEnd::Length)
        } else {
            None
        }
    }

    /// Sends an event; a reader that is gone ends the sequence.
    pub(crate) fn tell(&mut self, event: SequenceEvent) {
        if !self.events.send(Ok(event)) && self.end.is_none() {
            self.end = Some(Ending::Cancelled);
        }
    }

    /// The last event of one that is done.
    pub(crate) fn finish_event(&self, end: SequenceEnd, now: Instant) -> SequenceEvent {
        let since = |moment: Option<Instant>| {
            moment.unwrap_or(now).saturating_duration_since(self.times.submitted)
        };
        SequenceEvent::Finished(SequenceFinish {
            end,
            prompt_tokens: self.prompt_len,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            completion_tokens: self.generated(),
            queue: since(self.times.started),
            ttft: since(self.times.first_token),
            total: since(Some(now)),
        })
    }

    /// Gives up every block, to be computed again later.
    pub(crate) fn surrender(&mut self) {
        debug_assert!(!self.in_step, "a step still reads its blocks");
        self.held = Held::default();
        if let Some(wanted) = &mut self.prompt_logprobs {
            wanted.gathered.clear();
        }
    }
}
