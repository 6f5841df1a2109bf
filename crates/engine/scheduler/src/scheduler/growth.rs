//! The blocks of running sequences: reserved when they are needed, and added to the tree when they
//! are full. If there are not enough, others lose theirs.

use std::sync::Arc;

use super::Scheduler;
use super::batch::Running;
use super::checkpoints::release_answers;
use crate::blocks_for;
use crate::context::EngineContext;
use crate::memory::{ActorStopped, CommitItem, Committed, Memory};
use crate::preempt;
use crate::sequence::Sequence;
use crate::transfer::SaveRequest;

/// The part of the pool, as a divisor, that stays free when blocks are reserved for proposed
/// tokens.
const SPARE_PART: usize = 4;

impl<M: Memory> Scheduler<M> {
    /// Adds the full blocks of the running sequences to the tree, except for those that write
    /// nothing to it.
    pub(super) async fn commit(&mut self) -> Result<(), ActorStopped> {
        if !self.context.config.prefix_caching {
            return Ok(());
        }
        let block_size = self.context.spec.block_size;
        let mut committing = Vec::new();
        let mut items = Vec::new();
        for sequence in self.batch.sequences_mut() {
            if sequence.in_step || !sequence.writes_cache() {
                continue;
            }
            let Some((len, lease, reserved)) = sequence.held.take_full(block_size) else {
                continue;
            };
            committing.push((sequence.id, lease.len() / block_size));
            items.push(CommitItem { tokens: Arc::clone(&sequence.tokens), len, lease, reserved });
        }
        if items.is_empty() {
            return Ok(());
        }
        let committed = self.blocks.memory().commit(items).await?;
        let mut saves = Vec::new();
        for ((id, first), Committed { lease, reserved }) in committing.into_iter().zip(committed) {
            let Some(sequence) = self.batch.get_mut(id) else { continue };
            sequence.held.committed_blocks(lease, reserved);
            saves.extend(wanted_save(&self.context, sequence, first));
        }
        for save in saves {
            self.save(save).await?;
        }
        Ok(())
    }

    /// Reserves the blocks that the next positions of running sequences need. If there are not
    /// enough, sessions release theirs, and then the youngest sequences are preempted.
    pub(super) async fn grow(&mut self) -> Result<(), ActorStopped> {
        let block_size = self.context.spec.block_size;
        let short = |Running { sequence, .. }: &Running| {
            let needed = blocks_for(block_size, sequence.tokens.len());
            needed.saturating_sub(sequence.held.table.len())
        };
        let mut growing: Vec<Growth> = Vec::new();
        for running in self.batch.running() {
            let count = short(running);
            if count > 0 && !running.sequence.is_stalled() {
                let (id, arrival) = (running.sequence.id, running.place().arrival);
                growing.push(Growth { id, arrival, count });
            }
        }
        if growing.is_empty() {
            return Ok(());
        }
        let total: usize = growing.iter().map(|growth| growth.count).sum();
        let mut reserved = self.blocks.reserve(total).await?;
        if reserved.is_none() && self.admission.drop_match_locks() {
            reserved = self.blocks.reserve(total).await?;
        }
        if reserved.is_none() && release_answers(&mut self.batch) {
            reserved = self.blocks.reserve(total).await?;
        }
        while reserved.is_none() && self.context.sessions.release_oldest() {
            reserved = self.blocks.reserve(total).await?;
        }
        let Some(mut blocks) = reserved else { return self.grow_one_by_one(growing).await };
        for Growth { id, count, .. } in growing {
            let share = blocks.split(count);
            if let Some(sequence) = self.batch.get_mut(id) {
                sequence.held.add_reserved(share);
            }
        }
        Ok(())
    }

    /// Reserves blocks for tokens that are likely to be proposed, if no other request needs the
    /// blocks: no request waits, and a part of the pool stays free.
    pub(super) async fn grow_for_proposals(&mut self) -> Result<(), ActorStopped> {
        if !self.admission.queue().is_empty() {
            return Ok(());
        }
        let sequences = self
            .batch
            .sequences()
            .map(|sequence| (sequence.id, self.speculating.lacking(sequence, &self.checkpoints)));
        let growing: Vec<(u64, usize)> = sequences.filter(|(_, count)| *count > 0).collect();
        let total = growing.iter().map(|(_, count)| count).sum();
        if total == 0 {
            return Ok(());
        }
        let spare = self.context.spec.block_count / SPARE_PART;
        let Some(mut blocks) = self.blocks.reserve_spare(total, spare).await? else {
            return Ok(());
        };
        for (id, count) in growing {
            let share = blocks.split(count);
            if let Some(sequence) = self.batch.get_mut(id) {
                sequence.held.add_reserved(share);
            }
        }
        Ok(())
    }

    /// Reserves one block for each sequence, oldest first, when there are not enough for all. The
    /// youngest sequences are preempted to free blocks.
    async fn grow_one_by_one(&mut self, mut growing: Vec<Growth>) -> Result<(), ActorStopped> {
        growing.sort_by_key(|growth| growth.arrival);
        for Growth { id, .. } in growing {
            while self.batch.get(id).is_some() {
                if let Some(block) = self.blocks.reserve(1).await? {
                    if let Some(sequence) = self.batch.get_mut(id) {
                        sequence.held.add_reserved(block);
                    }
                    break;
                }
                let holders = self.batch.running().map(Running::holder);
                let Some(victim) = preempt::victim(holders) else { break };
                self.estimates.note_preemption();
                self.context.gauges.preemptions_for_blocks.add(1);
                self.preempt(victim);
            }
        }
        Ok(())
    }
}

/// A running sequence that needs more blocks.
#[derive(Clone, Copy, Debug)]
struct Growth {
    id: u64,
    arrival: u64,
    /// Number of blocks that it needs.
    count: usize,
}

/// The save that the sink requests for a running sequence, which has committed its blocks from
/// `first` on.
fn wanted_save(context: &EngineContext, sequence: &Sequence, first: usize) -> Option<SaveRequest> {
    let sink = context.config.kv_sink.as_ref()?;
    let committed = first..sequence.held.committed() / context.spec.block_size;
    let priority = sequence.options.priority;
    sink.wanted(&sequence.namespace, &sequence.tokens, committed, priority)
}
