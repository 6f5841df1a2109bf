//! The products of a tile on pairs of bf16, by the dot product instruction of AVX-512 BF16.
//!
//! Queries and weights are rounded to bf16. A word of a query or key holds two successive values of
//! a head, as bf16 keys are stored in [`KvLayout::Transposed`]. A word of weights or values holds
//! those of two successive positions. Each sum adds its pairs in ascending order. The instruction
//! treats numbers below 2^-126 as zero.
//!
//! Bytes and the levels of 4-bit codes are bf16 numbers too, so widening them to pairs loses nothing.
//! Their scales are applied to scores and weights.
#![allow(unsafe_code, reason = "accesses scratch memory and the KV cache through raw pointers")]

use std::marker::PhantomData;

use super::arithmetic::{Arithmetic, TilePair};
use super::paired::{Paired, StoredPairs};
use super::products::{add_loaded, add_stored, score_loaded, score_panels};
use super::work::{RowGroup, SimdWork};
use crate::attention::args::{AttentionArgs, KvSlice};
use crate::attention::tile_loading::{load_live, prefetch_rows};
use crate::attention::tile_view::TransposedKeys;
use crate::gemm::{Bf16Dots, F32, PairWord, Panels};
use crate::kv_layout::KvLayout;
use crate::lanes::{Avx512, LANES, Lanes};
use crate::path::PathKind;

/// Maximum number of query vectors for which values are read as they are stored. They are then
/// interleaved once per row group of queries instead of once per tile.
const STORED_READ_QUERIES_MAX: usize = 16;

/// Products of bf16 pairs with f32 sums, of keys that are stored in the type K and values in the
/// type V. Needs AVX-512 F, BW, VL, DQ and BF16.
pub(super) struct Bf16Arithmetic<K, V>(PhantomData<(K, V)>);

/// Number of successive values of a head in a word.
const VALUES_PER_WORD: usize = 2;

/// Whether these arguments are computed on bf16 pairs. This depends only on shapes, types and the
/// instruction set, so that all queries of a layer have the same arithmetic.
pub(super) fn applies(args: &AttentionArgs<'_>) -> bool {
    args.path.kind() == PathKind::Avx512Bf16
        && !matches!(args.keys, KvSlice::F32(_) | KvSlice::F16(_))
        && args.head_dim.is_multiple_of(VALUES_PER_WORD)
}

/// Whether keys are multiplied as they are stored, for this number of query vectors.
#[inline(always)]
fn reads_stored_keys<T: Paired>(work: &SimdWork<'_>, queries: usize) -> bool {
    queries <= T::STORED_KEY_QUERIES_MAX && work.args.key_layout != KvLayout::Rows
}

impl<K: Paired, V: Paired> Arithmetic for Bf16Arithmetic<K, V> {
    type Lanes = Avx512;
    const VALUES_PER_WORD: usize = VALUES_PER_WORD;

    #[inline(always)]
    unsafe fn query_words(from: *const f32, left: usize, factor: Avx512) -> Avx512 {
        // SAFETY: `from` is readable for `left` values, and the second vector loads those beyond
        // the first 16, which may be none. The AVX-512 sets are available.
        unsafe {
            let low = load_live::<Avx512, F32>(from, left);
            let high =
                load_live::<Avx512, F32>(from.wrapping_add(LANES), left.saturating_sub(LANES));
            low.mul(factor).round_pairs(high.mul(factor))
        }
    }

    #[inline(always)]
    unsafe fn load(work: &SimdWork<'_>, tile: TilePair<'_>, queries: usize) {
        // SAFETY: the conditions are those of this function.
        unsafe {
            if !reads_stored_keys::<K>(work, queries) {
                pair_keys::<K>(work, tile);
            }
            if !reads_stored_values(tile, queries) {
                pair_values::<V>(work, tile);
            }
        }
    }

    #[inline(always)]
    unsafe fn score(
        work: &SimdWork<'_>,
        tile: TilePair<'_>,
        group: &RowGroup,
        q: *const f32,
        scores: *mut f32,
    ) {
        let stored = stored_words::<K>(tile);
        // SAFETY: keys that are not read as they are stored have been loaded to `work.keys`.
        // Otherwise each panel of `stored` begins `16 * head_dim` values in a block that the
        // validation has found within the keys. The other conditions are those of this function;
        // AVX-512 BF16 is available.
        unsafe {
            if !reads_stored_keys::<K>(work, group.queries) {
                score_loaded::<Self, Bf16Dots>(work, group, q, scores);
            } else if group.first == 0 {
                score_panels::<Self, Bf16Dots<K::Word>, _>(work, stored, group, q, scores);
            } else {
                score_panels::<Self, Bf16Dots<K::Word>, _>(work, stored.cached(), group, q, scores);
            }
        }
    }

    #[inline(always)]
    unsafe fn exp2(x: Avx512) -> Avx512 {
        // SAFETY: computes in registers; AVX-512 is available.
        unsafe { x.exp2_rough() }
    }

    #[inline(always)]
    unsafe fn store_weights(row: *mut f32, panel: usize, weights: [Avx512; 2]) {
        // SAFETY: `row` has 64 words, and the pairs of two of the 4 panels are 16 words. AVX-512
        // and AVX-512 BF16 are available.
        unsafe { weights[0].round_pairs(weights[1]).store(row.add(panel / 2 * LANES)) }
    }

    #[inline(always)]
    unsafe fn add_values(
        work: &SimdWork<'_>,
        tile: TilePair<'_>,
        group: &RowGroup,
        weights: *const f32,
        sums: *mut f32,
    ) {
        // SAFETY: `reads_stored_values` has checked what `add_stored` requires of the tile. The
        // other conditions are those of this function; AVX-512 BF16 is available.
        unsafe {
            if reads_stored_values(tile, group.queries) {
                let values = V::of(&work.args.values);
                add_stored::<Self, Bf16Dots<V::Word>, StoredPairs<V>, _>(
                    tile, values, group, weights, sums,
                );
            } else {
                add_loaded::<Self, Bf16Dots>(work, group, weights, sums);
            }
        }
    }
}

/// The keys of a tile that are stored transposed, as words of two values.
#[inline(always)]
fn stored_words<K: Paired>(tile: TilePair<'_>) -> TransposedKeys<K::Word> {
    let keys = K::of(&tile.now.args.keys);
    TransposedKeys {
        now: tile.now.transposed(keys).map(<*const K>::cast),
        next: tile.next.transposed(keys).map(<*const K>::cast),
    }
}

/// Loads the keys of a tile into `work.keys` as `[panel][word of a head][16]`. Positions that are
/// not read get unspecified values. Prefetches the keys of the next tile.
///
/// # Safety
/// As for [`Arithmetic::load`].
#[inline(always)]
unsafe fn pair_keys<T: Paired>(work: &SimdWork<'_>, tile: TilePair<'_>) {
    let keys = T::of(&work.args.keys);
    let words = work.args.head_dim / VALUES_PER_WORD;
    let stored = stored_words::<T>(tile);
    for panel in 0..tile.now.panels() {
        // SAFETY: `rows` are the starts of heads of `2 * words` values, `from` is that of a panel
        // of `16 * words` words, all in blocks that the validation has found within the keys.
        // `work.keys` has room for 4 panels of `2 * words` vectors, of which the panels before this
        // one have taken `panel * words`. AVX-512 is available.
        unsafe {
            let to = work.keys.add(panel * words * LANES);
            if work.args.key_layout == KvLayout::Rows {
                let (rows, next) = (tile.now.rows(panel, keys), tile.next.rows(panel, keys));
                T::transpose(&rows, &next, words, to);
                continue;
            }
            let from = stored.at(panel);
            for word in 0..words {
                stored.prefetch::<1>(panel, word, from);
                T::Word::load::<Avx512>(from.add(word * LANES)).store(to.add(word * LANES));
            }
        }
    }
}

/// Loads the values of a tile into `work.values` as `[position / 2][padded_dim]` words. Positions
/// that are not read get the values of another position. Prefetches the values of the next tile.
///
/// # Safety
/// As for [`Arithmetic::load`].
#[inline(always)]
unsafe fn pair_values<T: Paired>(work: &SimdWork<'_>, tile: TilePair<'_>) {
    let dim = work.args.head_dim;
    let whole = dim / LANES * LANES;
    let values = T::of(&work.args.values);
    for panel in 0..tile.now.panels() {
        let (rows, next) = (tile.now.rows(panel, values), tile.next.rows(panel, values));
        for pair in 0..LANES / 2 {
            let (first, second) = (rows[2 * pair], rows[2 * pair + 1]);
            // SAFETY: both rows are starts of heads of `dim` values in blocks that the validation
            // has found within the values, and 16 values are read from `d` on, or, from `whole` on,
            // the `dim - whole` that are left. The stores end at most at `padded_dim` in the row of
            // one of the 32 pairs of positions, for which `work.values` has room. AVX-512 is
            // available.
            unsafe {
                let to = work.values.add((panel * LANES / 2 + pair) * work.padded_dim);
                for d in (0..whole).step_by(LANES) {
                    prefetch_rows(&next[2 * pair..2 * pair + 2], d);
                    let at = d / T::VALUES;
                    T::pair::<Avx512>(first.add(at), second.add(at)).store(to.add(d));
                }
                if whole < dim {
                    let mut rest = [[T::default(); LANES]; 2];
                    for (rest, row) in rest.iter_mut().zip([first, second]) {
                        std::ptr::copy_nonoverlapping(
                            row.add(whole / T::VALUES),
                            rest.as_mut_ptr(),
                            (dim - whole) / T::VALUES,
                        );
                    }
                    T::pair::<Avx512>(rest[0].as_ptr(), rest[1].as_ptr()).store(to.add(whole));
                }
            }
        }
    }
}

/// Whether the values of a tile are multiplied as they are stored, for this number of query
/// vectors. This requires that heads are whole vectors, blocks whole panels, and that the positions
/// which are read are whole pairs.
#[inline(always)]
fn reads_stored_values(tile: TilePair<'_>, queries: usize) -> bool {
    let (args, location) = (tile.now.args, tile.now.location);
    let seen = [location.seen.start - location.begin, location.seen.end - location.begin];
    queries <= STORED_READ_QUERIES_MAX
        && args.head_dim.is_multiple_of(LANES)
        && args.block_size.is_multiple_of(LANES)
        && seen.iter().all(|end| end.is_multiple_of(2))
}
