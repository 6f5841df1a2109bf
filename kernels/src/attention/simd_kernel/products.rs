//! The two products of a tile, scores and weighted values, and the softmax between them.
//!
//! For few queries, transposed keys and values are read from the cache as they are stored and
//! widened while they are multiplied, the values block by block. Each sum continues from block to
//! block, so its order is that of positions either way. For more queries they have been widened
//! before, once for all of them.
#![allow(unsafe_code, reason = "accesses scratch memory and the KV cache through raw pointers")]

use std::ops::Range;

use super::work::{ReaderGroup, SimdWork};
use crate::attention::args::KvSlice;
use crate::attention::sizes::POSITIONS_PER_TILE;
use crate::attention::softmax_state::{SoftmaxState, rescale_factor};
use crate::attention::tile_view::{TileScales, TileView, TransposedKeys};
use crate::gemm::{
    Bf16, Bf16Pairs, CachedPanels, F16, F32, Form, I8, Panels, RegisterTile, group_rows, tile_group,
};
use crate::kv_layout::KvLayout;
use crate::lanes::{self, LANES, Lanes};

/// Maximum number of query vectors for which keys and values are read as they are stored. They are
/// then widened once per row group of queries instead of once per tile.
const STORED_READ_QUERIES_MAX: usize = 32;

// The methods rely on the invariant of `SimdWork`, which says what each pointer is valid for.
impl SimdWork<'_> {
    /// Whether keys are multiplied as they are stored, for this number of query vectors.
    #[inline(always)]
    pub(super) fn reads_stored_keys(&self, queries: usize) -> bool {
        queries <= STORED_READ_QUERIES_MAX && self.args.key_layout != KvLayout::Rows
    }

    /// Whether values are multiplied as they are stored, for this number of query vectors. This
    /// requires that heads are whole vectors and blocks whole panels of 16 positions.
    #[inline(always)]
    pub(super) fn reads_stored_values(&self, queries: usize) -> bool {
        let whole = |size: usize| size.is_multiple_of(LANES);
        queries <= STORED_READ_QUERIES_MAX
            && whole(self.args.head_dim)
            && whole(self.args.block_size)
    }

    /// Computes scores, softmax and weighted values of a tile for a reader group's queries of one
    /// head. If keys or values are read as they are stored, those of `next` are prefetched on the
    /// way.
    ///
    /// # Safety
    /// `view` is of a tile that `readers` share, and `next` of a tile of the item. `q` holds the
    /// group's queries as [`pack_queries`](SimdWork::pack_queries) packs them, `state` is the state
    /// of the same queries, and `self.keys` and `self.values` hold the tile unless it is read as
    /// stored. The instruction set of `L` is available.
    #[inline(always)]
    pub(super) unsafe fn add_products<L: Lanes>(
        &self,
        readers: ReaderGroup,
        view: &TileView<'_>,
        next: &TileView<'_>,
        q: *const f32,
        state: &SoftmaxState,
    ) {
        let queries = readers.len() * self.queries;
        let scales = view.scales();
        let mut first = 0;
        while first < queries {
            let rows = group_rows(queries - first, L::GROUP_MAX);
            let live = rows.min(queries - first);
            // SAFETY: `first + rows` is at most the group's queries plus PADDING_ROWS_MAX, for
            // which `scores` and `q` have rows; `first + live` is at most the group's queries,
            // which `state` has. The packed queries of the row group begin at `first * head_dim`.
            // `TileScales` has 64 scales.
            unsafe {
                let scores = self.scores.add(first * POSITIONS_PER_TILE);
                let q = q.add(first * self.args.head_dim);
                if self.reads_stored_keys(queries) {
                    self.score_stored::<L>(view, next, q, rows, live, scores);
                } else {
                    let step = self.args.head_dim * LANES;
                    let keys =
                        CachedPanels { first: self.keys.cast_const(), step, inner_step: LANES };
                    self.score::<L, F32, _>(view, keys, q, rows, live, scores);
                }
                for query in first..first + live {
                    let seen = self.seen(&readers, query, view);
                    let scores = self.scores.add(query * POSITIONS_PER_TILE);
                    let softcap = self.args.softcap_base_2();
                    weigh::<L>(scores, scales.as_ref(), softcap, state, query, seen, view.panels());
                }
                let sums = state.values.add(first * self.padded_dim);
                if self.reads_stored_values(queries) {
                    self.add_stored::<L>(view, next, rows, live, scores, sums);
                } else {
                    self.add_loaded::<L>(view, rows, live, scores, sums);
                }
            }
            first += rows;
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
        let (begin, end) = (view.location.begin, view.location.seen.end);
        let group = self.args.heads / self.args.kv_heads;
        let position = self.plan.chunk(self.item, readers.start).position + query / group;
        let from = self.args.first_seen(position).max(begin) - begin;
        from..(position + 1).min(end).saturating_sub(begin)
    }

    /// Computes the scores of a row group with transposed keys, read as they are stored.
    ///
    /// # Safety
    /// As for [`Self::score`], and the keys are stored as [`KvLayout::Transposed`].
    #[inline(always)]
    unsafe fn score_stored<L: Lanes>(
        &self,
        view: &TileView<'_>,
        next: &TileView<'_>,
        q: *const f32,
        rows: usize,
        live: usize,
        scores: *mut f32,
    ) {
        macro_rules! score {
            ($form:ty, $from:expr) => {{
                let keys =
                    TransposedKeys { now: view.transposed($from), next: next.transposed($from) };
                self.score::<L, $form, _>(view, keys, q, rows, live, scores)
            }};
        }
        // SAFETY: the form is that in which transposed keys of this type are stored, and the panels
        // of `view` are in blocks that the validation has found within the keys. The other
        // conditions are those of this function.
        unsafe {
            match self.args.keys {
                KvSlice::F32(from) => score!(F32, from),
                KvSlice::Bf16(from) => score!(Bf16Pairs, from),
                KvSlice::F16(from) => score!(F16, from),
                KvSlice::Int8 { values, .. } => score!(I8, values),
            }
        }
    }

    /// Computes the scores of a row group of `rows` query rows, of which `live` are not padding,
    /// with all panels of a tile.
    ///
    /// # Safety
    /// `q` holds the packed queries of the row group, `keys` gives panels of `16 * head_dim`
    /// readable keys in the form F, and `scores` is writable for `live` rows of 64 scores. The
    /// instruction set of `L` is available.
    #[inline(always)]
    unsafe fn score<L: Lanes, F: Form, B: Panels<F::Raw>>(
        &self,
        view: &TileView<'_>,
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
            c_row: POSITIONS_PER_TILE,
            rows: live,
            accumulate: false,
        };
        // SAFETY: `q` is readable at `r + k * rows` for `rows` rows and `head_dim` steps, `keys`
        // for the panels and steps, and `scores` is writable for `live` rows of 64 scores, at most
        // 4 panels. The set of `L` is available.
        unsafe { tile_group::<L, F, _>(&product, rows, view.panels()) };
    }

    /// Adds the weighted values of a tile that was loaded to `self.values`.
    ///
    /// # Safety
    /// `weights` holds `rows` rows of 64 weights, of which `live` are not padding, and `sums` is
    /// valid for `live` rows of `padded_dim` sums. The instruction set of `L` is available.
    #[inline(always)]
    unsafe fn add_loaded<L: Lanes>(
        &self,
        view: &TileView<'_>,
        rows: usize,
        live: usize,
        weights: *const f32,
        sums: *mut f32,
    ) {
        let product = RegisterTile {
            inner: view.panels() * LANES,
            a: weights,
            a_inner: 1,
            a_row: POSITIONS_PER_TILE,
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
        // SAFETY: `weights` is readable for `rows` rows of 64, and `panels * 16` is at most 64.
        // `self.values` has as many rows of `padded_dim`. `sums` is writable for `live` rows of
        // `padded_dim`, a multiple of
        // 16. The set of `L` is available.
        unsafe { tile_group::<L, F32, _>(&product, rows, self.padded_dim / LANES) };
    }

    /// Adds the weighted values of a tile, read as they are stored.
    ///
    /// # Safety
    /// [`Self::reads_stored_values`] is true for the group's queries. `weights` holds `rows` rows
    /// of 64 weights, of which `live` are not padding, and `sums` is valid for `live` rows of
    /// `head_dim` sums. The instruction set of `L` is available.
    #[inline(always)]
    unsafe fn add_stored<L: Lanes>(
        &self,
        view: &TileView<'_>,
        next: &TileView<'_>,
        rows: usize,
        live: usize,
        weights: *const f32,
        sums: *mut f32,
    ) {
        macro_rules! add {
            ($form:ty, $from:expr) => {
                self.add_stored_as::<L, $form>(view, next, $from, rows, live, weights, sums)
            };
        }
        // SAFETY: the form is that in which values of this type are stored. The other conditions
        // are those of this function.
        unsafe {
            match self.args.values {
                KvSlice::F32(from) => add!(F32, from),
                KvSlice::Bf16(from) => add!(Bf16, from),
                KvSlice::F16(from) => add!(F16, from),
                KvSlice::Int8 { values, .. } => add!(I8, values),
            }
        }
    }

    /// [`Self::add_stored`] for one form of values. Positions that the readers do not see are
    /// skipped; their weights would be zero.
    ///
    /// # Safety
    /// As for [`Self::add_stored`]; `from` is the arguments' values, stored in the form F.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "pointers and sizes of one product")]
    unsafe fn add_stored_as<L: Lanes, F: Form>(
        &self,
        view: &TileView<'_>,
        next: &TileView<'_>,
        from: &[F::Raw],
        rows: usize,
        live: usize,
        weights: *const f32,
        sums: *mut f32,
    ) {
        let dim = self.args.head_dim;
        let (begin, seen) = (view.location.begin, &view.location.seen);
        for panel in 0..view.panels() {
            // A block holds whole panels, so the positions that are seen of a panel are evenly
            // spaced.
            let first = begin + panel * LANES;
            let positions = first.max(seen.start)..(first + LANES).min(seen.end);
            if positions.is_empty() {
                continue;
            }
            let values = view.stored_values(next, positions.start - begin, from);
            // SAFETY: `positions` lie in one panel and so in one block, which the validation has
            // found within `from`; their rows are `inner_step` apart, and each is readable for
            // `dim` values, a multiple of 16. `weights` has 64 columns. `sums` has `live` rows of
            // `head_dim`, which equals `padded_dim`. The set of `L` is available.
            unsafe {
                let product = RegisterTile {
                    inner: positions.len(),
                    a: weights.add(positions.start - begin),
                    a_inner: 1,
                    a_row: POSITIONS_PER_TILE,
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

/// One step of the online softmax: turns a query's scores of a tile into weights relative to the
/// largest score so far, and rescales the query's state to it. Positions outside `seen` get the
/// weight zero. The scales of bytes are applied here, once per position: those of keys to scores,
/// those of values to weights. `softcap` is in the units of the scores.
///
/// # Safety
/// `scores` is valid for `panels * 16` values, at most 64, and `seen` lies within them. `query` is
/// below the number of queries of `state`, whose memory is valid and not accessed by other threads.
/// The instruction set of `L` is available.
#[inline(always)]
unsafe fn weigh<L: Lanes>(
    scores: *mut f32,
    scales: Option<&TileScales>,
    softcap: Option<f32>,
    state: &SoftmaxState,
    query: usize,
    seen: Range<usize>,
    panels: usize,
) {
    // SAFETY: all offsets into `scores` and the scales are below `panels * 16`, at most 64.
    // `largest` and `sums` are valid for `query`. The set of `L` is available.
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
        if let Some(cap) = softcap {
            for panel in (0..panels * LANES).step_by(LANES) {
                let at = scores.add(panel);
                lanes::soft_cap(L::load(at), cap).store(at);
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
        let factor = rescale_factor(*largest, new);
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
