//! Attention on SIMD lanes: computes one work item, in f32 or on pairs of bf16.
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

mod arithmetic;
#[cfg(target_arch = "x86_64")]
mod bf16_products;
mod f32_products;
#[cfg(target_arch = "x86_64")]
mod paired;
mod products;
mod softmax;
mod work;

use std::ops::Range;

use crate::attention::args::AttentionArgs;
#[cfg(target_arch = "x86_64")]
use crate::attention::args::KvSlice;
use crate::attention::plan::{AttentionPlan, QUERIES_PER_WORK_ITEM, WorkItem};
use crate::attention::prefix_sharing;
use crate::attention::scratch::pieces;
use crate::attention::sizes::{POSITIONS_PER_SPAN, POSITIONS_PER_TILE};
use crate::attention::softmax_state::{AttentionOutput, SoftmaxState};
use crate::attention::tile_view::{TileLocation, TileView};
use crate::gemm::group_rows;
use crate::lanes::{LANES, Lanes, dispatch, store_some};
use crate::threads::Threads;
use arithmetic::{Arithmetic, TilePair};
#[cfg(target_arch = "x86_64")]
use bf16_products::Bf16Arithmetic;
use f32_products::F32Arithmetic;
use softmax::TileScores;
use work::{PADDING_ROWS_MAX, ReaderGroup, RowGroup, SimdWork};

/// A tile of the cache and the readers that share it.
struct SharedTile {
    readers: ReaderGroup,
    /// The positions that are read: all of the tile if there are several readers.
    location: TileLocation,
}

/// Computes a work item: stores the states of its spans, or writes its rows and heads of the
/// output.
///
/// # Safety
/// * `args.validate` has accepted an output of the length of `args.q`, for which `output.out` is
///   valid.
/// * `plan` was made for `args` with tiles of [`POSITIONS_PER_TILE`], and `item` is one of its
///   items.
/// * `output.states` is valid for `plan.state_len` values.
/// * No other thread accesses the item's rows and heads of the output, nor the states of its spans.
pub(super) unsafe fn compute(
    args: &AttentionArgs<'_>,
    plan: &AttentionPlan,
    item: &WorkItem,
    threads: &Threads,
    output: &AttentionOutput,
) {
    #[cfg(target_arch = "x86_64")]
    if bf16_products::applies(args) {
        // SAFETY: `applies` is true only if `args.path` proves that AVX-512 F, BW, VL, DQ and BF16
        // are available. The other conditions are those of this function.
        return unsafe { compute_bf16(args, plan, item, threads, output) };
    }
    // SAFETY: the conditions are those of this function.
    unsafe { compute_f32(args.path, args, plan, item, threads, output) }
}

/// Computes a work item on pairs of bf16.
///
/// # Safety
/// As for [`compute`], and [`bf16_products::applies`] is true for `args`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn compute_bf16(
    args: &AttentionArgs<'_>,
    plan: &AttentionPlan,
    item: &WorkItem,
    threads: &Threads,
    output: &AttentionOutput,
) {
    // SAFETY: the conditions are those of this function, and the types are those of the arguments.
    unsafe {
        match (args.keys, args.values) {
            (KvSlice::Int4 { .. }, _) => {
                compute_with::<Bf16Arithmetic<u8, u8>>(args, plan, item, threads, output);
            }
            (KvSlice::Int8 { .. }, KvSlice::Int4 { .. }) => {
                compute_with::<Bf16Arithmetic<i8, u8>>(args, plan, item, threads, output);
            }
            (KvSlice::Int8 { .. }, _) => {
                compute_with::<Bf16Arithmetic<i8, i8>>(args, plan, item, threads, output);
            }
            _ => compute_with::<Bf16Arithmetic<u16, u16>>(args, plan, item, threads, output),
        }
    }
}

/// # Safety
/// As for [`compute`], and the instruction set of `L` is available.
#[inline(always)]
unsafe fn compute_lanes<L: Lanes>(
    args: &AttentionArgs<'_>,
    plan: &AttentionPlan,
    item: &WorkItem,
    threads: &Threads,
    output: &AttentionOutput,
) {
    // SAFETY: the conditions are those of this function.
    unsafe { compute_with::<F32Arithmetic<L>>(args, plan, item, threads, output) }
}
dispatch! {
    /// Computes a work item in f32.
    ///
    /// # Safety
    /// As for [`compute`].
    unsafe fn compute_f32(
        args: &AttentionArgs<'_>, plan: &AttentionPlan, item: &WorkItem, threads: &Threads,
        output: &AttentionOutput,
    ) = compute_lanes
}

/// # Safety
/// As for [`compute`], and the methods of A may be called for `args`.
#[inline(always)]
unsafe fn compute_with<A: Arithmetic>(
    args: &AttentionArgs<'_>,
    plan: &AttentionPlan,
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
    let [q, keys, values, scores, span, all] = pieces(scratch.slice_mut(), sizes);
    let work =
        SimdWork { args, plan, item, queries, padded_dim, q, keys, values, scores, span, all };
    let mut packed = [0; QUERIES_PER_WORK_ITEM];
    // SAFETY: the pieces of scratch have the sizes that the fields of `SimdWork` require, do not
    // overlap, and belong to this call until `scratch` is dropped. The other conditions are those
    // of this function.
    unsafe { work.run::<A>(&mut packed[..readers], output) }
}

// The methods rely on the invariant of `SimdWork`, which says what each pointer is valid for.
impl SimdWork<'_> {
    /// Computes the work item. `packed` has one number for each reader, all 0: for the first reader
    /// of a group whose queries are packed, the number of readers in the group.
    ///
    /// # Safety
    /// `output` is as [`compute`] requires, and the methods of A may be called.
    #[inline(always)]
    unsafe fn run<A: Arithmetic>(&self, packed: &mut [usize], output: &AttentionOutput) {
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
                    self.add_tile::<A>(&tile, tiles.peek(), packed);
                }
                self.finish_span::<A::Lanes>(index, output);
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
                // All readers of the item see some of its span. By the invariant of
                // `AttentionPlan` no other item has this chunk, span and head, nor, if the chunk's
                // context is not divided, this chunk and head.
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
    /// Both tiles come from [`Self::tiles`], and the methods of A may be called.
    #[inline(always)]
    unsafe fn add_tile<A: Arithmetic>(
        &self,
        tile: &SharedTile,
        next: Option<&SharedTile>,
        packed: &mut [usize],
    ) {
        let group = &tile.readers;
        let already_packed = packed[group.start] == group.len();
        packed[group.clone()].fill(0);
        packed[group.start] = group.len();
        let room = (self.queries + PADDING_ROWS_MAX) * self.args.head_dim / A::VALUES_PER_WORD;
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
                    self.pack_queries::<A>(group.clone(), kv_head, q);
                }
                let tile = TilePair { now: &view, next: &next };
                A::load(self, tile, group.len() * self.queries);
                let state = self.state(self.span, head, group.clone());
                self.add_products::<A>(group.clone(), tile, q, &state);
            }
        }
    }

    /// Computes scores, softmax and weighted values of a tile for a reader group's queries of one
    /// head.
    ///
    /// # Safety
    /// `tile.now` is a tile that `readers` share, and [`Arithmetic::load`] has loaded it. `q` holds
    /// the group's queries as [`Self::pack_queries`] packs them, and `state` is the state of the
    /// same queries. The methods of A may be called.
    #[inline(always)]
    unsafe fn add_products<A: Arithmetic>(
        &self,
        readers: ReaderGroup,
        tile: TilePair<'_>,
        q: *const f32,
        state: &SoftmaxState,
    ) {
        let queries = readers.len() * self.queries;
        let words = self.args.head_dim / A::VALUES_PER_WORD;
        let scales = tile.now.scales();
        let in_tile = TileScores { scales: scales.as_ref(), softcap: self.args.softcap_base_2() };
        let has_bias = self.args.bias.is_some();
        let mut next_first = 0;
        while next_first < queries {
            let first = next_first;
            let rows = group_rows(queries - first, A::Lanes::GROUP_MAX);
            next_first += rows;
            let live = rows.min(queries - first);
            let seen = |row| self.seen(&readers, first + row, tile.now);
            // Rows are in order of position, and so are the first and last positions they see.
            let (of_first, of_last) = (seen(0), seen(live - 1));
            let panels = of_last.end.div_ceil(LANES);
            let group = RowGroup { first, rows, live, queries, panels };
            let whole = of_first.end == POSITIONS_PER_TILE && of_last.start == 0;
            if of_last.end == 0 || of_first.start == POSITIONS_PER_TILE {
                continue;
            }
            // SAFETY: `first + rows` is at most the group's queries plus PADDING_ROWS_MAX, for
            // which `scores` and `q` have rows; `first + live` is at most the group's queries,
            // which `state` has. The packed queries of the row group begin at `first * words`. The
            // positions that a query sees lie within the tile.
            unsafe {
                let scores = self.scores.add(first * POSITIONS_PER_TILE);
                A::score(self, tile, &group, q.add(first * words), scores);
                if has_bias {
                    self.add_bias::<A>(&readers, &group, tile.now, scores);
                }
                in_tile.step::<A>(scores, &group, state, (!whole).then_some(seen));
                let sums = state.values.add(first * self.padded_dim);
                A::add_values(self, tile, &group, scores, sums);
            }
        }
    }

    /// Adds the relative bias to the scores of a row group.
    ///
    /// # Safety
    /// `scores` is valid for 64 values for each live row of the group, and the methods of A may be
    /// called.
    #[inline(always)]
    unsafe fn add_bias<A: Arithmetic>(
        &self,
        readers: &ReaderGroup,
        group: &RowGroup,
        view: &TileView<'_>,
        scores: *mut f32,
    ) {
        let Some(bias) = self.args.bias else { return };
        let shared = self.args.heads / self.args.kv_heads;
        for row in 0..group.live {
            let query = group.first + row;
            let chunk = self.plan.chunk(self.item, readers.start + query / self.queries);
            let own = query % self.queries;
            let head = view.kv_head * shared + own % shared;
            let position = chunk.position + own / shared;
            let values = bias.of_tile(head, position, view.location.begin);
            for panel in (0..group.panels * LANES).step_by(LANES) {
                // SAFETY: `panels` is at most 4, the panels of the 64 scores of a live row and of
                // the 64 values.
                unsafe {
                    let at = scores.add(row * POSITIONS_PER_TILE + panel);
                    let value = A::Lanes::load(values.as_ptr().add(panel));
                    A::Lanes::load(at).add(value).store(at);
                }
            }
        }
    }

    /// The positions of the tile that a query of the group sees, counted from the tile's first
    /// position.
    #[inline(always)]
    fn seen(&self, readers: &ReaderGroup, query: usize, view: &TileView<'_>) -> Range<usize> {
        if readers.len() > 1 {
            // Several readers share a tile only if each of them sees all of it.
            return 0..POSITIONS_PER_TILE;
        }
        let begin = view.location.begin;
        let group = self.args.heads / self.args.kv_heads;
        let (chunk, row) = (self.plan.chunk(self.item, readers.start), query / group);
        let in_tile = |position: usize| position.saturating_sub(begin).min(POSITIONS_PER_TILE);
        in_tile(self.args.first_seen(chunk.position + row))..in_tile(chunk.seen_end(self.args, row))
    }

    /// Packs the queries of a reader group for the microkernels, `[row group][words of a head][rows
    /// of the row group]`, multiplied by a factor that makes scores come out in units of ln 2.
    ///
    /// # Safety
    /// `to` is writable for the words of the group's queries and PADDING_ROWS_MAX more, which no
    /// other thread accesses. `readers` lies within the item's readers and `kv_head` below
    /// `args.kv_heads`. The methods of A may be called.
    #[inline(always)]
    unsafe fn pack_queries<A: Arithmetic>(
        &self,
        readers: ReaderGroup,
        kv_head: usize,
        to: *mut f32,
    ) {
        let (args, dim) = (self.args, self.args.head_dim);
        let group = args.heads / args.kv_heads;
        let queries = readers.len() * self.queries;
        let words = dim / A::VALUES_PER_WORD;
        let factor = args.scale * std::f32::consts::LOG2_E;
        let mut first = 0;
        while first < queries {
            let rows = group_rows(queries - first, A::Lanes::GROUP_MAX);
            let mut from = [std::ptr::null(); LANES];
            for (r, from) in from.iter_mut().enumerate() {
                let query = (first + r).min(queries - 1);
                let chunk = self.plan.chunk(self.item, readers.start + query / self.queries);
                let own = query % self.queries;
                let head = kv_head * group + own % group;
                *from = &raw const args.q[((chunk.row + own / group) * args.heads + head) * dim];
            }
            for word in (0..words).step_by(LANES) {
                // SAFETY: each of `from` is the start of a query head of `dim` values in `args.q`,
                // by the validated length of `q`, and at most `dim - d` values are read from `d`
                // on. A row group has `words * rows` words from `first * words` on, and has at most
                // PADDING_ROWS_MAX rows more than queries, so `to` has room for it. A column is
                // stored as a whole vector, but not beyond the end of the row group. The lanes
                // beyond its `rows` fall on the columns after it, which are written later.
                unsafe {
                    let d = word * A::VALUES_PER_WORD;
                    let mut square = [A::Lanes::splat(0.0); LANES];
                    for r in 0..LANES {
                        let factor = A::Lanes::splat(factor);
                        square[r] = A::query_words(from[r].add(d), dim - d, factor);
                    }
                    A::Lanes::transpose(&mut square);
                    for (word, column) in (word..words).zip(square) {
                        let at = to.add(first * words + word * rows);
                        store_some(column, at, (words - word) * rows);
                    }
                }
            }
            first += rows;
        }
    }
}
