//! The quantized block formats: their layout in a packed panel, and their conversion to f32.
//!
//! The formats come from ggml (`ggml-common.h`, `ggml-quants.c`). All integers are little-endian. A
//! block consists of scales and *words*; a word is 4 bytes of quantized weights. A panel holds 16
//! rows in two parts:
//!
//! * `[block][word][16]`, 4 bytes per word: the part that dot products and AMX tiles of bytes read;
//! * `[block][byte][16]`: the other bytes of the blocks, the scales.
//!
//! Packing moves bytes, and some formats reorder bits in a block. No information is lost, so a
//! packed row can be unpacked exactly.
//!
//! Everything about one format is in one implementation of [`Format`].
#![allow(unsafe_code, reason = "unpacks blocks that were packed before")]

mod format;
mod grid_formats;
mod grids;
mod groups;
mod halves;
mod k_quants;
mod small_blocks;
mod ternary;

pub(crate) use format::{Block, Expanded, Format, WORDS};
pub(crate) use grid_formats::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
pub(crate) use groups::{I8Group16, I8Group32, ScaledBytes, U4Group32, U4Group128};
pub use halves::is_bf16;
pub(crate) use halves::to_bf16;
pub(crate) use k_quants::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};
pub(crate) use small_blocks::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub(crate) use ternary::{Tq1_0, Tq2_0};

use crate::lanes::{LANES, PlainBytes, Portable};
use crate::tensor_type::{TensorType, with_format};

/// Number of weights in a sub-block.
pub(super) const SUB_BLOCK: usize = 32;

/// Calls `copy` for each piece of a row with its offset in the row, its offset in the panel, and
/// whether it is a word (4 bytes) or a single byte.
#[inline(always)]
fn each_piece<F: Format>(row_bytes: usize, lane: usize, mut copy: impl FnMut(usize, usize, bool)) {
    let mut word = 4 * lane;
    let mut byte = row_bytes / F::BLOCK_BYTES * F::WORDS.len() * LANES + lane;
    for block in (0..row_bytes).step_by(F::BLOCK_BYTES) {
        for place in F::WORDS.step_by(4) {
            copy(block + place, word, true);
            word += 4 * LANES;
        }
        for place in (0..F::WORDS.start).chain(F::WORDS.end..F::BLOCK_BYTES) {
            copy(block + place, byte, false);
            byte += LANES;
        }
    }
}

/// Copies a word or a byte from the start of `source` to the start of `target`.
#[inline(always)]
fn copy_piece(source: &[u8], target: &mut [u8], is_word: bool) {
    match (source.first_chunk::<4>(), target.first_chunk_mut::<4>()) {
        (Some(source), Some(target)) if is_word => *target = *source,
        _ => target[0] = source[0],
    }
}

/// Packs at most 16 rows of blocks, `row_bytes` bytes each, into a panel. Lanes of missing rows are
/// not changed.
pub(super) fn pack(dtype: TensorType, row_bytes: usize, rows: &[u8], panel: &mut [u8]) {
    with_format!(dtype, F => pack_of::<F>(row_bytes, rows, panel));
}

/// [`pack`] for blocks of `F`.
fn pack_of<F: Format>(row_bytes: usize, rows: &[u8], panel: &mut [u8]) {
    let mut arranged = Vec::new();
    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
        let row = if F::ARRANGED {
            arranged.clear();
            arranged.extend_from_slice(row);
            arranged.chunks_exact_mut(F::BLOCK_BYTES).for_each(F::arrange);
            &arranged
        } else {
            row
        };
        each_piece::<F>(row_bytes, lane, |in_row, in_panel, is_word| {
            copy_piece(&row[in_row..], &mut panel[in_panel..], is_word);
        });
    }
}

/// Reverses [`pack`] for the row in lane `lane` of `panel`.
pub(super) fn unpack(dtype: TensorType, panel: &[u8], lane: usize, row: &mut [u8]) {
    with_format!(dtype, F => {
        each_piece::<F>(row.len(), lane, |in_row, in_panel, is_word| {
            copy_piece(&panel[in_panel..], &mut row[in_row..], is_word);
        });
        if F::ARRANGED {
            row.chunks_exact_mut(F::BLOCK_BYTES).for_each(F::restore);
        }
    });
}

/// Converts weights of type `dtype`, as they are stored in a file, to f32.
///
/// `row` holds little-endian values, or whole GGUF blocks for quantized types. `out` receives one
/// value per weight.
///
/// # Panics
/// If the number of weights in `row` is not the length of `out`.
pub fn widen(dtype: TensorType, row: &[u8], out: &mut [f32]) {
    assert_eq!(
        row.len() / dtype.block_bytes() * dtype.block_len(),
        out.len(),
        "out must hold one value per weight"
    );
    let pairs = row.as_chunks::<2>().0;
    match dtype {
        TensorType::F32 => {
            for (value, bytes) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        TensorType::F16 => {
            for (value, bytes) in out.iter_mut().zip(pairs) {
                *value = f32::from_bits(halves::widen(*bytes));
            }
        }
        TensorType::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(pairs) {
                *value = half::bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        _ => dequantize(dtype, row, out),
    }
}

/// Quantizes rows of float values of type `dtype` to `Q8_0` blocks. A row has whole blocks.
pub(super) fn round_to_q8_0(dtype: TensorType, rows: &[u8]) -> Vec<u8> {
    let mut values = vec![0.0; rows.len() / dtype.block_bytes()];
    widen(dtype, rows, &mut values);
    let mut blocks = vec![0; values.len() / SUB_BLOCK * TensorType::Q8_0.block_bytes()];
    quantize_q8_0(&values, &mut blocks);
    blocks
}

/// Rounds a number from -127 to 127 to the nearest integer, ties to even.
#[inline(always)]
pub(super) fn round_to_byte(value: f32) -> i8 {
    /// 1.5 * 2^23. Adding it to a small number leaves the nearest integer in the low bits.
    const ROUND_TO_INTEGER: f32 = 12_582_912.0;
    #[allow(clippy::cast_possible_truncation, reason = "the low byte holds the integer")]
    let low = (value + ROUND_TO_INTEGER).to_bits() as u8;
    low.cast_signed()
}

/// Quantizes values to `Q8_0` blocks. The scale of a block is its largest magnitude divided by 127,
/// rounded to f16. If a value is NaN, or so large that the scale overflows f16, the whole block
/// becomes NaN.
///
/// # Panics
/// If `blocks` does not hold 34 bytes for each 32 values.
pub(super) fn quantize_q8_0(values: &[f32], blocks: &mut [u8]) {
    let block_bytes = TensorType::Q8_0.block_bytes();
    assert_eq!(values.len() / SUB_BLOCK * block_bytes, blocks.len(), "blocks must hold all values");
    let values = values.as_chunks::<SUB_BLOCK>().0.iter();
    for (values, block) in values.zip(blocks.chunks_exact_mut(block_bytes)) {
        // Compare magnitudes as integers, so that NaN is the largest.
        let largest = values.iter().fold(0, |max, value| max.max(value.to_bits() & 0x7fff_ffff));
        let scale = half::f16::from_f32(f32::from_bits(largest) / 127.0);
        let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
        block[..2].copy_from_slice(&scale.to_le_bytes());
        for (byte, value) in block[2..].iter_mut().zip(values) {
            // A very small scale is a subnormal f16. It may be rounded down so much that values
            // exceed
            // 127 steps.
            *byte = round_to_byte((value * inverse).clamp(-127.0, 127.0)).cast_unsigned();
        }
    }
}

/// Dequantizes whole blocks. `out` receives one value per weight.
///
/// # Panics
/// If the blocks do not fill `out` exactly, or `dtype` is not quantized.
pub(super) fn dequantize(dtype: TensorType, blocks: &[u8], out: &mut [f32]) {
    assert_eq!(
        blocks.len() / dtype.block_bytes() * dtype.block_len(),
        out.len(),
        "out must hold one value per weight"
    );
    with_format!(dtype, F => dequantize_of::<F>(blocks, out));
}

/// [`dequantize`] for blocks of `F`. Packs 16 blocks at a time as if they were the rows of a
/// panel, and unpacks these with the same code as products do, in portable Rust.
fn dequantize_of<F: Format>(blocks: &[u8], out: &mut [f32]) {
    let mut panel = vec![0; F::BLOCK_BYTES * LANES];
    let blocks = blocks.chunks(F::BLOCK_BYTES * LANES);
    for (blocks, out) in blocks.zip(out.chunks_mut(F::BLOCK_LEN * LANES)) {
        pack_of::<F>(F::BLOCK_BYTES, blocks, &mut panel);
        let scales = panel[F::WORDS.len() * LANES..].as_ptr();
        let block = Block { words: panel.as_ptr(), scales };
        for place in 0..F::SUB_BLOCKS * WORDS {
            let scale = place * F::SCALES / WORDS;
            // SAFETY: the panel holds one whole packed block in each lane. Portable Rust needs no
            // instruction set.
            let (PlainBytes(bytes), Portable(scales), Portable(mins)) = unsafe {
                let min = if F::MINS { F::min(block, scale) } else { Portable([0.0; LANES]) };
                (F::word(block, place / WORDS, place % WORDS), F::scale(block, scale), min)
            };
            for (lane, out) in out.chunks_exact_mut(F::BLOCK_LEN).enumerate() {
                let bytes = &bytes[4 * lane..][..4];
                for (value, byte) in out[4 * place..].iter_mut().zip(bytes) {
                    *value = scales[lane] * f32::from(byte.cast_signed()) - mins[lane];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
