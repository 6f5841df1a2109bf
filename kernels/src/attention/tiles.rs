//! Parts of attention on AMX tiles, for keys and values in bf16.
//!
//! Scores are computed transposed: a tile of 16 positions' keys, read where they stand in the
//! cache, times queries packed once a part. So a vector holds one position's scores of 16 queries,
//! and largest scores, weights and sums need no operation across lanes. The weights are then
//! rounded to bf16 and turned, 32 positions times 16 queries at a time, and multiply the values,
//! of which two successive positions are brought side by side.
//!
//! A tile that several decodes share is computed for all their queries at once: a tile register has rows
//! for 16, of which one decode fills as many as heads share its keys and values.
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
use super::super::{KvLayout, Path, PathKind};
use super::plan::{Part, Plan, Task};
use super::share;
use super::state::{Output, State};
use super::task::carve;
use super::{AttentionArgs, KvSlice, SPAN};

/// Positions whose scores are computed together; a span holds a whole number of them.
pub(super) const TILE: usize = 128;
const _: () = assert!(SPAN.is_multiple_of(TILE) && TILE.is_multiple_of(DEPTH));

/// Whether a path has tiles that heads of this size fill.
pub(super) fn exist(path: Path, head_dim: usize) -> bool {
    path.kind() == PathKind::Amx && head_dim.is_multiple_of(DEPTH)
}

/// Whether these arguments are computed here. It depends on shapes and types alone.
pub(super) fn apply(args: &AttentionArgs<'_>) -> bool {
    let bf16 = matches!((&args.keys, &args.values), (KvSlice::Bf16(_), KvSlice::Bf16(_)));
    exist(args.path, args.head_dim) && bf16 && args.key_layout == KvLayout::Rows
}

/// One kv head of a part, and its scratch, in f32s; pieces that hold bf16 pairs use an f32's place
/// for a pair.
struct Work<'a> {
    args: &'a AttentionArgs<'a>,
    plan: &'a Plan,
    part: &'a Part,
    kv_head: usize,
    keys: &'a [u16],
    values: &'a [u16],
    /// The readers, numbers within the part, whose queries are packed.
    run: Range<usize>,
    /// Query vectors of one reader.
    each: usize,
    /// Those of the run, padded to a tile; the padding computes on zeroes and is dropped.
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
    /// The run's states of the span that runs, padding included.
    span: State,
}

/// Computes a part: leaves its spans' states, or writes the tasks' rows and heads of the output.
///
/// # Safety
/// [`apply`] holds; `args`, of which `part` is in the plan, has passed its check with an output of the size
/// of `q`, of which no one else touches the part's rows and heads, nor what its spans leave.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn run(
    args: &AttentionArgs<'_>,
    plan: &Plan,
    part: &Part,
    threads: &Threads,
    output: &Output,
) {
    let (KvSlice::Bf16(keys), KvSlice::Bf16(values)) = (args.keys, args.values) else {
        unreachable!("apply() has found bf16");
    };
    let dim = args.head_dim;
    let each = plan.task(part, 0).queries(args);
    let live = part.readers.len() * each;
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
        State::len(live, dim),
    ];
    let mut scratch = threads.scratch::<f32>(sizes.iter().sum());
    let [q, scores, weights, pairs, gathered, first, last, span, spans, all] =
        carve(scratch.slice_mut(), sizes);
    for kv_head in part.kv_heads.clone() {
        // SAFETY: the caller's promise; every piece of scratch is used within its size.
        unsafe {
            let mut work = Work {
                args,
                plan,
                part,
                kv_head,
                keys,
                values,
                run: 0..0,
                each,
                queries,
                q,
                scores,
                weights,
                pairs,
                gathered: gathered.cast(),
                first_seen: first.cast(),
                last_seen: last.cast(),
                span: State::at(span, queries, dim),
            };
            amx::configure(ROWS, ROWS, true);
            work.run(&State::at(spans, live, dim), &State::at(all, live, dim), output);
        }
    }
}

// SAFETY of all methods, here and in the files below: the conditions of `run`, whose scratch they
// use within its sizes.
impl Work<'_> {
    /// Computes the head. `span` and `all` have room for the states of all readers' queries: of
    /// the span that runs, which one reader alone leaves where its tiles are computed, and of all
    /// spans before.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn run(&mut self, span: &State, all: &State, output: &Output) {
        let (args, plan, part) = (self.args, self.plan, self.part);
        let readers = &plan.readers[part.readers.clone()];
        let (each, several) = (self.each, readers.len() > 1);
        let of = |run: &Range<usize>| run.start * each..run.end * each;
        let alone = self.span;
        let span = if several { span } else { &alone };
        // SAFETY: see above the impl.
        unsafe {
            all.reset();
            for index in part.spans.clone() {
                self.span.reset();
                span.reset();
                for begin in (index * SPAN..(index + 1) * SPAN).step_by(TILE) {
                    for run in share::runs(readers, begin) {
                        let seen = plan.task(part, run.start).seen(begin..begin + TILE);
                        if seen.is_empty() {
                            continue;
                        }
                        let own = span.part(of(&run));
                        if self.run != run {
                            self.run = run;
                            self.queries = (self.run.len() * self.each).next_multiple_of(ROWS);
                            self.note_positions();
                            self.pack_queries();
                        }
                        if several {
                            self.span.copy(&own);
                        }
                        self.add_tile(begin, seen);
                        if several {
                            own.copy(&self.span);
                        }
                    }
                }
                for reader in 0..readers.len() {
                    let (task, own) = (plan.task(part, reader), of(&(reader..reader + 1)));
                    let (span, all) = (span.part(own.clone()), all.part(own));
                    output.close_span::<Avx512>(args, task, self.kv_head, index, &span, &all);
                }
            }
            amx::release();
            for reader in 0..readers.len() {
                let (task, own) = (plan.task(part, reader), of(&(reader..reader + 1)));
                output.close_part::<Avx512>(args, task, self.kv_head, &all.part(own));
            }
        }
    }

    /// The task of the run's first reader: of the only one, or one in whose place the tile is read.
    fn task(&self) -> &Task {
        self.plan.task(self.part, self.run.start)
    }

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

    /// Notes what each query sees: where several readers share a tile, they see all of it.
    unsafe fn note_positions(&self) {
        let group = self.args.heads / self.args.kv_heads;
        for query in 0..self.queries {
            let (mut first, mut last) = (0, i32::MAX);
            if self.run.len() == 1 {
                // The padding sees what the last query sees, so that it needs no mask of its own.
                let position = self.task().position + query.min(self.each - 1) / group;
                (first, last) = (narrow(self.args.first_seen(position)), narrow(position));
            }
            // SAFETY: see above the impl.
            unsafe {
                *self.first_seen.add(query) = first;
                *self.last_seen.add(query) = last;
            }
        }
    }

    /// Where the keys or values of a position and the task's head begin.
    #[inline]
    fn place(&self, position: usize) -> usize {
        self.args.stored_head(self.task(), self.kv_head, position) * self.args.head_dim
    }
}

/// A position as a lane holds it.
#[allow(clippy::cast_possible_truncation, reason = "positions are far below 2^31")]
#[allow(clippy::cast_possible_wrap, reason = "as above")]
fn narrow(position: usize) -> i32 {
    position as i32
}
