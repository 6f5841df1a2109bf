//! Parts of attention on lanes, in f32.
//!
//! Scratch of a part: its queries packed for register tiles; a tile of keys, transposed; a tile of
//! values; the scores; and the softmax's states of the span that runs and of all spans before.
#![allow(unsafe_code, reason = "register tiles and lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use super::super::gemm::{F32, TileArgs, group_rows, tile_group};
use super::super::lanes::{self, LANES, Lanes, dispatch};
use super::super::threads::Threads;
use super::load::load_tile;
use super::plan::{Part, Task};
use super::state::{Output, State, correction};
use super::{AttentionArgs, SPAN, TILE};

/// A part's scratch.
struct Work {
    /// Query vectors.
    queries: usize,
    /// `head_dim`, padded to lanes.
    padded_dim: usize,
    /// `[group][head_dim][rows of the group]`.
    q: *mut f32,
    /// `[TILE / 16][head_dim][16]`.
    keys: *mut f32,
    /// `[TILE][padded_dim]`.
    values: *mut f32,
    /// `[queries, padded to a group][TILE]`.
    scores: *mut f32,
    /// Of the span that runs.
    span: State,
}

dispatch! {
    /// Computes a part: leaves its spans' states, or writes the task's rows and heads of the output.
    ///
    /// # Safety
    /// `args` has passed its check with an output of the size of `q`, of which no one else touches
    /// the task's part, nor what the part's spans leave.
    pub(super) unsafe fn run(
        args: &AttentionArgs<'_>, task: &Task, part: &Part, threads: &Threads, output: &Output,
    ) = run_lanes
}

#[inline(always)]
unsafe fn run_lanes<L: Lanes>(
    args: &AttentionArgs<'_>,
    task: &Task,
    part: &Part,
    threads: &Threads,
    output: &Output,
) {
    let queries = task.queries(args);
    let padded_dim = args.head_dim.next_multiple_of(LANES);
    let sizes = [
        (queries + L::GROUP_MAX) * args.head_dim,
        TILE * padded_dim,
        TILE * padded_dim,
        (queries + L::GROUP_MAX) * TILE,
        State::len(queries, padded_dim),
        State::len(queries, padded_dim),
    ]
    .map(|size| size.next_multiple_of(LANES));
    let mut scratch = threads.scratch::<f32>(sizes.iter().sum());
    let [q, keys, values, scores, span, all] = carve(scratch.slice_mut(), sizes);
    // SAFETY: every piece of scratch is used within its size.
    unsafe {
        let span = State::at(span, queries, padded_dim);
        let all = State::at(all, queries, padded_dim);
        let work = Work { queries, padded_dim, q, keys, values, scores, span };
        pack_queries::<L>(args, task, q);
        all.reset();
        for index in part.spans.clone() {
            span.reset();
            let from = task.first.max(index * SPAN);
            let until = task.end().min((index + 1) * SPAN);
            for begin in (from / TILE * TILE..until).step_by(TILE) {
                let seen = from.max(begin)..until.min(begin + TILE);
                let count = seen.end - begin;
                load_tile::<L>(args, task, begin, seen, keys, values);
                add_tile::<L>(args, task, &work, begin, count);
            }
            output.close_span::<L>(part, index, &span, &all);
        }
        output.close_part::<L>(args, task, part, &all);
    }
}

/// Pieces of these sizes, one after the other.
pub(super) fn carve<const N: usize>(mut rest: &mut [f32], sizes: [usize; N]) -> [*mut f32; N] {
    sizes.map(|size| {
        let (piece, after) = std::mem::take(&mut rest).split_at_mut(size);
        rest = after;
        piece.as_mut_ptr()
    })
}

/// Scales the task's queries, so that scores are in units of ln 2, and packs them in groups.
#[inline(always)]
unsafe fn pack_queries<L: Lanes>(args: &AttentionArgs<'_>, task: &Task, to: *mut f32) {
    let group = args.heads / args.kv_heads;
    let queries = task.count * group;
    let factor = args.scale * std::f32::consts::LOG2_E;
    let mut first = 0;
    while first < queries {
        let rows = group_rows(queries - first, L::GROUP_MAX);
        for r in 0..rows {
            let query = first + r;
            let head = task.kv_head * group + query % group;
            let from = ((task.row + query / group) * args.heads + head) * args.head_dim;
            for d in 0..args.head_dim {
                let value = if query < queries { args.q[from + d] * factor } else { 0.0 };
                // SAFETY: within `queries + GROUP_MAX` packed vectors.
                unsafe { *to.add(first * args.head_dim + d * rows + r) = value };
            }
        }
        first += rows;
    }
}

/// Scores, softmax and weighted values of one tile, of which positions below `count` are loaded.
#[inline(always)]
unsafe fn add_tile<L: Lanes>(
    args: &AttentionArgs<'_>,
    task: &Task,
    work: &Work,
    begin: usize,
    count: usize,
) {
    let dim = args.head_dim;
    let group = args.heads / args.kv_heads;
    let panels = count.div_ceil(LANES);
    let mut first = 0;
    while first < work.queries {
        let rows = group_rows(work.queries - first, L::GROUP_MAX);
        let live = rows.min(work.queries - first);
        // SAFETY: scratch is used within its sizes, with room for a padded last group.
        unsafe {
            let scores = work.scores.add(first * TILE);
            let product = TileArgs {
                inner: dim,
                a: work.q.add(first * dim).cast_const(),
                a_inner: rows,
                a_row: 1,
                b: work.keys.cast_const(),
                b_inner: LANES,
                b_panel: dim * LANES,
                c: scores,
                c_row: TILE,
                rows: live,
                accumulate: false,
            };
            tile_group::<L, F32>(product, rows, panels);
            for r in 0..live {
                let query = first + r;
                let position = task.position + query / group;
                let seen_from = args.first_seen(position).max(begin) - begin;
                let seen_until = (position + 1).min(begin + count).saturating_sub(begin);
                weigh::<L>(work, query, seen_from, seen_until, panels);
            }
            let product = TileArgs {
                inner: panels * LANES,
                a: scores.cast_const(),
                a_inner: 1,
                a_row: TILE,
                b: work.values.cast_const(),
                b_inner: work.padded_dim,
                b_panel: LANES,
                c: work.span.values.add(first * work.padded_dim),
                c_row: work.padded_dim,
                rows: live,
                accumulate: true,
            };
            tile_group::<L, F32>(product, rows, work.padded_dim / LANES);
        }
        first += rows;
    }
}

/// Turns a query's scores of a tile into weights: positions outside `from..until` get zero. Brings
/// the query's state of the running span to the new largest score.
#[inline(always)]
unsafe fn weigh<L: Lanes>(work: &Work, query: usize, from: usize, until: usize, panels: usize) {
    // SAFETY: the query's own parts of scratch.
    unsafe {
        let scores = work.scores.add(query * TILE);
        if from >= until {
            scores.write_bytes(0, panels * LANES);
            return;
        }
        for outside in (0..from).chain(until..panels * LANES) {
            *scores.add(outside) = f32::NEG_INFINITY;
        }
        let mut max = L::splat(f32::NEG_INFINITY);
        for panel in 0..panels {
            max = max.max(L::load(scores.add(panel * LANES)));
        }
        let largest = work.span.largest.add(query);
        let new = (*largest).max(max.reduce_max());
        let factor = correction(*largest, new);
        let mut sum = L::splat(0.0);
        for panel in 0..panels {
            let at = scores.add(panel * LANES);
            let weight = lanes::exp2(L::load(at).sub(L::splat(new)));
            weight.store(at);
            sum = sum.add(weight);
        }
        *largest = new;
        let sums = work.span.sums.add(query);
        *sums = *sums * factor + sum.reduce_add();
        work.span.scale::<L>(query, factor);
    }
}
