//! A GEMM task: the rows of some groups times a chunk of panels.
//!
//! Few rows are memory-bound: each panel is read once, streamed from memory with software
//! prefetching. Many rows are compute-bound: the inner dimension is blocked, and a block of weights
//! is widened to f32 once for all rows, into a buffer that stays in the L1 cache.
#![allow(unsafe_code, reason = "reads packed weights and activations by pointer")]

use super::groups::group_rows;
use super::tile::{CachedPanels, Panels, RegisterTile, tile_group};
#[cfg(target_arch = "x86_64")]
use super::weights::Bf16Dots;
use super::weights::{Bf16Pairs, F16, F32, Form};
use crate::lanes::{LANES, Lanes, dispatch};
use crate::prefetch::{CACHE_LINE_BYTES, prefetch_l2};

/// A GEMM task: `rows` rows times `panel_count` panels.
///
/// # Validity
/// `packed` is readable for whole groups of `rows` rows of `padded_inner` values, `panels` for
/// `panel_count` panels of `16 * padded_inner` values, and `out` is writable for `features` values
/// in each of `rows` rows; no other thread accesses these values of `out`.
pub(crate) struct GemmChunk<Raw> {
    /// Packed activations, beginning with a group: `[group][padded_inner][rows of the group]`.
    pub(crate) packed: *const f32,
    /// Number of rows.
    pub(crate) rows: usize,
    /// Length of the sums, padded as the weights are.
    pub(crate) padded_inner: usize,
    /// The first panel of weights.
    pub(crate) panels: *const Raw,
    /// Number of panels.
    pub(crate) panel_count: usize,
    /// The sum of the first row and the first output feature.
    pub(crate) out: *mut f32,
    /// Number of values from a row of `out` to the next.
    pub(crate) out_row: usize,
    /// Number of output features: at most `16 * panel_count`, less if the last panel is partial.
    pub(crate) features: usize,
}

/// Number of rows from which the inner dimension is blocked and weights are widened once for all
/// rows.
const BLOCKED_ROWS: usize = 48;
/// Number of steps of the inner dimension in a block, chosen so that the widened weights of
/// [`PANELS_PER_PASS`] panels and the activations of a group fit in the L1 cache.
const INNER_BLOCK: usize = 192;
/// Number of panels that are multiplied with all rows before the next panels.
const PANELS_PER_PASS: usize = 2;
/// Distance in bytes by which streamed weights are prefetched into the L2 cache. It covers the
/// latency of memory. More lines can be on their way to the L2 cache than to the L1 cache.
const WEIGHT_PREFETCH_BYTES: usize = 4096;

/// Consecutive panels that are streamed from memory and prefetched, [`WEIGHT_PREFETCH_BYTES`]
/// ahead.
struct StreamedPanels<Raw> {
    first: *const Raw,
    /// Number of values in a panel.
    len: usize,
}

impl<Raw> Panels<Raw> for StreamedPanels<Raw> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const Raw {
        self.first.wrapping_add(p * self.len)
    }
    /// Prefetches within the panel, or beyond its end in the panel that the next tile reads in its
    /// place.
    #[inline(always)]
    fn prefetch<const P: usize>(&self, _: usize, k: usize, now: *const Raw) {
        let ahead = WEIGHT_PREFETCH_BYTES / size_of::<Raw>();
        let ends = (k * LANES) + ahead >= self.len;
        prefetch_l2(now.wrapping_add(ahead + if ends { (P - 1) * self.len } else { 0 }));
    }
}

/// Computes a task with weights of form `F`.
///
/// # Safety
/// The instruction set of `L` and what [`Form::call`] needs are available. `args` is valid (see
/// [`GemmChunk`]).
#[inline(always)]
unsafe fn chunk<L: Lanes, F: Form>(args: &GemmChunk<F::Raw>) {
    let full_panels = args.features / LANES;
    // SAFETY: `blocked_panels` has the same requirements, and `panel + count` is at most
    // `panel_count`.
    unsafe {
        let blocked =
            if F::WIDENS && args.rows >= BLOCKED_ROWS { blocked_panels::<L, F>(args) } else { 0 };
        // Weights of these panels stay in the L1 cache while they are multiplied with all rows.
        let per_pass = if args.rows > 8 { PANELS_PER_PASS } else { 4 };
        let mut panel = blocked;
        while panel < args.panel_count {
            let full = full_panels > panel;
            let count = if full { per_pass.min(full_panels - panel) } else { 1 };
            panels::<L, F>(args, panel, count, full);
            panel += count;
        }
    }
}

/// Multiplies `count` panels from `panel` on with all rows. All of them are full, or there is one
/// partial panel.
///
/// # Safety
/// As for [`chunk`]. `panel + count` is at most `panel_count`.
#[inline(always)]
unsafe fn panels<L: Lanes, F: Form>(
    args: &GemmChunk<F::Raw>,
    panel: usize,
    count: usize,
    full: bool,
) {
    let mut row = 0;
    while row < args.rows {
        let group = group_rows(args.rows - row, L::GROUP_MAX);
        let rows = group.min(args.rows - row);
        // Sums of a partial panel beyond the features must not be written to `out`, so the tile
        // goes to this buffer first. The largest group has 12 rows.
        let mut spill = [0.0_f32; 12 * LANES];
        // SAFETY: `packed` has the whole group that begins with `row < rows`; `panels` has the
        // panels; full panels are written to `rows` rows of `out`. A partial panel is written to
        // `spill`, from which only its features are copied to `out`.
        unsafe {
            let out = args.out.add(row * args.out_row + panel * LANES);
            let panel_len = args.padded_inner * LANES;
            let tile = RegisterTile {
                inner: args.padded_inner,
                a: args.packed.add(row * args.padded_inner),
                a_inner: group,
                a_row: 1,
                b: StreamedPanels { first: args.panels.add(panel * panel_len), len: panel_len },
                c: if full { out } else { spill.as_mut_ptr() },
                c_row: if full { args.out_row } else { LANES },
                rows,
                accumulate: false,
            };
            tile_group::<L, F, _>(&tile, group, count);
            if !full {
                for r in 0..rows {
                    let from = spill.as_ptr().add(r * LANES);
                    let live = args.features - panel * LANES;
                    std::ptr::copy_nonoverlapping(from, out.add(r * args.out_row), live);
                }
            }
        }
        row += group;
    }
}

/// Multiplies all pairs of full panels with all rows, one block of the inner dimension after the
/// other. The weights of a block are widened once, and while they are multiplied, those of the next
/// pair are prefetched, a share with each group of rows. Partial sums are kept in `out` between
/// blocks as f32, which does not change a bit of the result. Returns the number of panels computed.
///
/// # Safety
/// As for [`chunk`].
#[inline(always)]
unsafe fn blocked_panels<L: Lanes, F: Form>(args: &GemmChunk<F::Raw>) -> usize {
    let paired = args.features / LANES / PANELS_PER_PASS * PANELS_PER_PASS;
    let panel_len = args.padded_inner * LANES;
    let mut widened = Widened([0.0; PANELS_PER_PASS * INNER_BLOCK * LANES]);
    let widened = widened.0.as_mut_ptr();
    for from in (0..args.padded_inner).step_by(INNER_BLOCK) {
        let inner = INNER_BLOCK.min(args.padded_inner - from);
        for panel in (0..paired).step_by(PANELS_PER_PASS) {
            // SAFETY: both panels are among the full ones and have `padded_inner` steps, of which
            // `from..from + inner` are read; `widened` has room for INNER_BLOCK steps of each.
            // `packed` has the whole group of each `row < rows`, and `out` its full panels.
            unsafe {
                for p in 0..PANELS_PER_PASS {
                    let weights = args.panels.add((panel + p) * panel_len + from * LANES);
                    F::widen::<L>(weights, inner, widened.add(p * INNER_BLOCK * LANES));
                }
                let next = (panel + PANELS_PER_PASS) * panel_len + from * LANES;
                let next = args.panels.wrapping_add(next);
                let groups = args.rows.div_ceil(L::GROUP_MAX);
                let mut row = 0;
                while row < args.rows {
                    let group = group_rows(args.rows - row, L::GROUP_MAX);
                    for p in 0..PANELS_PER_PASS {
                        let block = next.wrapping_add(p * panel_len);
                        prefetch_share(block, inner * LANES, row / L::GROUP_MAX, groups);
                    }
                    let tile = RegisterTile {
                        inner,
                        a: args.packed.add(row * args.padded_inner + from * group),
                        a_inner: group,
                        a_row: 1,
                        b: CachedPanels {
                            first: widened.cast_const(),
                            step: INNER_BLOCK * LANES,
                            inner_step: LANES,
                        },
                        c: args.out.add(row * args.out_row + panel * LANES),
                        c_row: args.out_row,
                        rows: group.min(args.rows - row),
                        accumulate: from > 0,
                    };
                    tile_group::<L, F32, _>(&tile, group, PANELS_PER_PASS);
                    row += group;
                }
            }
        }
    }
    paired
}

/// Prefetches the cache lines of share `index` of `shares` of a block of `len` weights.
#[inline(always)]
fn prefetch_share<Raw>(block: *const Raw, len: usize, index: usize, shares: usize) {
    let lines = len * size_of::<Raw>() / CACHE_LINE_BYTES;
    let share = lines.div_ceil(shares);
    for line in (index * share..lines).take(share) {
        prefetch_l2(block.wrapping_byte_add(line * CACHE_LINE_BYTES));
    }
}

/// Widened weights of a block: `[panel][inner][16]`.
#[repr(align(64))]
struct Widened([f32; PANELS_PER_PASS * INNER_BLOCK * LANES]);

/// # Safety
/// The instruction set of `L` is available, and `args` is valid (see [`GemmChunk`]).
#[inline(always)]
unsafe fn chunk_f32_lanes<L: Lanes>(args: &GemmChunk<f32>) {
    // SAFETY: the requirements are the same, and `F32` needs no additional instructions.
    unsafe { chunk::<L, F32>(args) }
}
dispatch! {
    /// Computes a task with f32 weights.
    ///
    /// # Safety
    /// `args` is valid (see [`GemmChunk`]).
    pub(crate) unsafe fn chunk_f32(args: &GemmChunk<f32>) = chunk_f32_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `args` is valid (see [`GemmChunk`]).
#[inline(always)]
unsafe fn chunk_f16_lanes<L: Lanes>(args: &GemmChunk<u16>) {
    // SAFETY: the requirements are the same, and `F16` needs no additional instructions.
    unsafe { chunk::<L, F16>(args) }
}
dispatch! {
    /// Computes a task with f16 weights.
    ///
    /// # Safety
    /// `args` is valid (see [`GemmChunk`]).
    pub(crate) unsafe fn chunk_f16(args: &GemmChunk<u16>) = chunk_f16_lanes
}

/// # Safety
/// The instruction set of `L` is available, and `args` is valid (see [`GemmChunk`]).
#[inline(always)]
unsafe fn chunk_bf16_lanes<L: Lanes>(args: &GemmChunk<u16>) {
    // SAFETY: the requirements are the same, and `Bf16Pairs` needs no additional instructions.
    unsafe { chunk::<L, Bf16Pairs>(args) }
}
dispatch! {
    /// Computes a task with bf16 weights, stored as pairs.
    ///
    /// # Safety
    /// `args` is valid (see [`GemmChunk`]).
    pub(crate) unsafe fn chunk_bf16(args: &GemmChunk<u16>) = chunk_bf16_lanes
}

/// Computes a task with bf16 weights and bf16 activations by the dot product instruction of AVX-512
/// BF16. All sizes along the inner dimension count pairs, and an f32 holds the bits of a pair.
///
/// # Safety
/// AVX-512 F, BW, VL, DQ and BF16 are available, and `args` is valid (see [`GemmChunk`]).
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn chunk_bf16_dots(args: &GemmChunk<f32>) {
    // SAFETY: this function enables the instruction sets; `args` is valid.
    unsafe { chunk::<crate::lanes::Avx512, Bf16Dots>(args) }
}
