//! Stored KV of a sequence's prompt: which blocks of it are loaded, and what happens when a load
//! has ended.

use std::ops::Range;

use stolon_kvcache::TokenSpan;

use super::Sequence;
use crate::images::PromptImage;
use crate::states::Resume;

impl Sequence {
    /// The blocks that can be loaded now: those of its stored KV that continue what is computed and
    /// that it has reserved. Only whole blocks of the prompt are loaded, and only whole images: the
    /// rest of one could not be computed without encoding it, or without its beginning if its
    /// positions attend to each other.
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
        let end = stored.end.min(self.held.table.len()).min(self.prompt_len / block_size);
        next..self.whole_images(end, block_size).max(next)
    }

    /// The largest number of blocks, at most `blocks`, that do not end inside an image.
    fn whole_images(&self, blocks: usize, block_size: usize) -> usize {
        let is_whole = |end: &usize| TokenSpan::may_end_after(self.tokens[end * block_size - 1]);
        (1..=blocks).rev().find(is_whole).unwrap_or(0)
    }

    /// How many of the `loadable` blocks are loaded in one step, about `room`: whole images, as all
    /// that is computed.
    pub(crate) fn load_in_step(&self, loadable: &Range<usize>, room: usize) -> Range<usize> {
        let Some(stored) = self.stored.as_ref().filter(|stored| !stored.has_checkpoint()) else {
            return loadable.start..loadable.end.min(loadable.start + room);
        };
        let block_size = stored.block_size();
        let limit = loadable.end.min(loadable.start + room);
        let whole = self.whole_images(limit, block_size);
        let is_whole = |end: &usize| TokenSpan::may_end_after(self.tokens[end * block_size - 1]);
        // An image that is larger than a step is loaded as a whole.
        let end = match whole > loadable.start {
            true => whole,
            false => (limit..loadable.end).find(is_whole).unwrap_or(loadable.end),
        };
        loadable.start..end
    }

    /// The first image that has to be encoded: it is neither computed nor about to be loaded.
    pub(crate) fn next_to_encode(&self) -> Option<&PromptImage> {
        let loadable = self.loadable();
        let loaded = match &self.stored {
            // The checkpoint comes after the KV, so all of the KV is loaded first.
            Some(stored) if !loadable.is_empty() => {
                loadable.end.min(stored.kv_range().end) * stored.block_size()
            }
            _ => 0,
        };
        self.images.next_to_encode(self.held.computed.max(loaded))
    }

    /// Number of prompt positions after the first `resume` ones that stored KV saves, if the keys and
    /// values of the first `matched` ones are in the tree.
    pub(crate) fn stored_after(&self, matched: usize, resume: usize) -> usize {
        let Some(stored) = &self.stored else { return 0 };
        let block_size = stored.block_size();
        if stored.has_checkpoint() {
            return self.stored_checkpoint(matched, resume).map_or(0, |len| len - resume);
        }
        let end = stored.range().end.min(self.prompt_len / block_size);
        let end = self.whole_images(end, block_size) * block_size;
        if stored.range().contains(&(matched / block_size)) {
            end.saturating_sub(matched)
        } else {
            0
        }
    }

    /// Number of positions that a stored checkpoint covers. `None` if it does not serve a sequence
    /// that has computed `resume` positions, if the tree has the keys and values of the first
    /// `matched` ones: stored KV has to continue them, and the last position is computed in any
    /// case. The tree may have had more when the KV was looked up.
    pub(crate) fn stored_checkpoint(&self, matched: usize, resume: usize) -> Option<usize> {
        let stored = self.stored.as_ref().filter(|stored| stored.has_checkpoint())?;
        let kv = stored.kv_range();
        let len = kv.end * stored.block_size();
        let continues = kv.start * stored.block_size() <= matched;
        let saves = len > resume && len <= self.prompt_len && len < self.tokens.len();
        (continues && saves).then_some(len)
    }

    /// Where its stored KV ends, in tokens from the start of the prompt, if everything before it is
    /// cached; 0 if it has none.
    pub(crate) fn stored_end(&self) -> usize {
        let Some(stored) = &self.stored else { return 0 };
        let start = stored.range().start * stored.block_size();
        let resume = if stored.has_checkpoint() { 0 } else { start };
        resume + self.stored_after(start, resume)
    }

    /// A load with a checkpoint has copied the blocks before the index `next`, or has failed. Then
    /// the sequence computes what was to be loaded.
    pub(crate) fn state_loaded(&mut self, next: usize, copied: bool) {
        let ends = self.stored.as_ref().is_none_or(|stored| stored.range().end == next);
        let Some(load) = self.held.state.load.as_mut().filter(|_| copied && !ends) else {
            let load = self.held.state.load.take();
            if let (Some(stored), Some(load), true) = (self.stored.take(), load, copied) {
                self.held.resume_at(stored.kv_range().end * stored.block_size());
                self.held.state.resume = Some(Resume::Loaded(load.blocks));
            }
            return;
        };
        load.next = next;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use stolon_kvcache::{TokenSpan, TokenSpanInterner};

    use crate::queue::tests::sequence;
    use crate::transfer::StoredKv;

    /// Goal: the loads of a step do not end inside an image, and an image larger than a step is
    /// loaded at once.
    #[test]
    fn loads_are_divided_between_images() {
        let (interner, mut tokens) = (TokenSpanInterner::new(9), vec![1; 4]);
        for (content_hash, kv_len) in [(1, 12), (2, 6)] {
            let image = TokenSpan::Image { content_hash, kv_len, columns: 0 };
            interner.append(image, &mut tokens).expect("in range");
        }
        tokens.extend([2; 10]);
        let mut sequence = sequence(1);
        sequence.prompt_len = tokens.len();
        sequence.tokens = Arc::new(tokens);
        sequence.stored = Some(StoredKv::new(2, 0, vec![bytes::Bytes::new(); 16]));
        let in_step = |start, room| sequence.load_in_step(&(start..14), room);
        assert_eq!([1, 2, 3, 7].map(|room| in_step(0, room)), [0..1, 0..2, 0..2, 0..2]);
        assert_eq!([1, 6, 8, 9].map(|room| in_step(2, room)), [2..8, 2..8, 2..8, 2..11]);
        assert_eq!([1, 4, 99].map(|room| in_step(8, room)), [8..11, 8..12, 8..14]);
        let whole = [1, 2, 7, 8, 10, 11, 13].map(|blocks| sequence.whole_images(blocks, 2));
        assert_eq!(whole, [1, 2, 2, 8, 8, 11, 13]);
    }
}
