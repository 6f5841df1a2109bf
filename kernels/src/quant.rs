//! The GGUF block formats: their bytes in a file, in a packed panel, and as f32. They are ggml's;
//! all integers little-endian.
//!
//! A block has scales and *words*, 4 bytes of small integers each. A panel holds 16 rows:
//!
//! * `[block][word][16]`, 4 bytes a word: as dot products and tiles of bytes read them;
//! * `[block][byte][16]`: the bytes that are no words.
//!
//! So packing moves bytes and changes none, and a packed row can be put together again.

use std::ops::Range;

use super::lanes::LANES;
use crate::tensor_type::TensorType;

/// Weights of a Q8_0 block, and of the parts that all formats divide into.
pub(super) const PART: usize = 32;

/// Which bytes of a block are words. The others are scales.
pub(super) fn words(dtype: TensorType) -> Range<usize> {
    match dtype {
        TensorType::Q8_0 => 2..34,
        TensorType::Q4K => 16..144,
        TensorType::Q5K => 16..176,
        TensorType::Q6K => 0..192,
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
            unreachable!("{dtype:?} weights have no blocks")
        }
    }
}

/// Calls `copy` with where each piece of a row stands: its place in the row, its place in the panel,
/// and whether it is a word or a byte.
#[inline(always)]
fn each_piece(
    dtype: TensorType,
    row_bytes: usize,
    lane: usize,
    mut copy: impl FnMut(usize, usize, bool),
) {
    let block_bytes = dtype.block_bytes();
    let words = words(dtype);
    let mut word = 4 * lane;
    let mut byte = row_bytes / block_bytes * words.len() * LANES + lane;
    for block in (0..row_bytes).step_by(block_bytes) {
        for place in words.clone().step_by(4) {
            copy(block + place, word, true);
            word += 4 * LANES;
        }
        for place in (0..words.start).chain(words.end..block_bytes) {
            copy(block + place, byte, false);
            byte += LANES;
        }
    }
}

/// Copies a word or a byte.
#[inline(always)]
fn copy_piece(source: &[u8], target: &mut [u8], is_word: bool) {
    match (source.first_chunk::<4>(), target.first_chunk_mut::<4>()) {
        (Some(source), Some(target)) if is_word => *target = *source,
        _ => target[0] = source[0],
    }
}

/// Packs at most 16 rows of blocks into a panel; missing rows stay as they are.
pub(super) fn pack(dtype: TensorType, row_bytes: usize, rows: &[u8], panel: &mut [u8]) {
    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
        each_piece(dtype, row_bytes, lane, |in_row, in_panel, is_word| {
            copy_piece(&row[in_row..], &mut panel[in_panel..], is_word);
        });
    }
}

/// Undoes [`pack`] for the row in `lane` of `panel`.
pub(super) fn unpack(dtype: TensorType, panel: &[u8], lane: usize, row: &mut [u8]) {
    each_piece(dtype, row.len(), lane, |in_row, in_panel, is_word| {
        copy_piece(&panel[in_panel..], &mut row[in_row..], is_word);
    });
}

/// The values of a row as it is in a file, in f32.
///
/// # Panics
/// If `row` and `out` are not of the same number of values.
pub fn widen(dtype: TensorType, row: &[u8], out: &mut [f32]) {
    assert_eq!(row.len() / dtype.block_bytes() * dtype.block_len(), out.len(), "a row's values");
    let pairs = row.as_chunks::<2>().0;
    match dtype {
        TensorType::F32 => {
            for (value, bytes) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        TensorType::F16 => {
            for (value, bytes) in out.iter_mut().zip(pairs) {
                *value = half::f16::from_le_bytes(*bytes).to_f32();
            }
        }
        TensorType::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(pairs) {
                *value = half::bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        TensorType::Q8_0 | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => {
            dequantise(dtype, row, out);
        }
    }
}

/// Rows of `inner` plain values as Q8_0 blocks.
pub(super) fn round_to_q8_0(dtype: TensorType, inner: usize, rows: &[u8]) -> Vec<u8> {
    let mut values = vec![0.0; rows.len() / dtype.block_bytes()];
    widen(dtype, rows, &mut values);
    let mut blocks = vec![0; values.len() / PART * TensorType::Q8_0.block_bytes()];
    debug_assert!(inner.is_multiple_of(PART), "rows are whole blocks");
    quantise_q8_0(&values, &mut blocks);
    blocks
}

/// The nearest integer, ties to even, of a number from -127 to 127.
#[inline(always)]
pub(super) fn round_to_byte(value: f32) -> i8 {
    /// Added to a small number, leaves it rounded in the low bits.
    const ROUND: f32 = 12_582_912.0;
    #[allow(clippy::cast_possible_truncation, reason = "the low byte is what is wanted")]
    let low = (value + ROUND).to_bits() as u8;
    low.cast_signed()
}

/// Rounds values to Q8_0 blocks: the scale is the largest magnitude's 127th part, rounded to f16.
/// A block with a value that is NaN, or too large for such a scale, becomes NaN.
///
/// # Panics
/// If the values are no whole blocks, or `blocks` is not 34 bytes for each.
pub(super) fn quantise_q8_0(values: &[f32], blocks: &mut [u8]) {
    let block_bytes = TensorType::Q8_0.block_bytes();
    assert_eq!(values.len() / PART * block_bytes, blocks.len(), "whole blocks take the values");
    let values = values.as_chunks::<PART>().0.iter();
    for (values, block) in values.zip(blocks.chunks_exact_mut(block_bytes)) {
        // As integers, so that what is no number is the largest.
        let largest = values.iter().fold(0, |max, value| max.max(value.to_bits() & 0x7fff_ffff));
        let scale = half::f16::from_f32(f32::from_bits(largest) / 127.0);
        let inverse = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
        block[..2].copy_from_slice(&scale.to_le_bytes());
        for (byte, value) in block[2..].iter_mut().zip(values) {
            // A scale that is very small is rounded so much that values can lie beyond 127 of it.
            *byte = round_to_byte((value * inverse).clamp(-127.0, 127.0)).cast_unsigned();
        }
    }
}

/// Dequantises a row of whole blocks. `out` takes one value a weight.
///
/// # Panics
/// If the blocks do not fill `out` exactly: a bug of the caller. Plain types have no blocks.
pub(super) fn dequantise(dtype: TensorType, blocks: &[u8], out: &mut [f32]) {
    let (block_len, block_bytes) = (dtype.block_len(), dtype.block_bytes());
    assert_eq!(blocks.len() / block_bytes * block_len, out.len(), "whole blocks fill the row");
    let one: fn(&[u8], &mut [f32]) = match dtype {
        TensorType::Q8_0 => q8_0,
        TensorType::Q4K => q4_k,
        TensorType::Q5K => q5_k,
        TensorType::Q6K => q6_k,
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
            unreachable!("{dtype:?} weights have no blocks")
        }
    };
    for (block, out) in blocks.chunks_exact(block_bytes).zip(out.chunks_exact_mut(block_len)) {
        one(block, out);
    }
}

/// The f16 at the front of `bytes`.
#[inline]
fn f16(bytes: &[u8]) -> f32 {
    half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// Scale, then 32 signed bytes.
#[inline]
fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = f16(block);
    for (value, byte) in out.iter_mut().zip(&block[2..]) {
        *value = f32::from(byte.cast_signed()) * scale;
    }
}

/// The 6-bit scale and minimum of the 32 weights numbered `index`, from 12 packed bytes.
#[inline]
fn scale_and_min(packed: &[u8], index: usize) -> (f32, f32) {
    let (scale, min) = if index < 4 {
        (packed[index] & 63, packed[index + 4] & 63)
    } else {
        let low = packed[index + 4];
        ((low & 15) | (packed[index - 4] >> 6 << 4), (low >> 4) | (packed[index] >> 6 << 4))
    };
    (f32::from(scale), f32::from(min))
}

/// Scale of scales, scale of minima, 12 bytes of both, 128 bytes of 4-bit pairs.
#[inline]
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, d_min) = (f16(block), f16(&block[2..]));
    let (scales, bytes) = (&block[4..16], &block[16..144]);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(scales, part);
        let (scale, min) = (d * scale, d_min * min);
        let shift = part % 2 * 4;
        for (value, byte) in out.iter_mut().zip(&bytes[part / 2 * 32..]) {
            *value = scale * f32::from((byte >> shift) & 15) - min;
        }
    }
}

/// As [`q4_k`], with 32 bytes of fifth bits before the pairs: bit n belongs to part n.
#[inline]
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, d_min) = (f16(block), f16(&block[2..]));
    let (scales, high, bytes) = (&block[4..16], &block[16..48], &block[48..176]);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(scales, part);
        let (scale, min) = (d * scale, d_min * min);
        let shift = part % 2 * 4;
        for ((value, byte), high) in out.iter_mut().zip(&bytes[part / 2 * 32..]).zip(high) {
            let quant = ((byte >> shift) & 15) | ((high >> part & 1) << 4);
            *value = scale * f32::from(quant) - min;
        }
    }
}

/// 128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales, scale of scales.
#[inline]
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = f16(&block[208..]);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        // Four parts share 64 low bytes and 32 high ones.
        let (half, quarter) = (part / 4, part % 4);
        let low = &low[half * 64 + quarter % 2 * 32..][..32];
        let high = &high[half * 32..][..32];
        for (i, value) in out.iter_mut().enumerate() {
            let scale = d * f32::from(scales[part * 2 + i / 16].cast_signed());
            let nibble = (low[i] >> (quarter / 2 * 4)) & 15;
            let quant = nibble | (high[i] >> (quarter * 2) & 3) << 4;
            *value = scale * (f32::from(quant) - 32.0);
        }
    }
}

#[cfg(test)]
mod tests;
