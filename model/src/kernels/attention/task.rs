//! One task of attention: some successive queries and the heads that share one kv head.
//!
//! Scratch of a task: its queries packed for register tiles; a tile of keys, transposed; a tile of
//! values; the scores; and for each query vector the softmax's state of the span that runs and of
//! all spans before. A state is the largest score, the sum of exponentials relative to it, and the
//! values' sum weighted with them.
#![allow(unsafe_code, reason = "register tiles and lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use super::super::gemm::{F32, TileArgs, group_rows, tile_group};
use super::super::lanes::{self, LANES, Lanes, dispatch};
use super::super::threads::Threads;
use super::{AttentionArgs, KvSlice, SPAN, TILE, Task};

/// Places in a task's scratch; offsets count f32s and are multiples of a cache line.
struct Layout {
    /// Query vectors.
    queries: usize,
    /// `head_dim`, padded to lanes.
    padded_dim: usize,
    /// `[group][head_dim][rows of the group]`.
    q: usize,
    /// `[TILE / 16][head_dim][16]`.
    keys: usize,
    /// `[TILE][padded_dim]`.
    values: usize,
    /// `[queries, padded to a group][TILE]`.
    scores: usize,
    /// The running span's weighted values, `[queries][padded_dim]`, and those of spans before.
    sums: [usize; 2],
    /// Largest score and sum of exponentials of both: `[2][queries]` each.
    states: [usize; 2],
    len: usize,
}

impl Layout {
    fn new(queries: usize, head_dim: usize, group_max: usize) -> Layout {
        let mut len = 0;
        let mut take = |count: usize| {
            let start = len;
            len += count.next_multiple_of(LANES);
            start
        };
        let padded_dim = head_dim.next_multiple_of(LANES);
        Layout {
            queries,
            padded_dim,
            q: take((queries + group_max) * head_dim),
            keys: take(TILE * padded_dim),
            values: take(TILE * padded_dim),
            scores: take((queries + group_max) * TILE),
            sums: [take(queries * padded_dim), take(queries * padded_dim)],
            states: [take(2 * queries), take(2 * queries)],
            len,
        }
    }
}

dispatch! {
    /// Computes a task, writing its queries' rows and heads of `out`.
    ///
    /// # Safety
    /// `args` has passed its check with an `out` of the size of `q`, of which no one else touches
    /// the task's part.
    pub(super) unsafe fn run(
        args: &AttentionArgs<'_>, task: &Task, threads: &Threads, out: *mut f32,
    ) = run_lanes
}

#[inline(always)]
unsafe fn run_lanes<L: Lanes>(
    args: &AttentionArgs<'_>,
    task: &Task,
    threads: &Threads,
    out: *mut f32,
) {
    let group = args.heads / args.kv_heads;
    let layout = Layout::new(task.count * group, args.head_dim, L::GROUP_MAX);
    let mut scratch = threads.scratch::<f32>(layout.len);
    let scratch = scratch.slice_mut::<f32>().as_mut_ptr();
    let last = task.position + task.count - 1;
    let first = args.first_seen(task.position);
    // SAFETY: every part of scratch is used within the size its layout gave it.
    unsafe {
        pack_queries::<L>(args, task, scratch.add(layout.q));
        reset_state(&layout, scratch, 0);
        reset_state(&layout, scratch, 1);
        for tile in first / TILE..=last / TILE {
            if (tile * TILE).is_multiple_of(SPAN) && tile > first / TILE {
                merge_span::<L>(&layout, scratch);
            }
            let from = first.max(tile * TILE);
            let until = (last + 1).min((tile + 1) * TILE);
            load_tile::<L>(args, task, &layout, scratch, tile * TILE, from, until);
            add_tile::<L>(args, task, &layout, scratch, tile * TILE, until - tile * TILE);
        }
        merge_span::<L>(&layout, scratch);
        for query in 0..layout.queries {
            let sum = *scratch.add(layout.states[1] + layout.queries + query);
            let head = task.kv_head * group + query % group;
            let to = ((task.row + query / group) * args.heads + head) * args.head_dim;
            let from = scratch.add(layout.sums[1] + query * layout.padded_dim);
            for d in 0..args.head_dim {
                // Adding zero turns -0 to 0: a masked position may or may not have done that.
                *out.add(to + d) = *from.add(d) / sum + 0.0;
            }
        }
    }
}

unsafe fn reset_state(layout: &Layout, scratch: *mut f32, which: usize) {
    // SAFETY: the layout's own parts.
    unsafe {
        let state = scratch.add(layout.states[which]);
        for query in 0..layout.queries {
            *state.add(query) = f32::NEG_INFINITY;
            *state.add(layout.queries + query) = 0.0;
        }
        let sums = scratch.add(layout.sums[which]);
        sums.write_bytes(0, layout.queries * layout.padded_dim);
    }
}

/// Scales the task's queries and packs them in groups.
#[inline(always)]
unsafe fn pack_queries<L: Lanes>(args: &AttentionArgs<'_>, task: &Task, to: *mut f32) {
    let group = args.heads / args.kv_heads;
    let queries = task.count * group;
    let mut first = 0;
    while first < queries {
        let rows = group_rows(queries - first, L::GROUP_MAX);
        for r in 0..rows {
            let query = first + r;
            let head = task.kv_head * group + query % group;
            let from = ((task.row + query / group) * args.heads + head) * args.head_dim;
            for d in 0..args.head_dim {
                let value = if query < queries { args.q[from + d] * args.scale } else { 0.0 };
                // SAFETY: within `queries + GROUP_MAX` packed vectors.
                unsafe { *to.add(first * args.head_dim + d * rows + r) = value };
            }
        }
        first += rows;
    }
}

/// Loads keys (transposed) and values of positions `from..until` of the tile that begins at
/// `begin`; zeroes elsewhere.
#[inline(always)]
unsafe fn load_tile<L: Lanes>(
    args: &AttentionArgs<'_>,
    task: &Task,
    layout: &Layout,
    scratch: *mut f32,
    begin: usize,
    from: usize,
    until: usize,
) {
    let table = args.sequences[task.sequence].block_table;
    let dim = args.head_dim;
    // SAFETY: positions below `until` lie in blocks that the check has seen; a full vector is read
    // only where the head has that many values left; scratch is used within its layout.
    unsafe {
        let keys = scratch.add(layout.keys);
        let values = scratch.add(layout.values);
        let place = |position: usize| {
            let block = table[position / args.block_size].0 as usize;
            let slot = block * args.block_size + position % args.block_size;
            (slot * args.kv_heads + task.kv_head) * dim
        };
        for panel in 0..(until - begin).div_ceil(LANES) {
            // One place a position; usize::MAX where there is nothing to read.
            let mut places = [usize::MAX; LANES];
            for (lane, entry) in places.iter_mut().enumerate() {
                let position = begin + panel * LANES + lane;
                if (from..until).contains(&position) {
                    *entry = place(position);
                }
            }
            let mut d = 0;
            while d < dim {
                let live = LANES.min(dim - d);
                let mut square = [L::splat(0.0); LANES];
                for (lane, &at) in places.iter().enumerate() {
                    if at != usize::MAX {
                        square[lane] = load_kv(&args.keys, at + d, live);
                    }
                    let value = if at == usize::MAX {
                        L::splat(0.0)
                    } else {
                        load_kv(&args.values, at + d, live)
                    };
                    value.store(values.add((panel * LANES + lane) * layout.padded_dim + d));
                }
                L::transpose(&mut square);
                for (i, column) in square.iter().enumerate().take(live) {
                    column.store(keys.add((panel * dim + d + i) * LANES));
                }
                d += LANES;
            }
        }
    }
}

/// `live` values from `at` on, zeroes in the other lanes.
#[inline(always)]
unsafe fn load_kv<L: Lanes>(slice: &KvSlice<'_>, at: usize, live: usize) -> L {
    // SAFETY: the caller gives `live` readable values from `at` on.
    unsafe {
        match slice {
            KvSlice::F32(values) if live == LANES => L::load(values.as_ptr().add(at)),
            KvSlice::Bf16(values) if live == LANES => L::load_bf16(values.as_ptr().add(at)),
            KvSlice::F32(values) => {
                let mut padded = [0.0; LANES];
                padded[..live].copy_from_slice(&values[at..at + live]);
                L::load(padded.as_ptr())
            }
            KvSlice::Bf16(values) => {
                let mut padded = [0; LANES];
                padded[..live].copy_from_slice(&values[at..at + live]);
                L::load_bf16(padded.as_ptr())
            }
        }
    }
}

/// Scores, softmax and weighted values of one tile, of which positions below `count` are loaded.
#[inline(always)]
unsafe fn add_tile<L: Lanes>(
    args: &AttentionArgs<'_>,
    task: &Task,
    layout: &Layout,
    scratch: *mut f32,
    begin: usize,
    count: usize,
) {
    let dim = args.head_dim;
    let group = args.heads / args.kv_heads;
    let panels = count.div_ceil(LANES);
    let mut first = 0;
    while first < layout.queries {
        let rows = group_rows(layout.queries - first, L::GROUP_MAX);
        let live = rows.min(layout.queries - first);
        // SAFETY: scratch is used within its layout, which has room for a padded last group.
        unsafe {
            let scores = scratch.add(layout.scores + first * TILE);
            let product = TileArgs {
                inner: dim,
                a: scratch.add(layout.q + first * dim).cast_const(),
                a_inner: rows,
                a_row: 1,
                b: scratch.add(layout.keys).cast_const(),
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
                weigh::<L>(layout, scratch, query, seen_from, seen_until, panels);
            }
            let product = TileArgs {
                inner: panels * LANES,
                a: scores.cast_const(),
                a_inner: 1,
                a_row: TILE,
                b: scratch.add(layout.values).cast_const(),
                b_inner: layout.padded_dim,
                b_panel: LANES,
                c: scratch.add(layout.sums[0] + first * layout.padded_dim),
                c_row: layout.padded_dim,
                rows: live,
                accumulate: true,
            };
            tile_group::<L, F32>(product, rows, layout.padded_dim / LANES);
        }
        first += rows;
    }
}

/// Turns a query's scores of a tile into weights: positions outside `from..until` get zero. Brings
/// the query's state of the running span to the new largest score.
#[inline(always)]
unsafe fn weigh<L: Lanes>(
    layout: &Layout,
    scratch: *mut f32,
    query: usize,
    from: usize,
    until: usize,
    panels: usize,
) {
    // SAFETY: the query's own parts of scratch.
    unsafe {
        let scores = scratch.add(layout.scores + query * TILE);
        let state = scratch.add(layout.states[0]);
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
        let old = *state.add(query);
        let new = old.max(max.reduce_max());
        let factor = correction(old, new);
        let mut sum = L::splat(0.0);
        for panel in 0..panels {
            let at = scores.add(panel * LANES);
            let weight = lanes::exp(L::load(at).sub(L::splat(new)));
            weight.store(at);
            sum = sum.add(weight);
        }
        *state.add(query) = new;
        let sums = state.add(layout.queries + query);
        *sums = *sums * factor + sum.reduce_add();
        scale::<L>(scratch.add(layout.sums[0] + query * layout.padded_dim), layout, factor);
    }
}

/// The factor that brings what was relative to `old` to `new`, the larger one.
pub(super) fn correction(old: f32, new: f32) -> f32 {
    if old == f32::NEG_INFINITY { 0.0 } else { (old - new).exp() }
}

/// Multiplies a query's weighted values.
#[inline(always)]
unsafe fn scale<L: Lanes>(sums: *mut f32, layout: &Layout, factor: f32) {
    if factor == 1.0 {
        return;
    }
    let mut d = 0;
    while d < layout.padded_dim {
        // SAFETY: the caller gives `padded_dim` values.
        unsafe { L::load(sums.add(d)).mul(L::splat(factor)).store(sums.add(d)) };
        d += LANES;
    }
}

/// Merges the running span's state into that of the spans before, and resets it.
#[inline(always)]
unsafe fn merge_span<L: Lanes>(layout: &Layout, scratch: *mut f32) {
    // SAFETY: the layout's own parts.
    unsafe {
        let (span, all) = (scratch.add(layout.states[0]), scratch.add(layout.states[1]));
        for query in 0..layout.queries {
            let (span_max, all_max) = (*span.add(query), *all.add(query));
            let max = all_max.max(span_max);
            let (keep, take) = (correction(all_max, max), correction(span_max, max));
            let (span_sum, all_sum) =
                (span.add(layout.queries + query), all.add(layout.queries + query));
            *all.add(query) = max;
            *all_sum = *all_sum * keep + *span_sum * take;
            let from = scratch.add(layout.sums[0] + query * layout.padded_dim);
            let to = scratch.add(layout.sums[1] + query * layout.padded_dim);
            let mut d = 0;
            while d < layout.padded_dim {
                let kept = L::load(to.add(d)).mul(L::splat(keep));
                kept.add(L::load(from.add(d)).mul(L::splat(take))).store(to.add(d));
                d += LANES;
            }
        }
        reset_state(layout, scratch, 0);
    }
}
