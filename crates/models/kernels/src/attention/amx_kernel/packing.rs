//! Brings queries, keys and values into the layouts that the tile products read.
#![allow(unsafe_code, reason = "accesses scratch memory and the KV cache through raw pointers")]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_castsi512_ps, _mm512_cvtne2ps_pbh, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_mul_ps, _mm512_permutex2var_epi16,
    _mm512_set1_ps, _mm512_setzero_si512, _mm512_storeu_si512,
};
use std::ops::Range;

use super::work::{AmxWork, POSITIONS_PER_AMX_TILE};
use crate::amx::tile::{AMX_BF16_DEPTH, AMX_TILE_ROWS};
use crate::lanes::{Avx512, LANES, Lanes};
use crate::prefetch::prefetch_l2;

/// The permutation that interleaves half of two vectors of 32 values of 16 bits: value `from` of
/// the first, value `from` of the second, value `from + 1` of the first, and so on.
const fn pair_order(from: i16) -> [i16; AMX_BF16_DEPTH] {
    let mut order = [0; AMX_BF16_DEPTH];
    let mut i = 0;
    while i < AMX_BF16_DEPTH {
        order[i] = from + (i / 2) as i16 + (i % 2 * AMX_BF16_DEPTH) as i16;
        i += 1;
    }
    order
}
const PAIRS_LOW: [i16; AMX_BF16_DEPTH] = pair_order(0);
const PAIRS_HIGH: [i16; AMX_BF16_DEPTH] = pair_order(16);

impl AmxWork<'_> {
    /// Packs the queries of the reader group: multiplies them by a factor that makes scores come
    /// out in units of ln 2, rounds them to bf16 and transposes them, so that lanes are queries.
    /// The padding is zero.
    ///
    /// # Safety
    /// `self.readers` lies within the item's readers, and `self.queries` is its number of queries,
    /// padded to a multiple of 16, for which `self.q` has room.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn pack_queries(&self) {
        let (args, dim) = (self.args, self.args.head_dim);
        let (group, all) = (args.heads / args.kv_heads, self.readers.len() * self.queries_each);
        let factor = _mm512_set1_ps(args.scale * std::f32::consts::LOG2_E);
        for first in (0..self.queries).step_by(AMX_TILE_ROWS) {
            for d in (0..dim).step_by(AMX_BF16_DEPTH) {
                let mut square = [Avx512(_mm512_castsi512_ps(_mm512_setzero_si512())); LANES];
                let live = AMX_TILE_ROWS.min(all - first);
                for (query, lanes) in (first..).zip(&mut square).take(live) {
                    let chunk =
                        self.plan.chunk(self.item, self.readers.start + query / self.queries_each);
                    let own = query % self.queries_each;
                    let head = self.kv_head * group + own % group;
                    let from = ((chunk.row + own / group) * args.heads + head) * dim + d;
                    // SAFETY: the query head begins at `from - d` in `args.q` by the validated
                    // length of `q` and has `dim` values, a multiple of 32, so 32 are readable from
                    // `d` on. The AVX-512 sets are enabled for this function. Both types of the
                    // transmute are 512 bits of plain data.
                    unsafe {
                        let at = args.q.as_ptr().add(from);
                        let low = _mm512_mul_ps(_mm512_loadu_ps(at), factor);
                        let high = _mm512_mul_ps(_mm512_loadu_ps(at.add(LANES)), factor);
                        let pairs = _mm512_cvtne2ps_pbh(high, low);
                        let bits = std::mem::transmute::<__m512bh, __m512i>(pairs);
                        *lanes = Avx512(_mm512_castsi512_ps(bits));
                    }
                }
                // SAFETY: `q` has room for `queries * dim / 2` pairs: `first + 16` is at most
                // `queries`, and `d / 2 + i` is below `dim / 2`. AVX-512 is enabled for this
                // function.
                unsafe {
                    Avx512::transpose(&mut square);
                    for (i, pairs) in square.iter().enumerate() {
                        pairs.store(self.q.add(first * dim / 2 + (d / 2 + i) * AMX_TILE_ROWS));
                    }
                }
            }
        }
    }

    /// The keys of 16 positions from number `row` of the tile on: a pointer to the first, and the
    /// number of values from one to the next. If 16 successive positions may be in different
    /// blocks, the keys are copied to scratch memory first. Rows of positions outside `seen` have
    /// unspecified values.
    ///
    /// # Safety
    /// `row` is a multiple of 16, and the position `begin + row` is below the end of `seen`. `seen`
    /// lies in the tile that begins at `begin` and is covered by the block table.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn key_rows(
        &self,
        begin: usize,
        row: usize,
        seen: &Range<usize>,
    ) -> (*const u16, usize) {
        let (args, dim) = (self.args, self.args.head_dim);
        // SAFETY: the validation has found all blocks of the table up to the end of `seen` within
        // `keys`, so a head of `dim` values is readable for each of these positions. If blocks are
        // a multiple of 16 positions, all 16 from `begin + row` on are in one block, at equal
        // distances. Otherwise only keys of positions in `seen` are read; `gathered_keys` has 128
        // rows of `dim`.
        unsafe {
            if args.block_size.is_multiple_of(AMX_TILE_ROWS) {
                let at = self.index_of(begin + row);
                return (self.keys.as_ptr().add(at), args.kv_heads * dim);
            }
            for i in row..row + AMX_TILE_ROWS {
                let to = self.gathered_keys.add(i * dim);
                if seen.contains(&(begin + i)) {
                    let key = self.keys.as_ptr().add(self.index_of(begin + i));
                    std::ptr::copy_nonoverlapping(key, to, dim);
                } else {
                    to.write_bytes(0, dim);
                }
            }
            (self.gathered_keys.add(row * dim).cast_const(), dim)
        }
    }

    /// Interleaves the values of each two successive positions as pairs, with zeroes for positions
    /// outside `seen`.
    ///
    /// # Safety
    /// `rows` lies within the tile, and its ends are even. `seen` lies in the tile that begins at
    /// `begin` and is covered by the block table.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn pair_values(&self, begin: usize, rows: Range<usize>, seen: Range<usize>) {
        let dim = self.args.head_dim;
        // SAFETY: both arrays have 32 values of 16 bits, the size of a vector. AVX-512 is enabled.
        let (low, high) = unsafe {
            let load = |order: &[i16; AMX_BF16_DEPTH]| _mm512_loadu_si512(order.as_ptr().cast());
            (load(&PAIRS_LOW), load(&PAIRS_HIGH))
        };
        for row in rows.step_by(2) {
            // A position that no query sees is not read: its mask is 0.
            let source = |position| match seen.contains(&position) {
                true => (self.index_of(position), u32::MAX),
                false => (0, 0),
            };
            let (first, second) = (source(begin + row), source(begin + row + 1));
            for next in
                [begin + row + POSITIONS_PER_AMX_TILE, begin + row + POSITIONS_PER_AMX_TILE + 1]
            {
                self.prefetch(self.values, next);
            }
            for d in (0..dim).step_by(AMX_BF16_DEPTH) {
                // SAFETY: for a position in `seen`, `at` is the start of its head of `dim` values,
                // a multiple of 32, within `values`; for others the mask is 0, and a masked load
                // reads nothing. `value_pairs` has `dim * 128 / 2` pairs: the stores go to the two
                // panels of 16 values from `d` on, at pair `row / 2`. AVX-512 is enabled.
                unsafe {
                    let load = |(at, mask): (usize, u32)| {
                        let from = self.values.as_ptr().add(at + d);
                        _mm512_maskz_loadu_epi16(mask, from.cast())
                    };
                    let (first, second) = (load(first), load(second));
                    let to = self.value_pairs.add((d * POSITIONS_PER_AMX_TILE + row * LANES) / 2);
                    let pairs = _mm512_permutex2var_epi16(first, low, second);
                    _mm512_storeu_si512(to.cast(), pairs);
                    let pairs = _mm512_permutex2var_epi16(first, high, second);
                    _mm512_storeu_si512(to.add(POSITIONS_PER_AMX_TILE * LANES / 2).cast(), pairs);
                }
            }
        }
    }

    /// Prefetches a position's keys or values for this kv head into the L2 cache, unless the
    /// position is after the end of the query chunk's context.
    #[inline]
    pub(super) fn prefetch(&self, from: &[u16], position: usize) {
        if position >= self.chunk().end {
            return;
        }
        let at = self.index_of(position);
        for d in (0..self.args.head_dim).step_by(AMX_BF16_DEPTH) {
            prefetch_l2(from.as_ptr().wrapping_add(at + d));
        }
    }
}
