//! The softmax's state of some query vectors: what attention adds up as it walks through positions.
//!
//! For each query: the largest score, the sum of weights relative to it, and the values' sum
//! weighted with them. Scores are in units of ln 2, so that weights are powers of two.
#![allow(unsafe_code, reason = "works on raw pointers, on lanes")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::ops::Range;

use super::super::lanes::{LANES, Lanes};
use super::AttentionArgs;
use super::plan::Task;

/// A view of states in memory that somebody else owns.
#[derive(Clone, Copy)]
pub(super) struct State {
    queries: usize,
    /// Values of a query, a multiple of 16.
    width: usize,
    /// `[queries]` largest scores; minus infinity before anything was seen.
    pub(super) largest: *mut f32,
    /// `[queries]` sums of weights.
    pub(super) sums: *mut f32,
    /// `[queries][width]` weighted values.
    pub(super) values: *mut f32,
}

/// The factor that brings what was relative to `old` to `new`, the larger one.
pub(super) fn correction(old: f32, new: f32) -> f32 {
    if old == f32::NEG_INFINITY { 0.0 } else { (old - new).exp2() }
}

// SAFETY of all methods: whoever made the view vouches for its memory, and that nobody else uses
// it; the set of `L` is available.
impl State {
    /// The `f32`s that states of `queries` queries take, a whole number of cache lines.
    pub(super) fn len(queries: usize, width: usize) -> usize {
        2 * queries.next_multiple_of(LANES) + queries * width
    }

    /// The states that begin at `start`.
    ///
    /// # Safety
    /// [`State::len`] values from there on belong to the view as long as it is used.
    pub(super) unsafe fn at(start: *mut f32, queries: usize, width: usize) -> State {
        let line = queries.next_multiple_of(LANES);
        // SAFETY: the caller's promise.
        let (sums, values) = unsafe { (start.add(line), start.add(2 * line)) };
        State { queries, width, largest: start, sums, values }
    }

    /// The states of some of its queries.
    pub(super) unsafe fn part(&self, queries: Range<usize>) -> State {
        debug_assert!(queries.end <= self.queries);
        let State { width, largest, sums, values, .. } = *self;
        let (first, queries) = (queries.start, queries.len());
        // SAFETY: see above the impl.
        unsafe {
            let (largest, sums) = (largest.add(first), sums.add(first));
            State { queries, width, largest, sums, values: values.add(first * width) }
        }
    }

    /// Forgets everything.
    pub(super) unsafe fn reset(&self) {
        // SAFETY: see above the impl.
        unsafe {
            for query in 0..self.queries {
                *self.largest.add(query) = f32::NEG_INFINITY;
            }
            self.sums.write_bytes(0, self.queries);
            self.values.write_bytes(0, self.queries * self.width);
        }
    }

    /// Takes another's first queries as they are; as many as either has.
    pub(super) unsafe fn copy(&self, from: &State) {
        debug_assert_eq!(self.width, from.width);
        let queries = self.queries.min(from.queries);
        // SAFETY: see above the impl; the two do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(from.largest, self.largest, queries);
            std::ptr::copy_nonoverlapping(from.sums, self.sums, queries);
            std::ptr::copy_nonoverlapping(from.values, self.values, queries * self.width);
        }
    }

    /// Multiplies a query's weighted values.
    #[inline(always)]
    pub(super) unsafe fn scale<L: Lanes>(&self, query: usize, factor: f32) {
        if factor == 1.0 {
            return;
        }
        for d in (0..self.width).step_by(LANES) {
            // SAFETY: see above the impl.
            unsafe {
                let at = self.values.add(query * self.width + d);
                L::load(at).mul(L::splat(factor)).store(at);
            }
        }
    }

    /// Adds what `later` has seen, query by query; it may hold more queries, which are left out.
    #[inline(always)]
    pub(super) unsafe fn merge<L: Lanes>(&self, later: &State) {
        debug_assert!(self.queries <= later.queries && self.width == later.width);
        // SAFETY: see above the impl.
        unsafe {
            for query in 0..self.queries {
                let (old, other) = (*self.largest.add(query), *later.largest.add(query));
                let new = old.max(other);
                let (keep, take) = (correction(old, new), correction(other, new));
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

    /// Writes the averages to the task's rows of `out`, to the heads that share `kv_head`.
    #[inline(always)]
    pub(super) unsafe fn write<L: Lanes>(
        &self,
        args: &AttentionArgs<'_>,
        task: &Task,
        kv_head: usize,
        out: *mut f32,
    ) {
        let group = args.heads / args.kv_heads;
        for query in 0..self.queries {
            let head = kv_head * group + query % group;
            let to = ((task.row + query / group) * args.heads + head) * args.head_dim;
            // SAFETY: see above the impl; the task's part of `out` is ours.
            unsafe {
                let sum = L::splat(*self.sums.add(query));
                for d in (0..args.head_dim).step_by(LANES) {
                    let values = L::load(self.values.add(query * self.width + d));
                    // Adding zero turns -0 to 0: a masked position may or may not have done that.
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

/// Where parts leave what they have computed.
pub(super) struct Output {
    /// `[rows, heads, head_dim]`.
    pub(super) out: *mut f32,
    /// The states of the spans of tasks that are cut.
    pub(super) states: *mut f32,
}

// SAFETY of both methods: nobody else touches the states or the rows and heads; the set of `L` is
// available.
impl Output {
    /// Takes a span's state: into that of all spans before, or, where the task is cut, into its own
    /// place.
    #[inline(always)]
    pub(super) unsafe fn close_span<L: Lanes>(
        &self,
        args: &AttentionArgs<'_>,
        task: &Task,
        kv_head: usize,
        index: usize,
        span: &State,
        all: &State,
    ) {
        // SAFETY: see above the impl.
        unsafe {
            let Some(states) = task.states else { return all.merge::<L>(span) };
            let number = (index - task.spans().start) * args.kv_heads + kv_head;
            let at = states + number * State::len(all.queries, all.width);
            let own = State::at(self.states.add(at), all.queries, all.width);
            own.reset();
            own.merge::<L>(span);
        }
    }

    /// Writes the result of a task that is not cut.
    #[inline(always)]
    pub(super) unsafe fn close_part<L: Lanes>(
        &self,
        args: &AttentionArgs<'_>,
        task: &Task,
        kv_head: usize,
        all: &State,
    ) {
        if task.states.is_none() {
            // SAFETY: see above the impl.
            unsafe { all.write::<L>(args, task, kv_head, self.out) };
        }
    }
}
