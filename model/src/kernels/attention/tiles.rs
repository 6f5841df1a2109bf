//! Parts of attention on AMX tiles, for keys and values in bf16.
//!
//! Scores are computed transposed: a tile of 16 positions' keys, read where they stand in the
//! cache, times queries packed once a part. So a vector holds one position's scores of 16 queries,
//! and largest scores, weights and sums need no operation across lanes. The weights are then
//! rounded to bf16 and turned, 32 positions times 16 queries at a time, and multiply the values,
//! of which two successive positions are brought side by side.
//!
//! Every sequence reads the cache for itself here, those that share a prefix too.
//!
//! **Order of sums.** Scores take a head's values 32 at a time. The positions of a tile ([`TILE`])
//! are summed in ascending order; so is the weighted sum of values, 32 positions at a time from the
//! tile's first. Positions that a query does not see weigh zero and change nothing.
//!
//! **Subnormals.** Tiles take bf16 and f32 numbers below 2^-126 for zero, whatever the thread's
//! mode. So a key, value or query of that size counts as zero here, and on lanes as what it is.
#![allow(unsafe_code, reason = "tiles and vectors work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

mod pack;
mod products;
mod weigh;

use std::ops::Range;

use super::super::amx::{self, DEPTH, ROWS};
use super::super::lanes::Avx512;
use super::super::threads::Threads;
use super::super::{Path, PathKind};
use super::plan::Task;
use super::state::{Output, State};
use super::task::carve;
use super::{AttentionArgs, KvSlice, SPAN};

/// Positions whose scores are computed together; a span holds a whole number of them.
const TILE: usize = 128;
const _: () = assert!(SPAN.is_multiple_of(TILE) && TILE.is_multiple_of(DEPTH));

/// Whether these arguments are computed here. It depends on shapes and types alone.
pub(super) fn apply(args: &AttentionArgs<'_>) -> bool {
    let amx = |path: Path| path.kind() == PathKind::Amx;
    let bf16 = matches!((&args.keys, &args.values), (KvSlice::Bf16(_), KvSlice::Bf16(_)));
    amx(args.path) && bf16 && args.head_dim.is_multiple_of(DEPTH)
}

/// A part's scratch, in f32s; pieces that hold bf16 pairs use an f32's place for a pair.
struct Work<'a> {
    args: &'a AttentionArgs<'a>,
    task: &'a Task,
    kv_head: usize,
    keys: &'a [u16],
    values: &'a [u16],
    /// Query vectors.
    live: usize,
    /// The same, padded to a tile; the padding computes on zeroes and is dropped.
    queries: usize,
    /// `[query tile][head_dim / 32][16 pairs][16 queries]` pairs.
    q: *mut f32,
    /// `[TILE][queries]`: scores.
    scores: *mut f32,
    /// `[TILE / 32][16 queries][16 pairs]` pairs: the weights of one query tile.
    weights: *mut f32,
    /// `[head_dim / 16][TILE / 32][16 pairs][16]` pairs.
    pairs: *mut f32,
    /// `[TILE][head_dim]` bf16: the tile's keys, where 16 positions do not stand in one block.
    gathered: *mut u16,
    /// `[queries]` as i32: first and last position that a query sees.
    first_seen: *mut i32,
    last_seen: *mut i32,
    /// Of the span that runs, padding included.
    span: State,
}

/// Computes a kv head of successive spans of a task: leaves their states, or writes the task's rows and
/// heads of the output.
///
/// # Safety
/// [`apply`] holds; `args` has passed its check with an output of the size of `q`, of which no one
/// else touches the task's rows and the head's part of them, nor what the spans leave.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn run(
    args: &AttentionArgs<'_>,
    task: &Task,
    kv_head: usize,
    spans: Range<usize>,
    threads: &Threads,
    output: &Output,
) {
    let (KvSlice::Bf16(keys), KvSlice::Bf16(values)) = (args.keys, args.values) else {
        unreachable!("apply() has found bf16");
    };
    let dim = args.head_dim;
    let live = task.queries(args);
    let queries = live.next_multiple_of(ROWS);
    // All sizes are multiples of 16, so every piece is aligned to a cache line.
    let sizes = [
        queries * dim / 2,
        TILE * queries,
        TILE * ROWS / 2,
        TILE * dim / 2,
        TILE * dim / 2,
        queries,
        queries,
        State::len(queries, dim),
        State::len(live, dim),
    ];
    let mut scratch = threads.scratch::<f32>(sizes.iter().sum());
    let [q, scores, weights, pairs, gathered, first, last, span, all] =
        carve(scratch.slice_mut(), sizes);
    // SAFETY: the caller's promise; every piece of scratch is used within its size.
    unsafe {
        let (span, all) = (State::at(span, queries, dim), State::at(all, live, dim));
        let work = Work {
            args,
            task,
            kv_head,
            keys,
            values,
            live,
            queries,
            q,
            scores,
            weights,
            pairs,
            gathered: gathered.cast(),
            first_seen: first.cast(),
            last_seen: last.cast(),
            span,
        };
        work.note_positions();
        work.pack_queries();
        all.reset();
        amx::configure(ROWS, ROWS, true);
        for index in spans {
            span.reset();
            let from = task.first.max(index * SPAN);
            let until = task.end().min((index + 1) * SPAN);
            for begin in (from / TILE * TILE..until).step_by(TILE) {
                work.add_tile(begin, from.max(begin)..until.min(begin + TILE));
            }
            output.close_span::<Avx512>(args, task, kv_head, index, &span, &all);
        }
        amx::release();
        output.close_part::<Avx512>(args, task, kv_head, &all);
    }
}

// SAFETY of all methods, here and in the files below: the conditions of `run`, whose scratch they
// use within its sizes.
impl Work<'_> {
    /// Adds the positions `seen`, not empty, of the tile that begins at `begin`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn add_tile(&self, begin: usize, seen: Range<usize>) {
        // Both products skip whole tiles of positions that no query sees, before and after.
        let rows = (seen.start - begin) / DEPTH * DEPTH..(seen.end - begin).next_multiple_of(DEPTH);
        // SAFETY: see above the impl.
        unsafe {
            self.score(begin, rows.clone(), seen.clone());
            self.pair_values(begin, rows.clone(), seen.clone());
            for first in (0..self.queries).step_by(ROWS) {
                if self.weigh(first, begin, rows.clone(), seen.end) {
                    self.add_values(first, rows.clone());
                }
            }
        }
    }

    /// Notes what each query sees.
    unsafe fn note_positions(&self) {
        let group = self.args.heads / self.args.kv_heads;
        for query in 0..self.queries {
            // The padding sees what the last query sees, so that it needs no mask of its own.
            let position = self.task.position + query.min(self.live - 1) / group;
            // SAFETY: see above the impl.
            unsafe {
                *self.first_seen.add(query) = narrow(self.args.first_seen(position));
                *self.last_seen.add(query) = narrow(position);
            }
        }
    }

    /// Where the keys or values of a position and the task's head begin.
    #[inline]
    fn place(&self, position: usize) -> usize {
        self.args.stored_head(self.task, self.kv_head, position) * self.args.head_dim
    }
}

/// A position as a lane holds it.
#[allow(clippy::cast_possible_truncation, reason = "positions are far below 2^31")]
#[allow(clippy::cast_possible_wrap, reason = "as above")]
fn narrow(position: usize) -> i32 {
    position as i32
}
