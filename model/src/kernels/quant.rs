//! Dequantisation of GGUF blocks to f32. The formats are ggml's; all integers little-endian.
//!
//! Two forms give the same bits: [`dequantise`] for the blocks of one row as they stand in a file,
//! and [`part`] for a packed panel, in which byte `j` of a block is a run of 16, one a row:
//! `[block][byte][16]`. A part is 32 successive weights, the unit all formats share.
#![allow(unsafe_code, reason = "runs on lanes, whose methods are unsafe")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: a whole block")]

use super::lanes::{LANES, Lanes};
use crate::tensor_type::TensorType;

/// Weights of a part.
pub(super) const PART: usize = 32;

/// Packs rows of blocks into panels; missing rows of the last panel are zero, scales included.
pub(super) fn pack(packed: &mut [u8], row_bytes: usize, bytes: &[u8]) {
    let mut rows = bytes.chunks_exact(row_bytes);
    for panel in packed.chunks_exact_mut(row_bytes * LANES) {
        for (lane, row) in rows.by_ref().take(LANES).enumerate() {
            for (run, byte) in panel.chunks_exact_mut(LANES).zip(row) {
                run[lane] = *byte;
            }
        }
    }
}

/// Sixteen bytes, one a row of the panel.
#[inline(always)]
unsafe fn run(block: *const u8, byte: usize) -> [u8; LANES] {
    // SAFETY: the caller gives a whole packed block.
    unsafe { block.add(byte * LANES).cast::<[u8; LANES]>().read() }
}

/// The f16 whose low byte is `byte`, of each row.
#[inline(always)]
unsafe fn halves<L: Lanes>(block: *const u8, byte: usize) -> L {
    // SAFETY: the caller gives a whole packed block.
    unsafe {
        let (low, high) = (run(block, byte), run(block, byte + 1));
        let bits: [u16; LANES] = std::array::from_fn(|i| u16::from_le_bytes([low[i], high[i]]));
        L::load_f16(bits.as_ptr())
    }
}

/// Dequantises part `index` of a packed block to `[32][16]`.
///
/// # Safety
/// The set of `L` is available, `block` is a whole packed block of `dtype` with that part, and
/// `out` takes 512 values.
#[inline(always)]
pub(super) unsafe fn part<L: Lanes>(
    dtype: TensorType,
    block: *const u8,
    index: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            TensorType::Q8_0 => {
                let scale = halves::<L>(block, 0);
                for i in 0..PART {
                    let quants = L::load_i8(block.add((2 + i) * LANES));
                    quants.mul(scale).store(out.add(i * LANES));
                }
            }
            TensorType::Q4K | TensorType::Q5K => {
                let five = dtype == TensorType::Q5K;
                let (scale, min) = scales_and_mins::<L>(block, index);
                let pairs = if five { 48 } else { 16 } + index / 2 * 32;
                let shift = index % 2 * 4;
                for i in 0..PART {
                    let mut quants = run(block, pairs + i).map(|byte| (byte >> shift) & 15);
                    if five {
                        let high = run(block, 16 + i);
                        for (quant, high) in quants.iter_mut().zip(high) {
                            *quant |= (high >> index & 1) << 4;
                        }
                    }
                    let value = scale.mul(L::load_u8(quants.as_ptr())).sub(min);
                    value.store(out.add(i * LANES));
                }
            }
            TensorType::Q6K => {
                let (half, quarter) = (index / 4, index % 4);
                let d = halves::<L>(block, 208);
                let scales = block.add((192 + index * 2) * LANES);
                let scales = [scales, scales.add(LANES)].map(|run| d.mul(L::load_i8(run)));
                for i in 0..PART {
                    let low = run(block, half * 64 + quarter % 2 * 32 + i);
                    let high = run(block, 128 + half * 32 + i);
                    let quants: [u8; LANES] = std::array::from_fn(|lane| {
                        let nibble = (low[lane] >> (quarter / 2 * 4)) & 15;
                        nibble | (high[lane] >> (quarter * 2) & 3) << 4
                    });
                    let value = L::load_u8(quants.as_ptr()).sub(L::splat(32.0));
                    scales[i / 16].mul(value).store(out.add(i * LANES));
                }
            }
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
                unreachable!("{dtype:?} weights have no blocks")
            }
        }
    }
}

/// As [`scale_and_min`] for each row, times the block's own scales.
#[inline(always)]
unsafe fn scales_and_mins<L: Lanes>(block: *const u8, index: usize) -> (L, L) {
    // SAFETY: the caller gives a whole packed block of 256 weights with 12 bytes of scales.
    unsafe {
        let packed = |byte| run(block, 4 + byte);
        let (scale, min): ([u8; LANES], [u8; LANES]) = if index < 4 {
            (packed(index).map(|byte| byte & 63), packed(index + 4).map(|byte| byte & 63))
        } else {
            let low = packed(index + 4);
            let (high_scale, high_min) = (packed(index - 4), packed(index));
            (
                std::array::from_fn(|i| (low[i] & 15) | (high_scale[i] >> 6 << 4)),
                std::array::from_fn(|i| (low[i] >> 4) | (high_min[i] >> 6 << 4)),
            )
        };
        let d = halves::<L>(block, 0).mul(L::load_u8(scale.as_ptr()));
        (d, halves::<L>(block, 2).mul(L::load_u8(min.as_ptr())))
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
