//! The two products of a tile, scores and weighted values, and the softmax between them.
//!
//! For few queries, keys that stand turned and values are widened as they are multiplied, where they
//! stand in the cache, values block by block: each sum goes on from block to block, so its order is that of
//! positions either way. Everything else has been widened before.
#![allow(unsafe_code, reason = "register tiles and lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::ops::Range;

use super::super::super::KvLayout;
use super::super::super::gemm::{
    Bf16, Bf16Pairs, CachedPanels, F16, F32, Form, I8, Panels, RegisterTile, group_rows, tile_group,
};
use super::super::super::lanes::{self, LANES, Lanes};
use super::super::state::{State, correction};
use super::super::walk::{Scales, TurnedKeys, Walk};
use super::super::{KvSlice, TILE};
use super::{Run, Work};

/// Query vectors up to which keys and values are widened as often as they are multiplied.
pub(super) const FEW_QUERIES: usize = 32;

// SAFETY of all methods: the conditions of `run`; scratch is used within its sizes.
impl Work<'_> {
    /// Whether so many queries multiply keys where they stand.
    #[inline(always)]
    pub(super) fn keys_stay(&self, queries: usize) -> bool {
        queries <= FEW_QUERIES && self.args.key_layout != KvLayout::Rows
    }

    /// Whether so many queries multiply values where they stand: whole vectors of them, whole panels in a
    /// block.
    #[inline(always)]
    pub(super) fn values_stay(&self, queries: usize) -> bool {
        let whole = |size: usize| size.is_multiple_of(LANES);
        queries <= FEW_QUERIES && whole(self.args.head_dim) && whole(self.args.block_size)
    }

    /// Scores, softmax and weighted values of a tile for a run's queries of one head. What is read where it stands
    /// is asked for of `ahead` meanwhile.
    #[inline(always)]
    pub(super) unsafe fn add_products<L: Lanes>(
        &self,
        run: Run,
        walk: &Walk<'_>,
        ahead: &Walk<'_>,
        q: *const f32,
        state: &State,
    ) {
        let queries = run.len() * self.queries;
        let scales = walk.scales();
        let mut first = 0;
        while first < queries {
            let rows = group_rows(queries - first, L::GROUP_MAX);
            let live = rows.min(queries - first);
            // SAFETY: see above the impl; scratch has room for a padded last group.
            unsafe {
                let scores = self.scores.add(first * TILE);
                let q = q.add(first * self.args.head_dim);
                if self.keys_stay(queries) {
                    self.score_stored::<L>(walk, ahead, q, rows, live, scores);
                } else {
                    let step = self.args.head_dim * LANES;
                    let keys =
                        CachedPanels { first: self.keys.cast_const(), step, inner_step: LANES };
                    self.score::<L, F32, _>(walk, keys, q, rows, live, scores);
                }
                for query in first..first + live {
                    let seen = self.seen(&run, query, walk);
                    let scores = self.scores.add(query * TILE);
                    weigh::<L>(scores, scales.as_ref(), state, query, seen, walk.panels());
                }
                let sums = state.values.add(first * self.padded_dim);
                if self.values_stay(queries) {
                    self.add_stored::<L>(walk, ahead, rows, live, scores, sums);
                } else {
                    self.add_loaded::<L>(walk, rows, live, scores, sums);
                }
            }
            first += rows;
        }
    }

    /// What a query of a run sees of its tile, counted from the tile's first position.
    #[inline(always)]
    fn seen(&self, run: &Run, query: usize, walk: &Walk<'_>) -> Range<usize> {
        if run.len() > 1 {
            return 0..TILE;
        }
        let (begin, end) = (walk.places.begin, walk.places.seen.end);
        let group = self.args.heads / self.args.kv_heads;
        let position = self.plan.task(self.part, run.start).position + query / group;
        let from = self.args.first_seen(position).max(begin) - begin;
        from..(position + 1).min(end).saturating_sub(begin)
    }

    /// Scores of keys that stand turned.
    #[inline(always)]
    unsafe fn score_stored<L: Lanes>(
        &self,
        walk: &Walk<'_>,
        ahead: &Walk<'_>,
        q: *const f32,
        rows: usize,
        live: usize,
        scores: *mut f32,
    ) {
        macro_rules! score {
            ($form:ty, $from:expr) => {{
                let keys = TurnedKeys { now: walk.turned($from), ahead: ahead.turned($from) };
                self.score::<L, $form, _>(walk, keys, q, rows, live, scores)
            }};
        }
        // SAFETY: see above the impl.
        unsafe {
            match self.args.keys {
                KvSlice::F32(from) => score!(F32, from),
                KvSlice::Bf16(from) => score!(Bf16Pairs, from),
                KvSlice::F16(from) => score!(F16, from),
                KvSlice::Int8 { values, .. } => score!(I8, values),
            }
        }
    }

    #[inline(always)]
    unsafe fn score<L: Lanes, F: Form, B: Panels<F::Raw>>(
        &self,
        walk: &Walk<'_>,
        keys: B,
        q: *const f32,
        rows: usize,
        live: usize,
        scores: *mut f32,
    ) {
        let product = RegisterTile {
            inner: self.args.head_dim,
            a: q,
            a_inner: rows,
            a_row: 1,
            b: keys,
            c: scores,
            c_row: TILE,
            rows: live,
            accumulate: false,
        };
        // SAFETY: see above the impl.
        unsafe { tile_group::<L, F, _>(&product, rows, walk.panels()) };
    }

    /// Adds values that were loaded.
    #[inline(always)]
    unsafe fn add_loaded<L: Lanes>(
        &self,
        walk: &Walk<'_>,
        rows: usize,
        live: usize,
        weights: *const f32,
        sums: *mut f32,
    ) {
        let product = RegisterTile {
            inner: walk.panels() * LANES,
            a: weights,
            a_inner: 1,
            a_row: TILE,
            b: CachedPanels {
                first: self.values.cast_const(),
                step: LANES,
                inner_step: self.padded_dim,
            },
            c: sums,
            c_row: self.padded_dim,
            rows: live,
            accumulate: true,
        };
        // SAFETY: see above the impl.
        unsafe { tile_group::<L, F32, _>(&product, rows, self.padded_dim / LANES) };
    }

    /// Adds values where they stand.
    #[inline(always)]
    unsafe fn add_stored<L: Lanes>(
        &self,
        walk: &Walk<'_>,
        ahead: &Walk<'_>,
        rows: usize,
        live: usize,
        weights: *const f32,
        sums: *mut f32,
    ) {
        macro_rules! add {
            ($form:ty, $from:expr) => {
                self.add_stored_as::<L, $form>(walk, ahead, $from, rows, live, weights, sums)
            };
        }
        // SAFETY: see above the impl.
        unsafe {
            match self.args.values {
                KvSlice::F32(from) => add!(F32, from),
                KvSlice::Bf16(from) => add!(Bf16, from),
                KvSlice::F16(from) => add!(F16, from),
                KvSlice::Int8 { values, .. } => add!(I8, values),
            }
        }
    }

    /// As [`Self::add_stored`]. Positions that are not there would weigh zero.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "places and sizes of one product")]
    unsafe fn add_stored_as<L: Lanes, F: Form>(
        &self,
        walk: &Walk<'_>,
        ahead: &Walk<'_>,
        from: &[F::Raw],
        rows: usize,
        live: usize,
        weights: *const f32,
        sums: *mut f32,
    ) {
        let dim = self.args.head_dim;
        let (begin, seen) = (walk.places.begin, &walk.places.seen);
        for panel in 0..walk.panels() {
            // A block holds whole panels, so what is seen of one stands evenly spaced.
            let first = begin + panel * LANES;
            let positions = first.max(seen.start)..(first + LANES).min(seen.end);
            if positions.is_empty() {
                continue;
            }
            let values = walk.stored_values(ahead, positions.start - begin, from);
            // SAFETY: see above the impl; whole vectors, since a head is a number of them.
            unsafe {
                let product = RegisterTile {
                    inner: positions.len(),
                    a: weights.add(positions.start - begin),
                    a_inner: 1,
                    a_row: TILE,
                    b: values,
                    c: sums,
                    c_row: dim,
                    rows: live,
                    accumulate: true,
                };
                tile_group::<L, F, _>(&product, rows, dim / LANES);
            }
        }
    }
}

/// Turns a query's scores of a tile into weights: positions outside `seen` get zero. Brings the query's
/// state of the running span to the new largest score. The scales of integers are multiplied in here, once a
/// position: those of keys into scores, those of values into weights.
#[inline(always)]
unsafe fn weigh<L: Lanes>(
    scores: *mut f32,
    scales: Option<&Scales>,
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
        if let Some(scales) = scales {
            for panel in (0..panels * LANES).step_by(LANES) {
                let at = scores.add(panel);
                L::load(at).mul(L::load(scales.keys.as_ptr().add(panel))).store(at);
            }
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
            sum = sum.add(weight);
            match scales {
                Some(scales) => {
                    let scale = L::load(scales.values.as_ptr().add(panel * LANES));
                    weight.mul(scale).store(at);
                }
                None => weight.store(at),
            }
        }
        *largest = new;
        let sums = state.sums.add(query);
        *sums = *sums * factor + sum.reduce_add();
        state.scale::<L>(query, factor);
    }
}
