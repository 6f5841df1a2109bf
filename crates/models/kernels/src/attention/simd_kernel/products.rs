//! The products of a row group with a tile, in either arithmetic.
#![allow(unsafe_code, reason = "accesses scratch memory and the KV cache through raw pointers")]

use super::arithmetic::{Arithmetic, TilePair};
use super::work::{RowGroup, SimdWork};
use crate::attention::sizes::POSITIONS_PER_TILE;
use crate::attention::tile_view::StoredValues;
use crate::gemm::{CachedPanels, Form, Panels, RegisterTile, Stored, tile_group};
use crate::lanes::LANES;

/// Computes the scores of a row group with all panels of a tile.
///
/// # Safety
/// As for [`Arithmetic::score`]; `keys` gives panels of 16 readable words for each word of a head,
/// in the form F, whose instructions are available.
#[inline(always)]
pub(super) unsafe fn score_panels<A: Arithmetic, F: Form, B: Panels<F::Raw>>(
    work: &SimdWork<'_>,
    keys: B,
    group: &RowGroup,
    q: *const f32,
    scores: *mut f32,
) {
    let product = RegisterTile {
        inner: work.args.head_dim / A::VALUES_PER_WORD,
        a: q,
        a_inner: group.rows,
        a_row: 1,
        b: keys,
        c: scores,
        c_row: POSITIONS_PER_TILE,
        rows: group.live,
        accumulate: false,
    };
    // SAFETY: `q` is readable at `r + k * rows` for `rows` rows and the words of a head, `keys` for
    // the panels and steps, and `scores` is writable for `live` rows of 64 scores, at most 4
    // panels. The instruction sets are available.
    unsafe { tile_group::<A::Lanes, F, _>(&product, group.rows, group.panels) };
}

/// Computes the scores of a row group with keys that were loaded to `work.keys`.
///
/// # Safety
/// As for [`Arithmetic::score`]; the instructions of F are available.
#[inline(always)]
pub(super) unsafe fn score_loaded<A: Arithmetic, F: Form<Raw = f32>>(
    work: &SimdWork<'_>,
    group: &RowGroup,
    q: *const f32,
    scores: *mut f32,
) {
    let step = work.args.head_dim / A::VALUES_PER_WORD * LANES;
    let keys = CachedPanels { first: work.keys.cast_const(), step, inner_step: LANES };
    // SAFETY: `work.keys` has 4 panels of 16 words for each word of a head. The other conditions
    // are those of this function.
    unsafe { score_panels::<A, F, _>(work, keys, group, q, scores) };
}

/// Adds the weighted values of a tile that was loaded to `work.values`.
///
/// # Safety
/// As for [`Arithmetic::add_values`]; the instructions of F are available.
#[inline(always)]
pub(super) unsafe fn add_loaded<A: Arithmetic, F: Form<Raw = f32>>(
    work: &SimdWork<'_>,
    group: &RowGroup,
    weights: *const f32,
    sums: *mut f32,
) {
    let product = RegisterTile {
        inner: group.panels * LANES / A::VALUES_PER_WORD,
        a: weights,
        a_inner: 1,
        a_row: POSITIONS_PER_TILE,
        b: CachedPanels {
            first: work.values.cast_const(),
            step: LANES,
            inner_step: work.padded_dim,
        },
        c: sums,
        c_row: work.padded_dim,
        rows: group.live,
        accumulate: true,
    };
    // SAFETY: `weights` is readable for `rows` rows of 64 words, and `panels * 16` is at most 64.
    // `work.values` has a row of `padded_dim` words, a multiple of 16, for each word of weights
    // that is used. `sums` is valid for `live` rows of `padded_dim`. The instruction sets are
    // available.
    unsafe { tile_group::<A::Lanes, F, _>(&product, group.rows, work.padded_dim / LANES) };
}

/// Adds the weighted values of a tile, read as they are stored, in panels of type B. Positions that
/// the readers do not see are skipped; their weights would be zero.
///
/// # Safety
/// As for [`Arithmetic::add_values`]; `from` is the arguments' values, and B reads them in the form
/// F, whose instructions are available. Heads are whole vectors, blocks are whole panels, and the
/// positions of the tile that are read begin and end at whole words.
#[inline(always)]
pub(super) unsafe fn add_stored<A, F, B, T>(
    tile: TilePair<'_>,
    from: &[T],
    group: &RowGroup,
    weights: *const f32,
    sums: *mut f32,
) where
    A: Arithmetic,
    F: Form,
    T: Stored,
    B: Panels<F::Raw> + From<StoredValues<T>>,
{
    let dim = tile.now.args.head_dim;
    let (begin, seen) = (tile.now.location.begin, &tile.now.location.seen);
    for panel in 0..group.panels {
        // A block holds whole panels, so the positions that are seen of a panel are evenly spaced.
        let first = begin + panel * LANES;
        let positions = first.max(seen.start)..(first + LANES).min(seen.end);
        if positions.is_empty() {
            continue;
        }
        let index = positions.start - begin;
        // SAFETY: `positions` are whole words in one panel and so in one block, which the
        // validation has found within `from`; their rows are evenly spaced, and each is readable
        // for `dim` values, a multiple of 16. `index` is below 64, and `weights` has 64 words per
        // row. `sums` has `live` rows of `dim`, which equals `padded_dim`. The instruction sets
        // are available.
        unsafe {
            let product = RegisterTile {
                inner: positions.len() / A::VALUES_PER_WORD,
                a: weights.add(index / A::VALUES_PER_WORD),
                a_inner: 1,
                a_row: POSITIONS_PER_TILE,
                b: B::from(tile.now.stored_values(tile.next, index, from)),
                c: sums,
                c_row: dim,
                rows: group.live,
                accumulate: true,
            };
            tile_group::<A::Lanes, F, _>(&product, group.rows, dim / LANES);
        }
    }
}
