//! How requests end: complete, canceled, timed out or failed.
//!
//! A sequence always releases its leases before its last event is sent, so that a caller who has
//! read the event finds the blocks released, and the next turn of its session can begin.

use std::time::Instant;

use super::Scheduler;
use crate::event::FinishReason;
use crate::memory::{ActorStopped, Memory};
use crate::queue::Waiting;
use crate::request_counts::Outcome;
use crate::sequence::{Ending, Sequence};

impl<M: Memory> Scheduler<M> {
    /// Ends complete sequences, after the checkpoints of all that end now were added to the tree.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn finish(
        &mut self,
        finished: Vec<(u64, FinishReason)>,
        now: Instant,
    ) -> Result<(), ActorStopped> {
        let ids: Vec<u64> = finished.iter().map(|&(id, _)| id).collect();
        let Scheduler { checkpoints, batch, blocks, transfers, .. } = self;
        checkpoints.publish_ending(&ids, batch, blocks, transfers).await?;
        for (id, reason) in finished {
            let Some(running) = self.batch.remove(id) else { continue };
            self.finish_one(running.sequence, reason, now);
        }
        Ok(())
    }

    fn finish_one(&mut self, mut sequence: Sequence, reason: FinishReason, now: Instant) {
        self.checkpoints.keep_answer(&mut sequence);
        sequence.release(true, now);
        self.estimates.note_answer(&sequence);
        sequence.record.span.record("reason", tracing::field::debug(&reason));
        let outcome = match reason {
            FinishReason::Length => Outcome::FinishedLength,
            _ => Outcome::Finished,
        };
        sequence.ended(outcome, now);
        self.admission.retry();
        let event = sequence.finish_event(reason, now);
        sequence.send(event);
    }

    /// Ends sequences that were canceled, timed out or failed and are not part of the step in
    /// flight.
    pub(super) fn end_overdue(&mut self, now: Instant) {
        for waiting in self.admission.take_overdue(now) {
            let Waiting { sequence, permit, .. } = waiting;
            drop(permit);
            let ending = sequence.end.clone().unwrap_or_else(|| sequence.timed_out(now));
            self.end_early(sequence, ending);
        }
        for (sequence, ending) in self.batch.take_overdue(now) {
            self.end_early(sequence, ending);
            self.admission.retry();
        }
    }

    /// Ends a sequence before its answer has its maximum length. A sequence that its caller has
    /// declared complete counts as finished.
    pub(super) fn end_early(&mut self, mut sequence: Sequence, ending: Ending) {
        let is_complete = ending == Ending::Canceled && sequence.events.is_complete();
        if ending == Ending::Canceled {
            self.checkpoints.keep_answer(&mut sequence);
        }
        let now = Instant::now();
        sequence.release(is_complete, now);
        match ending {
            Ending::Canceled if is_complete => {
                self.estimates.note_answer(&sequence);
                sequence.ended(Outcome::Finished, now);
            }
            Ending::Canceled => sequence.ended(Outcome::Canceled, now),
            Ending::Failed(error) => {
                sequence.record.span.record("reason", tracing::field::display(&error));
                sequence.ended(Outcome::Failed, now);
                // Fails if the caller has dropped the stream.
                let _ = sequence.events.send(Err(error));
            }
        }
    }
}
