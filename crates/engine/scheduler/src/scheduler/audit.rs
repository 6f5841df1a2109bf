//! Verifies that the blocks and slots that the scheduler holds are those that the pool and the tree
//! count as held.

use super::Scheduler;
use crate::memory::{ActorStopped, Memory};
use crate::stats::AuditReport;

impl<M: Memory> Scheduler<M> {
    /// Verifies the accounting of blocks, tree and sequences. The inner error describes the first
    /// inconsistency.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub async fn audit(&mut self) -> Result<Result<AuditReport, String>, ActorStopped> {
        let partial_before = self.context.sessions.partial_blocks();
        let mut report = match self.memory.audit().await? {
            Ok(report) => report,
            Err(problem) => return Ok(Err(problem)),
        };
        if let Err(problem) = self.context.sessions.audit() {
            return Ok(Err(problem));
        }
        let steps = self.fence.running();
        if self.in_flight.is_none() && steps > 0 {
            return Ok(Err(format!(
                "steps: no step is in flight, but the tickets of {steps} were not dropped, so blocks \
                 that are returned are not used again"
            )));
        }
        if let Err(problem) = self.audit_slots() {
            return Ok(Err(problem));
        }
        report.running = self.running.len();
        report.waiting = self.queue.len();
        let reserved: usize = self
            .running
            .iter()
            .map(|r| {
                let reserved = r.sequence.held.reserved.as_ref().map_or(0, |lease| lease.len());
                reserved + r.sequence.held.state.reserved()
            })
            .sum();
        let written = self.written.iter().map(|item| item.blocks.len()).sum::<usize>();
        let in_flight = self.in_flight.iter().flatten().map(|slice| slice.state.block_count());
        let reserved = reserved + written + in_flight.sum::<usize>();
        // Callers may close sessions meanwhile, which returns partial blocks to the pool.
        let partial = self.context.sessions.partial_blocks()..=partial_before;
        let in_sessions = report.blocks_reserved.checked_sub(reserved);
        let Some(in_sessions) = in_sessions.filter(|count| partial.contains(count)) else {
            return Ok(Err(format!(
                "reserved blocks: running sequences hold {reserved} and sessions {partial:?}, the pool \
                 counts {}",
                report.blocks_reserved
            )));
        };
        (report.blocks_reserved, report.blocks_partial) = (reserved, in_sessions);
        if let Some(waiting) = self.queue.entries().iter().find(|w| w.overtaken > w.bound) {
            return Ok(Err(format!(
                "sequence {}: overtaken by {} tokens, expected at most {}",
                waiting.sequence.id, waiting.overtaken, waiting.bound
            )));
        }
        Ok(self.audit_running().map(|()| report))
    }

    /// Each slot for a recurrent state is free, or a running sequence has it.
    fn audit_slots(&self) -> Result<(), String> {
        if let Some((slots, state)) = self.free_slots.as_ref().zip(self.context.spec.state) {
            let used = self.running.iter().filter(|r| r.sequence.held.state.slot.is_some()).count();
            if slots.count() + used != state.slots {
                return Err(format!(
                    "state slots: {used} used and {} free, expected {} together",
                    slots.count(),
                    state.slots
                ));
            }
        }
        Ok(())
    }

    /// Running sequences have blocks for what they have computed, and have computed what they have
    /// committed.
    fn audit_running(&self) -> Result<(), String> {
        for running in &self.running {
            let held = &running.sequence.held;
            let covered = held.table.len() * self.context.spec.block_size;
            let ahead = self.free_slots.is_none() && held.committed() > held.computed;
            if held.computed > covered || ahead {
                return Err(format!(
                    "sequence {}: {} positions committed, {} computed, {covered} covered",
                    running.sequence.id,
                    held.committed(),
                    held.computed
                ));
            }
        }
        Ok(())
    }
}
