//! Stored KV of a sequence's prompt: what of it is loaded, and when a load has ended.

use std::ops::Range;

use super::Sequence;
use crate::states::Resume;

impl Sequence {
    /// The blocks that can be loaded now: those of its stored KV that continue what is computed and
    /// that it has reserved. Only whole blocks of the prompt are loaded.
    pub(crate) fn loadable(&self) -> Range<usize> {
        let Some(stored) = &self.stored else { return 0..0 };
        let block_size = stored.block_size();
        if stored.has_checkpoint() {
            let next = self.held.state.load.as_ref().map(|load| load.next);
            return next.map_or(0..0, |next| next..stored.range().end);
        }
        let (computed, stored) = (self.held.computed, stored.range());
        let next = computed / block_size;
        if !computed.is_multiple_of(block_size) || !stored.contains(&next) {
            return 0..0;
        }
        next..stored.end.min(self.held.table.len()).min(self.prompt_len / block_size).max(next)
    }

    /// Number of prompt positions after the first `matched` ones that stored KV has.
    pub(crate) fn stored_after(&self, matched: usize) -> usize {
        let Some(stored) = &self.stored else { return 0 };
        let block_size = stored.block_size();
        if stored.has_checkpoint() {
            return (stored.kv_range().end * block_size).saturating_sub(matched);
        }
        let end = stored.range().end.min(self.prompt_len / block_size) * block_size;
        if stored.range().contains(&(matched / block_size)) {
            end.saturating_sub(matched)
        } else {
            0
        }
    }

    /// A load with a checkpoint has copied the blocks before the index `next`, or has failed. Then
    /// the sequence computes what was to be loaded.
    pub(crate) fn state_loaded(&mut self, next: usize, copied: bool) {
        let ends = self.stored.as_ref().is_none_or(|stored| stored.range().end == next);
        let Some(load) = self.held.state.load.as_mut().filter(|_| copied && !ends) else {
            let load = self.held.state.load.take();
            if let (Some(stored), Some(load), true) = (self.stored.take(), load, copied) {
                self.held.computed = stored.kv_range().end * stored.block_size();
                self.held.state.resume = Some(Resume::Loaded(load.blocks));
            }
            return;
        };
        load.next = next;
    }
}
