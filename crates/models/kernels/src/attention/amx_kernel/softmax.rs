//! One step of the online softmax on AMX: turns scores into weights and rescales the states.
#![allow(unsafe_code, reason = "accesses scratch memory through raw pointers")]

use std::arch::x86_64::{
    _CMP_NEQ_UQ, _mm512_add_epi32, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cmple_epi32_mask, _mm512_loadu_si512, _mm512_mask_blend_epi16, _mm512_mask_mov_ps,
    _mm512_maskz_mov_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_srli_epi32,
};
use std::ops::Range;

use super::work::{AmxWork, POSITIONS_PER_AMX_TILE, position_lane};
use crate::amx::tile::{AMX_BF16_DEPTH, AMX_TILE_ROWS};
use crate::attention::softmax_state::rescale_factor;
use crate::lanes::{self, Avx512, LANES, Lanes};

/// Pairs of bf16: `first` rounded in the low halves of the lanes, `second` in the high halves. Both
/// are finite and not negative; ties are rounded up.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn paired(first: Avx512, second: Avx512) -> Avx512 {
    let half = _mm512_set1_epi32(0x8000);
    let up = |value: Avx512| _mm512_add_epi32(_mm512_castps_si512(value.0), half);
    let low = _mm512_srli_epi32::<16>(up(first));
    Avx512(_mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, low, up(second))))
}

impl AmxWork<'_> {
    /// Turns the scores of the 16 queries from `first` on into weights relative to their largest
    /// scores so far, and rescales their states to those. Returns false, without doing either, if
    /// none of the queries sees a position of the tile. `until` is the end of the positions of
    /// which scores were computed.
    ///
    /// # Safety
    /// `first` is a multiple of 16 below `self.queries`. `rows` lies within the tile that begins at
    /// `begin`, and its ends are multiples of 32.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn softmax_step(
        &self,
        first: usize,
        begin: usize,
        rows: Range<usize>,
        until: usize,
    ) -> bool {
        // SAFETY: `first + 16` is at most `queries`, so the arrays of seen positions and the state
        // have these 16 queries, and each row of scores has them for the positions `rows`, whose
        // number is a multiple of
        // 32. The AVX-512 sets are enabled for this function.
        unsafe {
            // Queries are in order of position, and so are the first and last positions that they
            // see.
            let lowest_last = *self.last_seen.add(first);
            let highest_first = *self.first_seen.add(first + AMX_TILE_ROWS - 1);
            let lowest_first = *self.first_seen.add(first);
            let highest_last = *self.last_seen.add(first + AMX_TILE_ROWS - 1);
            if highest_last < position_lane(begin)
                || lowest_first >= position_lane(begin + POSITIONS_PER_AMX_TILE)
            {
                return false;
            }
            if let Some(cap) = self.args.softcap_base_2() {
                for row in rows.clone() {
                    let at = self.scores_at(row, first);
                    lanes::soft_cap(Avx512::load(at), cap).store(at);
                }
            }
            let whole = lowest_last >= position_lane(begin + rows.end - 1)
                && highest_first <= position_lane(begin + rows.start);
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
            let state = self.group_span.largest.add(first);
            let old = Avx512::load(state);
            let new = old.max(largest);
            new.store(state);
            // For a query that has seen nothing yet any finite number is right: all its weights are
            // zero.
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
                    *factor = rescale_factor(before[query], after[query]);
                    self.group_span.scale::<Avx512>(first + query, *factor);
                }
            }
            let sums = self.group_span.sums.add(first);
            Avx512::load(sums).mul_add(Avx512::load(factors.as_ptr()), sum).store(sums);
        }
        true
    }

    /// The scores of one position of the tile for the 16 queries from `first` on.
    ///
    /// # Safety
    /// `row` is below 128, and `first` is a multiple of 16 below `self.queries`.
    #[inline]
    unsafe fn scores_at(&self, row: usize, first: usize) -> *mut f32 {
        // SAFETY: `scores` has 128 rows of `queries`.
        unsafe { self.scores.add(row * self.queries + first) }
    }

    /// Sets scores to minus infinity where a query does not see the position or the position is not
    /// below `until`.
    ///
    /// # Safety
    /// As for [`Self::softmax_step`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn mask(&self, first: usize, begin: usize, rows: Range<usize>, until: usize) {
        // SAFETY: `first + 16` is at most `queries`, so both arrays of seen positions have 16
        // numbers from `first` on, and each row of scores 16 values; `rows` are below 128. AVX-512
        // is enabled.
        unsafe {
            let seen_from = _mm512_loadu_si512(self.first_seen.add(first).cast());
            let seen_last = _mm512_loadu_si512(self.last_seen.add(first).cast());
            for row in rows {
                let at = self.scores_at(row, first);
                let position = _mm512_set1_epi32(position_lane(begin + row));
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

    /// Computes the weights of 16 queries, rounds them to bf16 and stores them transposed for the
    /// product with values. Returns the sum of each query's weights before rounding. If `MASKED`,
    /// scores of minus infinity get the weight zero; otherwise there must be none.
    ///
    /// # Safety
    /// As for [`Self::softmax_step`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn exponentials<const MASKED: bool>(
        &self,
        first: usize,
        rows: Range<usize>,
        relative: Avx512,
    ) -> Avx512 {
        // SAFETY: `tile` is a multiple of 32 below 128, and rows up to `tile + 31` are read, all
        // below 128. `weights` has `128 / 2` rows of 16 pairs, of which those from `tile / 2` on
        // are written. AVX-512 is enabled.
        unsafe {
            let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
            let weight = |row: usize| {
                let score = Avx512::load(self.scores_at(row, first));
                let weight = score.sub(relative).exp2_rough();
                if !MASKED {
                    return weight;
                }
                let seen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(score.0, hidden);
                Avx512(_mm512_maskz_mov_ps(seen, weight.0))
            };
            let mut sums = [Avx512::splat(0.0); 4];
            for tile in rows.step_by(AMX_BF16_DEPTH) {
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
                    pairs.store(self.weights.add((tile / 2 + query) * AMX_TILE_ROWS));
                }
            }
            sums[0].add(sums[1]).add(sums[2].add(sums[3]))
        }
    }
}
