//! [`Blocks`]: the prefix tree and the block pool, and what the next step has to do for the blocks
//! that were reserved since the last one.

use std::mem;
use std::sync::Arc;

use stolon_kvcache::{BlockId, BlockLease, StepFence, StepTicket, TreeReader};

use crate::context::EngineContext;
use crate::memory::{ActorStopped, LogitsKey, Memory, Reserved};
use crate::transfer::{EvictedCopy, KvSink};

/// The tree and the pool. See the module documentation.
#[derive(Debug)]
pub(super) struct Blocks<M> {
    memory: M,
    /// Reads the prefix tree of `memory` without going through it.
    reader: TreeReader,
    /// Delays the reuse of released blocks until the step in flight has ended.
    fence: StepFence,
    sink: Option<Arc<dyn KvSink>>,
    /// The blocks that were reserved since the last step.
    reserved: Vec<BlockId>,
    /// Copies of evicted blocks that the next step makes before it overwrites the blocks.
    evicted: Vec<EvictedCopy>,
}

impl<M: Memory> Blocks<M> {
    /// `reader` reads the tree behind `memory`; `fence` belongs to its block pool.
    pub(super) fn new(
        context: &EngineContext,
        memory: M,
        reader: TreeReader,
        fence: StepFence,
    ) -> Blocks<M> {
        let sink = context.config.kv_sink.clone();
        Blocks { memory, reader, fence, sink, reserved: Vec::new(), evicted: Vec::new() }
    }

    /// The tree and the pool, for everything but reservations.
    pub(super) fn memory(&mut self) -> &mut M {
        &mut self.memory
    }

    pub(super) fn reader(&self) -> &TreeReader {
        &self.reader
    }

    /// Reserves blocks. Blocks that are evicted for them are offered to the sink.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn reserve(
        &mut self,
        count: usize,
    ) -> Result<Option<BlockLease>, ActorStopped> {
        Ok(self.reserve_and_find(count, None).await?.0)
    }

    /// Reserves blocks if at least `spare` others stay free, so that none is evicted for them.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn reserve_spare(
        &mut self,
        count: usize,
        spare: usize,
    ) -> Result<Option<BlockLease>, ActorStopped> {
        match self.memory.counts().await?.free >= count + spare {
            true => self.reserve(count).await,
            false => Ok(None),
        }
    }

    /// As [`Blocks::reserve`]; also looks up cached logits.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn reserve_and_find(
        &mut self,
        count: usize,
        logits: Option<LogitsKey>,
    ) -> Result<(Option<BlockLease>, Option<Arc<[f32]>>), ActorStopped> {
        let Reserved { lease, logits, evicted } = self.memory.reserve(count, logits).await?;
        self.reserved.extend(lease.iter().flat_map(BlockLease::blocks));
        if let Some(sink) = &self.sink {
            self.evicted.extend(evicted.into_iter().filter_map(|prefix| sink.evicted(prefix)));
        }
        Ok((lease, logits))
    }

    /// The copies of evicted blocks that the next step makes.
    pub(super) fn take_evicted(&mut self) -> Vec<EvictedCopy> {
        mem::take(&mut self.evicted)
    }

    /// A step begins. Returns the blocks that were reserved since the last one, and the ticket that
    /// the step holds until it has ended.
    pub(super) fn begin_step(&mut self) -> (Vec<BlockId>, StepTicket) {
        (mem::take(&mut self.reserved), self.fence.begin())
    }

    /// Drops the copies of evicted blocks, because the engine stops.
    pub(super) fn close(&mut self) {
        self.evicted.clear();
    }

    /// Number of steps whose tickets were not dropped.
    pub(super) fn steps(&self) -> usize {
        self.fence.running()
    }
}
