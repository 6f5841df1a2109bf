//! The product of a chunk of panels with all rows of a task, on dot products of bytes.
#![allow(unsafe_code, reason = "walks packed weights and activations by pointer")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: sizes given")]

use super::dots::Dots;
#[cfg(target_arch = "x86_64")]
use super::dots::{Bytes, RUN};
use super::format::{Format, Q4K, Q5K, Q6K, Q8_0, WORDS};
use crate::fetch::fetch_near;
use crate::gemm::group_rows;
use crate::lanes::{LANES, Lanes};
use crate::quant::{self, PART};
use crate::tensor_type::TensorType;

/// Bytes by which words are asked for ahead: as long as memory takes to answer.
const AHEAD: usize = 4096;

/// A task: some rows times a chunk of panels.
#[derive(Clone, Copy)]
pub(crate) struct ChunkArgs {
    /// Activations of the first row, which begins a group: `[group][inner / 4][rows of the group]`
    /// words.
    pub words: *const u8,
    /// Their scales, `[group][inner / 32][rows of the group]`.
    pub scales: *const f32,
    /// Their sums, negative, in the same order.
    pub sums: *const f32,
    pub rows: usize,
    pub inner: usize,
    /// The chunk's first panel.
    pub panels: *const u8,
    /// Where the first row's sum for the chunk's first feature goes.
    pub out: *mut f32,
    /// Values between two rows of `out`.
    pub out_features: usize,
    /// Features of the chunk; the last panel may be less than full.
    pub features: usize,
}

/// A packed panel's two parts.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub words: *const u8,
    pub scales: *const u8,
    pub blocks: usize,
    pub block_words: usize,
    pub block_scales: usize,
}

impl Panel {
    /// Panel `index` from `panels` on.
    pub(super) fn at(dtype: TensorType, inner: usize, panels: *const u8, index: usize) -> Panel {
        let blocks = inner / dtype.block_len();
        let block_words = quant::words(dtype).len() * LANES;
        let block_scales = dtype.block_bytes() * LANES - block_words;
        let words = panels.wrapping_add(index * blocks * dtype.block_bytes() * LANES);
        let scales = words.wrapping_add(blocks * block_words);
        Panel { words, scales, blocks, block_words, block_scales }
    }

    /// Asks for a part's share of the words that stand [`AHEAD`] bytes after those of `block`, the first
    /// that is left: in the panel, or behind its scales in the one after it.
    #[inline(always)]
    fn fetch<F: Format>(&self, block: usize, part: usize) {
        debug_assert_eq!(F::PARTS * F::PART_BYTES, self.block_words);
        let ends = (block + 1) * self.block_words + AHEAD > self.blocks * self.block_words;
        let skipped = if ends { self.blocks * self.block_scales } else { 0 };
        let from = self.words.wrapping_add(AHEAD + part * F::PART_BYTES + skipped);
        for byte in (0..F::PART_BYTES).step_by(64) {
            fetch_near(from.wrapping_add(byte));
        }
    }

    /// The block after the first.
    pub(super) fn advance(&mut self) {
        self.words = self.words.wrapping_add(self.block_words);
        self.scales = self.scales.wrapping_add(self.block_scales);
    }
}

/// Multiplies one panel with the R rows of a group, of which `live` are written.
///
/// # Safety
/// The set of `D` is available, the pointers are valid for the sizes, and `out` takes `features`
/// values, at most 16, in each of `live` rows.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "counted loops stay in registers")]
unsafe fn group<D: Dots, F: Format, const R: usize>(
    args: &ChunkArgs,
    mut panel: Panel,
    live: usize,
    features: usize,
) {
    // SAFETY: all reads and writes stay in what the caller promised.
    unsafe {
        let mut totals = [D::Lanes::splat(0.0); R];
        let (mut words, mut scales, mut sums) = (args.words, args.scales, args.sums);
        for block in 0..panel.blocks {
            for part in 0..F::PARTS {
                panel.fetch::<F>(block, part);
                for index in 0..F::SCALES {
                    let count = WORDS / F::SCALES;
                    // All rows in step: each sum alone would wait for itself.
                    let (mut dots, mut excess) = ([D::zero(); R], D::zero());
                    for i in index * count..(index + 1) * count {
                        let weights = D::weights(F::word(panel.words, part, i));
                        excess = D::exceed(excess, weights);
                        D::dot_rows(&mut dots, weights, words.add(i * R * D::WORD));
                    }
                    let scale = F::scale::<D::Lanes>(panel.scales, part * F::SCALES + index);
                    for r in 0..R {
                        let row_scale = D::Lanes::splat(*scales.add(r));
                        let dots = D::widen(dots[r], excess).mul(row_scale);
                        totals[r] = D::fused(dots, scale, totals[r]);
                    }
                }
                if F::MINS {
                    let min = F::min::<D::Lanes>(panel.scales, part);
                    for r in 0..R {
                        totals[r] = D::fused(D::Lanes::splat(*sums.add(r)), min, totals[r]);
                    }
                }
                words = words.add(WORDS * R * D::WORD);
                scales = scales.add(R);
                sums = sums.add(R);
            }
            panel.advance();
        }
        for (r, total) in totals.iter().enumerate().take(live) {
            let to = args.out.add(r * args.out_features);
            if features == LANES {
                total.store(to);
            } else {
                let mut spare = [0.0_f32; LANES];
                total.store(spare.as_mut_ptr());
                std::ptr::copy_nonoverlapping(spare.as_ptr(), to, features);
            }
        }
    }
}

/// Computes a task.
///
/// # Safety
/// The set of `D` is available; the pointers of `args` are valid for its sizes, and what is
/// written is touched by nobody else.
#[inline(always)]
pub(super) unsafe fn chunk<D: Dots, F: Format>(args: &ChunkArgs) {
    for index in 0..args.features.div_ceil(LANES) {
        let panel = Panel::at(F::DTYPE, args.inner, args.panels, index);
        let features = LANES.min(args.features - index * LANES);
        let mut row = 0;
        while row < args.rows {
            let size = group_rows(args.rows - row, D::GROUP_MAX);
            let live = size.min(args.rows - row);
            // SAFETY: the caller's promise; groups follow each other.
            unsafe {
                let args = ChunkArgs {
                    words: args.words.add(row * args.inner / 4 * D::WORD),
                    scales: args.scales.add(row * args.inner / PART),
                    sums: args.sums.add(row * args.inner / PART),
                    out: args.out.add(row * args.out_features + index * LANES),
                    ..*args
                };
                match size {
                    1 => group::<D, F, 1>(&args, panel, live, features),
                    2 => group::<D, F, 2>(&args, panel, live, features),
                    4 => group::<D, F, 4>(&args, panel, live, features),
                    6 if const { D::GROUP_MAX >= 6 } => {
                        group::<D, F, 6>(&args, panel, live, features)
                    }
                    8 if const { D::GROUP_MAX >= 8 } => {
                        group::<D, F, 8>(&args, panel, live, features)
                    }
                    _ => unreachable!("no group of {size} rows"),
                }
            }
            row += size;
        }
    }
}

/// Signed bytes, scales and minima of a whole panel: `[part][8][16]` words, `[part][scale][16]`
/// and `[part][16]` f32.
///
/// # Safety
/// The set of `D` is available, the panel is whole, and the three take what they are given.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn expand<D: Dots>(
    dtype: TensorType,
    panel: Panel,
    bytes: *mut u8,
    scales: *mut f32,
    mins: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            TensorType::Q8_0 => expand_of::<D, Q8_0>(panel, bytes, scales, mins),
            TensorType::Q4K => expand_of::<D, Q4K>(panel, bytes, scales, mins),
            TensorType::Q5K => expand_of::<D, Q5K>(panel, bytes, scales, mins),
            TensorType::Q6K => expand_of::<D, Q6K>(panel, bytes, scales, mins),
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
                unreachable!("{dtype:?} weights have no blocks")
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn expand_of<D: Dots, F: Format>(
    mut panel: Panel,
    mut bytes: *mut u8,
    mut scales: *mut f32,
    mut mins: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for _ in 0..panel.blocks {
            for part in 0..F::PARTS {
                for index in 0..WORDS {
                    F::word::<D::Bytes>(panel.words, part, index).store(bytes);
                    bytes = bytes.add(RUN);
                }
                for index in 0..F::SCALES {
                    F::scale::<D::Lanes>(panel.scales, part * F::SCALES + index).store(scales);
                    scales = scales.add(LANES);
                }
                if F::MINS {
                    F::min::<D::Lanes>(panel.scales, part).store(mins);
                    mins = mins.add(LANES);
                }
            }
            panel.advance();
        }
    }
}
