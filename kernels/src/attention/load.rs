//! Reads a tile of keys and values through the block table and widens them to f32: keys turned, as the product
//! of scores wants them, unless they stand so; values as they stand.
#![allow(unsafe_code, reason = "lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use super::super::KvLayout;
use super::super::fetch::{LINE, fetch_second};
use super::super::gemm::{Bf16, Bf16Pairs, F16, F32, Form, I8, Panels};
use super::super::lanes::{LANES, Lanes};
use super::KvSlice;
use super::walk::{TurnedKeys, Walk};

/// Asks for the line of each row that begins with its value `from`, if one does.
#[inline(always)]
fn fetch_line<T>(rows: &[*const T], from: usize) {
    if (from * size_of::<T>()).is_multiple_of(LINE) {
        for row in rows {
            fetch_second(row.wrapping_add(from));
        }
    }
}

/// The sixteen values at `from`, of which there are `live`; zeroes beyond.
///
/// # Safety
/// There are `live` values at `from`; the set of `L` is available.
#[inline(always)]
pub(super) unsafe fn load_live<L: Lanes, F: Form>(from: *const F::Raw, live: usize) -> L {
    // SAFETY: the caller's promise.
    unsafe {
        if live >= LANES {
            return F::load(from);
        }
        let mut padded = [F::Raw::default(); LANES];
        std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), live);
        F::load(padded.as_ptr())
    }
}

/// Loads keys, `[panel of 16 positions][head_dim][16]`; where there is no position, whatever. Meanwhile asks
/// for the keys of `ahead`.
///
/// # Safety
/// The check has seen the blocks; `to` has room for a tile; the set of `L` is available.
#[inline(always)]
pub(super) unsafe fn load_keys<L: Lanes>(walk: &Walk<'_>, ahead: &Walk<'_>, to: *mut f32) {
    let turned = walk.args.key_layout != KvLayout::Rows;
    // SAFETY: the caller's promise.
    unsafe {
        match walk.args.keys {
            KvSlice::F32(from) if turned => widen::<L, F32>(walk, ahead, to, from),
            KvSlice::F32(from) => turn::<L, F32>(walk, ahead, to, from),
            KvSlice::Bf16(from) if turned => widen::<L, Bf16Pairs>(walk, ahead, to, from),
            KvSlice::Bf16(from) => turn::<L, Bf16>(walk, ahead, to, from),
            KvSlice::F16(from) if turned => widen::<L, F16>(walk, ahead, to, from),
            KvSlice::F16(from) => turn::<L, F16>(walk, ahead, to, from),
            KvSlice::Int8 { values, .. } if turned => widen::<L, I8>(walk, ahead, to, values),
            KvSlice::Int8 { values, .. } => turn::<L, I8>(walk, ahead, to, values),
        }
    }
}

/// Keys that stand turned.
#[inline(always)]
unsafe fn widen<L: Lanes, F: Form>(
    walk: &Walk<'_>,
    ahead: &Walk<'_>,
    to: *mut f32,
    from: &[F::Raw],
) {
    let dim = walk.args.head_dim;
    let keys = TurnedKeys { now: walk.turned(from), ahead: ahead.turned(from) };
    for panel in 0..walk.panels() {
        let now = keys.at(panel);
        for d in 0..dim {
            keys.prefetch::<1>(panel, d, now);
        }
        // SAFETY: the caller's promise; the tile's memory is used within its size.
        unsafe { F::widen::<L>(now, dim, to.add(panel * dim * LANES)) };
    }
}

/// Keys that stand as rows.
#[inline(always)]
unsafe fn turn<L: Lanes, F: Form>(
    walk: &Walk<'_>,
    ahead: &Walk<'_>,
    to: *mut f32,
    from: &[F::Raw],
) {
    let dim = walk.args.head_dim;
    for panel in 0..walk.panels() {
        let (rows, ahead) = (walk.rows(panel, from), ahead.rows(panel, from));
        for d in (0..dim).step_by(LANES) {
            fetch_line(&ahead, d);
            // SAFETY: the caller's promise; the tile's memory is used within its size.
            unsafe {
                let mut square = [L::splat(0.0); LANES];
                for lane in 0..LANES {
                    square[lane] = load_live::<L, F>(rows[lane].add(d), dim - d);
                }
                L::transpose(&mut square);
                for (i, column) in square.into_iter().enumerate().take(dim - d) {
                    column.store(to.add((panel * dim + d + i) * LANES));
                }
            }
        }
    }
}

/// Loads values, `[position][padded_dim]`; where there is no position, those of another one. Meanwhile asks for
/// the values of `ahead`.
///
/// # Safety
/// As [`load_keys`].
#[inline(always)]
pub(super) unsafe fn load_values<L: Lanes>(walk: &Walk<'_>, ahead: &Walk<'_>, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match walk.args.values {
            KvSlice::F32(from) => copy::<L, F32>(walk, ahead, to, from),
            KvSlice::Bf16(from) => copy::<L, Bf16>(walk, ahead, to, from),
            KvSlice::F16(from) => copy::<L, F16>(walk, ahead, to, from),
            KvSlice::Int8 { values, .. } => copy::<L, I8>(walk, ahead, to, values),
        }
    }
}

#[inline(always)]
unsafe fn copy<L: Lanes, F: Form>(
    walk: &Walk<'_>,
    ahead: &Walk<'_>,
    to: *mut f32,
    from: &[F::Raw],
) {
    let dim = walk.args.head_dim;
    let padded_dim = dim.next_multiple_of(LANES);
    for panel in 0..walk.panels() {
        let (rows, ahead) = (walk.rows(panel, from), ahead.rows(panel, from));
        for (lane, row) in rows.into_iter().enumerate() {
            for d in (0..dim).step_by(LANES) {
                fetch_line(&ahead[lane..=lane], d);
                // SAFETY: the caller's promise; the tile's memory is used within its size.
                unsafe {
                    let value = load_live::<L, F>(row.add(d), dim - d);
                    value.store(to.add((panel * LANES + lane) * padded_dim + d));
                }
            }
        }
    }
}
