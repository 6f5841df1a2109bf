//! Dequantisation of GGUF blocks to f32. The formats are ggml's; all integers little-endian.

use super::matrix::WeightType;

/// Dequantises a row of whole blocks. `out` takes one value a weight.
///
/// # Panics
/// If the blocks do not fill `out` exactly: a bug of the caller. Plain types have no blocks.
pub(super) fn dequantise(dtype: WeightType, blocks: &[u8], out: &mut [f32]) {
    let (block_len, block_bytes) = dtype.block();
    assert_eq!(blocks.len() / block_bytes * block_len, out.len(), "whole blocks fill the row");
    let one: fn(&[u8], &mut [f32]) = match dtype {
        WeightType::Q8_0 => q8_0,
        WeightType::Q4K => q4_k,
        WeightType::Q5K => q5_k,
        WeightType::Q6K => q6_k,
        WeightType::F32 | WeightType::F16 | WeightType::Bf16 => {
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
