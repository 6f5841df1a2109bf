//! The quantised block formats of GGUF: their bytes in a file, their layout in a packed panel, and
//! their conversion to f32.
//!
//! The formats are those of ggml (`ggml-common.h`, `ggml-quants.c`). All integers are
//! little-endian. A block consists of scales and *words*; a word is 4 bytes of quantised weights. A
//! panel holds 16 rows in two parts:
//!
//! * `[block][word][16]`, 4 bytes per word: what dot products and AMX tiles of bytes read;
//! * `[block][byte][16]`: the other bytes of the blocks, the scales.
//!
//! Packing moves bytes but does not change them, so a packed row can be unpacked exactly.

use std::ops::Range;

use crate::lanes::LANES;
use crate::tensor_type::TensorType;

/// Number of weights in a sub-block. A `Q8_0` block is one sub-block; the 256 weights of a K-quant
/// block are eight.
pub(super) const SUB_BLOCK: usize = 32;

/// The range of the words in the bytes of a block. The other bytes are scales.
pub(super) fn words(dtype: TensorType) -> Range<usize> {
    match dtype {
        TensorType::Q8_0 => 2..34,
        TensorType::Q4K => 16..144,
        TensorType::Q5K => 16..176,
        TensorType::Q6K => 0..192,
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
            unreachable!("{dtype:?} weights are not quantised")
        }
    }
}

/// Calls `copy` for each piece of a row with its offset in the row, its offset in the panel, and
/// whether it is a word (4 bytes) or a single byte.
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
    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
        each_piece(dtype, row_bytes, lane, |in_row, in_panel, is_word| {
            copy_piece(&row[in_row..], &mut panel[in_panel..], is_word);
        });
    }
}

/// Reverses [`pack`] for the row in lane `lane` of `panel`.
pub(super) fn unpack(dtype: TensorType, panel: &[u8], lane: usize, row: &mut [u8]) {
    each_piece(dtype, row.len(), lane, |in_row, in_panel, is_word| {
        copy_piece(&panel[in_panel..], &mut row[in_row..], is_word);
    });
}

/// Converts weights of type `dtype`, as they are stored in a file, to f32.
///
/// `row` holds little-endian values, or whole GGUF blocks for quantised types. `out` receives one
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

/// Quantises rows of `inner` float values of type `dtype` to `Q8_0` blocks.
pub(super) fn round_to_q8_0(dtype: TensorType, inner: usize, rows: &[u8]) -> Vec<u8> {
    let mut values = vec![0.0; rows.len() / dtype.block_bytes()];
    widen(dtype, rows, &mut values);
    let mut blocks = vec![0; values.len() / SUB_BLOCK * TensorType::Q8_0.block_bytes()];
    debug_assert!(inner.is_multiple_of(SUB_BLOCK), "rows must be whole blocks");
    quantise_q8_0(&values, &mut blocks);
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

/// Quantises values to `Q8_0` blocks. The scale of a block is its largest magnitude divided by 127,
/// rounded to f16. If a value is NaN, or so large that the scale overflows f16, the whole block
/// becomes NaN.
///
/// # Panics
/// If `blocks` does not hold 34 bytes for each 32 values.
pub(super) fn quantise_q8_0(values: &[f32], blocks: &mut [u8]) {
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

/// Dequantises whole blocks. `out` receives one value per weight.
///
/// # Panics
/// If the blocks do not fill `out` exactly, or `dtype` is not quantised.
pub(super) fn dequantise(dtype: TensorType, blocks: &[u8], out: &mut [f32]) {
    let (block_len, block_bytes) = (dtype.block_len(), dtype.block_bytes());
    assert_eq!(
        blocks.len() / block_bytes * block_len,
        out.len(),
        "out must hold one value per weight"
    );
    let one: fn(&[u8], &mut [f32]) = match dtype {
        TensorType::Q8_0 => q8_0,
        TensorType::Q4K => q4_k,
        TensorType::Q5K => q5_k,
        TensorType::Q6K => q6_k,
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
            unreachable!("{dtype:?} weights are not quantised")
        }
    };
    for (block, out) in blocks.chunks_exact(block_bytes).zip(out.chunks_exact_mut(block_len)) {
        one(block, out);
    }
}

/// The f16 value in the first two bytes.
#[inline]
fn f16(bytes: &[u8]) -> f32 {
    half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// `Q8_0`: an f16 scale, then 32 signed bytes.
#[inline]
fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = f16(block);
    for (value, byte) in out.iter_mut().zip(&block[2..]) {
        *value = f32::from(byte.cast_signed()) * scale;
    }
}

/// The 6-bit scale and minimum of sub-block `index`, from the 12 bytes that hold those of all
/// eight.
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

/// `Q4_K`: an f16 scale of the scales, an f16 scale of the minima, 12 bytes of 6-bit scales and
/// minima,
/// 128 bytes with two 4-bit weights each.
#[inline]
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, d_min) = (f16(block), f16(&block[2..]));
    let (scales, bytes) = (&block[4..16], &block[16..144]);
    for (sub_block, out) in out.chunks_exact_mut(SUB_BLOCK).enumerate() {
        let (scale, min) = scale_and_min(scales, sub_block);
        let (scale, min) = (d * scale, d_min * min);
        let shift = sub_block % 2 * 4;
        for (value, byte) in out.iter_mut().zip(&bytes[sub_block / 2 * 32..]) {
            *value = scale * f32::from((byte >> shift) & 15) - min;
        }
    }
}

/// `Q5_K`: as [`q4_k`], with 32 bytes of fifth bits before the 4-bit weights. Bit `n` of these
/// belongs to sub-block `n`.
#[inline]
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, d_min) = (f16(block), f16(&block[2..]));
    let (scales, high, bytes) = (&block[4..16], &block[16..48], &block[48..176]);
    for (sub_block, out) in out.chunks_exact_mut(SUB_BLOCK).enumerate() {
        let (scale, min) = scale_and_min(scales, sub_block);
        let (scale, min) = (d * scale, d_min * min);
        let shift = sub_block % 2 * 4;
        for ((value, byte), high) in out.iter_mut().zip(&bytes[sub_block / 2 * 32..]).zip(high) {
            let quant = ((byte >> shift) & 15) | ((high >> sub_block & 1) << 4);
            *value = scale * f32::from(quant) - min;
        }
    }
}

/// `Q6_K`: 128 bytes of low 4 bits, 64 bytes of high 2 bits, 16 signed 8-bit scales, an f16 scale
/// of the scales.
#[inline]
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = f16(&block[208..]);
    for (sub_block, out) in out.chunks_exact_mut(SUB_BLOCK).enumerate() {
        // Four sub-blocks share 64 bytes of low bits and 32 bytes of high bits.
        let (half, quarter) = (sub_block / 4, sub_block % 4);
        let low = &low[half * 64 + quarter % 2 * 32..][..32];
        let high = &high[half * 32..][..32];
        for (i, value) in out.iter_mut().enumerate() {
            let scale = d * f32::from(scales[sub_block * 2 + i / 16].cast_signed());
            let nibble = (low[i] >> (quarter / 2 * 4)) & 15;
            let quant = nibble | (high[i] >> (quarter * 2) & 3) << 4;
            *value = scale * (f32::from(quant) - 32.0);
        }
    }
}

#[cfg(test)]
mod tests;
