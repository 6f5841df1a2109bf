//! [`Background`]: prompts that are computed only while there is no request, for the cache.
//!
//! 1. [`Scheduler::submit_background`] adds a prompt. Without a request, it runs alone, in steps of
//!    at most [`CHUNK`] tokens, and ends without a token when it is cached.
//! 2. When a request arrives, the prompt ends at once, or with the step in flight, so a request
//!    waits for at most one short step. What was computed until then stays cached.
//!
//! Such a prompt reserves blocks that are free or that the tree evicts next. It takes none from
//! sessions, is never preempted, and does not count as a request.

use std::collections::VecDeque;
use std::time::Instant;

use super::Scheduler;
use crate::memory::{ActorStopped, Memory};
use crate::sequence::{Ending, Sequence};

/// Maximum number of tokens of such a prompt in one step: about as many as take the time of a
/// decode, because reading the weights takes longer than computing them.
pub(crate) const CHUNK: usize = 16;

/// Maximum number of prompts that wait. The one that has waited longest ends for another one.
const WAITING_MAX: usize = 16;

/// The prompts that wait until there is no request.
#[derive(Debug, Default)]
pub(super) struct Background {
    /// In order of arrival.
    waiting: VecDeque<Sequence>,
}

impl Background {
    /// Adds a prompt. Returns the one that has to end for it.
    fn push(&mut self, sequence: Sequence) -> Option<Sequence> {
        self.waiting.push_back(sequence);
        if self.waiting.len() > WAITING_MAX { self.waiting.pop_front() } else { None }
    }

    /// Removes a prompt.
    pub(super) fn cancel(&mut self, id: u64) -> Option<Sequence> {
        let index = self.waiting.iter().position(|sequence| sequence.id == id)?;
        self.waiting.remove(index)
    }

    /// Drops every prompt, because the engine stops.
    pub(super) fn close(&mut self) {
        self.waiting.clear();
    }
}

impl<M: Memory> Scheduler<M> {
    /// Adds a prompt to compute while there is no request; see
    /// [`EngineContext::submit_background`](crate::EngineContext::submit_background).
    pub fn submit_background(&mut self, sequence: Sequence) {
        if let Some(oldest) = self.background.push(sequence) {
            self.end_early(oldest, Ending::Canceled);
        }
    }

    /// Ends the prompt that is computed in the background if a request waits. It is removed from
    /// the batch after the step in flight.
    pub(super) fn end_background(&mut self) {
        if !self.admission.queue().is_empty() {
            let running = self.batch.sequences_mut().filter(|sequence| sequence.is_background);
            running.for_each(|sequence| _ = sequence.end.get_or_insert(Ending::Canceled));
        }
    }

    /// Starts the next prompt if there is no request, and nothing is copied or computed.
    ///
    /// # Errors
    /// [`ActorStopped`] if the memory no longer answers.
    pub(super) async fn start_background(&mut self, now: Instant) -> Result<(), ActorStopped> {
        let is_idle = |own: &Self| {
            own.batch.is_empty() && own.admission.queue().is_empty() && !own.has_step()
        };
        while is_idle(self) && !self.transfers.has_saves() {
            let Some(sequence) = self.background.waiting.pop_front() else { break };
            let id = sequence.id;
            self.admission.submit(sequence, None);
            self.admit(now).await?;
            // There are no blocks for it.
            if let Some(waiting) = self.admission.cancel(id) {
                self.end_early(waiting.sequence, Ending::Canceled);
            }
            self.end_overdue(now);
        }
        Ok(())
    }
}
