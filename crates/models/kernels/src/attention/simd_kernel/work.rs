//! A work item on SIMD lanes with its scratch memory.
#![allow(unsafe_code, reason = "views softmax states in scratch memory through raw pointers")]

use std::ops::Range;

use crate::attention::args::AttentionArgs;
use crate::attention::plan::{AttentionPlan, WorkItem};
use crate::attention::softmax_state::SoftmaxState;

/// Maximum number of padding rows in the last row group of packed queries: the row groups that
/// [`group_rows`](crate::gemm::group_rows) chooses have at most 3 rows more than there are.
pub(super) const PADDING_ROWS_MAX: usize = 3;

/// Readers that share a tile, as an index range of the work item's readers.
pub(super) type ReaderGroup = Range<usize>;

/// Packed query vectors that the microkernels compute together.
pub(super) struct RowGroup {
    /// The group's first query vector, counted from the first of the reader group.
    pub(super) first: usize,
    /// Number of packed rows, at most 16.
    pub(super) rows: usize,
    /// Number of rows that are not padding.
    pub(super) live: usize,
    /// Number of query vectors of the reader group.
    pub(super) queries: usize,
    /// Number of panels of 16 positions, from the tile's first, up to the last that a row sees.
    pub(super) panels: usize,
}

/// A work item with its scratch memory. Queries, keys and values are stored in words of 4 bytes,
/// which hold one f32 or two bf16 (see [`Arithmetic`](super::arithmetic::Arithmetic)).
///
/// **Invariant**: the pointers are valid for the shapes given, in initialized memory that only this
/// work item accesses; the pieces do not overlap. `args` has been validated and `item` is in
/// `plan`, which was made for `args`.
pub(super) struct SimdWork<'a> {
    pub(super) args: &'a AttentionArgs<'a>,
    pub(super) plan: &'a AttentionPlan,
    pub(super) item: &'a WorkItem,
    /// Query vectors per reader and kv head.
    pub(super) queries: usize,
    /// `head_dim`, rounded up to a multiple of 16.
    pub(super) padded_dim: usize,
    /// The packed queries: `[head][reader]`, each with room for `queries + PADDING_ROWS_MAX` rows.
    /// Those of a reader group begin at its first reader: `[row group][words of a head][rows of
    /// the row group]`.
    pub(super) q: *mut f32,
    /// `[64 / 16][words of a head][16]`: the keys of a tile, transposed.
    pub(super) keys: *mut f32,
    /// `[positions][padded_dim]`: the values of a tile. A row holds those of one position, or those
    /// of two successive positions in pairs.
    pub(super) values: *mut f32,
    /// `[readers * queries + PADDING_ROWS_MAX][64]`: scores, then weights, which take the first 32
    /// words of a row if they are pairs.
    pub(super) scores: *mut f32,
    /// `[head]` states of the queries of all readers, over the current span.
    pub(super) span: *mut f32,
    /// `[head]` states of the queries of all readers, over all spans before.
    pub(super) all: *mut f32,
}

impl SimdWork<'_> {
    /// The states of some readers' queries of a head.
    ///
    /// # Safety
    /// `states` is `self.span` or `self.all`, `head` counts from the item's first head and is below
    /// its number of heads, and `readers` lies within the item's readers.
    pub(super) unsafe fn state(
        &self,
        states: *mut f32,
        head: usize,
        readers: ReaderGroup,
    ) -> SoftmaxState {
        let all = self.item.readers.len() * self.queries;
        // SAFETY: `states` holds one state of `all` queries for each head of the item, of which
        // `head` is one, and only this work item accesses it. The queries of `readers` are within
        // `all`.
        unsafe {
            let at = states.add(head * SoftmaxState::len(all, self.padded_dim));
            let state = SoftmaxState::at(at, all, self.padded_dim);
            state.part(readers.start * self.queries..readers.end * self.queries)
        }
    }
}
