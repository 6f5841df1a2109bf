//! The state of an online softmax for some query vectors, which attention accumulates as it walks
//! through positions (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022).
//!
//! For each query the state is the largest score so far, the sum of the weights relative to it, and
//! the sum of the values weighted in the same way. Scores are in units of ln 2, so weights are
//! powers of two.
#![allow(unsafe_code, reason = "views states in scratch memory through raw pointers")]

use std::ops::Range;

use crate::attention::args::AttentionArgs;
use crate::attention::query_chunk::QueryChunk;
use crate::lanes::{LANES, Lanes};

/// A view of the states of some queries in memory that is owned elsewhere.
///
/// **Invariant**, which [`SoftmaxState::at`] requires of its caller: as long as the view is used,
/// `largest` and `sums` are valid for `queries` values and `values` for `queries * width`, in
/// initialized memory that no other thread accesses. The methods rely on it. Those that are generic
/// over [`Lanes`] are unsafe also because the instruction set of `L` must be available.
#[derive(Clone, Copy)]
pub(super) struct SoftmaxState {
    /// Number of queries.
    queries: usize,
    /// Values per query: the head length, padded to a multiple of 16.
    width: usize,
    /// `[queries]`: the largest score; minus infinity before any position was added.
    pub(super) largest: *mut f32,
    /// `[queries]`: the sum of the weights.
    pub(super) sums: *mut f32,
    /// `[queries][width]`: the sum of the weighted values.
    pub(super) values: *mut f32,
}

/// The factor that converts sums relative to the largest score `old` to the new largest score
/// `new`, which is not smaller.
pub(super) fn rescale_factor(old: f32, new: f32) -> f32 {
    if old == f32::NEG_INFINITY { 0.0 } else { (old - new).exp2() }
}

impl SoftmaxState {
    /// Number of `f32`s in the states of `queries` queries: a whole number of cache lines, since
    /// `width` is a multiple of 16.
    pub(super) fn len(queries: usize, width: usize) -> usize {
        2 * queries.next_multiple_of(LANES) + queries * width
    }

    /// A view of the states that begin at `start`. `width` is a multiple of 16.
    ///
    /// # Safety
    /// From `start` on, [`SoftmaxState::len`] values are valid and initialized. As long as the view
    /// or a view made from it is used, no other thread accesses them.
    pub(super) unsafe fn at(start: *mut f32, queries: usize, width: usize) -> SoftmaxState {
        debug_assert!(width.is_multiple_of(LANES));
        let line = queries.next_multiple_of(LANES);
        // SAFETY: both offsets are below `len(queries, width)`, or equal to it for no queries, and
        // the caller gives that many values.
        let (sums, values) = unsafe { (start.add(line), start.add(2 * line)) };
        SoftmaxState { queries, width, largest: start, sums, values }
    }

    /// A view of the states of some of the queries.
    ///
    /// # Safety
    /// `queries` lies within `0..self.queries`, and the memory of `self` is still valid.
    pub(super) unsafe fn part(&self, queries: Range<usize>) -> SoftmaxState {
        debug_assert!(queries.start <= queries.end && queries.end <= self.queries);
        let SoftmaxState { width, largest, sums, values, .. } = *self;
        let (first, queries) = (queries.start, queries.len());
        // SAFETY: `first` is at most `self.queries`, for which the three pointers are valid.
        unsafe {
            let (largest, sums) = (largest.add(first), sums.add(first));
            SoftmaxState { queries, width, largest, sums, values: values.add(first * width) }
        }
    }

    /// Sets the state of each query to that before any position was added.
    ///
    /// # Safety
    /// The memory of the view is still valid, and no other thread accesses it.
    pub(super) unsafe fn reset(&self) {
        // SAFETY: the pointers are valid for `queries` values and `queries * width` values.
        unsafe {
            for query in 0..self.queries {
                *self.largest.add(query) = f32::NEG_INFINITY;
            }
            self.sums.write_bytes(0, self.queries);
            self.values.write_bytes(0, self.queries * self.width);
        }
    }

    /// Copies the states of the first queries of `from`: as many as both views have.
    ///
    /// # Safety
    /// The memory of both views is still valid and does not overlap, and no other thread accesses
    /// it. Both have the same width.
    #[cfg(target_arch = "x86_64")]
    pub(super) unsafe fn copy(&self, from: &SoftmaxState) {
        debug_assert_eq!(self.width, from.width);
        let queries = self.queries.min(from.queries);
        // SAFETY: `queries` is at most that of either view and the widths are equal, so both are
        // valid for the copied values. The caller makes sure that they do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(from.largest, self.largest, queries);
            std::ptr::copy_nonoverlapping(from.sums, self.sums, queries);
            std::ptr::copy_nonoverlapping(from.values, self.values, queries * self.width);
        }
    }

    /// Multiplies the weighted values of a query by `factor`.
    ///
    /// # Safety
    /// `query` is below `self.queries`, the memory of the view is still valid, no other thread
    /// accesses it, and the instruction set of `L` is available.
    #[inline(always)]
    pub(super) unsafe fn scale<L: Lanes>(&self, query: usize, factor: f32) {
        debug_assert!(query < self.queries);
        if factor == 1.0 {
            return;
        }
        for d in (0..self.width).step_by(LANES) {
            // SAFETY: `values` is valid for `queries * width` values, `query` is below `queries`,
            // and `d + 16` is at most `width`, a multiple of 16. The set of `L` is available.
            unsafe {
                let at = self.values.add(query * self.width + d);
                L::load(at).mul(L::splat(factor)).store(at);
            }
        }
    }

    /// Adds the states of the same queries over later positions. `later` may have more queries, of
    /// which the last are ignored.
    ///
    /// # Safety
    /// The memory of both views is still valid, and no other thread accesses it. `later` has at
    /// least as many queries and the same width. The instruction set of `L` is available.
    #[inline(always)]
    pub(super) unsafe fn merge<L: Lanes>(&self, later: &SoftmaxState) {
        debug_assert!(self.queries <= later.queries && self.width == later.width);
        // SAFETY: `query` is below the number of queries of both views, and `d + 16` is at most the
        // end of the query's values in both, since their width is the same multiple of 16. The set
        // of `L` is available.
        unsafe {
            for query in 0..self.queries {
                let (old, other) = (*self.largest.add(query), *later.largest.add(query));
                let new = old.max(other);
                let (keep, take) = (rescale_factor(old, new), rescale_factor(other, new));
                *self.largest.add(query) = new;
                let sum = self.sums.add(query);
                *sum = *sum * keep + *later.sums.add(query) * take;
                for d in (query * self.width..(query + 1) * self.width).step_by(LANES) {
                    let to = self.values.add(d);
                    let kept = L::load(to).mul(L::splat(keep));
                    kept.add(L::load(later.values.add(d)).mul(L::splat(take))).store(to);
                }
            }
        }
    }

    /// The factor of the values and the sum of the weights after an attention sink with the score
    /// `sink` was added.
    ///
    /// # Safety
    /// The memory of the view is still valid, and `query` is below `self.queries`.
    unsafe fn with_sink(&self, query: usize, sink: f32) -> (f32, f32) {
        let sink = sink * std::f32::consts::LOG2_E;
        // SAFETY: `query` is below the number of queries, for which both pointers are valid.
        let (largest, sum) = unsafe { (*self.largest.add(query), *self.sums.add(query)) };
        let new = largest.max(sink);
        let keep = rescale_factor(largest, new);
        (keep, sum * keep + rescale_factor(sink, new))
    }

    /// Writes the results, the weighted averages of values, to the rows of `chunk` in `out`
    /// (`[rows, heads, head_dim]`) for the query heads that share `kv_head`.
    ///
    /// # Safety
    /// The memory of the view is still valid. It has at most `chunk.queries(args)` queries and a
    /// width of at least `args.head_dim`. `out` is valid for as many values as `args.q`, `kv_head`
    /// is below `args.kv_heads`, and no other thread accesses these rows and heads. The instruction
    /// set of `L` is available.
    #[inline(always)]
    pub(super) unsafe fn write<L: Lanes>(
        &self,
        args: &AttentionArgs<'_>,
        chunk: &QueryChunk,
        kv_head: usize,
        out: *mut f32,
    ) {
        debug_assert!(self.queries <= chunk.queries(args) && args.head_dim <= self.width);
        let group = args.heads / args.kv_heads;
        for query in 0..self.queries {
            let head = kv_head * group + query % group;
            let to = ((chunk.row + query / group) * args.heads + head) * args.head_dim;
            // SAFETY: `query` is below the number of queries, so `sums` is valid for it and
            // `values` for `width` values of it, a multiple of 16. `query / group` is below the
            // chunk's rows and `head` below `heads`, so `to..to + head_dim` lies within `out`; the
            // stores of `live` or 16 values end there. The set of `L` is available.
            unsafe {
                let (keep, sum) = match args.sinks {
                    None => (1.0, *self.sums.add(query)),
                    Some(sinks) => self.with_sink(query, sinks[head]),
                };
                let (keep, sum) = (L::splat(keep), L::splat(sum));
                for d in (0..args.head_dim).step_by(LANES) {
                    let values = L::load(self.values.add(query * self.width + d)).mul(keep);
                    // Adding zero turns -0 into 0. A masked position has the same effect on a sum,
                    // so the result would otherwise depend on how many positions were masked.
                    let average = values.div(sum).add(L::splat(0.0));
                    let live = LANES.min(args.head_dim - d);
                    if live == LANES {
                        average.store(out.add(to + d));
                    } else {
                        let mut padded = [0.0; LANES];
                        average.store(padded.as_mut_ptr());
                        std::ptr::copy_nonoverlapping(padded.as_ptr(), out.add(to + d), live);
                    }
                }
            }
        }
    }
}

/// Where work items write their results.
pub(super) struct AttentionOutput {
    /// `[rows, heads, head_dim]`: the output of the call.
    pub(super) out: *mut f32,
    /// The states of the spans of those query chunks whose context is divided into several work
    /// items.
    pub(super) states: *mut f32,
}

impl AttentionOutput {
    /// Takes the state of a completed span: merges it into `all`, the state of all spans before,
    /// or, if the context of the chunk is divided, stores it in the memory for states.
    ///
    /// # Safety
    /// * The memory of `span` and `all` is valid and does not overlap; both have the width of
    ///   `args.head_dim` padded to a multiple of 16, `all` has `chunk.queries(args)` queries and
    ///   `span` at least as many.
    /// * `index` is one of `chunk.spans()`, and `kv_head` is below `args.kv_heads`.
    /// * If the chunk's context is divided, `self.states` is valid for the `state_len` of the
    ///   chunk's plan.
    /// * No other thread accesses the state of this chunk, span and head, nor `span` and `all`.
    /// * The instruction set of `L` is available.
    #[inline(always)]
    pub(super) unsafe fn finish_span<L: Lanes>(
        &self,
        args: &AttentionArgs<'_>,
        chunk: &QueryChunk,
        kv_head: usize,
        index: usize,
        span: &SoftmaxState,
        all: &SoftmaxState,
    ) {
        debug_assert!(chunk.spans().contains(&index) && all.queries == chunk.queries(args));
        // SAFETY: the views are valid and of the sizes that `merge` requires. The plan has reserved
        // `spans * kv_heads` states of this length from `states` on, of which `number` is one, and
        // it is this span's and head's alone.
        unsafe {
            let Some(states) = chunk.states else { return all.merge::<L>(span) };
            let number = (index - chunk.spans().start) * args.kv_heads + kv_head;
            let at = states + number * SoftmaxState::len(all.queries, all.width);
            let own = SoftmaxState::at(self.states.add(at), all.queries, all.width);
            own.reset();
            own.merge::<L>(span);
        }
    }

    /// Writes the result of a query chunk for a kv head, unless its context is divided.
    ///
    /// # Safety
    /// As for [`SoftmaxState::write`] with `all` and `self.out`.
    #[inline(always)]
    pub(super) unsafe fn finish_chunk<L: Lanes>(
        &self,
        args: &AttentionArgs<'_>,
        chunk: &QueryChunk,
        kv_head: usize,
        all: &SoftmaxState,
    ) {
        if chunk.states.is_none() {
            // SAFETY: the conditions of `write` are those of this function.
            unsafe { all.write::<L>(args, chunk, kv_head, self.out) };
        }
    }
}
