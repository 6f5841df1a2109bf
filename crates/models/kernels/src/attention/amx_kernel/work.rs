//! One kv head of a work item on AMX tiles, with its scratch memory.

use std::ops::Range;

use crate::amx::tile::AMX_BF16_DEPTH;
use crate::attention::args::AttentionArgs;
use crate::attention::plan::{AttentionPlan, WorkItem};
use crate::attention::query_chunk::QueryChunk;
use crate::attention::sizes::POSITIONS_PER_SPAN;
use crate::attention::softmax_state::SoftmaxState;

/// Positions of a tile on AMX, whose scores are computed together: a divisor of the span.
pub(in crate::attention) const POSITIONS_PER_AMX_TILE: usize = 128;
const _: () = assert!(
    POSITIONS_PER_SPAN.is_multiple_of(POSITIONS_PER_AMX_TILE)
        && POSITIONS_PER_AMX_TILE.is_multiple_of(AMX_BF16_DEPTH)
);

/// One kv head of a work item, with its scratch memory.
///
/// **Invariant**: `args` has been validated, [`applies`](super::applies) is true for it, and `item`
/// is in `plan`, which was made for it. The pointers are valid for the shapes given, with the
/// number of queries that `queries` had at first, in initialized memory that only this work
/// accesses; the pieces do not overlap. The processor has the AVX-512 sets that the methods enable,
/// and this process may use AMX with bf16, both because `args.path` is `Amx`.
///
/// Scratch memory is allocated as `f32`s; arrays of bf16 pairs use one `f32` per pair.
pub(super) struct AmxWork<'a> {
    pub(super) args: &'a AttentionArgs<'a>,
    pub(super) plan: &'a AttentionPlan,
    pub(super) item: &'a WorkItem,
    pub(super) kv_head: usize,
    /// The arguments' keys.
    pub(super) keys: &'a [u16],
    /// The arguments' values.
    pub(super) values: &'a [u16],
    /// The reader group whose queries are packed, as an index range of the item's readers.
    pub(super) readers: Range<usize>,
    /// Query vectors of one reader.
    pub(super) queries_each: usize,
    /// Query vectors of the reader group, padded to a multiple of 16. The padding is computed with
    /// zeroes and ignored.
    pub(super) queries: usize,
    /// `[queries / 16][head_dim / 32][16 pairs][16 queries]` bf16 pairs.
    pub(super) q: *mut f32,
    /// `[128][queries]` scores.
    pub(super) scores: *mut f32,
    /// `[128 / 32][16 queries][16 pairs]` bf16 pairs: the weights of 16 queries.
    pub(super) weights: *mut f32,
    /// `[head_dim / 16][128 / 32][16 pairs][16]` bf16 pairs: the values of two successive positions
    /// each.
    pub(super) value_pairs: *mut f32,
    /// `[128][head_dim]` bf16: the tile's keys, used if 16 successive positions are not in one
    /// block.
    pub(super) gathered_keys: *mut u16,
    /// `[queries]`: the first position that each query sees.
    pub(super) first_seen: *mut i32,
    /// `[queries]`: the last position that each query sees.
    pub(super) last_seen: *mut i32,
    /// The state of the reader group's queries over the current span, including the padding.
    pub(super) group_span: SoftmaxState,
}

impl AmxWork<'_> {
    /// The query chunk of the group's first reader. All readers of a group have its tile in the
    /// same blocks.
    pub(super) fn chunk(&self) -> &QueryChunk {
        self.plan.chunk(self.item, self.readers.start)
    }

    /// Index of the first key or value of a position for this kv head.
    #[inline]
    pub(super) fn index_of(&self, position: usize) -> usize {
        let sequence = self.chunk().sequence;
        self.args.stored_head(sequence, self.kv_head, position) * self.args.head_dim
    }
}

/// A position as a 32-bit lane holds it.
#[allow(clippy::cast_possible_truncation, reason = "positions are far below 2^31")]
#[allow(clippy::cast_possible_wrap, reason = "positions are far below 2^31")]
pub(super) fn position_lane(position: usize) -> i32 {
    position as i32
}
