//! How requests end: done, cancelled, late or failed. Leases go first, words after.

use std::sync::Arc;
use std::time::Instant;

use super::Scheduler;
use crate::error::EngineError;
use crate::event::FinishReason;
use crate::memory::Memory;
use crate::queue::Waiting;
use crate::sequence::{Ending, Held, Sequence};
use crate::stats::Gauges;

impl<M: Memory> Scheduler<M> {
    /// Ends a sequence that is done: its leases go first, so that whoever reads its last event
    /// finds them returned.
    pub(super) fn finish(&mut self, id: u64, end: FinishReason, now: Instant) {
        let Some(index) = self.running.iter().position(|r| r.sequence.id == id) else { return };
        let mut sequence = self.running.remove(index).sequence;
        sequence.held = Held::default();
        self.forecast.finished(sequence.max_tokens, sequence.generated());
        self.context.gauges.finished.add(1);
        self.context.gauges.running.set(self.running.len());
        self.try_admission = true;
        let event = sequence.finish_event(end, now);
        sequence.send(event);
    }

    /// Ends what is cancelled or late and not part of the step in flight.
    pub(super) fn end_overdue(&mut self, now: Instant) {
        let gauges = Arc::clone(&self.context.gauges);
        for waiting in self.queue.take_overdue(now) {
            let Waiting { sequence, permit, .. } = waiting;
            drop(permit);
            let ending = sequence.end.clone().unwrap_or_else(|| late(&sequence, now));
            end_early(sequence, ending, &gauges);
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
                    sequence.end = Some(late(sequence, now));
                }
            }
            match sequence.end.clone() {
                Some(ending) if !sequence.in_step => {
                    end_early(self.running.remove(index).sequence, ending, &gauges);
                    self.try_admission = true;
                }
                _ => index += 1,
            }
        }
    }
}

/// How a sequence whose time is up ends.
fn late(sequence: &Sequence, now: Instant) -> Ending {
    let elapsed = now.saturating_duration_since(sequence.times.submitted);
    let total = sequence.times.deadline.is_some_and(|deadline| deadline <= now);
    Ending::Failed(if total {
        EngineError::Timeout { elapsed }
    } else {
        EngineError::QueueTimeout { waited: elapsed }
    })
}

/// Ends a sequence before it is done; its leases go first.
pub(super) fn end_early(mut sequence: Sequence, ending: Ending, gauges: &Gauges) {
    sequence.held = Held::default();
    match ending {
        Ending::Cancelled => gauges.cancelled.add(1),
        Ending::Failed(error) => {
            gauges.failed.add(1);
            // Nobody may be there to read it.
            let _ = sequence.events.send(Err(error));
        }
    }
}
