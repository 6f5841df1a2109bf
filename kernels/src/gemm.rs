//! The matrix product on lanes: forms of weights, and register tiles.
//!
//! Weights stand in panels of 16 output features: `[panel][inner][16]`. Activations are packed in
//! groups of rows: `[group][inner][rows of the group]`. A register tile keeps the sums of R rows
//! times P panels and walks the inner dimension once, in ascending order, with one addition chain
//! per output element. So neither R nor P, nor where a row stands, can change an element's bits.
#![allow(unsafe_code, reason = "register tiles work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

mod chunk;
mod pack;

#[cfg(target_arch = "x86_64")]
pub(super) use chunk::chunk_bf16_dots;
pub(super) use chunk::{ChunkArgs, chunk_bf16, chunk_f16, chunk_f32};
pub(super) use pack::{pack_group, pack_group_pairs};

use std::marker::PhantomData;

use super::fetch::fetch_near;
use super::lanes::{Kernel, LANES, Lanes, dispatch};

/// Bytes by which weights that come from memory are asked for ahead: as long as memory takes to answer.
const AHEAD: usize = 2048;

/// Where the panels of a product stand.
pub(super) trait Panels<Raw> {
    /// The first weight of panel `p`.
    fn at(&self, p: usize) -> *const Raw;
    /// Asks for what will be read some time after step `k` of panel `p`, which is at `now`, of a tile of P panels.
    fn fetch<const P: usize>(&self, p: usize, k: usize, now: *const Raw);
}

/// Panels that stand evenly spaced, in a near cache.
pub(super) struct Near<Raw> {
    pub first: *const Raw,
    /// Values from one to the next.
    pub step: usize,
}

/// Panels one after the other that come from memory: asked for [`AHEAD`] bytes before they are read.
struct Far<Raw> {
    first: *const Raw,
    /// Values of one, as many steps of 16 as its sums are long.
    len: usize,
}

/// How a panel's weights stand in memory.
pub(super) trait Form {
    type Raw: Copy + Default;
    /// Whether two successive weights of a feature stand side by side: `[inner / 2][16][2]`.
    const PAIRS: bool;
    /// Whether weights become f32, by [`Form::widen`], before they are multiplied.
    const WIDENS: bool;
    /// Writes `inner` steps of a panel as f32, `[inner][16]`. Only for forms that widen.
    ///
    /// # Safety
    /// The set of `L` is available; both are valid for so many steps.
    #[inline(always)]
    unsafe fn widen<L: Lanes>(from: *const Self::Raw, inner: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            if Self::PAIRS {
                for k in (0..inner).step_by(2) {
                    let (first, second) = Self::load_pairs::<L>(from.add(k * LANES));
                    first.store(to.add(k * LANES));
                    second.store(to.add((k + 1) * LANES));
                }
            } else {
                for k in 0..inner {
                    Self::load::<L>(from.add(k * LANES)).store(to.add(k * LANES));
                }
            }
        }
    }
    /// The 16 weights at `from`, one a feature. Unused for pairs.
    ///
    /// # Safety
    /// As [`Lanes::load`].
    unsafe fn load<L: Lanes>(from: *const Self::Raw) -> L;
    /// The 16 pairs at `from`: all firsts, all seconds. Unused for singles.
    ///
    /// # Safety
    /// As [`Lanes::load_bf16_pairs`].
    unsafe fn load_pairs<L: Lanes>(from: *const Self::Raw) -> (L, L);
    /// Runs `kernel` in a function of its own, compiled for the instruction set of `L` and for what the
    /// form needs beyond it.
    ///
    /// # Safety
    /// Both are available; the rest is as for the kernel.
    #[inline(always)]
    unsafe fn call<L: Lanes, K: Kernel>(kernel: K) {
        // SAFETY: the caller's promise.
        unsafe { L::call(kernel) }
    }
    /// Adds one step's products to a sum.
    ///
    /// # Safety
    /// The set of `L` is available.
    #[inline(always)]
    unsafe fn accumulate<L: Lanes>(weights: L, x: L, sum: L) -> L {
        // SAFETY: the caller's promise.
        unsafe { weights.mul_add(x, sum) }
    }
}

/// `[inner][16]` f32.
pub(super) struct F32;
/// `[inner][16]` f16.
pub(super) struct F16;
/// `[inner][16]` bf16.
pub(super) struct Bf16;
/// `[inner / 2][16][2]` bf16.
pub(super) struct Bf16Pairs;
/// `[inner][16]` signed bytes.
pub(super) struct I8;

/// As [`Bf16Pairs`], an f32's place holding a pair, for activations that stand in pairs as well.
#[cfg(target_arch = "x86_64")]
struct Bf16Dots;

#[cfg(target_arch = "x86_64")]
impl Form for Bf16Dots {
    type Raw = f32;
    const PAIRS: bool = false;
    const WIDENS: bool = false;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(from) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const f32) -> (L, L) {
        unreachable!("a pair is one step")
    }
    #[inline(always)]
    unsafe fn call<L: Lanes, K: Kernel>(kernel: K) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
        #[inline(never)]
        unsafe fn run<L: Lanes, K: Kernel>(kernel: K) {
            // SAFETY: the instruction sets are enabled.
            unsafe { kernel.run::<L>() }
        }
        // SAFETY: the caller's promise.
        unsafe { run::<L, K>(kernel) }
    }
    #[inline(always)]
    unsafe fn accumulate<L: Lanes>(weights: L, x: L, sum: L) -> L {
        // SAFETY: the caller's promise.
        unsafe { weights.dot_pairs(x, sum) }
    }
}

impl Form for F32 {
    type Raw = f32;
    const PAIRS: bool = false;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(from) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const f32) -> (L, L) {
        unreachable!("f32 weights stand alone")
    }
}

impl Form for F16 {
    type Raw = u16;
    const PAIRS: bool = false;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(from) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const u16) -> (L, L) {
        unreachable!("f16 weights stand alone")
    }
}

impl Form for Bf16 {
    type Raw = u16;
    const PAIRS: bool = false;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const u16) -> (L, L) {
        unreachable!("these weights stand alone")
    }
}

impl Form for I8 {
    type Raw = i8;
    const PAIRS: bool = false;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const i8) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_i8(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const i8) -> (L, L) {
        unreachable!("bytes stand alone")
    }
}

impl Form for Bf16Pairs {
    type Raw = u16;
    const PAIRS: bool = true;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(_: *const u16) -> L {
        unreachable!("bf16 weights stand in pairs")
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(from: *const u16) -> (L, L) {
        // SAFETY: the caller's promise.
        unsafe { L::load_bf16_pairs(from) }
    }
}

impl<Raw> Panels<Raw> for Near<Raw> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const Raw {
        self.first.wrapping_add(p * self.step)
    }
    #[inline(always)]
    fn fetch<const P: usize>(&self, _: usize, _: usize, _: *const Raw) {}
}

impl<Raw> Panels<Raw> for Far<Raw> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const Raw {
        self.first.wrapping_add(p * self.len)
    }
    /// In the same panel, or after its end in the one that is read next in its place.
    #[inline(always)]
    fn fetch<const P: usize>(&self, _: usize, k: usize, now: *const Raw) {
        let ahead = AHEAD / size_of::<Raw>();
        let ends = (k * LANES) + ahead >= self.len;
        fetch_near(now.wrapping_add(ahead + if ends { (P - 1) * self.len } else { 0 }));
    }
}

/// The operands of one register tile. Strides count values.
pub(super) struct TileArgs<B> {
    /// Length of the sums; even for pairs.
    pub inner: usize,
    /// Activation of row r at k: `a + k * a_inner + r * a_row`.
    pub a: *const f32,
    pub a_inner: usize,
    pub a_row: usize,
    /// Sixteen weights of panel p at k: `b.at(p) + k * b_inner`.
    pub b: B,
    pub b_inner: usize,
    /// Sixteen sums of row r and panel p: `c + r * c_row + 16 p`.
    pub c: *mut f32,
    pub c_row: usize,
    /// Rows to write; the tile's others are computed and dropped.
    pub rows: usize,
    /// Whether sums begin with what stands in `c`, or with zero.
    pub accumulate: bool,
}

/// One register tile of R rows and P panels.
///
/// # Safety
/// The set of `L` is available; `a` is readable for R rows, `b` for P panels from `first` on, over `inner` steps;
/// `c` is writable (readable too if `accumulate`) for `rows` rows of them.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "iterators would be compiled once for each shape")]
unsafe fn tile<L: Lanes, F: Form, B: Panels<F::Raw>, const R: usize, const P: usize>(
    args: &TileArgs<B>,
    first: usize,
) {
    // SAFETY: all reads and writes stay in what the caller promised.
    unsafe {
        let c = args.c.add(first * LANES);
        let mut sums = [[L::splat(0.0); P]; R];
        if args.accumulate {
            for r in 0..R {
                if r < args.rows {
                    for p in 0..P {
                        sums[r][p] = L::load(c.add(r * args.c_row + p * LANES));
                    }
                }
            }
        }
        let mut a = args.a;
        let mut b = [std::ptr::null::<F::Raw>(); P];
        for p in 0..P {
            b[p] = args.b.at(first + p);
        }
        let mut k = 0;
        while k < args.inner {
            for p in 0..P {
                args.b.fetch::<P>(first + p, k, b[p]);
            }
            let mut weights = [L::splat(0.0); P];
            let mut seconds = [L::splat(0.0); P];
            for p in 0..P {
                if F::PAIRS {
                    (weights[p], seconds[p]) = F::load_pairs(b[p]);
                } else {
                    weights[p] = F::load(b[p]);
                }
            }
            for r in 0..R {
                let x = L::splat(*a.add(r * args.a_row));
                for p in 0..P {
                    sums[r][p] = F::accumulate(weights[p], x, sums[r][p]);
                }
            }
            a = a.add(args.a_inner);
            if F::PAIRS {
                for r in 0..R {
                    let x = L::splat(*a.add(r * args.a_row));
                    for p in 0..P {
                        sums[r][p] = F::accumulate(seconds[p], x, sums[r][p]);
                    }
                }
                a = a.add(args.a_inner);
            }
            let steps = if F::PAIRS { 2 } else { 1 };
            for p in 0..P {
                b[p] = b[p].add(steps * args.b_inner);
            }
            k += steps;
        }
        for r in 0..R {
            if r < args.rows {
                for p in 0..P {
                    sums[r][p].store(c.add(r * args.c_row + p * LANES));
                }
            }
        }
    }
}

/// A row of tiles: `panels` panels for at most R rows, as many panels at a time as registers allow.
///
/// # Safety
/// As [`tile`], for `panels` panels from the first.
#[inline(always)]
unsafe fn tile_row<L: Lanes, F: Form, B: Panels<F::Raw>, const R: usize>(
    args: &TileArgs<B>,
    panels: usize,
) {
    let mut first = 0;
    while first < panels {
        let left = panels - first;
        // SAFETY: at most the panels that are left are touched.
        unsafe {
            first += if const { R * 4 + 4 < L::REGISTERS } && left >= 4 {
                tile::<L, F, B, R, 4>(args, first);
                4
            } else if const { R * 2 + 2 < L::REGISTERS } && left >= 2 {
                tile::<L, F, B, R, 2>(args, first);
                2
            } else {
                tile::<L, F, B, R, 1>(args, first);
                1
            };
        }
    }
}

/// Tiles for a group of rows, as [`group_rows`] made it.
///
/// # Safety
/// As [`tile`], for `group` rows (all readable) and `panels` panels.
#[inline(always)]
pub(super) unsafe fn tile_group<L: Lanes, F: Form, B: Panels<F::Raw>>(
    args: &TileArgs<B>,
    group: usize,
    panels: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { F::call::<L, _>(TileGroup::<F, B> { args, group, panels, form: PhantomData }) }
}

struct TileGroup<'a, F, B> {
    args: &'a TileArgs<B>,
    group: usize,
    panels: usize,
    form: PhantomData<F>,
}

impl<F: Form, B: Panels<F::Raw>> Kernel for TileGroup<'_, F, B> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let TileGroup { args, group, panels, .. } = self;
        // SAFETY: the caller's promise. Arms beyond the set's largest group fold away.
        unsafe {
            match group {
                1 => tile_row::<L, F, B, 1>(args, panels),
                2 => tile_row::<L, F, B, 2>(args, panels),
                4 => tile_row::<L, F, B, 4>(args, panels),
                6 if const { L::GROUP_MAX >= 6 } => tile_row::<L, F, B, 6>(args, panels),
                8 if const { L::GROUP_MAX >= 8 } => tile_row::<L, F, B, 8>(args, panels),
                12 if const { L::GROUP_MAX >= 12 } => tile_row::<L, F, B, 12>(args, panels),
                _ => unreachable!("no group of {group} rows"),
            }
        }
    }
}

/// Rows of the next group when `left` are left: the largest, or the smallest that takes them all.
#[inline]
pub(super) fn group_rows(left: usize, group_max: usize) -> usize {
    [1, 2, 4, 6, 8].into_iter().find(|&rows| rows >= left).map_or(group_max, |r| r.min(group_max))
}

/// Rows of the largest group on the path.
pub(super) fn group_max(path: super::Path) -> usize {
    #[inline(always)]
    unsafe fn of<L: Lanes>() -> usize {
        L::GROUP_MAX
    }
    dispatch! {
        /// # Safety
        /// None.
        unsafe fn on() -> usize = of
    }
    // SAFETY: reads a constant.
    unsafe { on(path) }
}
