//! The product of a chunk of panels with all rows of a task, on register tiles.
#![allow(unsafe_code, reason = "walks packed weights and activations by pointer")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

#[cfg(target_arch = "x86_64")]
use super::Bf16Dots;
use super::{Bf16Pairs, F16, F32, Far, Form, Near, TileArgs, group_rows, tile_group};
use crate::lanes::{LANES, Lanes, dispatch};

/// A task: all rows of some groups times a chunk of panels.
pub(crate) struct ChunkArgs<Raw> {
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

/// Rows from which weights are widened once for all of them, and the inner dimension is blocked.
const BLOCKED_ROWS: usize = 48;
/// Steps of the inner dimension in a block: two panels of it, widened, and the activations of a
/// group stay in the nearest cache.
const BLOCK: usize = 192;
/// Panels that pass by all rows together.
const NEAR: usize = 2;

/// # Safety
/// The set of `L` is available; `packed` holds whole groups, `panels` the panels, and `out` takes
/// `features` values in each of `rows` rows, touched by nobody else.
#[inline(always)]
unsafe fn chunk<L: Lanes, F: Form>(args: &ChunkArgs<F::Raw>) {
    let full_panels = args.features / LANES;
    // SAFETY: the caller's promise.
    unsafe {
        let blocked =
            if F::WIDENS && args.rows >= BLOCKED_ROWS { blocked_panels::<L, F>(args) } else { 0 };
        // Panels whose weights stay near while all rows pass by.
        let near = if args.rows > 8 { NEAR } else { 4 };
        let mut panel = blocked;
        while panel < args.panel_count {
            let full = full_panels > panel;
            let count = if full { near.min(full_panels - panel) } else { 1 };
            panels::<L, F>(args, panel, count, full);
            panel += count;
        }
    }
}

/// Some panels times all rows; the last panel may be less than full.
///
/// # Safety
/// As [`chunk`].
#[inline(always)]
unsafe fn panels<L: Lanes, F: Form>(
    args: &ChunkArgs<F::Raw>,
    panel: usize,
    count: usize,
    full: bool,
) {
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
                b: Far { first: args.panels.add(panel * panel_len), len: panel_len },
                b_inner: LANES,
                c: if full { out } else { spill.as_mut_ptr() },
                c_row: if full { args.out_features } else { LANES },
                rows,
                accumulate: false,
            };
            tile_group::<L, F, _>(&tile, group, count);
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
}

/// All pairs of full panels times all rows, a block of the inner dimension after the other: its weights
/// are widened once, and sums wait in `out` meanwhile, which loses nothing. Returns how many panels
/// that were.
///
/// # Safety
/// As [`chunk`].
#[inline(always)]
unsafe fn blocked_panels<L: Lanes, F: Form>(args: &ChunkArgs<F::Raw>) -> usize {
    let paired = args.features / LANES / NEAR * NEAR;
    let panel_len = args.padded_inner * LANES;
    let mut widened = Widened([0.0; NEAR * BLOCK * LANES]);
    let widened = widened.0.as_mut_ptr();
    for from in (0..args.padded_inner).step_by(BLOCK) {
        let inner = BLOCK.min(args.padded_inner - from);
        for panel in (0..paired).step_by(NEAR) {
            // SAFETY: the panels' weights from `from` on, as the caller promised, and room for a block
            // of them; then the group's activations and the sums' places.
            unsafe {
                for p in 0..NEAR {
                    let weights = args.panels.add((panel + p) * panel_len + from * LANES);
                    F::widen::<L>(weights, inner, widened.add(p * BLOCK * LANES));
                }
                let mut row = 0;
                while row < args.rows {
                    let group = group_rows(args.rows - row, L::GROUP_MAX);
                    let tile = TileArgs {
                        inner,
                        a: args.packed.add(row * args.padded_inner + from * group),
                        a_inner: group,
                        a_row: 1,
                        b: Near { first: widened.cast_const(), step: BLOCK * LANES },
                        b_inner: LANES,
                        c: args.out.add(row * args.out_features + panel * LANES),
                        c_row: args.out_features,
                        rows: group.min(args.rows - row),
                        accumulate: from > 0,
                    };
                    tile_group::<L, F32, _>(&tile, group, NEAR);
                    row += group;
                }
            }
        }
    }
    paired
}

/// Widened weights of a block.
#[repr(align(64))]
struct Widened([f32; NEAR * BLOCK * LANES]);

#[inline(always)]
unsafe fn chunk_f32_lanes<L: Lanes>(args: &ChunkArgs<f32>) {
    // SAFETY: the caller's promise.
    unsafe { chunk::<L, F32>(args) }
}
dispatch! {
    /// # Safety
    /// The pointers of `args` are valid for its sizes.
    pub(crate) unsafe fn chunk_f32(args: &ChunkArgs<f32>) = chunk_f32_lanes
}

#[inline(always)]
unsafe fn chunk_f16_lanes<L: Lanes>(args: &ChunkArgs<u16>) {
    // SAFETY: the caller's promise.
    unsafe { chunk::<L, F16>(args) }
}
dispatch! {
    /// # Safety
    /// The pointers of `args` are valid for its sizes.
    pub(crate) unsafe fn chunk_f16(args: &ChunkArgs<u16>) = chunk_f16_lanes
}

#[inline(always)]
unsafe fn chunk_bf16_lanes<L: Lanes>(args: &ChunkArgs<u16>) {
    // SAFETY: the caller's promise.
    unsafe { chunk::<L, Bf16Pairs>(args) }
}
dispatch! {
    /// # Safety
    /// The pointers of `args` are valid for its sizes.
    pub(crate) unsafe fn chunk_bf16(args: &ChunkArgs<u16>) = chunk_bf16_lanes
}

/// As [`chunk_bf16`] with activations in bf16: all sizes along the inner dimension, and all places
/// of values, count pairs.
///
/// # Safety
/// AVX-512 BF16 is available; the pointers of `args` are valid for its sizes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn chunk_bf16_dots(args: &ChunkArgs<f32>) {
    // SAFETY: the caller's promise.
    unsafe { chunk::<crate::lanes::Avx512, Bf16Dots>(args) }
}
