//! Loads a tile of keys and values through the block table and widens it to f32. Keys are loaded
//! transposed, as the product of scores needs them; values are loaded as rows.
#![allow(unsafe_code, reason = "reads the KV cache and writes scratch memory through raw pointers")]

use crate::attention::args::KvSlice;
use crate::attention::tile_view::{TileView, TransposedKeys};
use crate::gemm::{Bf16, Bf16Pairs, F16, F32, Form, I4, I4Pairs, I8, Panels, SingleForm, Stored};
use crate::kv_layout::KvLayout;
use crate::lanes::{LANES, Lanes};
use crate::prefetch::{CACHE_LINE_BYTES, prefetch_l2};

/// Prefetches the cache line of each row that begins with the row's value `from`. Does nothing if
/// `from` is not at the start of a cache line relative to the row.
#[inline(always)]
pub(super) fn prefetch_rows<T: Stored>(rows: &[*const T], from: usize) {
    let from = from / T::VALUES;
    if (from * size_of::<T>()).is_multiple_of(CACHE_LINE_BYTES) {
        for row in rows {
            prefetch_l2(row.wrapping_add(from));
        }
    }
}

/// The first `min(live, 16)` values at `from`, widened to f32. The remaining lanes have the values
/// of stored zeroes. `live` is a whole number of stored numbers.
///
/// # Safety
/// `from` is readable for `min(live, 16)` values, and the instruction set of `L` is available.
#[inline(always)]
pub(crate) unsafe fn load_live<L: Lanes, F: SingleForm>(from: *const F::Raw, live: usize) -> L {
    // SAFETY: 16 values are loaded from `from` only if `live` is at least 16, otherwise `live`
    // values are copied to a local array of 16, which is loaded. The set of `L` is available.
    unsafe {
        if live >= LANES {
            return F::load(from);
        }
        let mut padded = [F::Raw::default(); LANES];
        // Copied as bytes, because `from` may be unaligned.
        let bytes = live / F::Raw::VALUES * size_of::<F::Raw>();
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), padded.as_mut_ptr().cast(), bytes);
        F::load(padded.as_ptr())
    }
}

/// Loads the keys of a tile into `to`, `[panel of 16 positions][head_dim][16]`. Positions that are
/// not read get unspecified values. Prefetches the keys of `next` on the way.
///
/// # Safety
/// [`AttentionArgs::validate`](crate::attention::args::AttentionArgs::validate) has accepted the
/// arguments of both views. `to` is writable for `64 * head_dim` values, which no other thread
/// accesses. The instruction set of `L` is available.
#[inline(always)]
pub(super) unsafe fn load_keys<L: Lanes>(tile: &TileView<'_>, next: &TileView<'_>, to: *mut f32) {
    let transposed = tile.args.key_layout != KvLayout::Rows;
    // SAFETY: the conditions are those of this function. `widen_transposed` is called for
    // transposed keys only, with the form in which `KvLayout::Transposed` stores the type.
    unsafe {
        match tile.args.keys {
            KvSlice::F32(from) if transposed => widen_transposed::<L, F32>(tile, next, to, from),
            KvSlice::F32(from) => transpose_rows::<L, F32>(tile, next, to, from),
            KvSlice::Bf16(from) if transposed => {
                widen_transposed::<L, Bf16Pairs>(tile, next, to, from);
            }
            KvSlice::Bf16(from) => transpose_rows::<L, Bf16>(tile, next, to, from),
            KvSlice::F16(from) if transposed => widen_transposed::<L, F16>(tile, next, to, from),
            KvSlice::F16(from) => transpose_rows::<L, F16>(tile, next, to, from),
            KvSlice::Int8 { values, .. } if transposed => {
                widen_transposed::<L, I8>(tile, next, to, values);
            }
            KvSlice::Int8 { values, .. } => transpose_rows::<L, I8>(tile, next, to, values),
            KvSlice::Int4 { packed, .. } if transposed => {
                widen_transposed::<L, I4Pairs>(tile, next, to, packed);
            }
            KvSlice::Int4 { packed, .. } => transpose_rows::<L, I4>(tile, next, to, packed),
        }
    }
}

/// Loads keys that are stored transposed.
///
/// # Safety
/// As for [`load_keys`]. `from` is the arguments' keys, stored as [`KvLayout::Transposed`] in the
/// form F.
#[inline(always)]
unsafe fn widen_transposed<L: Lanes, F: Form>(
    tile: &TileView<'_>,
    next: &TileView<'_>,
    to: *mut f32,
    from: &[F::Raw],
) {
    let dim = tile.args.head_dim;
    let keys = TransposedKeys { now: tile.transposed(from), next: next.transposed(from) };
    for panel in 0..tile.panels() {
        let now = keys.at(panel);
        for d in 0..dim {
            keys.prefetch::<1>(panel, d, now);
        }
        // SAFETY: `now` is the start of a panel of `16 * dim` values within a block that the block
        // table names, and the validation has found that block within `from`. A tile has 4 panels,
        // for which `to` has room. The set of `L` is available.
        unsafe { F::widen::<L>(now, dim, to.add(panel * dim * LANES)) };
    }
}

/// Loads keys that are stored as rows.
///
/// # Safety
/// As for [`load_keys`]. `from` is the arguments' keys, stored as [`KvLayout::Rows`] in the form F.
#[inline(always)]
unsafe fn transpose_rows<L: Lanes, F: SingleForm>(
    tile: &TileView<'_>,
    next: &TileView<'_>,
    to: *mut f32,
    from: &[F::Raw],
) {
    let dim = tile.args.head_dim;
    for panel in 0..tile.panels() {
        let (rows, next) = (tile.rows(panel, from), next.rows(panel, from));
        // SAFETY: each of `rows` is the start of a head of `dim` values in a block that the
        // validation has found within `from`, and `to` has room for 4 panels. The set of `L` is
        // available.
        unsafe { transpose_panel::<L, F>(&rows, &next, dim, to.add(panel * dim * LANES)) };
    }
}

/// Transposes 16 rows of `len` values to `[len][16]` and widens them. Prefetches the rows `next`.
///
/// # Safety
/// Each of `rows` is readable for `len` values. `to` is writable for `16 * len` values, which no
/// other thread accesses. The instruction set of `L` is available.
#[inline(always)]
pub(super) unsafe fn transpose_panel<L: Lanes, F: SingleForm>(
    rows: &[*const F::Raw; LANES],
    next: &[*const F::Raw; LANES],
    len: usize,
    to: *mut f32,
) {
    for d in (0..len).step_by(LANES) {
        prefetch_rows(next, d);
        // SAFETY: at most `len - d` values of each row are read from `d` on. The stores write 16
        // values at step `d + i`, below `len`. The set of `L` is available.
        unsafe {
            let mut square = [L::splat(0.0); LANES];
            for lane in 0..LANES {
                square[lane] = load_live::<L, F>(rows[lane].add(d / F::Raw::VALUES), len - d);
            }
            L::transpose(&mut square);
            for (i, column) in square.into_iter().enumerate().take(len - d) {
                column.store(to.add((d + i) * LANES));
            }
        }
    }
}

/// Loads the values of a tile into `to`, `[position][padded_dim]`, where `padded_dim` is `head_dim`
/// rounded up to a multiple of 16. Positions that are not read get the values of another position.
/// Prefetches the values of `next` on the way.
///
/// # Safety
/// [`AttentionArgs::validate`](crate::attention::args::AttentionArgs::validate) has accepted the
/// arguments of both views. `to` is writable for `64 * padded_dim` values, which no other thread
/// accesses. The instruction set of `L` is available.
#[inline(always)]
pub(super) unsafe fn load_values<L: Lanes>(tile: &TileView<'_>, next: &TileView<'_>, to: *mut f32) {
    // SAFETY: the conditions are those of this function; each form is that of the stored type.
    unsafe {
        match tile.args.values {
            KvSlice::F32(from) => widen_rows::<L, F32>(tile, next, to, from),
            KvSlice::Bf16(from) => widen_rows::<L, Bf16>(tile, next, to, from),
            KvSlice::F16(from) => widen_rows::<L, F16>(tile, next, to, from),
            KvSlice::Int8 { values, .. } => widen_rows::<L, I8>(tile, next, to, values),
            KvSlice::Int4 { packed, .. } => widen_rows::<L, I4>(tile, next, to, packed),
        }
    }
}

/// Loads values, which are always stored as rows.
///
/// # Safety
/// As for [`load_values`]. `from` is the arguments' values, stored in the form F.
#[inline(always)]
unsafe fn widen_rows<L: Lanes, F: SingleForm>(
    tile: &TileView<'_>,
    next: &TileView<'_>,
    to: *mut f32,
    from: &[F::Raw],
) {
    let dim = tile.args.head_dim;
    let padded_dim = dim.next_multiple_of(LANES);
    for panel in 0..tile.panels() {
        let (rows, next) = (tile.rows(panel, from), next.rows(panel, from));
        for (lane, row) in rows.into_iter().enumerate() {
            for d in (0..dim).step_by(LANES) {
                prefetch_rows(&next[lane..=lane], d);
                // SAFETY: `row` is the start of a head of `dim` values in a block that the
                // validation has found within `from`, and at most `dim - d` values are read from
                // `d` on. The store ends at most at `padded_dim` in the row of one of the 64
                // positions for which `to` has room. The set of `L` is available.
                unsafe {
                    let value = load_live::<L, F>(row.add(d / F::Raw::VALUES), dim - d);
                    value.store(to.add((panel * LANES + lane) * padded_dim + d));
                }
            }
        }
    }
}
