//! Attention on SIMD lanes, in f32: computes one work item.
//!
//! A work item walks through its positions tile by tile, and through its kv heads within a tile.
//! Readers that share a tile have it loaded once and computed for all of them; the other readers
//! each for themselves.
//!
//! Each row of keys or values that is read prefetches the row that will be read in its place, from
//! the next head or from the first head of the next tile. Memory latency is too long to request
//! data only when it is needed, and a core can have only a limited number of cache misses in
//! flight, so the requests are spread evenly.
#![allow(unsafe_code, reason = "accesses scratch memory and the KV cache through raw pointers")]

mod products;
mod work;

use crate::attention::args::AttentionArgs;
use crate::attention::plan::{Plan, QUERIES_PER_WORK_ITEM, WorkItem};
use crate::attention::prefix_sharing;
use crate::attention::scratch::carve;
use crate::attention::sizes::{POSITIONS_PER_SPAN, POSITIONS_PER_TILE};
use crate::attention::softmax_state::{AttentionOutput, SoftmaxState};
use crate::attention::tile_loading::{load_keys, load_live, load_values};
use crate::attention::tile_view::{TileLocation, TileView};
use crate::gemm::{F32, group_rows};
use crate::lanes::{LANES, Lanes, dispatch};
use crate::threads::Threads;
use work::{PADDING_ROWS_MAX, ReaderGroup, SimdWork};

/// A tile of the cache and the readers that share it.
struct SharedTile {
    readers: ReaderGroup,
    /// The positions that are read: all of the tile if there are several readers.
    location: TileLocation,
}

dispatch! {
    /// Computes a work item: stores the states of its spans, or writes its rows and heads of the
    /// output.
    ///
    /// # Safety
    /// * `args.validate` has accepted an output of the length of `args.q`, for which `output.out`
    ///   is valid.
    /// * `plan` was made for `args` with tiles of [`POSITIONS_PER_TILE`], and `item` is one of its
    ///   items.
    /// * `output.states` is valid for `plan.state_len` values.
    /// * No other thread accesses the item's rows and heads of the output, nor the states of its
    ///   spans.
    pub(super) unsafe fn compute(
        args: &AttentionArgs<'_>, plan: &Plan, item: &WorkItem, threads: &Threads,
        output: &AttentionOutput,
    ) = compute_lanes
}

/// # Safety
/// As for [`compute`], and the instruction set of `L` is available.
#[inline(always)]
unsafe fn compute_lanes<L: Lanes>(
    args: &AttentionArgs<'_>,
    plan: &Plan,
    item: &WorkItem,
    threads: &Threads,
    output: &AttentionOutput,
) {
    let (readers, heads) = (item.readers.len(), item.kv_heads.len());
    let queries = plan.chunk(item, 0).queries(args);
    debug_assert!((1..readers).all(|reader| plan.chunk(item, reader).queries(args) == queries));
    let padded_dim = args.head_dim.next_multiple_of(LANES);
    let sizes = [
        heads * readers * (queries + PADDING_ROWS_MAX) * args.head_dim,
        POSITIONS_PER_TILE * padded_dim,
        POSITIONS_PER_TILE * padded_dim,
        (readers * queries + PADDING_ROWS_MAX) * POSITIONS_PER_TILE,
        heads * SoftmaxState::len(readers * queries, padded_dim),
        heads * SoftmaxState::len(readers * queries, padded_dim),
    ]
    .map(|size| size.next_multiple_of(LANES));
    let mut scratch = threads.scratch::<f32>(sizes.iter().sum());
    let [q, keys, values, scores, span, all] = carve(scratch.slice_mut(), sizes);
    let work =
        SimdWork { args, plan, item, queries, padded_dim, q, keys, values, scores, span, all };
    let mut packed = [0; QUERIES_PER_WORK_ITEM];
    // SAFETY: the pieces of scratch have the sizes that the fields of `SimdWork` require, do not
    // overlap, and belong to this call until `scratch` is dropped. The other conditions are those
    // of this function.
    unsafe { work.run::<L>(&mut packed[..readers], output) }
}

// The methods rely on the invariant of `SimdWork`, which says what each pointer is valid for.
impl SimdWork<'_> {
    /// Computes the work item. `packed` has one number for each reader, all 0: for the first reader
    /// of a group whose queries are packed, the number of readers in the group.
    ///
    /// # Safety
    /// `output` is as [`compute`] requires, and the instruction set of `L` is available.
    #[inline(always)]
    unsafe fn run<L: Lanes>(&self, packed: &mut [usize], output: &AttentionOutput) {
        let readers = 0..self.item.readers.len();
        let heads = self.item.kv_heads.len();
        // SAFETY: `head` is below the item's number of heads and `readers` are all its readers, as
        // `state` requires. The tiles come from `self.tiles`, and the spans are the item's.
        unsafe {
            for head in 0..heads {
                self.state(self.all, head, readers.clone()).reset();
            }
            for index in self.item.spans.clone() {
                for head in 0..heads {
                    self.state(self.span, head, readers.clone()).reset();
                }
                let mut tiles = self.tiles(index).peekable();
                while let Some(tile) = tiles.next() {
                    self.add_tile::<L>(&tile, tiles.peek(), packed);
                }
                self.finish_span::<L>(index, output);
            }
        }
    }

    /// The tiles of a span in order of position, each for all readers that share it.
    fn tiles(&self, span: usize) -> impl Iterator<Item = SharedTile> {
        let readers = &self.plan.readers[self.item.readers.clone()];
        let begins = (span * POSITIONS_PER_SPAN..(span + 1) * POSITIONS_PER_SPAN)
            .step_by(POSITIONS_PER_TILE);
        begins.flat_map(move |begin| {
            prefix_sharing::groups(readers, begin).filter_map(move |group| {
                let chunk = self.plan.chunk(self.item, group.start);
                let seen = chunk.seen(begin..begin + POSITIONS_PER_TILE);
                let location = || TileLocation::new(self.args, chunk, begin, seen.clone());
                (!seen.is_empty()).then(|| SharedTile { readers: group, location: location() })
            })
        })
    }

    /// The keys and values of one kv head in a tile.
    fn view<'a>(&'a self, tile: &'a SharedTile, kv_head: usize) -> TileView<'a> {
        TileView { args: self.args, location: &tile.location, kv_head }
    }

    /// Takes the states of a completed span, and writes the results if it was the item's last.
    ///
    /// # Safety
    /// `index` is one of the item's spans, `output` is as [`compute`] requires, and the instruction
    /// set of `L` is available.
    #[inline(always)]
    unsafe fn finish_span<L: Lanes>(&self, index: usize, output: &AttentionOutput) {
        let last = index + 1 == self.item.spans.end;
        for reader in 0..self.item.readers.len() {
            let chunk = self.plan.chunk(self.item, reader);
            for (head, kv_head) in self.item.kv_heads.clone().enumerate() {
                // SAFETY: `head` and `reader` are within the item. `span` and `all` are views of
                // separate pieces of scratch with the chunk's queries and the padded head length.
                // All readers of the item see some of its span. By the invariant of `Plan` no other
                // item has this chunk, span and head, nor, if the chunk's context is not divided,
                // this chunk and head.
                unsafe {
                    let span = self.state(self.span, head, reader..reader + 1);
                    let all = self.state(self.all, head, reader..reader + 1);
                    output.finish_span::<L>(self.args, chunk, kv_head, index, &span, &all);
                    if last {
                        output.finish_chunk::<L>(self.args, chunk, kv_head, &all);
                    }
                }
            }
        }
    }

    /// Adds a tile to the states of its readers and prefetches `next`, the tile after it, on the
    /// way.
    ///
    /// # Safety
    /// Both tiles come from [`Self::tiles`], and the instruction set of `L` is available.
    #[inline(always)]
    unsafe fn add_tile<L: Lanes>(
        &self,
        tile: &SharedTile,
        next: Option<&SharedTile>,
        packed: &mut [usize],
    ) {
        let group = &tile.readers;
        let already_packed = packed[group.start] == group.len();
        packed[group.clone()].fill(0);
        packed[group.start] = group.len();
        let room = (self.queries + PADDING_ROWS_MAX) * self.args.head_dim;
        let kv_heads = self.item.kv_heads.clone();
        for (head, kv_head) in kv_heads.clone().enumerate() {
            let view = self.view(tile, kv_head);
            let next = match next {
                _ if kv_head + 1 < kv_heads.end => self.view(tile, kv_head + 1),
                Some(next) => self.view(next, kv_heads.start),
                None => view,
            };
            // SAFETY: `q` has `room` values for each head and reader, so from the group's first
            // reader on it has room for the group's queries and the padding rows. `keys` and
            // `values` have room for a tile. The arguments of the views have been validated. The
            // state is that of the group's queries.
            unsafe {
                let q = self.q.add((head * self.item.readers.len() + group.start) * room);
                if !already_packed {
                    self.pack_queries::<L>(group.clone(), kv_head, q);
                }
                let queries = group.len() * self.queries;
                if !self.reads_stored_keys(queries) {
                    load_keys::<L>(&view, &next, self.keys);
                }
                if !self.reads_stored_values(queries) {
                    load_values::<L>(&view, &next, self.values);
                }
                let state = self.state(self.span, head, group.clone());
                self.add_products::<L>(group.clone(), &view, &next, q, &state);
            }
        }
    }

    /// Packs the queries of a reader group for the microkernels, `[row group][head_dim][rows of the
    /// row group]`, multiplied by a factor that makes scores come out in units of ln 2.
    ///
    /// # Safety
    /// `to` is writable for `(queries of the group + PADDING_ROWS_MAX) * head_dim` values, which no
    /// other thread accesses. `readers` lies within the item's readers and `kv_head` below
    /// `args.kv_heads`. The instruction set of `L` is available.
    #[inline(always)]
    unsafe fn pack_queries<L: Lanes>(&self, readers: ReaderGroup, kv_head: usize, to: *mut f32) {
        let (args, dim) = (self.args, self.args.head_dim);
        let group = args.heads / args.kv_heads;
        let queries = readers.len() * self.queries;
        let factor = args.scale * std::f32::consts::LOG2_E;
        let mut first = 0;
        while first < queries {
            let rows = group_rows(queries - first, L::GROUP_MAX);
            let mut from = [std::ptr::null(); LANES];
            for (r, from) in from.iter_mut().enumerate() {
                let query = (first + r).min(queries - 1);
                let chunk = self.plan.chunk(self.item, readers.start + query / self.queries);
                let own = query % self.queries;
                let head = kv_head * group + own % group;
                *from = &raw const args.q[((chunk.row + own / group) * args.heads + head) * dim];
            }
            for d in (0..dim).step_by(LANES) {
                // SAFETY: each of `from` is the start of a query head of `dim` values in `args.q`,
                // by the validated length of `q`, and at most `dim - d` values are read from `d`
                // on. A row group has `dim * rows` values from `first * dim` on, and has at most
                // PADDING_ROWS_MAX rows more than queries, so `to` has room for it. A column is
                // stored with 16 lanes only if they end within the row group. The lanes beyond its
                // `rows` fall on the columns after it, which are written later. The set of `L` is
                // available.
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
