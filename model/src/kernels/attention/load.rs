//! Reads a tile of keys and values through the block table, widened to f32: keys transposed, as
//! the product of scores wants them, values as they stand.
#![allow(unsafe_code, reason = "lanes work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use std::ops::Range;

use super::super::lanes::{LANES, Lanes};
use super::plan::Task;
use super::{AttentionArgs, KvSlice};

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

/// Heads of keys or values, each with a scale or all without.
struct Heads<'a, E: Element> {
    values: &'a [E::Raw],
    scales: Option<&'a [f32]>,
    head_dim: usize,
}

impl<E: Element> Heads<'_, E> {
    /// Sixteen values of a head from `d` on; zeroes beyond its end.
    ///
    /// # Safety
    /// There is such a head, `d` lies in it, and the set of `L` is available.
    #[inline(always)]
    unsafe fn load<L: Lanes>(&self, head: usize, d: usize) -> L {
        let (at, live) = (head * self.head_dim + d, self.head_dim - d);
        // SAFETY: the caller's promise; a full vector is read only where the head has it.
        unsafe {
            let stored = if live >= LANES {
                E::load::<L>(self.values.as_ptr().add(at))
            } else {
                let mut padded = [E::Raw::default(); LANES];
                padded[..live].copy_from_slice(&self.values[at..at + live]);
                E::load(padded.as_ptr())
            };
            match self.scales {
                Some(scales) => stored.mul(L::splat(scales[head])),
                None => stored,
            }
        }
    }
}

/// Loads keys, `[panel of 16 positions][head_dim][16]`, and values, `[position][padded_dim]`, of a head and
/// the positions `seen` of the tile that begins at `begin`; zeroes in the rest of the last panel
/// and before `seen`.
///
/// # Safety
/// The check has seen the blocks of `seen`; `keys` and `values` have room for a tile; the set of
/// `L` is available.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "what to read, and where to")]
pub(super) unsafe fn load_tile<L: Lanes>(
    args: &AttentionArgs<'_>,
    task: &Task,
    kv_head: usize,
    begin: usize,
    seen: Range<usize>,
    keys: *mut f32,
    values: *mut f32,
) {
    let dim = args.head_dim;
    let plain = |head_dim| (None, None, head_dim);
    macro_rules! load {
        ($element:ty, $keys:expr, $values:expr, $scales:expr) => {{
            let (key_scales, value_scales, head_dim) = $scales;
            let from = (
                Heads::<$element> { values: $keys, scales: key_scales, head_dim },
                Heads::<$element> { values: $values, scales: value_scales, head_dim },
            );
            // SAFETY: the caller's promise.
            unsafe {
                load_heads::<L, $element>(args, task, kv_head, begin, seen, &from, keys, values)
            }
        }};
    }
    match (args.keys, args.values) {
        (KvSlice::F32(k), KvSlice::F32(v)) => load!(F32, k, v, plain(dim)),
        (KvSlice::Bf16(k), KvSlice::Bf16(v)) => load!(Bf16, k, v, plain(dim)),
        (KvSlice::F16(k), KvSlice::F16(v)) => load!(F16, k, v, plain(dim)),
        (
            KvSlice::Int8 { values: k, scales: key_scales },
            KvSlice::Int8 { values: v, scales: value_scales },
        ) => load!(I8, k, v, (Some(key_scales), Some(value_scales), dim)),
        _ => unreachable!("the check has found keys and values of one type"),
    }
}

/// As [`load_tile`].
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "as above")]
unsafe fn load_heads<L: Lanes, E: Element>(
    args: &AttentionArgs<'_>,
    task: &Task,
    kv_head: usize,
    begin: usize,
    seen: Range<usize>,
    (from_keys, from_values): &(Heads<'_, E>, Heads<'_, E>),
    keys: *mut f32,
    values: *mut f32,
) {
    let dim = args.head_dim;
    let padded_dim = dim.next_multiple_of(LANES);
    for panel in 0..(seen.end - begin).div_ceil(LANES) {
        let mut heads = [None; LANES];
        for (lane, head) in heads.iter_mut().enumerate() {
            let position = begin + panel * LANES + lane;
            *head = seen.contains(&position).then(|| args.stored_head(task, kv_head, position));
        }
        for d in (0..dim).step_by(LANES) {
            // SAFETY: the caller's promise; the tile's memory is used within its size.
            unsafe {
                let mut square = [L::splat(0.0); LANES];
                for (lane, head) in heads.iter().enumerate() {
                    let mut value = L::splat(0.0);
                    if let Some(head) = *head {
                        square[lane] = from_keys.load(head, d);
                        value = from_values.load(head, d);
                    }
                    value.store(values.add((panel * LANES + lane) * padded_dim + d));
                }
                L::transpose(&mut square);
                for (i, column) in square.iter().enumerate().take(dim - d) {
                    column.store(keys.add((panel * dim + d + i) * LANES));
                }
            }
        }
    }
}
