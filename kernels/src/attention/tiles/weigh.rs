//! The softmax of attention on tiles: scores become weights, and states follow.
#![allow(unsafe_code, reason = "vectors work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::arch::x86_64::{
    _CMP_NEQ_UQ, _mm512_add_epi32, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cmple_epi32_mask, _mm512_loadu_si512, _mm512_mask_blend_epi16, _mm512_mask_mov_ps,
    _mm512_maskz_mov_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_srli_epi32,
};
use std::ops::Range;

use super::super::super::amx::{DEPTH, ROWS};
use super::super::super::lanes::{self, Avx512, LANES, Lanes};
use super::super::state::correction;
use super::{TILE, Work, narrow};

/// Pairs of bf16: `first` rounded in the low halves, `second` in the high ones. Both are finite
/// and positive; what lies halfway goes up.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn paired(first: Avx512, second: Avx512) -> Avx512 {
    let half = _mm512_set1_epi32(0x8000);
    let up = |value: Avx512| _mm512_add_epi32(_mm512_castps_si512(value.0), half);
    let low = _mm512_srli_epi32::<16>(up(first));
    Avx512(_mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, low, up(second))))
}

impl Work<'_> {
    /// Turns the scores of 16 queries into weights, and brings their state to the new largest
    /// scores. False if none of them sees a position of the tile.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn weigh(
        &self,
        first: usize,
        begin: usize,
        rows: Range<usize>,
        until: usize,
    ) -> bool {
        // SAFETY: see above the impl of `Work`.
        unsafe {
            // Queries stand in order of position, and what they see moves with it.
            let lowest_last = *self.last_seen.add(first);
            let highest_first = *self.first_seen.add(first + ROWS - 1);
            let lowest_first = *self.first_seen.add(first);
            let highest_last = *self.last_seen.add(first + ROWS - 1);
            if highest_last < narrow(begin) || lowest_first >= narrow(begin + TILE) {
                return false;
            }
            let whole = lowest_last >= narrow(begin + rows.end - 1)
                && highest_first <= narrow(begin + rows.start);
            if !whole {
                self.mask(first, begin, rows.clone(), until);
            }
            let mut largest = [Avx512::splat(f32::NEG_INFINITY); 4];
            for row in rows.clone().step_by(4) {
                for (i, largest) in largest.iter_mut().enumerate() {
                    *largest = largest.max(Avx512::load(self.scores_at(row + i, first)));
                }
            }
            let largest = largest[0].max(largest[1]).max(largest[2].max(largest[3]));
            let state = self.span.largest.add(first);
            let old = Avx512::load(state);
            let new = old.max(largest);
            new.store(state);
            // A query that has seen nothing yet: any finite number will do, all weights are zero.
            let relative = Avx512::splat(f32::MIN).max(new);
            let sum = if whole {
                self.exponentials::<false>(first, rows, relative)
            } else {
                self.exponentials::<true>(first, rows, relative)
            };
            let mut factors = [0.0; LANES];
            let (mut before, mut after) = ([0.0; LANES], [0.0; LANES]);
            old.store(before.as_mut_ptr());
            new.store(after.as_mut_ptr());
            for (query, factor) in factors.iter_mut().enumerate() {
                *factor = 1.0;
                if before[query] != after[query] {
                    *factor = correction(before[query], after[query]);
                    self.span.scale::<Avx512>(first + query, *factor);
                }
            }
            let sums = self.span.sums.add(first);
            Avx512::load(sums).mul_add(Avx512::load(factors.as_ptr()), sum).store(sums);
        }
        true
    }

    /// Where one position's scores of 16 queries stand.
    #[inline]
    unsafe fn scores_at(&self, row: usize, first: usize) -> *mut f32 {
        // SAFETY: see above the impl of `Work`.
        unsafe { self.scores.add(row * self.queries + first) }
    }

    /// Gives minus infinity to scores of positions that a query does not see.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn mask(&self, first: usize, begin: usize, rows: Range<usize>, until: usize) {
        // SAFETY: see above the impl of `Work`.
        unsafe {
            let seen_from = _mm512_loadu_si512(self.first_seen.add(first).cast());
            let seen_last = _mm512_loadu_si512(self.last_seen.add(first).cast());
            for row in rows {
                let at = self.scores_at(row, first);
                let position = _mm512_set1_epi32(narrow(begin + row));
                let mut seen = 0;
                if begin + row < until {
                    seen = _mm512_cmple_epi32_mask(seen_from, position)
                        & _mm512_cmple_epi32_mask(position, seen_last);
                }
                let score = Avx512::load(at).0;
                let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
                Avx512(_mm512_mask_mov_ps(hidden, seen, score)).store(at);
            }
        }
    }

    /// The weights of 16 queries, rounded and turned for the product with values; returns their sums
    /// before they are rounded. With `MASKED`, scores of minus infinity weigh zero.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn exponentials<const MASKED: bool>(
        &self,
        first: usize,
        rows: Range<usize>,
        relative: Avx512,
    ) -> Avx512 {
        // SAFETY: see above the impl of `Work`.
        unsafe {
            let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
            let weight = |row: usize| {
                let score = Avx512::load(self.scores_at(row, first));
                let weight = lanes::exp2_rough(score.sub(relative));
                if !MASKED {
                    return weight;
                }
                let seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(score.0, hidden);
                Avx512(_mm512_maskz_mov_ps(seen, weight.0))
            };
            let mut sums = [Avx512::splat(0.0); 4];
            for tile in rows.step_by(DEPTH) {
                let mut square = [Avx512::splat(0.0); LANES];
                for (i, pairs) in square.chunks_exact_mut(2).enumerate() {
                    let row = tile + 4 * i;
                    let weights = [weight(row), weight(row + 1), weight(row + 2), weight(row + 3)];
                    for (sum, weight) in sums.iter_mut().zip(weights) {
                        *sum = sum.add(weight);
                    }
                    pairs[0] = paired(weights[0], weights[1]);
                    pairs[1] = paired(weights[2], weights[3]);
                }
                Avx512::transpose(&mut square);
                for (query, pairs) in square.iter().enumerate() {
                    pairs.store(self.weights.add((tile / 2 + query) * ROWS));
                }
            }
            sums[0].add(sums[1]).add(sums[2].add(sums[3]))
        }
    }
}
