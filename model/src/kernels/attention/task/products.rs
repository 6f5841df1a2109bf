//! The two products of a tile, scores and weighted values, and the softmax between them.
//!
//! For few queries, keys that stand turned and values of bf16 are widened as they are multiplied, where they
//! stand in the cache, values block by block: each sum goes on from block to block, so its order is that of
//! positions either way. Everything else has been widened before.
#![allow(unsafe_code, reason = "register tiles and lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::ops::Range;

use super::super::super::KvLayout;
use super::super::super::gemm::{
    Bf16, Bf16Pairs, F16, F32, Form, Near, Panels, TileArgs, group_rows, tile_group,
};
use super::super::super::lanes::{self, LANES, Lanes};
use super::super::load::fetch_line;
use super::super::state::{State, correction};
use super::super::walk::{TurnedKeys, Walk};
use super::super::{KvSlice, TILE};
use super::{Run, Work};

/// Query vectors up to which keys and values of bf16 are widened as often as they are multiplied.
pub(super) const FEW_QUERIES: usize = 16;

// SAFETY of all methods: the conditions of `run`; scratch is used within its sizes.
impl Work<'_> {
    /// Whether so many queries multiply keys where they stand.
    #[inline(always)]
    pub(super) fn keys_stay(&self, queries: usize) -> bool {
        let turned = self.args.key_layout != KvLayout::Rows;
        turned && queries <= FEW_QUERIES && !matches!(self.args.keys, KvSlice::Int8 { .. })
    }

    /// The values, if so many queries multiply them where they stand.
    #[inline(always)]
    pub(super) fn stored_values(&self, queries: usize) -> Option<&[u16]> {
        let whole = |size: usize| size.is_multiple_of(LANES);
        match self.args.values {
            KvSlice::Bf16(values)
                if queries <= FEW_QUERIES
                    && whole(self.args.head_dim)
                    && whole(self.args.block_size) =>
            {
                Some(values)
            }
            _ => None,
        }
    }

    /// Scores, softmax and weighted values of a loaded tile for a run's queries of one head. Values that are read
    /// where they stand are asked for of `ahead` meanwhile.
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
                    let keys =
                        Near { first: self.keys.cast_const(), step: self.args.head_dim * LANES };
                    self.score::<L, F32, _>(walk, keys, q, rows, live, scores);
                }
                for query in first..first + live {
                    let seen = self.seen(&run, query, walk);
                    weigh::<L>(self.scores.add(query * TILE), state, query, seen, walk.panels());
                }
                let sums = state.values.add(first * self.padded_dim);
                match self.stored_values(queries) {
                    Some(from) => {
                        self.add_stored::<L>(walk, ahead, from, rows, live, scores, sums);
                    }
                    None => self.add_loaded::<L>(walk, rows, live, scores, sums),
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
                KvSlice::Int8 { .. } => unreachable!("integers are widened"),
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
        let product = TileArgs {
            inner: self.args.head_dim,
            a: q,
            a_inner: rows,
            a_row: 1,
            b: keys,
            b_inner: LANES,
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
        let product = TileArgs {
            inner: walk.panels() * LANES,
            a: weights,
            a_inner: 1,
            a_row: TILE,
            b: Near { first: self.values.cast_const(), step: LANES },
            b_inner: self.padded_dim,
            c: sums,
            c_row: self.padded_dim,
            rows: live,
            accumulate: true,
        };
        // SAFETY: see above the impl.
        unsafe { tile_group::<L, F32, _>(&product, rows, self.padded_dim / LANES) };
    }

    /// Adds values where they stand. Positions that are not there would weigh zero.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "places and sizes of one product")]
    unsafe fn add_stored<L: Lanes>(
        &self,
        walk: &Walk<'_>,
        ahead: &Walk<'_>,
        from: &[u16],
        rows: usize,
        live: usize,
        weights: *const f32,
        sums: *mut f32,
    ) {
        /// Vectors of a head that are added together.
        const NEAR: usize = 8;
        let dim = self.args.head_dim;
        let (begin, seen) = (walk.places.begin, &walk.places.seen);
        for panel in 0..walk.panels() {
            let (places, ahead) = (walk.rows(panel, from), ahead.rows(panel, from));
            // A block holds whole panels, so what is seen of one stands evenly spaced.
            let first = begin + panel * LANES;
            let (from, to) = (first.max(seen.start), (first + LANES).min(seen.end));
            if from >= to {
                continue;
            }
            for d in (0..dim).step_by(NEAR * LANES) {
                let count = (dim - d).min(NEAR * LANES);
                for vector in 0..count / LANES {
                    fetch_line(&ahead, d + vector * LANES);
                }
                // SAFETY: see above the impl; whole vectors, since a head is a number of them.
                unsafe {
                    let product = TileArgs {
                        inner: to - from,
                        a: weights.add(from - begin),
                        a_inner: 1,
                        a_row: TILE,
                        b: Near { first: places[from - first].add(d), step: LANES },
                        b_inner: self.args.kv_heads * dim,
                        c: sums.add(d),
                        c_row: dim,
                        rows: live,
                        accumulate: true,
                    };
                    tile_group::<L, Bf16, _>(&product, rows, count / LANES);
                }
            }
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
