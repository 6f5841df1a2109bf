//! The products of a tile in f32.
//!
//! For few queries, transposed keys and values are read from the cache as they are stored and
//! widened while they are multiplied, the values block by block. Each sum continues from block to
//! block, so its order is that of positions either way. For more queries they have been widened
//! before, once for all of them.
#![allow(unsafe_code, reason = "accesses scratch memory and the KV cache through raw pointers")]

use std::marker::PhantomData;

use super::arithmetic::{Arithmetic, TilePair};
use super::products::{add_loaded, add_stored, score_loaded, score_panels};
use super::work::{RowGroup, SimdWork};
use crate::attention::args::KvSlice;
use crate::attention::tile_loading::{load_keys, load_live, load_values};
use crate::attention::tile_view::{StoredValues, TransposedKeys};
use crate::gemm::{Bf16, Bf16Pairs, F16, F32, Form, I4, I4Pairs, I8};
use crate::kv_layout::KvLayout;
use crate::lanes::{self, LANES, Lanes};

/// Maximum number of query vectors for which keys and values are read as they are stored. They are
/// then widened once per row group of queries instead of once per tile.
const STORED_READ_QUERIES_MAX: usize = 32;

/// Products in f32 on vectors of type L.
pub(super) struct F32Arithmetic<L>(PhantomData<L>);

/// Whether keys are multiplied as they are stored, for this number of query vectors.
#[inline(always)]
fn reads_stored_keys(work: &SimdWork<'_>, queries: usize) -> bool {
    queries <= STORED_READ_QUERIES_MAX && work.args.key_layout != KvLayout::Rows
}

/// Whether values are multiplied as they are stored, for this number of query vectors. This
/// requires that heads are whole vectors and blocks whole panels of 16 positions.
#[inline(always)]
fn reads_stored_values(work: &SimdWork<'_>, queries: usize) -> bool {
    let whole = |size: usize| size.is_multiple_of(LANES);
    queries <= STORED_READ_QUERIES_MAX && whole(work.args.head_dim) && whole(work.args.block_size)
}

impl<L: Lanes> Arithmetic for F32Arithmetic<L> {
    type Lanes = L;
    const VALUES_PER_WORD: usize = 1;

    #[inline(always)]
    unsafe fn query_words(from: *const f32, left: usize, factor: L) -> L {
        // SAFETY: `from` is readable for `left` values; the instruction set of `L` is available.
        unsafe { load_live::<L, F32>(from, left).mul(factor) }
    }

    #[inline(always)]
    unsafe fn load(work: &SimdWork<'_>, tile: TilePair<'_>, queries: usize) {
        // SAFETY: the arguments of both views have been validated, and `keys` and `values` have
        // room for a tile. The instruction set of `L` is available.
        unsafe {
            if !reads_stored_keys(work, queries) {
                load_keys::<L>(tile.now, tile.next, work.keys);
            }
            if !reads_stored_values(work, queries) {
                load_values::<L>(tile.now, tile.next, work.values);
            }
        }
    }

    #[inline(always)]
    unsafe fn score(
        work: &SimdWork<'_>,
        tile: TilePair<'_>,
        group: &RowGroup,
        q: *const f32,
        scores: *mut f32,
    ) {
        let TilePair { now, next } = tile;
        macro_rules! stored {
            ($form:ty, $from:expr) => {{
                let keys =
                    TransposedKeys { now: now.transposed($from), next: next.transposed($from) };
                score_panels::<Self, $form, _>(work, keys, group, q, scores)
            }};
        }
        // SAFETY: the form is that in which transposed keys of this type are stored, and the panels
        // of the tile are in blocks that the validation has found within the keys. Otherwise
        // `work.keys` holds them, widened. The other conditions are those of this function.
        unsafe {
            if !reads_stored_keys(work, group.queries) {
                return score_loaded::<Self, F32>(work, group, q, scores);
            }
            match work.args.keys {
                KvSlice::F32(from) => stored!(F32, from),
                KvSlice::Bf16(from) => stored!(Bf16Pairs, from),
                KvSlice::F16(from) => stored!(F16, from),
                KvSlice::Int8 { values, .. } => stored!(I8, values),
                KvSlice::Int4 { packed, .. } => stored!(I4Pairs, packed),
            }
        }
    }

    #[inline(always)]
    unsafe fn exp2(x: L) -> L {
        // SAFETY: computes in registers; the instruction set of `L` is available.
        unsafe { lanes::exp2(x) }
    }

    #[inline(always)]
    unsafe fn store_weights(row: *mut f32, panel: usize, weights: [L; 2]) {
        // SAFETY: `row` has 64 words, and `panel` and the panel after it are two of its 4 panels.
        // The instruction set of `L` is available.
        unsafe {
            weights[0].store(row.add(panel * LANES));
            weights[1].store(row.add((panel + 1) * LANES));
        }
    }

    #[inline(always)]
    unsafe fn add_values(
        work: &SimdWork<'_>,
        tile: TilePair<'_>,
        group: &RowGroup,
        weights: *const f32,
        sums: *mut f32,
    ) {
        macro_rules! stored {
            ($form:ty, $from:expr) => {
                add_stored::<Self, $form, StoredValues<<$form as Form>::Raw>, _>(
                    tile, $from, group, weights, sums,
                )
            };
        }
        // SAFETY: the form is that in which values of this type are stored, and
        // `reads_stored_values` has checked what `add_stored` requires of the sizes; a word holds
        // one position. The other conditions are those of this function.
        unsafe {
            if !reads_stored_values(work, group.queries) {
                return add_loaded::<Self, F32>(work, group, weights, sums);
            }
            match work.args.values {
                KvSlice::F32(from) => stored!(F32, from),
                KvSlice::Bf16(from) => stored!(Bf16, from),
                KvSlice::F16(from) => stored!(F16, from),
                KvSlice::Int8 { values, .. } => stored!(I8, values),
                KvSlice::Int4 { packed, .. } => stored!(I4, packed),
            }
        }
    }
}
