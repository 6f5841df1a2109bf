//! Brings queries, keys and values into the layouts that tiles read.
#![allow(unsafe_code, reason = "vectors work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_castsi512_ps, _mm512_cvtne2ps_pbh, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_mul_ps, _mm512_permutex2var_epi16,
    _mm512_set1_ps, _mm512_setzero_si512, _mm512_storeu_si512,
};
use std::ops::Range;

use super::super::super::amx::{DEPTH, ROWS};
use super::super::super::fetch::fetch_second;
use super::super::super::lanes::{Avx512, LANES, Lanes};
use super::{TILE, Work};

/// Which 16-bit values of two vectors stand side by side in a vector of pairs: number `from` of
/// the first, number `from` of the second, and so on.
const fn pair_order(from: i16) -> [i16; DEPTH] {
    let mut order = [0; DEPTH];
    let mut i = 0;
    while i < DEPTH {
        order[i] = from + (i / 2) as i16 + (i % 2 * DEPTH) as i16;
        i += 1;
    }
    order
}
const PAIRS_LOW: [i16; DEPTH] = pair_order(0);
const PAIRS_HIGH: [i16; DEPTH] = pair_order(16);

impl Work<'_> {
    /// Scales the queries, so that scores are in units of ln 2, rounds them to bf16 and turns them:
    /// lanes are queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn pack_queries(&self) {
        let (args, dim) = (self.args, self.args.head_dim);
        let (group, all) = (args.heads / args.kv_heads, self.run.len() * self.each);
        let factor = _mm512_set1_ps(args.scale * std::f32::consts::LOG2_E);
        for first in (0..self.queries).step_by(ROWS) {
            for d in (0..dim).step_by(DEPTH) {
                let mut square = [Avx512(_mm512_castsi512_ps(_mm512_setzero_si512())); LANES];
                let live = ROWS.min(all - first);
                for (query, lanes) in (first..).zip(&mut square).take(live) {
                    let task = self.plan.task(self.part, self.run.start + query / self.each);
                    let own = query % self.each;
                    let head = self.kv_head * group + own % group;
                    let from = ((task.row + own / group) * args.heads + head) * dim + d;
                    // SAFETY: the query has 32 values from d on; the types are 512 bits of plain data.
                    unsafe {
                        let at = args.q.as_ptr().add(from);
                        let low = _mm512_mul_ps(_mm512_loadu_ps(at), factor);
                        let high = _mm512_mul_ps(_mm512_loadu_ps(at.add(LANES)), factor);
                        let pairs = _mm512_cvtne2ps_pbh(high, low);
                        let bits = std::mem::transmute::<__m512bh, __m512i>(pairs);
                        *lanes = Avx512(_mm512_castsi512_ps(bits));
                    }
                }
                // SAFETY: see above the impl of `Work`.
                unsafe {
                    Avx512::transpose(&mut square);
                    for (i, pairs) in square.iter().enumerate() {
                        pairs.store(self.q.add(first * dim / 2 + (d / 2 + i) * ROWS));
                    }
                }
            }
        }
    }

    /// Where the keys of the tile's 16 positions from `row` on stand: the first, and the values
    /// between two. Rows outside `seen` may hold anything of the cache.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn key_rows(
        &self,
        begin: usize,
        row: usize,
        seen: &Range<usize>,
    ) -> (*const u16, usize) {
        let (args, dim) = (self.args, self.args.head_dim);
        // SAFETY: see above the impl of `Work`; a block of the cache is there as a whole.
        unsafe {
            if args.block_size.is_multiple_of(ROWS) {
                let at = self.place(begin + row);
                return (self.keys.as_ptr().add(at), args.kv_heads * dim);
            }
            for i in row..row + ROWS {
                let to = self.gathered.add(i * dim);
                if seen.contains(&(begin + i)) {
                    let key = self.keys.as_ptr().add(self.place(begin + i));
                    std::ptr::copy_nonoverlapping(key, to, dim);
                } else {
                    to.write_bytes(0, dim);
                }
            }
            (self.gathered.add(row * dim).cast_const(), dim)
        }
    }

    /// Brings the values of each two positions side by side; zeroes outside `seen`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn pair_values(&self, begin: usize, rows: Range<usize>, seen: Range<usize>) {
        let dim = self.args.head_dim;
        // SAFETY: both arrays fill a vector.
        let (low, high) = unsafe {
            let load = |order: &[i16; DEPTH]| _mm512_loadu_si512(order.as_ptr().cast());
            (load(&PAIRS_LOW), load(&PAIRS_HIGH))
        };
        for row in rows.step_by(2) {
            // What nobody sees is not read at all.
            let place = |position| match seen.contains(&position) {
                true => (self.place(position), u32::MAX),
                false => (0, 0),
            };
            let (first, second) = (place(begin + row), place(begin + row + 1));
            for next in [begin + row + TILE, begin + row + TILE + 1] {
                self.fetch(self.values, next);
            }
            for d in (0..dim).step_by(DEPTH) {
                // SAFETY: see above the impl of `Work`; a head has 32 values from d on.
                unsafe {
                    let load = |(at, mask): (usize, u32)| {
                        let from = self.values.as_ptr().add(at + d);
                        _mm512_maskz_loadu_epi16(mask, from.cast())
                    };
                    let (first, second) = (load(first), load(second));
                    let to = self.pairs.add((d * TILE + row * LANES) / 2);
                    let pairs = _mm512_permutex2var_epi16(first, low, second);
                    _mm512_storeu_si512(to.cast(), pairs);
                    let pairs = _mm512_permutex2var_epi16(first, high, second);
                    _mm512_storeu_si512(to.add(TILE * LANES / 2).cast(), pairs);
                }
            }
        }
    }

    /// Fetches a position's keys or values towards the processor, if the task sees it.
    #[inline]
    pub(super) fn fetch(&self, from: &[u16], position: usize) {
        if position >= self.task().end() {
            return;
        }
        let at = self.place(position);
        for d in (0..self.args.head_dim).step_by(DEPTH) {
            fetch_second(from.as_ptr().wrapping_add(at + d));
        }
    }
}
