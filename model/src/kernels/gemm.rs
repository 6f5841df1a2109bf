//! The matrix product on lanes: register tiles, and the loop over a chunk of panels.
//!
//! Weights stand in panels of 16 output features: `[panel][inner][16]`. Activations are packed in
//! groups of rows: `[group][inner][rows of the group]`. A register tile keeps the sums of R rows
//! times P panels and walks the inner dimension once, in ascending order, with one addition chain
//! per output element. So neither R nor P, nor where a row stands, can change an element's bits.
#![allow(unsafe_code, reason = "register tiles work on raw pointers")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use super::lanes::{LANES, Lanes, dispatch};
use super::quant;
use crate::tensor_type::TensorType;

/// How a panel's weights stand in memory.
pub(super) trait Form {
    type Raw;
    /// Whether two successive weights of a feature stand side by side: `[inner / 2][16][2]`.
    const PAIRS: bool;
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
/// `[inner / 2][16][2]` bf16.
pub(super) struct Bf16Pairs;

/// As [`Bf16Pairs`], an f32's place holding a pair, for activations that stand in pairs as well.
struct Bf16Dots;

impl Form for Bf16Dots {
    type Raw = f32;
    const PAIRS: bool = false;
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
    unsafe fn accumulate<L: Lanes>(weights: L, x: L, sum: L) -> L {
        // SAFETY: the caller's promise.
        unsafe { weights.dot_pairs(x, sum) }
    }
}

impl Form for F32 {
    type Raw = f32;
    const PAIRS: bool = false;
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

impl Form for Bf16Pairs {
    type Raw = u16;
    const PAIRS: bool = true;
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

/// The operands of one register tile. Strides count values.
pub(super) struct TileArgs<Raw> {
    /// Length of the sums; even for pairs.
    pub inner: usize,
    /// Activation of row r at k: `a + k * a_inner + r * a_row`.
    pub a: *const f32,
    pub a_inner: usize,
    pub a_row: usize,
    /// Sixteen weights of panel p at k: `b + p * b_panel + k * b_inner`.
    pub b: *const Raw,
    pub b_inner: usize,
    pub b_panel: usize,
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
/// The set of `L` is available; `a` is readable for R rows, `b` for P panels, over `inner` steps;
/// `c` is writable (readable too if `accumulate`) for `rows` rows of P panels.
#[inline(always)]
pub(super) unsafe fn tile<L: Lanes, F: Form, const R: usize, const P: usize>(
    args: &TileArgs<F::Raw>,
) {
    // SAFETY: all reads and writes stay in what the caller promised.
    unsafe {
        let mut sums = [[L::splat(0.0); P]; R];
        if args.accumulate {
            for (r, row) in sums.iter_mut().enumerate() {
                if r < args.rows {
                    for (p, sum) in row.iter_mut().enumerate() {
                        *sum = L::load(args.c.add(r * args.c_row + p * LANES));
                    }
                }
            }
        }
        let (mut a, mut b) = (args.a, args.b);
        let mut k = 0;
        while k < args.inner {
            if F::PAIRS {
                let mut firsts = [L::splat(0.0); P];
                let mut seconds = [L::splat(0.0); P];
                for p in 0..P {
                    (firsts[p], seconds[p]) = F::load_pairs(b.add(p * args.b_panel));
                }
                for (r, row) in sums.iter_mut().enumerate() {
                    let x = L::splat(*a.add(r * args.a_row));
                    for (sum, weight) in row.iter_mut().zip(firsts) {
                        *sum = weight.mul_add(x, *sum);
                    }
                }
                a = a.add(args.a_inner);
                for (r, row) in sums.iter_mut().enumerate() {
                    let x = L::splat(*a.add(r * args.a_row));
                    for (sum, weight) in row.iter_mut().zip(seconds) {
                        *sum = weight.mul_add(x, *sum);
                    }
                }
                a = a.add(args.a_inner);
                b = b.add(2 * args.b_inner);
                k += 2;
            } else {
                let mut weights = [L::splat(0.0); P];
                for (p, weight) in weights.iter_mut().enumerate() {
                    *weight = F::load(b.add(p * args.b_panel));
                }
                for (r, row) in sums.iter_mut().enumerate() {
                    let x = L::splat(*a.add(r * args.a_row));
                    for (sum, weight) in row.iter_mut().zip(weights) {
                        *sum = F::accumulate(weight, x, *sum);
                    }
                }
                a = a.add(args.a_inner);
                b = b.add(args.b_inner);
                k += 1;
            }
        }
        for (r, row) in sums.iter().enumerate() {
            if r < args.rows {
                for (p, sum) in row.iter().enumerate() {
                    sum.store(args.c.add(r * args.c_row + p * LANES));
                }
            }
        }
    }
}

/// A row of tiles: `panels` panels for at most R rows, as many panels at a time as registers allow.
///
/// # Safety
/// As [`tile`], for `panels` panels.
#[inline(always)]
unsafe fn tile_row<L: Lanes, F: Form, const R: usize>(
    mut args: TileArgs<F::Raw>,
    mut panels: usize,
) {
    let fits = |p: usize| R * p + p < L::REGISTERS;
    while panels > 0 {
        // SAFETY: at most `panels` panels are touched and then left behind.
        unsafe {
            let done = if fits(4) && panels >= 4 {
                tile::<L, F, R, 4>(&args);
                4
            } else if fits(2) && panels >= 2 {
                tile::<L, F, R, 2>(&args);
                2
            } else {
                tile::<L, F, R, 1>(&args);
                1
            };
            panels -= done;
            args.b = args.b.add(done * args.b_panel);
            args.c = args.c.add(done * LANES);
        }
    }
}

/// Tiles for a group of rows, as [`group_rows`] made it.
///
/// # Safety
/// As [`tile`], for `group` rows (all readable) and `panels` panels.
#[inline(always)]
pub(super) unsafe fn tile_group<L: Lanes, F: Form>(
    args: TileArgs<F::Raw>,
    group: usize,
    panels: usize,
) {
    // SAFETY: the caller's promise. Arms beyond the set's largest group fold away.
    unsafe {
        match group {
            1 => tile_row::<L, F, 1>(args, panels),
            2 => tile_row::<L, F, 2>(args, panels),
            4 => tile_row::<L, F, 4>(args, panels),
            6 if L::GROUP_MAX >= 6 => tile_row::<L, F, 6>(args, panels),
            8 if L::GROUP_MAX >= 8 => tile_row::<L, F, 8>(args, panels),
            12 if L::GROUP_MAX >= 12 => tile_row::<L, F, 12>(args, panels),
            _ => unreachable!("no group of {group} rows"),
        }
    }
}

/// Rows of the next group when `left` are left: the largest, or the smallest that takes them all.
#[inline]
pub(super) fn group_rows(left: usize, group_max: usize) -> usize {
    [1, 2, 4, 6, 8].into_iter().find(|&rows| rows >= left).map_or(group_max, |r| r.min(group_max))
}

/// Packed activations, padded to whole groups, needed for `rows` rows.
pub(super) fn packed_rows(rows: usize, group_max: usize) -> usize {
    let full = rows / group_max * group_max;
    if full == rows { rows } else { full + group_rows(rows - full, group_max) }
}

/// Packs group `index` of `x`: `[rows, inner]` into `[padded_inner][rows of the group]`, zeroes where
/// there is no row or column.
pub(super) fn pack_group(
    x: &[f32],
    inner: usize,
    padded_inner: usize,
    first_row: usize,
    group: usize,
    packed: &mut [f32],
) {
    let rows = x.len() / inner;
    debug_assert_eq!(packed.len(), group * padded_inner);
    let live = group.min(rows - first_row);
    if live < group || padded_inner > inner {
        packed.fill(0.0);
    }
    // By short runs of columns, so that the lines being filled stay in the nearest cache.
    for from in (0..inner).step_by(64) {
        let to = inner.min(from + 64);
        for row in 0..live {
            let start = (first_row + row) * inner;
            for (k, value) in (from..to).zip(&x[start + from..start + to]) {
                packed[k * group + row] = *value;
            }
        }
    }
}

/// As [`pack_group`], rounded to bf16: `[padded_inner / 2][rows of the group]` pairs.
pub(super) fn pack_group_pairs(
    x: &[f32],
    inner: usize,
    first_row: usize,
    group: usize,
    packed: &mut [f32],
) {
    let live = group.min(x.len() / inner - first_row);
    packed.fill(0.0);
    for row in 0..live {
        let values = x[(first_row + row) * inner..][..inner].chunks(2);
        for (k, pair) in values.enumerate() {
            let second = pair.get(1).copied().unwrap_or(0.0);
            packed[k * group + row] = pair_bits(pair[0], second);
        }
    }
}

/// A task: all rows of some groups times a chunk of panels.
pub(super) struct ChunkArgs<Raw> {
    /// Packed activations of the first group.
    pub packed: *const f32,
    pub rows: usize,
    pub padded_inner: usize,
    /// The chunk's first panel.
    pub panels: *const Raw,
    pub panel_count: usize,
    /// Where the first row's sum for the chunk's first feature goes.
    pub out: *mut f32,
    /// Values between two rows of `out`.
    pub out_features: usize,
    /// Features of the chunk; less than 16 a panel if the last one is not full.
    pub features: usize,
}

/// # Safety
/// The set of `L` is available; `packed` holds [`packed_rows`] rows, `panels` the panels, and `out`
/// takes `features` values in each of `rows` rows, touched by nobody else.
#[inline(always)]
unsafe fn chunk<L: Lanes, F: Form>(args: &ChunkArgs<F::Raw>) {
    let full_panels = args.features / LANES;
    // Panels whose weights stay near while all rows pass by.
    let near = if args.rows > 8 { 2 } else { 4 };
    let mut panel = 0;
    while panel < args.panel_count {
        let full = full_panels > panel;
        let count = if full { near.min(full_panels - panel) } else { 1 };
        let mut row = 0;
        while row < args.rows {
            let group = group_rows(args.rows - row, L::GROUP_MAX);
            let rows = group.min(args.rows - row);
            // The last panel's sums beyond the features must not be written to `out`.
            let mut spill = [0.0_f32; 12 * LANES];
            // SAFETY: the group's activations, the panels' weights and the sums' places are in
            // what the caller promised; a panel that is not full goes to `spill`.
            unsafe {
                let out = args.out.add(row * args.out_features + panel * LANES);
                let panel_len = args.padded_inner * LANES;
                let tile = TileArgs {
                    inner: args.padded_inner,
                    a: args.packed.add(row * args.padded_inner),
                    a_inner: group,
                    a_row: 1,
                    b: args.panels.add(panel * panel_len),
                    b_inner: LANES,
                    b_panel: panel_len,
                    c: if full { out } else { spill.as_mut_ptr() },
                    c_row: if full { args.out_features } else { LANES },
                    rows,
                    accumulate: false,
                };
                tile_group::<L, F>(tile, group, count);
                if !full {
                    for r in 0..rows {
                        let from = spill.as_ptr().add(r * LANES);
                        let live = args.features - panel * LANES;
                        std::ptr::copy_nonoverlapping(from, out.add(r * args.out_features), live);
                    }
                }
            }
            row += group;
        }
        panel += count;
    }
}

#[inline(always)]
unsafe fn chunk_f32_lanes<L: Lanes>(args: &ChunkArgs<f32>) {
    // SAFETY: the caller's promise.
    unsafe { chunk::<L, F32>(args) }
}
dispatch! {
    /// # Safety
    /// The pointers of `args` are valid for its sizes.
    pub(super) unsafe fn chunk_f32(args: &ChunkArgs<f32>) = chunk_f32_lanes
}

#[inline(always)]
unsafe fn chunk_f16_lanes<L: Lanes>(args: &ChunkArgs<u16>) {
    // SAFETY: the caller's promise.
    unsafe { chunk::<L, F16>(args) }
}
dispatch! {
    /// # Safety
    /// The pointers of `args` are valid for its sizes.
    pub(super) unsafe fn chunk_f16(args: &ChunkArgs<u16>) = chunk_f16_lanes
}

#[inline(always)]
unsafe fn chunk_bf16_lanes<L: Lanes>(args: &ChunkArgs<u16>) {
    // SAFETY: the caller's promise.
    unsafe { chunk::<L, Bf16Pairs>(args) }
}
dispatch! {
    /// # Safety
    /// The pointers of `args` are valid for its sizes.
    pub(super) unsafe fn chunk_bf16(args: &ChunkArgs<u16>) = chunk_bf16_lanes
}

/// As [`chunk_bf16`] with activations in bf16: all sizes along the inner dimension, and all places
/// of values, count pairs.
///
/// # Safety
/// AVX-512 BF16 is available; the pointers of `args` are valid for its sizes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn chunk_bf16_dots(args: &ChunkArgs<f32>) {
    // SAFETY: the caller's promise.
    unsafe { chunk::<super::lanes::Avx512, Bf16Dots>(args) }
}

/// Rounds a pair of activations to bf16, in the place of an f32.
pub(super) fn pair_bits(first: f32, second: f32) -> f32 {
    let bits = |value| u32::from(half::bf16::from_f32(value).to_bits());
    f32::from_bits(bits(first) | bits(second) << 16)
}

/// A task whose weights are blocks: a part of a few panels at a time is dequantised next to the
/// registers, and all rows pass by. `args.panels` are packed as [`quant`] says; `spare` takes 16
/// sums a row where the chunk's last panel is not full.
#[inline(always)]
unsafe fn chunk_quantised_lanes<L: Lanes>(
    args: &ChunkArgs<u8>,
    dtype: TensorType,
    spare: *mut f32,
) {
    const NEAR: usize = 4;
    const PART_LEN: usize = quant::PART * LANES;
    let (block_len, block_bytes) = (dtype.block_len(), dtype.block_bytes());
    let panel_bytes = args.padded_inner / block_len * block_bytes * LANES;
    let full_panels = args.features / LANES;
    let mut weights = [0.0_f32; NEAR * PART_LEN];
    let mut panel = 0;
    while panel < args.panel_count {
        let full = full_panels > panel;
        let count = if full { NEAR.min(full_panels - panel) } else { 1 };
        for from in (0..args.padded_inner).step_by(quant::PART) {
            let (block, part) = (from / block_len, from % block_len / quant::PART);
            // SAFETY: blocks, activations and sums are in what the caller promised.
            unsafe {
                for near in 0..count {
                    let block = block * block_bytes * LANES + (panel + near) * panel_bytes;
                    let to = weights.as_mut_ptr().add(near * PART_LEN);
                    quant::part::<L>(dtype, args.panels.add(block), part, to);
                }
                let mut row = 0;
                while row < args.rows {
                    let group = group_rows(args.rows - row, L::GROUP_MAX);
                    let out = args.out.add(row * args.out_features + panel * LANES);
                    let tile = TileArgs {
                        inner: quant::PART,
                        a: args.packed.add(row * args.padded_inner + from * group),
                        a_inner: group,
                        a_row: 1,
                        b: weights.as_ptr(),
                        b_inner: LANES,
                        b_panel: PART_LEN,
                        c: if full { out } else { spare.add(row * LANES) },
                        c_row: if full { args.out_features } else { LANES },
                        rows: group.min(args.rows - row),
                        accumulate: from > 0,
                    };
                    tile_group::<L, F32>(tile, group, count);
                    row += group;
                }
            }
        }
        if !full {
            let live = args.features - panel * LANES;
            for row in 0..args.rows {
                // SAFETY: as above.
                unsafe {
                    let to = args.out.add(row * args.out_features + panel * LANES);
                    std::ptr::copy_nonoverlapping(spare.add(row * LANES), to, live);
                }
            }
        }
        panel += count;
    }
}
dispatch! {
    /// # Safety
    /// The pointers of `args` are valid for its sizes; `spare` takes 16 values a row.
    pub(super) unsafe fn chunk_quantised(
        args: &ChunkArgs<u8>, dtype: TensorType, spare: *mut f32,
    ) = chunk_quantised_lanes
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
