//! One task of attention on AMX tiles, for keys and values in bf16.
//!
//! Scores are computed transposed: a tile of 16 positions' keys, read where they stand in the
//! cache, times queries packed once a task. So a vector holds one position's scores of 16 queries,
//! and largest scores, exponentials and sums need no operation across lanes. The weights are then
//! rounded to bf16 and turned, 32 positions times 16 queries at a time, and multiply the values,
//! of which two successive positions are brought side by side.
//!
//! **Order of sums.** Scores take a head's values 32 at a time. The positions of a tile ([`TILE`])
//! are summed in ascending order; so is the weighted sum of values, 32 positions at a time from the
//! tile's first. Positions that a query does not see weigh zero and change nothing.
#![allow(unsafe_code, reason = "tiles and vectors work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512i, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmple_epi32_mask, _mm512_cvtepu16_epi32,
    _mm512_cvtneps_pbh, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_mov_ps, _mm512_max_ps,
    _mm512_or_si512, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512, _mm512_slli_epi32,
    _mm512_storeu_ps, _mm512_storeu_si512,
};

use super::super::amx::{self, Block, DEPTH, ROWS, TILE_BYTES, TILE_ROW_BYTES};
use super::super::lanes::{self, Avx512, LANES, Lanes};
use super::super::threads::Threads;
use super::super::{Path, PathKind};
use super::{AttentionArgs, KvSlice, SPAN, Task};

/// Positions whose scores are computed together; a span holds a whole number of them.
const TILE: usize = 128;
const _: () = assert!(SPAN.is_multiple_of(TILE) && TILE.is_multiple_of(DEPTH));

/// Whether these arguments are computed here. It depends on shapes and types alone.
pub(super) fn apply(args: &AttentionArgs<'_>) -> bool {
    let amx = |path: Path| path.kind() == PathKind::Amx;
    let bf16 = matches!((&args.keys, &args.values), (KvSlice::Bf16(_), KvSlice::Bf16(_)));
    amx(args.path) && bf16 && args.head_dim.is_multiple_of(DEPTH)
}

/// A task's scratch, in f32s; parts that hold bf16 pairs use an f32's place for a pair.
struct Work<'a> {
    args: &'a AttentionArgs<'a>,
    task: &'a Task,
    keys: &'a [u16],
    values: &'a [u16],
    /// Query vectors, padded to a tile; the padding computes on zeroes and is dropped.
    queries: usize,
    /// `[query tile][head_dim / 32][16 pairs][16 queries]` pairs.
    q: *mut f32,
    /// `[TILE][queries]`: scores.
    scores: *mut f32,
    /// `[TILE / 32][16 queries][16 pairs]` pairs: the weights of one query tile.
    weights: *mut f32,
    /// `[head_dim / 16][TILE / 32][16 pairs][16]` pairs.
    pairs: *mut f32,
    /// `[16][head_dim]` bf16: keys of 16 positions, where blocks are smaller.
    gathered: *mut u16,
    /// `[queries][head_dim]`: the running span's weighted values, and those of spans before.
    sums: [*mut f32; 2],
    /// `[queries]` largest scores, then `[queries]` sums of exponentials, of both.
    states: [*mut f32; 2],
    /// `[queries]` as i32: first and last position that a query sees.
    first_seen: *mut i32,
    last_seen: *mut i32,
}

/// Computes a task, writing its queries' rows and heads of `out`.
///
/// # Safety
/// [`apply`] holds; `args` has passed its check with an `out` of the size of `q`, of which no one
/// else touches the task's part.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn run(args: &AttentionArgs<'_>, task: &Task, threads: &Threads, out: *mut f32) {
    let (KvSlice::Bf16(keys), KvSlice::Bf16(values)) = (args.keys, args.values) else {
        unreachable!("apply() has found bf16");
    };
    let dim = args.head_dim;
    let group = args.heads / args.kv_heads;
    let live = task.count * group;
    let queries = live.next_multiple_of(ROWS);
    let sizes = [
        queries * dim / 2,
        TILE * queries,
        TILE * ROWS / 2,
        TILE * dim / 2,
        ROWS * dim / 2,
        queries * dim,
        queries * dim,
        2 * queries,
        2 * queries,
        queries,
        queries,
    ];
    let mut scratch = threads.scratch::<f32>(sizes.iter().sum());
    let mut rest = scratch.slice_mut::<f32>();
    let [q, scores, weights, pairs, gathered, sum, all, state, all_state, first, last] =
        sizes.map(|size| {
            // All sizes are multiples of 16, so every part is aligned to a cache line.
            let (part, after) = std::mem::take(&mut rest).split_at_mut(size);
            rest = after;
            part.as_mut_ptr()
        });
    let work = Work {
        args,
        task,
        keys,
        values,
        queries,
        q,
        scores,
        weights,
        pairs,
        gathered: gathered.cast(),
        sums: [sum, all],
        states: [state, all_state],
        first_seen: first.cast(),
        last_seen: last.cast(),
    };
    let position_end = task.position + task.count;
    let first = args.first_seen(task.position);
    // SAFETY: the caller's promise; every part of scratch is used within its size.
    unsafe {
        work.pack_queries(live);
        work.reset_state(0);
        work.reset_state(1);
        amx::configure(ROWS, ROWS, true);
        for tile in first / TILE..=(position_end - 1) / TILE {
            if (tile * TILE).is_multiple_of(SPAN) && tile > first / TILE {
                work.merge_span();
            }
            let begin = tile * TILE;
            work.add_tile(begin, first.max(begin), position_end.min(begin + TILE));
        }
        amx::release();
        work.merge_span();
        for query in 0..live {
            let factor = *work.states[1].add(work.queries + query);
            let head = task.kv_head * group + query % group;
            let to = ((task.row + query / group) * args.heads + head) * dim;
            for d in 0..dim {
                // Adding zero turns -0 to 0: a masked position may or may not have done that.
                *out.add(to + d) = *work.sums[1].add(query * dim + d) / factor + 0.0;
            }
        }
    }
}

/// Rounds to bf16 (to nearest, ties to even), one value in the low half of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn rounded(values: __m512) -> __m512i {
    // SAFETY: both types are 256 bits of plain data.
    let bits = unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values)) };
    _mm512_cvtepu16_epi32(bits)
}

/// Pairs of bf16: `first` in the low halves, `second` in the high ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn paired(first: __m512i, second: __m512i) -> __m512i {
    _mm512_or_si512(first, _mm512_slli_epi32::<16>(second))
}

// SAFETY of all methods: the conditions of `run`, whose scratch they use within its sizes.
impl Work<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn pack_queries(&self, live: usize) {
        let (args, task, dim) = (self.args, self.task, self.args.head_dim);
        let group = args.heads / args.kv_heads;
        for query in 0..self.queries {
            let position = task.position + query / group;
            // The padding sees what the last query sees, so that it needs no mask of its own.
            let position = position.min(task.position + task.count - 1);
            #[allow(clippy::cast_possible_truncation, reason = "positions are far below 2^31")]
            #[allow(clippy::cast_possible_wrap, reason = "as above")]
            // SAFETY: see above the impl.
            unsafe {
                *self.first_seen.add(query) = args.first_seen(position) as i32;
                *self.last_seen.add(query) = position as i32;
            }
            let head = task.kv_head * group + query % group;
            let from = ((task.row + query / group) * args.heads + head) * dim;
            let tile = query / ROWS * ROWS * dim;
            for d in 0..dim {
                let value = if query < live { args.q[from + d] * args.scale } else { 0.0 };
                let at = tile + d / 2 * 2 * ROWS + query % ROWS * 2 + d % 2;
                // SAFETY: see above the impl.
                unsafe { *self.q.cast::<u16>().add(at) = half::bf16::from_f32(value).to_bits() };
            }
        }
    }

    unsafe fn reset_state(&self, which: usize) {
        // SAFETY: see above the impl.
        unsafe {
            for query in 0..self.queries {
                *self.states[which].add(query) = f32::NEG_INFINITY;
                *self.states[which].add(self.queries + query) = 0.0;
            }
            self.sums[which].write_bytes(0, self.queries * self.args.head_dim);
        }
    }

    /// Where the keys or values of a position and the task's head begin.
    #[inline]
    fn place(&self, position: usize) -> usize {
        let args = self.args;
        let table = args.sequences[self.task.sequence].block_table;
        let block = table[position / args.block_size].0 as usize;
        let slot = block * args.block_size + position % args.block_size;
        (slot * args.kv_heads + self.task.kv_head) * args.head_dim
    }

    /// Adds positions `from..until` of the tile that begins at `begin`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn add_tile(&self, begin: usize, from: usize, until: usize) {
        // Both products skip whole tiles of positions that no query sees, before and after.
        let first_row = (from - begin) / DEPTH * DEPTH;
        let row_end = (until - begin).next_multiple_of(DEPTH);
        // SAFETY: see above the impl; `from < until`, both within the tile.
        unsafe {
            for row in (first_row..row_end).step_by(ROWS) {
                if begin + row < until {
                    self.score(begin, row, from, until);
                }
            }
            self.pair_values(begin, first_row, row_end, from, until);
            for first in (0..self.queries).step_by(ROWS) {
                if self.weigh(first, begin, first_row, row_end, until) {
                    self.add_values(first, first_row, row_end);
                }
            }
        }
    }

    /// Scores of 16 positions from `begin + row` on, for all queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn score(&self, begin: usize, row: usize, from: usize, until: usize) {
        let (args, dim) = (self.args, self.args.head_dim);
        let position = begin + row;
        // SAFETY: see above the impl. Keys of 16 positions are read in one block (positions beyond
        // `until` too, whose scores are masked), or gathered from several.
        unsafe {
            let (a, row_values) = if args.block_size >= ROWS {
                (self.keys.as_ptr().add(self.place(position)), args.kv_heads * dim)
            } else {
                for i in 0..ROWS {
                    let to = self.gathered.add(i * dim);
                    if (from..until).contains(&(position + i)) {
                        let key = self.keys.as_ptr().add(self.place(position + i));
                        std::ptr::copy_nonoverlapping(key, to, dim);
                    } else {
                        to.write_bytes(0, dim);
                    }
                }
                (self.gathered.cast_const(), dim)
            };
            let mut block = Block {
                a,
                a_tile: 0,
                a_row_bytes: row_values * size_of::<u16>(),
                a_step_bytes: DEPTH * size_of::<u16>(),
                b: self.q.cast::<u16>().cast_const(),
                b_panel: ROWS * dim,
                depth: dim / DEPTH,
                begin: std::ptr::null(),
                begin_row: 0,
                c: self.scores.add(row * self.queries),
                c_row: self.queries,
                ahead: a,
            };
            let mut left = self.queries / ROWS;
            while left > 0 {
                let count = if left >= 4 { 4 } else { 1 };
                if count == 4 {
                    amx::block_1x4(&block);
                } else {
                    amx::block_1x1(&block);
                }
                left -= count;
                block.b = block.b.add(count * block.b_panel);
                block.c = block.c.add(count * LANES);
            }
        }
    }

    /// Brings the values of each two positions side by side; zeroes outside `from..until`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn pair_values(
        &self,
        begin: usize,
        first_row: usize,
        row_end: usize,
        from: usize,
        until: usize,
    ) {
        let dim = self.args.head_dim;
        for row in (first_row..row_end).step_by(2) {
            let at =
                |position: usize| (from..until).contains(&position).then(|| self.place(position));
            let (first, second) = (at(begin + row), at(begin + row + 1));
            for next in [begin + row + TILE, begin + row + TILE + 1] {
                if next < self.task.position + self.task.count {
                    self.fetch(self.place(next));
                }
            }
            let load = |at: Option<usize>, d: usize| match at {
                // SAFETY: the check has seen the block; a head has 16 values from d on.
                Some(at) => unsafe {
                    _mm512_cvtepu16_epi32(_mm256_loadu_si256(
                        self.values.as_ptr().add(at + d).cast(),
                    ))
                },
                None => _mm512_setzero_si512(),
            };
            for d in (0..dim).step_by(LANES) {
                let pair = paired(load(first, d), load(second, d));
                // SAFETY: see above the impl.
                unsafe {
                    let to = self.pairs.add((d * TILE + row * LANES) / 2);
                    _mm512_storeu_si512(to.cast(), pair);
                }
            }
        }
    }

    /// Fetches a position's keys and values of the next tile towards the processor.
    #[inline]
    fn fetch(&self, at: usize) {
        for d in (0..self.args.head_dim).step_by(DEPTH) {
            let (key, value) = (self.keys.as_ptr(), self.values.as_ptr());
            // SAFETY: a hint; no memory is accessed that the program could see.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(key.wrapping_add(at + d).cast());
                _mm_prefetch::<_MM_HINT_T1>(value.wrapping_add(at + d).cast());
            }
        }
    }

    /// Turns the scores of 16 queries into weights, and brings their state to the new largest
    /// scores. False if none of them sees a position of the tile.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn weigh(
        &self,
        first: usize,
        begin: usize,
        first_row: usize,
        row_end: usize,
        until: usize,
    ) -> bool {
        #[allow(clippy::cast_possible_truncation, reason = "positions are far below 2^31")]
        #[allow(clippy::cast_possible_wrap, reason = "as above")]
        let narrow = |position: usize| position as i32;
        // SAFETY: see above the impl.
        unsafe {
            let seen_from = _mm512_loadu_si512(self.first_seen.add(first).cast());
            let seen_last = _mm512_loadu_si512(self.last_seen.add(first).cast());
            // Queries stand in order of position, and what they see moves with it.
            let lowest_last = *self.last_seen.add(first);
            let highest_first = *self.first_seen.add(first + ROWS - 1);
            let lowest_first = *self.first_seen.add(first);
            let highest_last = *self.last_seen.add(first + ROWS - 1);
            if highest_last < narrow(begin) || lowest_first >= narrow(begin + TILE) {
                return false;
            }
            let whole = lowest_last >= narrow(begin + row_end - 1)
                && highest_first <= narrow(begin + first_row);
            let scores = |row: usize| self.scores.add(row * self.queries + first);
            let minus_infinity = _mm512_set1_ps(f32::NEG_INFINITY);
            let mut max = [minus_infinity; 4];
            for row in first_row..row_end {
                let at = scores(row);
                let mut score = _mm512_loadu_ps(at);
                if !whole {
                    let position = _mm512_set1_epi32(narrow(begin + row));
                    let seen = if begin + row < until {
                        _mm512_cmple_epi32_mask(seen_from, position)
                            & _mm512_cmple_epi32_mask(position, seen_last)
                    } else {
                        0
                    };
                    score = _mm512_mask_mov_ps(minus_infinity, seen, score);
                    _mm512_storeu_ps(at, score);
                }
                max[row % 4] = _mm512_max_ps(max[row % 4], score);
            }
            let max = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
            let state = self.states[0].add(first);
            let old = _mm512_loadu_ps(state);
            let new = _mm512_max_ps(old, max);
            // A query that has seen nothing yet: any finite number gives weights of zero.
            let relative = Avx512(_mm512_max_ps(new, _mm512_set1_ps(f32::MIN)));
            let factor = lanes::exp_rough(Avx512(old).sub(relative));
            let mut sum = [Avx512::splat(0.0); 4];
            for tile in (first_row..row_end).step_by(DEPTH) {
                let mut square = [Avx512::splat(0.0); LANES];
                for (i, pair) in square.iter_mut().enumerate() {
                    let row = tile + 2 * i;
                    let low = lanes::exp_rough(Avx512::load(scores(row)).sub(relative));
                    let high = lanes::exp_rough(Avx512::load(scores(row + 1)).sub(relative));
                    sum[row % 4] = sum[row % 4].add(low);
                    sum[row % 4 + 1] = sum[row % 4 + 1].add(high);
                    let bits = paired(rounded(low.0), rounded(high.0));
                    *pair = Avx512(_mm512_castsi512_ps(bits));
                }
                Avx512::transpose(&mut square);
                for (query, pairs) in square.iter().enumerate() {
                    let to = self.weights.add((tile / 2 + query) * ROWS);
                    _mm512_storeu_si512(to.cast(), _mm512_castps_si512(pairs.0));
                }
            }
            let sum = sum[0].add(sum[1]).add(sum[2].add(sum[3]));
            _mm512_storeu_ps(state, new);
            let sums = state.add(self.queries);
            Avx512::load(sums).mul(factor).add(sum).store(sums);
            let mut factors = [0.0; LANES];
            factor.store(factors.as_mut_ptr());
            for (query, factor) in factors.into_iter().enumerate() {
                self.scale(first + query, factor);
            }
        }
        true
    }

    /// Multiplies a query's weighted values.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn scale(&self, query: usize, factor: f32) {
        let dim = self.args.head_dim;
        if factor == 1.0 {
            return;
        }
        for d in (0..dim).step_by(LANES) {
            // SAFETY: see above the impl.
            unsafe {
                let at = self.sums[0].add(query * dim + d);
                Avx512::load(at).mul(Avx512::splat(factor)).store(at);
            }
        }
    }

    /// Adds the values, weighted, for 16 queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn add_values(&self, first: usize, first_row: usize, row_end: usize) {
        let dim = self.args.head_dim;
        // SAFETY: see above the impl.
        unsafe {
            let c = self.sums[0].add(first * dim);
            let mut block = Block {
                a: self.weights.add(first_row / 2 * ROWS).cast::<u16>().cast_const(),
                a_tile: 0,
                a_row_bytes: TILE_ROW_BYTES,
                a_step_bytes: TILE_BYTES,
                b: self.pairs.add(first_row * LANES / 2).cast::<u16>().cast_const(),
                b_panel: TILE * LANES,
                depth: (row_end - first_row) / DEPTH,
                begin: c.cast_const(),
                begin_row: dim,
                c,
                c_row: dim,
                ahead: self.q.cast::<u16>().cast_const(),
            };
            let mut left = dim / LANES;
            while left > 0 {
                let count = if left >= 4 { 4 } else { 1 };
                if count == 4 {
                    amx::block_1x4(&block);
                } else {
                    amx::block_1x1(&block);
                }
                left -= count;
                block.b = block.b.add(count * block.b_panel);
                block.c = block.c.add(count * LANES);
                block.begin = block.c.cast_const();
            }
        }
    }

    /// Merges the running span's state into that of the spans before, and resets it.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn merge_span(&self) {
        let dim = self.args.head_dim;
        // SAFETY: see above the impl.
        unsafe {
            for query in 0..self.queries {
                let (span, all) = (self.states[0].add(query), self.states[1].add(query));
                let (span_max, all_max) = (*span, *all);
                let max = all_max.max(span_max);
                let keep = super::task::correction(all_max, max);
                let take = super::task::correction(span_max, max);
                *all = max;
                let all_sum = all.add(self.queries);
                *all_sum = *all_sum * keep + *span.add(self.queries) * take;
                for d in (query * dim..(query + 1) * dim).step_by(LANES) {
                    let (from, to) = (self.sums[0].add(d), self.sums[1].add(d));
                    let kept = Avx512::load(to).mul(Avx512::splat(keep));
                    kept.add(Avx512::load(from).mul(Avx512::splat(take))).store(to);
                }
            }
            self.reset_state(0);
        }
    }
}
