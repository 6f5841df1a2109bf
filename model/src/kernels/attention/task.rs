//! Parts of attention on lanes, in f32.
//!
//! Scratch of a part: its queries packed for register tiles; a tile of keys, transposed; a tile of
//! values; the scores; and the softmax's states of the span that runs and of all spans before.
//!
//! A part walks through its positions tile by tile. Readers that share a tile have it loaded once
//! and computed for all of them; those that do not, each for itself.
#![allow(unsafe_code, reason = "register tiles and lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::ops::Range;

use super::super::gemm::{F32, TileArgs, group_rows, tile_group};
use super::super::lanes::{self, LANES, Lanes, dispatch};
use super::super::threads::Threads;
use super::load::load_tile;
use super::plan::{PART_QUERIES, Part, Plan};
use super::state::{Output, State, correction};
use super::{AttentionArgs, SPAN, TILE};

/// Most rows that the last group of packed queries has beyond them.
const SPARE_ROWS: usize = 3;

/// A part's scratch, and what it computes.
struct Work<'a> {
    args: &'a AttentionArgs<'a>,
    plan: &'a Plan,
    part: &'a Part,
    /// Query vectors of a reader and head.
    queries: usize,
    /// `head_dim`, padded to lanes.
    padded_dim: usize,
    /// `[head][reader]`, each with room for `queries` and the spare rows: `[group][head_dim][rows of
    /// the group]` from the first reader of a run on.
    q: *mut f32,
    /// `[TILE / 16][head_dim][16]`.
    keys: *mut f32,
    /// `[TILE][padded_dim]`.
    values: *mut f32,
    /// `[queries of a run, padded to a group][TILE]`.
    scores: *mut f32,
    /// `[head]` states of all readers' queries: of the span that runs.
    span: *mut f32,
    /// The same of all spans before.
    all: *mut f32,
}

/// Readers that share a tile, as numbers within a part.
type Run = Range<usize>;

dispatch! {
    /// Computes a part: leaves its spans' states, or writes the tasks' rows and heads of the output.
    ///
    /// # Safety
    /// `args`, of which `part` is in the plan, has passed its check with an output of the size of
    /// `q`, of which no one else touches the part's rows and heads, nor what its spans leave.
    pub(super) unsafe fn run(
        args: &AttentionArgs<'_>, plan: &Plan, part: &Part, threads: &Threads, output: &Output,
    ) = run_lanes
}

#[inline(always)]
unsafe fn run_lanes<L: Lanes>(
    args: &AttentionArgs<'_>,
    plan: &Plan,
    part: &Part,
    threads: &Threads,
    output: &Output,
) {
    let (readers, heads) = (part.readers.len(), part.kv_heads.len());
    let queries = plan.task(part, 0).queries(args);
    let padded_dim = args.head_dim.next_multiple_of(LANES);
    let sizes = [
        heads * readers * (queries + SPARE_ROWS) * args.head_dim,
        TILE * padded_dim,
        TILE * padded_dim,
        (readers * queries + SPARE_ROWS) * TILE,
        heads * State::len(readers * queries, padded_dim),
        heads * State::len(readers * queries, padded_dim),
    ]
    .map(|size| size.next_multiple_of(LANES));
    let mut scratch = threads.scratch::<f32>(sizes.iter().sum());
    let [q, keys, values, scores, span, all] = carve(scratch.slice_mut(), sizes);
    let work = Work { args, plan, part, queries, padded_dim, q, keys, values, scores, span, all };
    let mut packed = [0; PART_QUERIES];
    // SAFETY: every piece of scratch is used within its size.
    unsafe { work.run::<L>(&mut packed[..readers], output) }
}

/// Pieces of these sizes, one after the other.
pub(super) fn carve<const N: usize>(mut rest: &mut [f32], sizes: [usize; N]) -> [*mut f32; N] {
    sizes.map(|size| {
        let (piece, after) = std::mem::take(&mut rest).split_at_mut(size);
        rest = after;
        piece.as_mut_ptr()
    })
}

// SAFETY of all methods: the conditions of `run`; scratch is used within its sizes.
impl Work<'_> {
    /// Computes the part. `packed` has a zero for each reader.
    #[inline(always)]
    unsafe fn run<L: Lanes>(&self, packed: &mut [usize], output: &Output) {
        let readers = &self.plan.readers[self.part.readers.clone()];
        let heads = self.part.kv_heads.len();
        // SAFETY: see above the impl.
        unsafe {
            for head in 0..heads {
                self.state(self.all, head, 0..readers.len()).reset();
            }
            for index in self.part.spans.clone() {
                for head in 0..heads {
                    self.state(self.span, head, 0..readers.len()).reset();
                }
                for begin in (index * SPAN..(index + 1) * SPAN).step_by(TILE) {
                    let mut next = 0;
                    while next < readers.len() {
                        let later = readers[next + 1..].iter();
                        let run = next..next + 1 + later.take_while(|r| r.shares(begin)).count();
                        next = run.end;
                        let seen = self.plan.task(self.part, run.start).seen(begin..begin + TILE);
                        if !seen.is_empty() {
                            self.add_tile::<L>(run, begin, seen, packed);
                        }
                    }
                }
                self.close_span::<L>(index, output);
            }
        }
    }

    /// The states of some readers' queries of a head.
    unsafe fn state(&self, states: *mut f32, head: usize, readers: Run) -> State {
        let all = self.part.readers.len() * self.queries;
        // SAFETY: see above the impl.
        unsafe {
            let at = states.add(head * State::len(all, self.padded_dim));
            let state = State::at(at, all, self.padded_dim);
            state.part(readers.start * self.queries..readers.end * self.queries)
        }
    }

    /// Takes the states of a span that has ended, and writes results where it was the task's last.
    #[inline(always)]
    unsafe fn close_span<L: Lanes>(&self, index: usize, output: &Output) {
        let last = index + 1 == self.part.spans.end;
        for reader in 0..self.part.readers.len() {
            let task = self.plan.task(self.part, reader);
            for (head, kv_head) in self.part.kv_heads.clone().enumerate() {
                // SAFETY: see above the impl.
                unsafe {
                    let span = self.state(self.span, head, reader..reader + 1);
                    let all = self.state(self.all, head, reader..reader + 1);
                    output.close_span::<L>(self.args, task, kv_head, index, &span, &all);
                    if last {
                        output.close_part::<L>(self.args, task, kv_head, &all);
                    }
                }
            }
        }
    }

    /// Adds the positions `seen`, not empty, of the tile that begins at `begin` to the readers of a run,
    /// which see all of it if they are several.
    #[inline(always)]
    unsafe fn add_tile<L: Lanes>(
        &self,
        run: Run,
        begin: usize,
        seen: Range<usize>,
        packed: &mut [usize],
    ) {
        let task = self.plan.task(self.part, run.start);
        let as_packed = packed[run.start] == run.len();
        packed[run.clone()].fill(0);
        packed[run.start] = run.len();
        let place = self.part.readers.len() * (self.queries + SPARE_ROWS) * self.args.head_dim;
        for (head, kv_head) in self.part.kv_heads.clone().enumerate() {
            let at = head * place + run.start * (self.queries + SPARE_ROWS) * self.args.head_dim;
            // SAFETY: see above the impl. Several readers have one row each, so that a run's queries
            // and their spare rows fit in the readers' places.
            unsafe {
                let q = self.q.add(at);
                if !as_packed {
                    self.pack_queries::<L>(run.clone(), kv_head, q);
                }
                let (keys, values) = (self.keys, self.values);
                load_tile::<L>(self.args, task, kv_head, begin, seen.clone(), keys, values);
                let state = self.state(self.span, head, run.clone());
                self.add_products::<L>(run.clone(), begin, seen.end - begin, q, &state);
            }
        }
    }

    /// Scales the queries of a run, so that scores are in units of ln 2, and packs them in groups.
    #[inline(always)]
    unsafe fn pack_queries<L: Lanes>(&self, run: Run, kv_head: usize, to: *mut f32) {
        let (args, dim) = (self.args, self.args.head_dim);
        let group = args.heads / args.kv_heads;
        let queries = run.len() * self.queries;
        let factor = args.scale * std::f32::consts::LOG2_E;
        let mut first = 0;
        while first < queries {
            let rows = group_rows(queries - first, L::GROUP_MAX);
            for r in 0..rows {
                let query = (first + r).min(queries - 1);
                let task = self.plan.task(self.part, run.start + query / self.queries);
                let own = query % self.queries;
                let head = kv_head * group + own % group;
                let from = ((task.row + own / group) * args.heads + head) * dim;
                for d in 0..dim {
                    let value = args.q[from + d] * factor;
                    // SAFETY: see above the impl.
                    unsafe { *to.add(first * dim + d * rows + r) = value };
                }
            }
            first += rows;
        }
    }

    /// Scores, softmax and weighted values of a loaded tile, of which `count` positions are there, for
    /// a run's queries of one head.
    #[inline(always)]
    unsafe fn add_products<L: Lanes>(
        &self,
        run: Run,
        begin: usize,
        count: usize,
        q: *const f32,
        state: &State,
    ) {
        let (args, dim) = (self.args, self.args.head_dim);
        let task = self.plan.task(self.part, run.start);
        let group = args.heads / args.kv_heads;
        let queries = run.len() * self.queries;
        let panels = count.div_ceil(LANES);
        let mut first = 0;
        while first < queries {
            let rows = group_rows(queries - first, L::GROUP_MAX);
            let live = rows.min(queries - first);
            // SAFETY: see above the impl; scratch has room for a padded last group.
            unsafe {
                let scores = self.scores.add(first * TILE);
                let product = TileArgs {
                    inner: dim,
                    a: q.add(first * dim),
                    a_inner: rows,
                    a_row: 1,
                    b: self.keys.cast_const(),
                    b_inner: LANES,
                    b_panel: dim * LANES,
                    c: scores,
                    c_row: TILE,
                    rows: live,
                    accumulate: false,
                };
                tile_group::<L, F32>(product, rows, panels);
                for query in first..first + live {
                    let seen = if run.len() > 1 {
                        0..TILE
                    } else {
                        let position = task.position + query / group;
                        let from = args.first_seen(position).max(begin) - begin;
                        from..(position + 1).min(begin + count).saturating_sub(begin)
                    };
                    weigh::<L>(self.scores.add(query * TILE), state, query, seen, panels);
                }
                let product = TileArgs {
                    inner: panels * LANES,
                    a: scores.cast_const(),
                    a_inner: 1,
                    a_row: TILE,
                    b: self.values.cast_const(),
                    b_inner: self.padded_dim,
                    b_panel: LANES,
                    c: state.values.add(first * self.padded_dim),
                    c_row: self.padded_dim,
                    rows: live,
                    accumulate: true,
                };
                tile_group::<L, F32>(product, rows, self.padded_dim / LANES);
            }
            first += rows;
        }
    }
}

/// Turns a query's scores of a tile into weights: positions outside `seen` get zero. Brings the query's
/// state of the running span to the new largest score.
#[inline(always)]
unsafe fn weigh<L: Lanes>(
    scores: *mut f32,
    state: &State,
    query: usize,
    seen: Range<usize>,
    panels: usize,
) {
    // SAFETY: the query's own parts of scratch.
    unsafe {
        if seen.is_empty() {
            scores.write_bytes(0, panels * LANES);
            return;
        }
        for outside in (0..seen.start).chain(seen.end..panels * LANES) {
            *scores.add(outside) = f32::NEG_INFINITY;
        }
        let mut max = L::splat(f32::NEG_INFINITY);
        for panel in 0..panels {
            max = max.max(L::load(scores.add(panel * LANES)));
        }
        let largest = state.largest.add(query);
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
        let sums = state.sums.add(query);
        *sums = *sums * factor + sum.reduce_add();
        state.scale::<L>(query, factor);
    }
}
