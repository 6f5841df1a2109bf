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
        let report = self.blocks.memory().audit().await?;
        Ok(report.and_then(|report| self.audit_own(report, partial_before)))
    }

    /// Verifies the report of the pool and the tree against what the scheduler holds. Sessions held
    /// `partial_before` partial blocks before the report was made.
    fn audit_own(
        &self,
        mut report: AuditReport,
        partial_before: usize,
    ) -> Result<AuditReport, String> {
        self.context.sessions.audit()?;
        let steps = self.blocks.steps();
        if !self.has_step() && steps > 0 {
            return Err(format!(
                "steps: no step is in flight, but the tickets of {steps} were not dropped, so blocks \
                 that are returned are not used again"
            ));
        }
        self.checkpoints.audit(&self.batch)?;
        report.running = self.batch.len();
        report.waiting = self.admission.queue().len();
        let reserved = self.batch.reserved_blocks() + self.checkpoints.block_count();
        // Callers may close sessions meanwhile, which returns partial blocks to the pool.
        let partial = self.context.sessions.partial_blocks()..=partial_before;
        let in_sessions = report.blocks_reserved.checked_sub(reserved);
        let Some(in_sessions) = in_sessions.filter(|count| partial.contains(count)) else {
            return Err(format!(
                "reserved blocks: running sequences hold {reserved} and sessions {partial:?}, the pool \
                 counts {}",
                report.blocks_reserved
            ));
        };
        (report.blocks_reserved, report.blocks_partial) = (reserved, in_sessions);
        self.admission.audit()?;
        self.batch.audit(self.context.spec.block_size, self.context.spec.state.is_some())?;
        Ok(report)
    }
}
