//! [`Transfers`]: the copies of KV into and out of the pool that steps make: the choice of the
//! blocks, and the handling of the results. `transfer.rs` says what loads and saves are.

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;

use stolon_backend::BackendSpec;
use stolon_kvcache::{BlockId, TokenSpan};

use super::batch::Batch;
use super::blocks::Blocks;
use crate::context::EngineContext;
use crate::memory::{ActorStopped, Memory};
use crate::sequence::Sequence;
use crate::step_plan::StepDone;
use crate::transfer::{EvictedCopy, LOAD_BYTES_PER_STEP, LoadTask, SAVES_MAX, SaveRequest, Saving};

/// A load of the step in flight.
#[derive(Debug)]
struct LoadInFlight {
    /// The sequence's id.
    id: u64,
    /// Number of its positions that are computed after the load.
    end: usize,
    /// The positions whose keys and values the load writes.
    written: Range<usize>,
    /// For stored KV with a checkpoint: index of the first block that the load does not cover.
    next: Option<usize>,
}

/// The saves that wait, and the copies of the step in flight.
#[derive(Debug)]
pub(super) struct Transfers {
    context: EngineContext,
    /// The saves. Each step makes a part of the first one.
    saves: VecDeque<Saving>,
    /// Whether the first save is part of the step in flight.
    save_in_flight: bool,
    /// The loads of the step in flight.
    loads: Vec<LoadInFlight>,
    /// Copies of evicted blocks that the step in flight makes.
    evicted: Vec<EvictedCopy>,
}

impl Transfers {
    pub(super) fn new(context: &EngineContext) -> Transfers {
        Transfers {
            context: context.clone(),
            saves: VecDeque::new(),
            save_in_flight: false,
            loads: Vec::new(),
            evicted: Vec::new(),
        }
    }

    /// Whether blocks are being saved, or wait for it.
    pub(super) fn has_saves(&self) -> bool {
        !self.saves.is_empty()
    }

    /// Drops the saves, because the engine stops.
    pub(super) fn close(&mut self) {
        self.saves.clear();
    }

    /// Copies cached blocks out of the pool during the next steps. If too many saves are waiting,
    /// or nothing is cached, the request is dropped.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn save<M: Memory>(
        &mut self,
        request: SaveRequest,
        blocks: &mut Blocks<M>,
    ) -> Result<(), ActorStopped> {
        if self.saves.len() >= SAVES_MAX || request.blocks.is_empty() {
            return Ok(());
        }
        let SaveRequest { namespace, tokens, .. } = &request;
        let block_size = self.context.spec.block_size;
        // A lease does not end inside an image.
        let is_whole = |end: &usize| TokenSpan::may_end_after(tokens[end - 1]);
        let ends = (request.blocks.end * block_size..=tokens.len()).step_by(block_size);
        let limit = ends.into_iter().find(is_whole).unwrap_or(tokens.len());
        let acquired = blocks.memory().acquire(namespace, tokens, limit, None).await?;
        self.saves.extend(Saving::new(request, acquired.lease));
        Ok(())
    }

    /// The copies out of the pool of the next step: of evicted blocks, and of the first save.
    pub(super) fn plan_saves(&mut self, evicted: Vec<EvictedCopy>) -> Vec<Vec<BlockId>> {
        self.evicted = evicted;
        let evicted = self.evicted.iter().map(|copy| copy.blocks.clone());
        let block_bytes = self.context.spec.block_bytes;
        let saved = self.saves.front().map(|save| save.next(block_bytes).to_vec());
        self.save_in_flight = saved.is_some();
        evicted.chain(saved).collect()
    }

    /// The loads of the next step, in the order of the running sequences.
    pub(super) fn plan_loads(&mut self, batch: &Batch) -> Vec<LoadTask> {
        let spec = &self.context.spec;
        let mut room = (LOAD_BYTES_PER_STEP / spec.block_bytes.max(1)).max(1);
        let mut tasks = Vec::new();
        for sequence in batch.sequences() {
            if room == 0 {
                break;
            }
            let Some((task, load)) = plan_load(sequence, spec, room) else { continue };
            room = room.saturating_sub(task.blocks.len());
            self.loads.push(load);
            tasks.push(task);
        }
        tasks
    }

    /// Whether the step in flight loads blocks.
    pub(super) fn has_loads(&self) -> bool {
        !self.loads.is_empty()
    }

    /// The ids of the sequences with a load in the step, in the order of the loads.
    pub(super) fn loading(&self) -> impl Iterator<Item = u64> + '_ {
        self.loads.iter().map(|load| load.id)
    }

    /// Index of the load of a sequence, and the number of its positions that are computed after it.
    pub(super) fn load_of(&self, id: u64) -> Option<(usize, usize)> {
        let index = self.loads.iter().position(|load| load.id == id)?;
        Some((index, self.loads[index].end))
    }

    /// Applies the copies of a step. Loaded positions count as computed and are committed with
    /// them.
    pub(super) fn complete(&mut self, batch: &mut Batch, done: &mut StepDone) {
        self.complete_loads(batch, mem::take(&mut done.loaded));
        self.complete_saves(mem::take(&mut done.saved));
    }

    fn complete_loads(&mut self, batch: &mut Batch, loaded: Vec<bool>) {
        let gauges = &self.context.gauges;
        let mut loaded = loaded.into_iter();
        for load in mem::take(&mut self.loads) {
            let copied = loaded.next().unwrap_or(false);
            let Some(sequence) = batch.get_mut(load.id) else { continue };
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
    }

    fn complete_saves(&mut self, saved: Vec<Option<Vec<u8>>>) {
        let gauges = &self.context.gauges;
        let mut saved = saved.into_iter();
        for copy in mem::take(&mut self.evicted) {
            let Some(bytes) = saved.next().flatten() else { continue };
            gauges.saved_blocks.add(copy.blocks.len());
            (copy.done)(bytes);
        }
        // Saves that came during the step wait for the next one.
        if !mem::take(&mut self.save_in_flight) {
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

/// The load of a sequence in the next step, of about `room` blocks; `None` if it has nothing to
/// load.
fn plan_load(
    sequence: &Sequence,
    spec: &BackendSpec,
    room: usize,
) -> Option<(LoadTask, LoadInFlight)> {
    let loadable = sequence.loadable();
    if loadable.is_empty() || sequence.end.is_some() {
        return None;
    }
    let kv = sequence.stored.clone()?;
    let blocks = sequence.load_in_step(&loadable, room);
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
    let load = LoadInFlight { id, end, written, next };
    Some((LoadTask { blocks, kv, first_block }, load))
}
