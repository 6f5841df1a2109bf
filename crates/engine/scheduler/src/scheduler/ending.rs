//! How requests end: complete, canceled, timed out or failed.
//!
//! A sequence always releases its leases before its last event is sent, so that a caller who has
//! read the event finds the blocks released, and the next turn of its session can begin.

use std::time::Instant;

use super::Scheduler;
use crate::error::EngineError;
use crate::event::FinishReason;
use crate::memory::Memory;
use crate::queue::Waiting;
use crate::request_counts::Outcome;
use crate::sequence::{Ending, Sequence};

impl<M: Memory> Scheduler<M> {
    /// Ends a complete sequence.
    pub(super) fn finish(&mut self, id: u64, reason: FinishReason, now: Instant) {
        let Some(index) = self.running.iter().position(|r| r.sequence.id == id) else { return };
        let mut sequence = self.running.remove(index).sequence;
        Self::keep_answer(&mut self.written, &mut sequence);
        sequence.release(true, now);
        self.note_length(&sequence);
        sequence.record.span.record("reason", tracing::field::debug(&reason));
        let outcome = match reason {
            FinishReason::Length => Outcome::FinishedLength,
            _ => Outcome::Finished,
        };
        sequence.ended(outcome, now);
        self.try_admission = true;
        let event = sequence.finish_event(reason, now);
        sequence.send(event);
    }

    /// Adds the length of a complete answer to the forecast. An embedding has none.
    fn note_length(&mut self, sequence: &Sequence) {
        if sequence.options.pooling.is_none() {
            self.forecast.finished(sequence.answer_limit(), sequence.generated());
        }
    }

    /// Ends sequences that were canceled, timed out or failed and are not part of the step in
    /// flight.
    pub(super) fn end_overdue(&mut self, now: Instant) {
        for waiting in self.queue.take_overdue(now) {
            let Waiting { sequence, permit, .. } = waiting;
            drop(permit);
            let ending = sequence.end.clone().unwrap_or_else(|| timed_out(&sequence, now));
            self.end_early(sequence, ending);
            self.try_admission = true;
        }
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index].sequence;
            let overdue = sequence.times.deadline.is_some_and(|deadline| deadline <= now);
            if sequence.end.is_none() {
                if sequence.events.is_closed() {
                    sequence.end = Some(Ending::Cancelled);
                } else if overdue {
                    sequence.end = Some(timed_out(sequence, now));
                }
            }
            match sequence.end.clone() {
                Some(ending) if !sequence.in_step => {
                    let sequence = self.running.remove(index).sequence;
                    self.end_early(sequence, ending);
                    self.try_admission = true;
                }
                _ => index += 1,
            }
        }
    }

    /// Ends a sequence before its answer has its maximum length. A sequence that its caller has
    /// declared complete counts as finished.
    pub(super) fn end_early(&mut self, mut sequence: Sequence, ending: Ending) {
        let is_complete = ending == Ending::Cancelled && sequence.events.is_complete();
        if ending == Ending::Cancelled {
            Self::keep_answer(&mut self.written, &mut sequence);
        }
        let now = Instant::now();
        sequence.release(is_complete, now);
        match ending {
            Ending::Cancelled if is_complete => {
                self.note_length(&sequence);
                sequence.ended(Outcome::Finished, now);
            }
            Ending::Cancelled => sequence.ended(Outcome::Cancelled, now),
            Ending::Failed(error) => {
                sequence.record.span.record("reason", tracing::field::display(&error));
                sequence.ended(Outcome::Failed, now);
                // Fails if the caller has dropped the stream.
                let _ = sequence.events.send(Err(error));
            }
        }
    }
}

/// The error of a sequence that has timed out.
fn timed_out(sequence: &Sequence, now: Instant) -> Ending {
    let elapsed = now.saturating_duration_since(sequence.times.submitted);
    let total = sequence.times.deadline.is_some_and(|deadline| deadline <= now);
    Ending::Failed(if total {
        EngineError::Timeout { elapsed }
    } else {
        EngineError::QueueTimeout { waited: elapsed }
    })
}
