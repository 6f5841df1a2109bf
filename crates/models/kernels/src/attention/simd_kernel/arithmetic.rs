//! The differences between attention in f32 and attention on bf16 pairs.
#![allow(unsafe_code, reason = "accesses scratch memory and the KV cache through raw pointers")]

use super::work::{RowGroup, SimdWork};
use crate::attention::tile_view::TileView;
use crate::lanes::Lanes;

/// The two products of a tile and the form of their operands.
///
/// The kernel walks through tiles, packs queries and computes the softmax in the same way for each
/// implementation. Scores and sums are f32. Queries, keys, values and weights are in words of 4
/// bytes, each of which holds [`VALUES_PER_WORD`](Self::VALUES_PER_WORD) values.
///
/// # Safety of the methods
/// The instruction set of [`Self::Lanes`], and what the implementation needs in addition, are
/// available. The work fulfills its invariant, and the tiles are tiles of its work item.
pub(super) trait Arithmetic {
    /// The vectors that are computed with.
    type Lanes: Lanes;
    /// Number of successive values of a head (queries and keys) or of successive positions (values
    /// and weights) in a word. A divisor of the head length.
    const VALUES_PER_WORD: usize;

    /// The next 16 words of a query, whose values are multiplied by `factor`. `from` is readable
    /// for `left` values; words beyond them are zero.
    unsafe fn query_words(from: *const f32, left: usize, factor: Self::Lanes) -> Self::Lanes;

    /// Loads the keys and values of a tile into `work.keys` and `work.values`, except for those
    /// that are multiplied as they are stored. `queries` is the number of query vectors.
    unsafe fn load(work: &SimdWork<'_>, tile: TilePair<'_>, queries: usize);

    /// Computes the scores of a row group, from `scores` on 64 per row. `q` is readable for the
    /// packed queries of the group.
    unsafe fn score(
        work: &SimdWork<'_>,
        tile: TilePair<'_>,
        group: &RowGroup,
        q: *const f32,
        scores: *mut f32,
    );

    /// 2^x for `x <= 126`, as precisely as weights are stored. Zero below -126.
    unsafe fn exp2(x: Self::Lanes) -> Self::Lanes;

    /// Stores the weights of two successive panels of 16 positions, of which the first has the even
    /// number `panel`. `row` is writable for 64 words.
    unsafe fn store_weights(row: *mut f32, panel: usize, weights: [Self::Lanes; 2]);

    /// Adds the weighted values of the tile to `sums`, which is valid for `padded_dim` values for
    /// each live row of the group. `weights` is readable for 64 words for each row.
    unsafe fn add_values(
        work: &SimdWork<'_>,
        tile: TilePair<'_>,
        group: &RowGroup,
        weights: *const f32,
        sums: *mut f32,
    );
}

/// A tile, and the tile that is read after it, which is prefetched on the way.
#[derive(Clone, Copy)]
pub(super) struct TilePair<'a> {
    pub(super) now: &'a TileView<'a>,
    pub(super) next: &'a TileView<'a>,
}
