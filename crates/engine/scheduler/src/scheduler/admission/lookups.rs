//! Repeated look-ups of stored KV for waiting requests: `lookup.rs` decides when there is one.

use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::Admission;
use crate::lookup::WAIT_MAX;
use crate::transfer::{PromptLookup, RepeatedLookup, StoredKv};

impl Admission {
    /// The look-ups that waiting requests have asked for since the last call.
    pub(in crate::scheduler) fn take_lookups(&mut self) -> Vec<RepeatedLookup> {
        mem::take(&mut self.lookups)
    }

    /// A repeated look-up has ended, with the KV that it has read. Without any, the request runs
    /// with what it has, and so it does if it does not wait for the answer any longer.
    pub(in crate::scheduler) fn stored_read(&mut self, id: u64, kv: Option<StoredKv>) {
        let Some(waiting) = self.queue.of_id(id) else { return };
        match kv.map(|kv| kv.check(&self.context.spec).map(|()| kv)) {
            Some(Ok(kv)) => waiting.sequence.stored = Some(kv),
            Some(Err(error)) => tracing::warn!(%error, "stored KV cannot be used"),
            None => {}
        }
        waiting.lookup.end(waiting.covered());
        self.retry = true;
    }

    /// Ends the waiting for answers that take too long.
    pub(in crate::scheduler) fn end_lookups(&mut self, now: Instant) {
        for waiting in self.queue.entries_mut() {
            if waiting.lookup.deadline().is_some_and(|deadline| deadline <= now) {
                waiting.lookup.end(waiting.covered());
                self.retry = true;
            }
        }
    }

    /// Lets a waiting request, which has just locked its match, ask again for stored KV if what it
    /// has found before was lost. Returns whether it does; if so, it keeps its place in the queue.
    pub(in crate::scheduler) fn look_again(&mut self, arrival: u64, now: Instant) -> bool {
        let block_size = self.context.spec.block_size;
        let Some(waiting) = self.queue.get_mut(arrival) else { return false };
        let due = waiting.lookup.is_due(waiting.covered(), block_size);
        if self.context.config.kv_source.is_none() || !due || waiting.sequence.bypasses_match() {
            return false;
        }
        waiting.lookup.begin(now);
        let (found, sequence) = (waiting.found_match(), &waiting.sequence);
        // Only KV of the prompt is loaded. What was generated before a preemption is not part of it.
        let tokens = match sequence.generated() {
            0 => Arc::clone(&sequence.tokens),
            _ => Arc::new(sequence.tokens[..sequence.prompt_len].to_vec()),
        };
        let (namespace, priority) = (sequence.namespace, sequence.options.priority);
        let prompt = PromptLookup {
            is_repeated: true,
            ..self.context.prompt_lookup(namespace, tokens, found, priority)
        };
        self.lookups.push(RepeatedLookup { id: sequence.id, prompt, limit: WAIT_MAX });
        self.has_deadlines = true;
        true
    }
}
