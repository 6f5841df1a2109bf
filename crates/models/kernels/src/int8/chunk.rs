//! A task of a quantized product, computed by dot products of bytes.
#![allow(unsafe_code, reason = "reads packed weights and activations by pointer")]

use super::activations::SUMS;
use super::dots::Dots;
use crate::gemm::group_rows;
use crate::lanes::{Bytes, LANES, Lanes, WORD_VECTOR_BYTES};
use crate::prefetch::prefetch_l2;
use crate::quant::{Block, Format, SUB_BLOCK, WORDS};

/// Distance in bytes by which words are prefetched into the L2 cache. It covers the latency of
/// memory. More lines can be on their way to the L2 cache than to the L1 cache.
const WORD_PREFETCH_BYTES: usize = 8192;

/// A task of a quantized product: some rows times some panels.
///
/// # Validity
/// `words`, `scales`, `sums` and `offsets` are readable for whole groups of `rows` rows, and
/// `panels` for the panels of `features` features. `out` is writable for `features` values in each
/// of `rows` rows, and no other thread accesses these values.
#[derive(Clone, Copy)]
pub(crate) struct Int8Chunk {
    /// Packed activations, beginning with a group: `[group][inner / 4][rows of the group]` words.
    pub(crate) words: *const u8,
    /// Scales of the activations, `[group][inner / 32][rows of the group]`.
    pub(crate) scales: *const f32,
    /// Negated sums of the activations, `[group][inner / 32][SUMS][rows of the group]`.
    pub(crate) sums: *const f32,
    /// The initial values of sums with unsigned weights, in the shape of `sums`.
    pub(crate) offsets: *const i32,
    /// Number of rows.
    pub(crate) rows: usize,
    /// Length of the sums.
    pub(crate) inner: usize,
    /// The first panel.
    pub(crate) panels: *const u8,
    /// The sum of the first row and the first output feature.
    pub(crate) out: *mut f32,
    /// Number of values from a row of `out` to the next.
    pub(crate) out_row: usize,
    /// Number of output features. The last panel may be partial.
    pub(crate) features: usize,
}

/// A packed panel of quantized weights, from some block on.
#[derive(Clone, Copy)]
pub(super) struct QuantPanel {
    /// The block.
    block: Block,
    /// Number of blocks of the panel.
    blocks: usize,
}

impl QuantPanel {
    /// The first block of panel `index`, where `panels` points to panel 0.
    pub(super) fn at<F: Format>(inner: usize, panels: *const u8, index: usize) -> QuantPanel {
        let blocks = inner / F::BLOCK_LEN;
        let words = panels.wrapping_add(index * blocks * F::BLOCK_BYTES * LANES);
        let scales = words.wrapping_add(blocks * F::WORDS.len() * LANES);
        QuantPanel { block: Block { words, scales }, blocks }
    }

    /// Prefetches as many bytes as the words of one sub-block have, [`WORD_PREFETCH_BYTES`] after
    /// the words of the current block, whose index is `block`, or a panel after them if panels are
    /// shorter. Beyond the words of this panel, the prefetch skips its scales and continues in the
    /// next panel. Also prefetches the scales of the same block of the next panel.
    #[inline(always)]
    fn prefetch<F: Format>(&self, block: usize, sub_block: usize) {
        let (block_words, block_bytes) = (F::WORDS.len() * LANES, F::BLOCK_BYTES * LANES);
        let distance = WORD_PREFETCH_BYTES.min(self.blocks * block_words);
        let ends = (block + 1) * block_words + distance > self.blocks * block_words;
        let skipped = if ends { self.blocks * (block_bytes - block_words) } else { 0 };
        let sub_block_words = block_words / F::SUB_BLOCKS;
        let from = distance + sub_block * sub_block_words + skipped;
        for byte in (0..sub_block_words).step_by(64) {
            prefetch_l2(self.block.words.wrapping_add(from + byte));
        }
        // The scales of two panels are too far apart for the processor's own prefetching.
        if sub_block == 0 {
            let next_panel = self.blocks * block_bytes;
            for byte in (0..block_bytes - block_words).step_by(64) {
                prefetch_l2(self.block.scales.wrapping_add(next_panel + byte));
            }
        }
    }

    /// Moves to the next block.
    fn advance<F: Format>(&mut self) {
        let words = F::WORDS.len();
        self.block.words = self.block.words.wrapping_add(words * LANES);
        self.block.scales = self.block.scales.wrapping_add((F::BLOCK_BYTES - words) * LANES);
    }
}

/// The microkernel: multiplies one panel with the R rows of a group, of which the first `live` are
/// written.
///
/// # Safety
/// The instruction set of `D` is available. `args` points to a whole group of R rows, and `panel`
/// is a whole panel with blocks of `F`. `out` is writable for `features` values, at most 16, in
/// each of `live` rows.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "counted loops keep sums in registers")]
unsafe fn group<D: Dots, F: Format, const R: usize>(
    args: &Int8Chunk,
    mut panel: QuantPanel,
    live: usize,
    features: usize,
) {
    // SAFETY: the loops read each word and each scale of `panel.blocks` blocks once. `words`,
    // `scales`, `sums` and `offsets` advance by one sub-block of R rows, of which there are
    // `inner / 32` in the group. Only `features` values of `live` rows are written.
    unsafe {
        let mut totals = [D::Lanes::splat(0.0); R];
        let (mut words, mut scales) = (args.words, args.scales);
        let (mut sums, mut offsets) = (args.sums, args.offsets);
        for block in 0..panel.blocks {
            for sub_block in 0..F::SUB_BLOCKS {
                panel.prefetch::<F>(block, sub_block);
                for index in 0..F::SCALES {
                    let count = WORDS / F::SCALES;
                    let sum = R * if F::SCALES == 1 { 0 } else { 1 + index };
                    // The sums of all rows advance together, which hides the latency of additions.
                    let mut dots = [D::start(0); R];
                    for r in 0..R {
                        dots[r] = D::start(*offsets.add(sum + r));
                    }
                    for i in index * count..(index + 1) * count {
                        let weights = D::weights(F::word(panel.block, sub_block, i));
                        D::dot_rows(&mut dots, weights, words.add(i * R * D::WORD));
                    }
                    let scale = F::scale::<D::Lanes>(panel.block, sub_block * F::SCALES + index);
                    for r in 0..R {
                        let row_scale = D::Lanes::splat(*scales.add(r));
                        let dots = D::widen(dots[r]).mul(row_scale);
                        totals[r] = D::fused(dots, scale, totals[r]);
                    }
                    if F::MINS {
                        let min = F::min::<D::Lanes>(panel.block, sub_block * F::SCALES + index);
                        for r in 0..R {
                            let sum = D::Lanes::splat(*sums.add(sum + r));
                            totals[r] = D::fused(sum, min, totals[r]);
                        }
                    }
                }
                words = words.add(WORDS * R * D::WORD);
                scales = scales.add(R);
                (sums, offsets) = (sums.add(SUMS * R), offsets.add(SUMS * R));
            }
            panel.advance::<F>();
        }
        for (r, total) in totals.iter().enumerate().take(live) {
            let to = args.out.add(r * args.out_row);
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
/// The instruction set of `D` is available. `args` is valid (see [`Int8Chunk`]), its rows were
/// packed for `D`, and its panels have blocks of `F`.
#[inline(always)]
pub(super) unsafe fn chunk<D: Dots, F: Format>(args: &Int8Chunk) {
    for index in 0..args.features.div_ceil(LANES) {
        let panel = QuantPanel::at::<F>(args.inner, args.panels, index);
        let features = LANES.min(args.features - index * LANES);
        let mut row = 0;
        while row < args.rows {
            let size = group_rows(args.rows - row, D::GROUP_MAX);
            let live = size.min(args.rows - row);
            // SAFETY: groups are contiguous, and the one of `row < rows` is complete. Panel `index`
            // is one of the task's, and `features` of its features exist.
            unsafe {
                let args = Int8Chunk {
                    words: args.words.add(row * args.inner / 4 * D::WORD),
                    scales: args.scales.add(row * args.inner / SUB_BLOCK),
                    sums: args.sums.add(row * args.inner / SUB_BLOCK * SUMS),
                    offsets: args.offsets.add(row * args.inner / SUB_BLOCK * SUMS),
                    out: args.out.add(row * args.out_row + index * LANES),
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
                    12 if const { D::GROUP_MAX >= 12 } => {
                        group::<D, F, 12>(&args, panel, live, features)
                    }
                    _ => unreachable!("no group has {size} rows"),
                }
            }
            row += size;
        }
    }
}

/// Number of bytes of a panel that [`expand_to_scaled`] writes.
pub(super) fn scaled_panel_len<F: Format>(inner: usize) -> usize {
    inner / SUB_BLOCK * (F::NUMBERS + WORDS) * WORD_VECTOR_BYTES
}

/// Unpacks a whole panel to one with blocks of [`ScaledBytes`](crate::quant::ScaledBytes): for each
/// sub-block its scales, its minima if it has any, and its words of signed bytes.
///
/// # Safety
/// The instruction set of `D` is available, `panel` is a whole panel with blocks of `F`, and `to` is
/// writable for [`scaled_panel_len`] bytes.
#[inline(always)]
pub(super) unsafe fn expand_to_scaled<D: Dots, F: Format>(mut panel: QuantPanel, mut to: *mut u8) {
    // SAFETY: the loops visit each sub-block of `panel.blocks` blocks once, so reads stay inside
    // the panel and writes inside the new one.
    unsafe {
        for block in 0..panel.blocks {
            for sub_block in 0..F::SUB_BLOCKS {
                panel.prefetch::<F>(block, sub_block);
                let numbers = sub_block * F::SCALES..(sub_block + 1) * F::SCALES;
                for index in numbers.clone() {
                    F::scale::<D::Lanes>(panel.block, index).store(to.cast());
                    to = to.add(WORD_VECTOR_BYTES);
                }
                for index in numbers.filter(|_| F::MINS) {
                    F::min::<D::Lanes>(panel.block, index).store(to.cast());
                    to = to.add(WORD_VECTOR_BYTES);
                }
                for index in 0..WORDS {
                    F::word::<D::Bytes>(panel.block, sub_block, index).store(to);
                    to = to.add(WORD_VECTOR_BYTES);
                }
            }
            panel.advance::<F>();
        }
    }
}

/// Unpacks a whole panel to signed bytes, `[sub-block][8][16]` words, scales,
/// `[sub-block][scale][16]`, and minima, which are as many as scales.
///
/// # Safety
/// The instruction set of `D` is available, `panel` is a whole panel with blocks of `F`, and
/// `bytes`, `scales` and `mins` are writable for the arrays above.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn expand<D: Dots, F: Format>(
    mut panel: QuantPanel,
    mut bytes: *mut u8,
    mut scales: *mut f32,
    mut mins: *mut f32,
) {
    // SAFETY: the loops visit each sub-block of `panel.blocks` blocks once, so reads stay inside
    // the panel and writes inside the arrays.
    unsafe {
        for _ in 0..panel.blocks {
            for sub_block in 0..F::SUB_BLOCKS {
                for index in 0..WORDS {
                    F::word::<D::Bytes>(panel.block, sub_block, index).store(bytes);
                    bytes = bytes.add(WORD_VECTOR_BYTES);
                }
                for index in 0..F::SCALES {
                    F::scale::<D::Lanes>(panel.block, sub_block * F::SCALES + index).store(scales);
                    scales = scales.add(LANES);
                    if F::MINS {
                        F::min::<D::Lanes>(panel.block, sub_block * F::SCALES + index).store(mins);
                        mins = mins.add(LANES);
                    }
                }
            }
            panel.advance::<F>();
        }
    }
}
