//! Query chunks: the queries that attention computes together.

use std::ops::Range;

use crate::attention::args::AttentionArgs;
use crate::attention::sizes::POSITIONS_PER_SPAN;

/// Query vectors per kv head up to which a chunk is memory-bound rather than compute-bound.
const MEMORY_BOUND_QUERIES: usize = 16;

/// Some successive queries of one sequence, of all heads.
#[derive(Clone, Debug)]
pub(super) struct QueryChunk {
    /// Index of the sequence in [`AttentionArgs::sequences`].
    pub(super) sequence: usize,
    /// Row of [`AttentionArgs::q`] that holds the first query.
    pub(super) row: usize,
    /// Position of the first query in its sequence.
    pub(super) position: usize,
    /// Number of rows, that is, of query positions; at least 1.
    pub(super) count: usize,
    /// First position that any of the queries sees.
    pub(super) first: usize,
    /// The last position that any of the queries sees, plus one.
    pub(super) end: usize,
    /// The end of the sequence if its queries see positions after their own; `None` if they do not.
    pub(super) full: Option<usize>,
    /// If the chunk's context is split over several work items: where the states of its spans,
    /// `[spans][kv_heads]`, begin in the memory for states, in `f32`s.
    pub(super) states: Option<usize>,
}

impl QueryChunk {
    /// The last position that the query of row `row` sees, plus one.
    #[inline(always)]
    pub(super) fn seen_end(&self, args: &AttentionArgs<'_>, row: usize) -> usize {
        let position = self.position + row;
        self.full.map_or(position + 1, |end| args.full_end(position, end))
    }

    /// Number of query vectors that use one kv head: rows times query heads per kv head.
    pub(super) fn queries(&self, args: &AttentionArgs<'_>) -> usize {
        self.count * (args.heads / args.kv_heads)
    }

    /// The spans that its queries see.
    pub(super) fn spans(&self) -> Range<usize> {
        self.first / POSITIONS_PER_SPAN..self.end.div_ceil(POSITIONS_PER_SPAN)
    }

    /// The part of `positions` that any of its queries sees; may be empty.
    pub(super) fn seen(&self, positions: Range<usize>) -> Range<usize> {
        let from = self.first.clamp(positions.start, positions.end);
        from..self.end.clamp(from, positions.end)
    }

    /// Whether computing the chunk is memory-bound, as in decoding.
    pub(super) fn memory_bound(&self, args: &AttentionArgs<'_>) -> bool {
        self.queries(args) <= MEMORY_BOUND_QUERIES
    }
}
