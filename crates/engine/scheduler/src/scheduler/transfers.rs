//! Loads and saves of a step: the choice of the blocks to copy, and the handling of the results.

use std::ops::Range;
use std::sync::Arc;

use stolon_kvcache::{BlockId, BlockLease, TokenSpan};

use super::Scheduler;
use crate::memory::{ActorStopped, LogitsKey, Memory, Reserved};
use crate::step_plan::StepDone;
use crate::transfer::{LOAD_BYTES_PER_STEP, LoadTask, SAVES_MAX, SaveRequest, Saving};

/// A load of the step in flight.
#[derive(Debug)]
pub(super) struct LoadInFlight {
    /// The sequence's id.
    id: u64,
    /// Its index in `running` when the step began.
    pub(super) index: usize,
    /// Number of its positions that are computed after the load.
    pub(super) end: usize,
    /// The positions whose keys and values the load writes.
    written: Range<usize>,
    /// For stored KV with a checkpoint: index of the first block that the load does not cover.
    next: Option<usize>,
}

impl<M: Memory> Scheduler<M> {
    /// Copies cached blocks out of the pool during the next steps. If too many saves are waiting,
    /// or nothing is cached, the request is dropped.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn save(&mut self, request: SaveRequest) -> Result<(), ActorStopped> {
        if self.saves.len() >= SAVES_MAX || request.blocks.is_empty() {
            return Ok(());
        }
        let (tokens, block_size) = (&request.tokens, self.context.spec.block_size);
        // A lease does not end inside an image.
        let is_whole = |end: &usize| TokenSpan::may_end_after(tokens[end - 1]);
        let ends = (request.blocks.end * block_size..=tokens.len()).step_by(block_size);
        let limit = ends.into_iter().find(is_whole).unwrap_or(tokens.len());
        let acquired =
            self.memory.acquire(&request.namespace, &request.tokens, limit, None).await?;
        self.saves.extend(Saving::new(request, acquired.lease));
        Ok(())
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

    /// As [`Scheduler::reserve`]; also looks up cached logits.
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
        if let Some(sink) = &self.context.config.kv_sink {
            self.evicted.extend(evicted.into_iter().filter_map(|prefix| sink.evicted(prefix)));
        }
        Ok((lease, logits))
    }

    /// The copies out of the pool of the next step.
    pub(super) fn plan_saves(&mut self) -> Vec<Vec<BlockId>> {
        self.evicted_in_flight = std::mem::take(&mut self.evicted);
        let evicted = self.evicted_in_flight.iter().map(|copy| copy.blocks.clone());
        let block_bytes = self.context.spec.block_bytes;
        let saved = self.saves.front().map(|save| save.next(block_bytes).to_vec());
        self.save_in_flight = saved.is_some();
        evicted.chain(saved).collect()
    }

    /// The loads of the next step, in the order of the running sequences.
    pub(super) fn plan_loads(&mut self) -> Vec<LoadTask> {
        let spec = &self.context.spec;
        let mut room = (LOAD_BYTES_PER_STEP / spec.block_bytes.max(1)).max(1);
        let mut tasks = Vec::new();
        for (index, running) in self.running.iter_mut().enumerate() {
            let sequence = &mut running.sequence;
            let loadable = sequence.loadable();
            if room == 0 || loadable.is_empty() || sequence.end.is_some() {
                continue;
            }
            let Some(kv) = sequence.stored.clone() else { continue };
            let blocks = sequence.load_in_step(&loadable, room);
            room = room.saturating_sub(blocks.len());
            sequence.in_step = true;
            let first_block = blocks.start;
            let (id, computed) = (sequence.id, sequence.held.computed);
            let kv_end = kv.kv_range().end;
            let of_kv = blocks.start.min(kv_end)..blocks.end.min(kv_end);
            let written = of_kv.start * spec.block_size..of_kv.end * spec.block_size;
            let of_state = blocks.start.max(kv_end) - kv_end..blocks.end.max(kv_end) - kv_end;
            let table = &sequence.held.table[of_kv];
            let (end, next, blocks) = match &sequence.held.state.load {
                None => (written.end, None, table.to_vec()),
                Some(load) => {
                    let state = &load.blocks.blocks()[of_state];
                    (computed, Some(blocks.end), [table, state].concat())
                }
            };
            self.loads.push(LoadInFlight { id, index, end, written, next });
            tasks.push(LoadTask { blocks, kv, first_block });
        }
        tasks
    }

    /// Applies the copies of a step. Loaded positions count as computed and are committed with
    /// them.
    pub(super) fn complete_transfers(&mut self, done: &mut StepDone) {
        let gauges = &self.context.gauges;
        let mut loaded = std::mem::take(&mut done.loaded).into_iter();
        for load in std::mem::take(&mut self.loads) {
            let copied = loaded.next().unwrap_or(false);
            let running = self.running.iter_mut().find(|r| r.sequence.id == load.id);
            let Some(running) = running else { continue };
            let sequence = &mut running.sequence;
            sequence.in_step = false;
            if copied && !load.written.is_empty() {
                sequence.held.wrote(load.written);
            }
            if let Some(next) = load.next {
                let before = sequence.held.computed;
                sequence.state_loaded(next, copied);
                gauges.loaded_tokens.add(sequence.held.computed - before);
                gauges.loads_failed.add(usize::from(!copied));
                continue;
            }
            if copied {
                gauges.loaded_tokens.add(load.end - sequence.held.computed);
                sequence.held.resume_at(load.end);
            } else {
                gauges.loads_failed.add(1);
                sequence.stored = None;
            }
            if sequence.loadable().is_empty() {
                // The memory of the stored KV is not needed any longer.
                sequence.stored = None;
            }
        }
        let mut saved = std::mem::take(&mut done.saved).into_iter();
        for copy in std::mem::take(&mut self.evicted_in_flight) {
            let Some(bytes) = saved.next().flatten() else { continue };
            gauges.saved_blocks.add(copy.blocks.len());
            (copy.done)(bytes);
        }
        // Saves that came during the step wait for the next one.
        if !std::mem::take(&mut self.save_in_flight) {
            return;
        }
        let Some(mut save) = self.saves.pop_front() else { return };
        let count = save.next(self.context.spec.block_bytes).len();
        // A failed save is dropped, and with it its lease.
        let Some(bytes) = saved.next().flatten() else { return };
        gauges.saved_blocks.add(count);
        if save.take(count, bytes) {
            self.saves.push_front(save);
            return;
        }
        let Saving { request, lease, bytes, .. } = save;
        drop(lease);
        (request.done)(bytes);
    }
}
