//! What a core is started with and what outlives its parts: settings, policy, door, counters. And
//! the way in, which goes by nothing else: checks, the door, an empty cache.
//!
//! One value, shared by the handle, the supervisor, the scheduler and simulations.

use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use stolon_kvcache::{BlockPool, StepFence, TreeBuilder, TreeReader, TreeWriter, prefix_tree};
use stolon_model::BackendSpec;
use stolon_model::sampling::SamplingError;

use crate::admission::sequence::Sequence;
use crate::config::{AdmissionPolicy, CoreConfig};
use crate::door::{Door, Permit};
use crate::error::{CoreError, LengthBound};
use crate::gauges::{CoreStats, Gauges};
use crate::kept_rows::KeptRows;
use crate::memory::pool::Blocks;
use crate::request::SequenceRequest;
use crate::stream::{EventReceiver, event_channel};

/// What outlives a scheduler. Clones share all but the sizes, which never change.
#[derive(Clone, Debug)]
pub(crate) struct Surroundings {
    pub(crate) config: Arc<CoreConfig>,
    pub(crate) policy: Arc<ArcSwap<AdmissionPolicy>>,
    pub(crate) door: Arc<Door>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) spec: BackendSpec,
}

/// An empty cache, not yet given to those who own its parts.
pub(crate) struct EmptyCache {
    pub(crate) writer: TreeWriter,
    pub(crate) reader: TreeReader,
    pub(crate) blocks: Blocks,
    pub(crate) fence: StepFence,
}

/// A request behind the door.
pub(crate) struct Entered {
    pub(crate) sequence: Sequence,
    pub(crate) permit: Permit,
    /// The caller's end of the sequence's events.
    pub(crate) events: EventReceiver,
}

impl Surroundings {
    /// # Errors
    /// [`CoreError::InvalidParameter`] for settings or sizes that cannot work.
    pub(crate) fn new(config: CoreConfig, spec: BackendSpec) -> Result<Surroundings, CoreError> {
        config.validate()?;
        check_spec(&spec, &config)?;
        Ok(Surroundings {
            policy: Arc::new(ArcSwap::from_pointee(config.policy)),
            door: Arc::new(Door::new(config.max_queued_requests, config.max_queued_tokens)),
            config: Arc::new(config),
            gauges: Arc::new(Gauges::default()),
            spec,
        })
    }

    /// An empty cache of the size that the backend has room for.
    ///
    /// # Errors
    /// [`CoreError::InvalidParameter`] for a block size that no tree can have.
    pub(crate) fn empty_cache(&self) -> Result<EmptyCache, CoreError> {
        let (writer, reader) = TreeBuilder::new(self.spec.block_size)
            .policy(self.config.eviction_policy)
            .pin_budget(self.config.pin_budget)
            .build()
            .map_err(|_| invalid_block_size(self.spec.block_size))?;
        let (pool, fence) = BlockPool::new(self.spec.block_count);
        let rows = KeptRows::new(self.config.kept_logit_bytes);
        Ok(EmptyCache { writer, reader, blocks: Blocks { pool, rows }, fence })
    }

    /// Checks a request; returns how many tokens it can generate at most.
    ///
    /// # Errors
    /// Every way a request can be wrong.
    pub(crate) fn check(&self, request: &SequenceRequest) -> Result<usize, CoreError> {
        check(request, &self.spec, self.config.pin_budget)
    }

    /// Takes a checked request through the door; `matched` of its positions are cached.
    ///
    /// # Errors
    /// [`CoreError::Overloaded`] when too much is waiting.
    pub(crate) fn enter(
        &self,
        id: u64,
        request: SequenceRequest,
        max_tokens: usize,
        matched: usize,
        now: Instant,
    ) -> Result<Entered, CoreError> {
        let uncached = request.tokens.len().saturating_sub(matched).max(1);
        let permit = self.door.enter(uncached).inspect_err(|_| self.gauges.rejected.add(1))?;
        let (sender, events) = event_channel(self.config.event_capacity);
        let sequence = Sequence::new(id, request, max_tokens, self.spec.block_size, sender, now);
        Ok(Entered { sequence, permit, events })
    }

    /// Counts and gauges.
    pub(crate) fn stats(&self) -> CoreStats {
        self.gauges.snapshot(self.door.waiting(), self.spec.block_count)
    }
}

/// Checks a request against the backend; returns how many tokens it can generate at most.
/// `pinned` blocks may never come free.
fn check(request: &SequenceRequest, spec: &BackendSpec, pinned: usize) -> Result<usize, CoreError> {
    let got = request.tokens.len();
    if got == 0 {
        return Err(CoreError::EmptyPrompt);
    }
    let blocks = spec.block_count - pinned;
    let pool = blocks * spec.block_size;
    let context = spec.max_positions - 1;
    if got > context.min(pool) {
        let bound = if context <= pool {
            LengthBound::Context(spec.max_positions)
        } else {
            LengthBound::Pool { blocks, block_size: spec.block_size }
        };
        return Err(CoreError::PromptTooLong { got, limit: context.min(pool), bound });
    }
    let vocab_size = spec.vocab_size;
    let outside = |&(_, &id): &(usize, &u32)| id as usize >= vocab_size;
    if let Some((index, &got)) = request.tokens.iter().enumerate().find(outside) {
        return Err(CoreError::TokenOutOfRange { index, got, vocab_size });
    }
    if request.max_tokens == 0 {
        return Err(CoreError::invalid("max_tokens", "at least 1", 0));
    }
    if let Some(top) = request.prompt_logprobs.filter(|&top| top > vocab_size) {
        let expected = format!("at most the vocabulary's {vocab_size}");
        return Err(CoreError::invalid("prompt_logprobs", expected, top));
    }
    request.sampling.validate(vocab_size).map_err(|error| match error {
        SamplingError::InvalidParameter { name, expected, got } => {
            CoreError::InvalidParameter { name, expected, got }
        }
        other => CoreError::invalid("sampling", "usable parameters", other),
    })?;
    // The last token generated is never computed, so it needs no place in the pool.
    Ok(request.max_tokens.min(spec.max_positions - got).min(pool - got + 1))
}

/// Checks what a backend says of itself, and the settings that depend on it.
fn check_spec(spec: &BackendSpec, config: &CoreConfig) -> Result<(), CoreError> {
    prefix_tree(spec.block_size).map_err(|_| invalid_block_size(spec.block_size))?;
    if spec.block_count == 0 {
        return Err(CoreError::invalid("num_blocks", "at least 1", 0));
    }
    if config.pin_budget >= spec.block_count {
        let expected = format!("fewer than the pool's {} blocks", spec.block_count);
        return Err(CoreError::invalid("pin_budget", expected, config.pin_budget));
    }
    if spec.max_positions < 2 {
        return Err(CoreError::invalid("max_positions", "at least 2", spec.max_positions));
    }
    if spec.vocab_size == 0 {
        return Err(CoreError::invalid("vocab_size", "at least 1", 0));
    }
    Ok(())
}

fn invalid_block_size(got: usize) -> CoreError {
    CoreError::invalid("block_size", "a power of two from 1 to 256", got)
}
