//! Reads a tile of keys and values through the block table and widens them to f32: keys turned, as the product
//! of scores wants them, unless they stand so; values as they stand.
#![allow(unsafe_code, reason = "lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use super::super::KvLayout;
use super::super::fetch::fetch_second;
use super::super::gemm::{self, Form, Panels};
use super::super::lanes::{LANES, Lanes};
use super::KvSlice;
use super::walk::{TurnedKeys, Walk};

/// An element type of the store.
trait Element {
    type Raw: Copy + Default;
    /// # Safety
    /// As [`Lanes::load`].
    unsafe fn load<L: Lanes>(from: *const Self::Raw) -> L;
}

struct F32;
struct Bf16;
struct F16;
struct I8;

impl Element for F32 {
    type Raw = f32;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(from) }
    }
}
impl Element for Bf16 {
    type Raw = u16;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_bf16(from) }
    }
}
impl Element for F16 {
    type Raw = u16;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(from) }
    }
}
impl Element for I8 {
    type Raw = i8;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const i8) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_i8(from.cast()) }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for the line of each row that begins with its value `from`, if one does.
#[inline(always)]
pub(super) fn fetch_line<T>(rows: &[*const T], from: usize) {
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
unsafe fn load_part<L: Lanes, E: Element>(from: *const E::Raw, live: usize) -> L {
    // SAFETY: the caller's promise.
    unsafe {
        if live >= LANES {
            return E::load(from);
        }
        let mut padded = [E::Raw::default(); LANES];
        std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), live);
        E::load(padded.as_ptr())
    }
}

/// As [`load_part`], for f32.
///
/// # Safety
/// As [`load_part`].
#[inline(always)]
pub(super) unsafe fn load_live<L: Lanes>(from: *const f32, live: usize) -> L {
    // SAFETY: the caller's promise.
    unsafe { load_part::<L, F32>(from, live) }
}

/// Calls a function with the element type of keys or values, their slice and scales.
macro_rules! by_element {
    ($slice:expr, $call:ident::<$lanes:ident>($($arg:expr),*)) => {
        match $slice {
            KvSlice::F32(from) => $call::<$lanes, F32>($($arg),*, from, None),
            KvSlice::Bf16(from) => $call::<$lanes, Bf16>($($arg),*, from, None),
            KvSlice::F16(from) => $call::<$lanes, F16>($($arg),*, from, None),
            KvSlice::Int8 { values, scales } => {
                $call::<$lanes, I8>($($arg),*, values, Some(scales))
            }
        }
    };
}

/// Loads keys, `[panel of 16 positions][head_dim][16]`; where there is no position, whatever. Meanwhile asks
/// for the keys of `ahead`.
///
/// # Safety
/// The check has seen the blocks; `to` has room for a tile; the set of `L` is available.
#[inline(always)]
pub(super) unsafe fn load_keys<L: Lanes>(walk: &Walk<'_>, ahead: &Walk<'_>, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match walk.args.key_layout {
            KvLayout::Rows => by_element!(walk.args.keys, turn::<L>(walk, ahead, to)),
            KvLayout::Turned { .. } => match walk.args.keys {
                KvSlice::F32(from) => widen::<L, gemm::F32>(walk, ahead, to, from, None),
                KvSlice::Bf16(from) => widen::<L, gemm::Bf16Pairs>(walk, ahead, to, from, None),
                KvSlice::F16(from) => widen::<L, gemm::F16>(walk, ahead, to, from, None),
                KvSlice::Int8 { values, scales } => {
                    widen::<L, gemm::I8>(walk, ahead, to, values, Some(scales));
                }
            },
        }
    }
}

#[inline(always)]
unsafe fn turn<L: Lanes, E: Element>(
    walk: &Walk<'_>,
    ahead: &Walk<'_>,
    to: *mut f32,
    from: &[E::Raw],
    scales: Option<&[f32]>,
) {
    let dim = walk.args.head_dim;
    for panel in 0..walk.panels() {
        let rows = walk.rows(panel, from);
        let ahead = ahead.rows(panel, from);
        let scales = scales.map(|scales| walk.scales(panel, scales));
        for d in (0..dim).step_by(LANES) {
            fetch_line(&ahead, d);
            // SAFETY: the caller's promise; the tile's memory is used within its size.
            unsafe {
                let mut square = [L::splat(0.0); LANES];
                for lane in 0..LANES {
                    square[lane] = load_part::<L, E>(rows[lane].add(d), dim - d);
                }
                L::transpose(&mut square);
                for (i, column) in square.into_iter().enumerate().take(dim - d) {
                    let column = match &scales {
                        Some(scales) => column.mul(L::load(scales.as_ptr())),
                        None => column,
                    };
                    column.store(to.add((panel * dim + d + i) * LANES));
                }
            }
        }
    }
}

/// Widens keys that stand turned.
#[inline(always)]
unsafe fn widen<L: Lanes, F: Form>(
    walk: &Walk<'_>,
    ahead: &Walk<'_>,
    to: *mut f32,
    from: &[F::Raw],
    scales: Option<&[f32]>,
) {
    let dim = walk.args.head_dim;
    let keys = TurnedKeys { now: walk.turned(from), ahead: ahead.turned(from) };
    for panel in 0..walk.panels() {
        let scales = scales.map(|scales| walk.scales(panel, scales));
        for d in 0..dim {
            keys.fetch::<1>(panel, d, keys.now[panel]);
        }
        // SAFETY: the caller's promise; the panel's memory is used within its size.
        unsafe {
            let to = to.add(panel * dim * LANES);
            F::widen::<L>(keys.now[panel], dim, to);
            if let Some(scales) = scales {
                for d in 0..dim {
                    let column = to.add(d * LANES);
                    L::load(column).mul(L::load(scales.as_ptr())).store(column);
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
    unsafe { by_element!(walk.args.values, copy::<L>(walk, ahead, to)) }
}

#[inline(always)]
unsafe fn copy<L: Lanes, E: Element>(
    walk: &Walk<'_>,
    ahead: &Walk<'_>,
    to: *mut f32,
    from: &[E::Raw],
    scales: Option<&[f32]>,
) {
    let dim = walk.args.head_dim;
    let padded_dim = dim.next_multiple_of(LANES);
    for panel in 0..walk.panels() {
        let rows = walk.rows(panel, from);
        let ahead = ahead.rows(panel, from);
        let scales = scales.map(|scales| walk.scales(panel, scales));
        for (lane, row) in rows.into_iter().enumerate() {
            for d in (0..dim).step_by(LANES) {
                fetch_line(&ahead[lane..=lane], d);
                // SAFETY: the caller's promise; the tile's memory is used within its size.
                unsafe {
                    let stored = load_part::<L, E>(row.add(d), dim - d);
                    let value = match scales {
                        Some(scales) => stored.mul(L::splat(scales[lane])),
                        None => stored,
                    };
                    value.store(to.add((panel * LANES + lane) * padded_dim + d));
                }
            }
        }
    }
}
