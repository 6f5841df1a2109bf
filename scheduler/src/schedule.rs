//! Batching: which tokens of which running sequences the next step computes.
//!
//! Decodes come first, with one token each. The rest of the step's token budget goes to prefill
//! chunks in order of admission. If decodes alone would fill the step, a quarter of the budget is
//! kept for prefills, and the decodes that took part least recently come first, so that neither
//! kind starves.

use stolon_backend::LogitRows;

/// What the plan needs to know about a running sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SequenceView {
    /// Number of positions whose keys and values are in the KV store.
    pub(crate) computed: usize,
    /// Number of its tokens, prompt and generated.
    pub(crate) tokens: usize,
    /// Number of positions that its block table covers.
    pub(crate) covered: usize,
    /// Number of the last step that it was part of.
    pub(crate) last_step: u64,
    /// Maximum number of its tokens in one step. Smaller than the step if every row gets logits.
    pub(crate) chunk_max: usize,
    /// Which rows are needed of a chunk that does not end its tokens.
    pub(crate) chunk_rows: LogitRows,
    /// Which rows are needed of the chunk that ends its tokens.
    pub(crate) last_rows: LogitRows,
    /// It takes no part in steps, because it is stalled by a slow consumer or is about to end.
    pub(crate) paused: bool,
}

impl SequenceView {
    /// Number of tokens to compute before the next one can be sampled. A full hit recomputes its
    /// last token.
    fn pending(&self) -> usize {
        (self.tokens - self.computed).max(1)
    }

    fn is_decode(&self) -> bool {
        self.pending() == 1
    }
}

/// One sequence's part of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slice {
    /// Index of the sequence in `views`.
    pub(crate) index: usize,
    /// Position of its first token.
    pub(crate) start: usize,
    /// Number of tokens.
    pub(crate) count: usize,
    /// First position whose keys and values are written; `start + count` if none are.
    pub(crate) write_from: usize,
    /// Which rows get logits, or whose hidden states are returned.
    pub(crate) rows: LogitRows,
}

/// Plans a step of at most `max_tokens` tokens. Slices are in the order of `views`.
pub(crate) fn plan(views: &[SequenceView], max_tokens: usize) -> Vec<Slice> {
    let takes_part = |view: &SequenceView| !view.paused && view.covered >= view.tokens;
    let mut decodes: Vec<usize> = Vec::with_capacity(views.len());
    let mut prefills: Vec<usize> = Vec::new();
    for (index, view) in views.iter().enumerate().filter(|(_, view)| takes_part(view)) {
        if view.is_decode() { decodes.push(index) } else { prefills.push(index) }
    }
    let kept = if prefills.is_empty() { 0 } else { (max_tokens / 4).max(1) };
    let decode_max = max_tokens - kept;
    if decodes.len() > decode_max {
        decodes.sort_by_key(|&index| views[index].last_step);
        decodes.truncate(decode_max);
    }
    let mut left = max_tokens - decodes.len();
    let mut slices: Vec<Slice> =
        decodes.iter().map(|&index| slice(index, &views[index], 1)).collect();
    for index in prefills {
        if left == 0 {
            break;
        }
        let view = &views[index];
        let count = view.pending().min(view.chunk_max.max(1)).min(left);
        slices.push(slice(index, view, count));
        left -= count;
    }
    slices.sort_unstable_by_key(|slice| slice.index);
    slices
}

fn slice(index: usize, view: &SequenceView, count: usize) -> Slice {
    let full_hit = view.computed == view.tokens;
    let start = if full_hit { view.tokens - 1 } else { view.computed };
    let end = start + count;
    let rows = if end == view.tokens { view.last_rows } else { view.chunk_rows };
    Slice { index, start, count, write_from: if full_hit { end } else { start }, rows }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn view(computed: usize, tokens: usize) -> SequenceView {
        SequenceView {
            computed,
            tokens,
            covered: tokens,
            last_step: 0,
            chunk_max: usize::MAX,
            chunk_rows: LogitRows::None,
            last_rows: LogitRows::Last,
            paused: false,
        }
    }

    fn counts(slices: &[Slice]) -> Vec<(usize, usize, usize)> {
        slices.iter().map(|slice| (slice.index, slice.start, slice.count)).collect()
    }

    #[test]
    fn decodes_and_prefill_chunks_share_a_step() {
        let views = [view(0, 100), view(50, 51), view(0, 30)];
        let slices = plan(&views, 64);
        assert_eq!(counts(&slices), [(0, 0, 63), (1, 50, 1)]);
        assert_eq!(slices[0].rows, LogitRows::None);
        assert_eq!(slices[1].rows, LogitRows::Last);
    }

    #[test]
    fn the_last_chunk_of_a_prompt_gets_logits_for_its_last_row() {
        let slices = plan(&[view(64, 100), view(0, 8)], 64);
        assert_eq!(counts(&slices), [(0, 64, 36), (1, 0, 8)]);
        assert!(slices.iter().all(|slice| slice.rows == LogitRows::Last));
    }

    #[test]
    fn a_full_hit_computes_one_position_and_writes_none() {
        let slices = plan(&[view(96, 96)], 64);
        assert_eq!(
            slices,
            [Slice { index: 0, start: 95, count: 1, write_from: 96, rows: LogitRows::Last }]
        );
    }

    #[test]
    fn a_paused_or_uncovered_sequence_takes_no_part() {
        let mut views = [view(16, 17), view(16, 17), view(16, 17)];
        views[0].paused = true;
        views[1].covered = 16;
        assert_eq!(counts(&plan(&views, 64)), [(2, 16, 1)]);
    }

    #[test]
    fn sequences_with_logits_for_all_rows_are_computed_in_small_chunks() {
        let mut long = view(0, 1000);
        long.chunk_max = 32;
        (long.chunk_rows, long.last_rows) = (LogitRows::All, LogitRows::All);
        let slices = plan(&[long, view(0, 10)], 512);
        assert_eq!(counts(&slices), [(0, 0, 32), (1, 0, 10)]);
        assert_eq!(slices[0].rows, LogitRows::All);
    }

    proptest! {
        /// Goal: a step never exceeds its token budget, never contains a sequence twice or tokens
        /// that it does not have, and every sequence makes progress, however small the step.
        #[test]
        fn every_sequence_makes_progress(
            shapes in prop::collection::vec((0usize..40, 1usize..40), 1..20),
            max_tokens in 1usize..30,
        ) {
            let mut views: Vec<SequenceView> =
                shapes.iter().map(|&(computed, more)| view(computed, computed + more)).collect();
            let goal: Vec<usize> = views.iter().map(|view| view.tokens + 5).collect();
            for step in 1..2000u64 {
                for (view, &goal) in views.iter_mut().zip(&goal) {
                    view.paused = view.computed >= goal;
                }
                if views.iter().all(|view| view.paused) {
                    return Ok(());
                }
                let slices = plan(&views, max_tokens);
                prop_assert!(!slices.is_empty());
                prop_assert!(slices.iter().map(|slice| slice.count).sum::<usize>() <= max_tokens);
                prop_assert!(slices.is_sorted_by(|a, b| a.index < b.index));
                for slice in slices {
                    let view = &mut views[slice.index];
                    prop_assert!(slice.start + slice.count <= view.tokens);
                    view.computed = slice.start + slice.count;
                    view.last_step = step;
                    if view.computed == view.tokens {
                        view.tokens += 1;
                        view.covered += 1;
                    }
                }
            }
            prop_assert!(false, "a sequence starved");
        }
    }
}
