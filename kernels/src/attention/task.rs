//! Parts of attention on lanes, in f32.
//!
//! Scratch of a part: its queries packed for register tiles; a tile of keys, transposed; a tile of
//! values; the scores; and the softmax's states of the span that runs and of all spans before.
//!
//! A part walks through its positions tile by tile, and through its kv heads within a tile. Readers that
//! share a tile have it loaded once and computed for all of them; those that do not, each for itself.
//! Whoever reads a row of keys or values asks for the one that it will read in its place from the next head, or from the
//! next tile's first: memory answers too slowly to be asked only when the answer is needed, and no more than a
//! few lines at a time.
#![allow(unsafe_code, reason = "register tiles and lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

mod products;

use std::ops::Range;

use super::super::gemm::{F32, group_rows};
use super::super::lanes::{LANES, Lanes, dispatch};
use super::super::threads::Threads;
use super::load::{load_keys, load_live, load_values};
use super::plan::{PART_QUERIES, Part, Plan};
use super::share;
use super::state::{Output, State};
use super::walk::{Places, Walk};
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

/// A tile of the cache, and who reads it.
struct Tile {
    run: Run,
    /// Its positions that are read: all where the run is of several.
    places: Places,
}

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
        let readers = 0..self.part.readers.len();
        let heads = self.part.kv_heads.len();
        // SAFETY: see above the impl.
        unsafe {
            for head in 0..heads {
                self.state(self.all, head, readers.clone()).reset();
            }
            for index in self.part.spans.clone() {
                for head in 0..heads {
                    self.state(self.span, head, readers.clone()).reset();
                }
                let mut tiles = self.tiles(index).peekable();
                while let Some(tile) = tiles.next() {
                    self.add_tile::<L>(&tile, tiles.peek(), packed);
                }
                self.close_span::<L>(index, output);
            }
        }
    }

    /// The tiles of a span, in order of position, each for all that share it.
    fn tiles(&self, span: usize) -> impl Iterator<Item = Tile> {
        let readers = &self.plan.readers[self.part.readers.clone()];
        let begins = (span * SPAN..(span + 1) * SPAN).step_by(TILE);
        begins.flat_map(move |begin| {
            share::runs(readers, begin).filter_map(move |run| {
                let task = self.plan.task(self.part, run.start);
                let seen = task.seen(begin..begin + TILE);
                let places = || Places::new(self.args, task, begin, seen.clone());
                (!seen.is_empty()).then(|| Tile { run, places: places() })
            })
        })
    }

    /// The way through a tile of one kv head.
    fn walk<'a>(&'a self, tile: &'a Tile, kv_head: usize) -> Walk<'a> {
        Walk { args: self.args, places: &tile.places, kv_head }
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

    /// Adds a tile to its readers' states; fetches `next`, the one to come, on the way.
    #[inline(always)]
    unsafe fn add_tile<L: Lanes>(&self, tile: &Tile, next: Option<&Tile>, packed: &mut [usize]) {
        let run = &tile.run;
        let as_packed = packed[run.start] == run.len();
        packed[run.clone()].fill(0);
        packed[run.start] = run.len();
        let room = (self.queries + SPARE_ROWS) * self.args.head_dim;
        let kv_heads = self.part.kv_heads.clone();
        for (head, kv_head) in kv_heads.clone().enumerate() {
            let walk = self.walk(tile, kv_head);
            let ahead = match next {
                _ if kv_head + 1 < kv_heads.end => self.walk(tile, kv_head + 1),
                Some(next) => self.walk(next, kv_heads.start),
                None => walk,
            };
            // SAFETY: see above the impl. Several readers have one row each, so that a run's queries
            // and their spare rows fit in the readers' places.
            unsafe {
                let q = self.q.add((head * self.part.readers.len() + run.start) * room);
                if !as_packed {
                    self.pack_queries::<L>(run.clone(), kv_head, q);
                }
                let queries = run.len() * self.queries;
                if !self.keys_stay(queries) {
                    load_keys::<L>(&walk, &ahead, self.keys);
                }
                if !self.values_stay(queries) {
                    load_values::<L>(&walk, &ahead, self.values);
                }
                let state = self.state(self.span, head, run.clone());
                self.add_products::<L>(run.clone(), &walk, &ahead, q, &state);
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
            let mut from = [std::ptr::null(); LANES];
            for (r, from) in from.iter_mut().enumerate() {
                let query = (first + r).min(queries - 1);
                let task = self.plan.task(self.part, run.start + query / self.queries);
                let own = query % self.queries;
                let head = kv_head * group + own % group;
                *from = &raw const args.q[((task.row + own / group) * args.heads + head) * dim];
            }
            for d in (0..dim).step_by(LANES) {
                // SAFETY: see above the impl. A column's lanes beyond its rows go to the columns after it,
                // which are written later.
                unsafe {
                    let mut square = [L::splat(0.0); LANES];
                    for r in 0..LANES {
                        square[r] =
                            load_live::<L, F32>(from[r].add(d), dim - d).mul(L::splat(factor));
                    }
                    L::transpose(&mut square);
                    for (d, column) in (d..dim).zip(square) {
                        let at = to.add((first * dim) + d * rows);
                        if (dim - d) * rows >= LANES {
                            column.store(at);
                        } else {
                            let mut lanes = [0.0; LANES];
                            column.store(lanes.as_mut_ptr());
                            std::ptr::copy_nonoverlapping(lanes.as_ptr(), at, rows);
                        }
                    }
                }
            }
            first += rows;
        }
    }
}
