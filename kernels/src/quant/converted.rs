//! Rare formats of GGUF files, which are converted while they are loaded.
//!
//! Each of their weights is a small integer times a scale in f32. They become blocks of
//! [`I8Group16`](super::I8Group16) or [`I8Group32`](super::I8Group32) without any change of a
//! value. Products with them are the same as those with all other formats, but they take more
//! memory than in the file.

use super::SUB_BLOCK;
use super::grids::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID};
use crate::tensor_type::TensorType;

/// Number of weights of a block: the same for all of these formats.
pub(crate) const BLOCK_LEN: usize = 256;
/// Number of sub-blocks of a block.
const SUB_BLOCKS: usize = BLOCK_LEN / SUB_BLOCK;

/// A format whose blocks are converted.
pub(crate) trait Converted {
    /// Number of bytes of a block in a file.
    const BLOCK_BYTES: usize;
    /// Number of scales of 32 weights: 1 or 2.
    const SCALES: usize;
    /// The integers and the scales of a block of [`BLOCK_BYTES`](Converted::BLOCK_BYTES) bytes.
    fn read(block: &[u8], to: &mut Integers);
}

/// A block as integers with scales.
pub(crate) struct Integers {
    weights: [i8; BLOCK_LEN],
    /// `SCALES` for each sub-block. The others are not used.
    scales: [f32; 2 * SUB_BLOCKS],
}

impl Integers {
    /// Sets the `N` weights of group `group` to those of an entry of a grid, with negative signs
    /// where a bit of `signs` is one.
    fn put<const N: usize>(&mut self, group: usize, weights: [i8; N], signs: u8) {
        for (i, weight) in weights.into_iter().enumerate() {
            let negative = signs >> i & 1 == 1;
            self.weights[N * group + i] = if negative { -weight } else { weight };
        }
    }
}

/// The type to which blocks of `C` are converted.
pub(crate) fn target<C: Converted>() -> TensorType {
    if C::SCALES == 1 { TensorType::I8Group32 } else { TensorType::I8Group16 }
}

/// Converts whole blocks of `C` to blocks of [`target`].
pub(crate) fn convert<C: Converted>(blocks: &[u8]) -> Vec<u8> {
    let mut to = Integers { weights: [0; BLOCK_LEN], scales: [0.0; 2 * SUB_BLOCKS] };
    let bytes = target::<C>().block_bytes() * SUB_BLOCKS;
    let mut out = Vec::with_capacity(blocks.len() / C::BLOCK_BYTES * bytes);
    for block in blocks.chunks_exact(C::BLOCK_BYTES) {
        C::read(block, &mut to);
        let scales = to.scales.chunks_exact(C::SCALES);
        for (weights, scales) in to.weights.as_chunks::<SUB_BLOCK>().0.iter().zip(scales) {
            out.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
            out.extend(weights.iter().map(|weight| weight.cast_unsigned()));
        }
    }
    out
}

/// The f16 value in the first two bytes.
fn f16(bytes: &[u8]) -> f32 {
    half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// Integer `index` of an array of 16-bit integers.
fn u16_at(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
}

/// Integer `index` of an array of 32-bit integers.
fn u32_at(bytes: &[u8], index: usize) -> u32 {
    u32::from(u16_at(bytes, 2 * index)) | u32::from(u16_at(bytes, 2 * index + 1)) << 16
}

/// Eight signs from seven bits: the number of negative signs is even.
fn even_signs(bits: u32) -> u8 {
    let bits = (bits & 127) as u8;
    bits | (bits.count_ones() as u8 & 1) << 7
}

/// `d * (bits + 1 / 2) / divisor`, which f32 holds exactly.
fn scale(d: f32, bits: u32, divisor: f32) -> f32 {
    #[allow(clippy::cast_precision_loss, reason = "a few bits")]
    let bits = bits as f32;
    d * (bits + 0.5) / divisor
}

/// An f16 scale; for each 32 weights four 8-bit indices into a grid, four times seven signs and a
/// 4-bit scale.
pub(crate) struct Iq2Xxs;

impl Converted for Iq2Xxs {
    const BLOCK_BYTES: usize = 66;
    const SCALES: usize = 1;
    fn read(block: &[u8], to: &mut Integers) {
        for (index, part) in block[2..].chunks_exact(8).enumerate() {
            let bits = u32_at(part, 1);
            to.scales[index] = scale(f16(block), bits >> 28, 4.0);
            for (i, entry) in part[..4].iter().enumerate() {
                let weights = IQ2_XXS_GRID.entry(usize::from(*entry));
                to.put::<8>(4 * index + i, weights, even_signs(bits >> (7 * i)));
            }
        }
    }
}

/// An f16 scale, 32 16-bit integers with a 9-bit index into a grid and seven signs, 16 4-bit
/// scales.
pub(crate) struct Iq2Xs;

impl Converted for Iq2Xs {
    const BLOCK_BYTES: usize = 74;
    const SCALES: usize = 2;
    fn read(block: &[u8], to: &mut Integers) {
        for index in 0..BLOCK_LEN / 8 {
            let bits = u16_at(&block[2..], index);
            let weights = IQ2_XS_GRID.entry((bits & 511).into());
            to.put::<8>(index, weights, even_signs(u32::from(bits >> 9)));
        }
        four_bit_scales(f16(block), &block[66..], to);
    }
}

/// Sets the 16 scales of a block from 4-bit integers, the low bits of a byte first.
fn four_bit_scales(d: f32, bytes: &[u8], to: &mut Integers) {
    for (index, to) in to.scales.iter_mut().enumerate() {
        *to = scale(d, u32::from(bytes[index / 2] >> (index % 2 * 4) & 15), 4.0);
    }
}

/// An f16 scale, the low 8 bits of 32 indices into a grid, 32 bytes of signs, the high 2 bits of
/// the indices, 16 4-bit scales.
pub(crate) struct Iq2S;

impl Converted for Iq2S {
    const BLOCK_BYTES: usize = 82;
    const SCALES: usize = 2;
    fn read(block: &[u8], to: &mut Integers) {
        let (low, signs, high) = (&block[2..34], &block[34..66], &block[66..74]);
        for index in 0..BLOCK_LEN / 8 {
            let high = usize::from(high[index / 4] >> (index % 4 * 2) & 3);
            let weights = IQ2_S_GRID.entry(usize::from(low[index]) | high << 8);
            to.put::<8>(index, weights, signs[index]);
        }
        four_bit_scales(f16(block), &block[74..], to);
    }
}

/// An f16 scale, 64 8-bit indices into a grid; for each 32 weights four times seven signs and a
/// 4-bit scale.
pub(crate) struct Iq3Xxs;

impl Converted for Iq3Xxs {
    const BLOCK_BYTES: usize = 98;
    const SCALES: usize = 1;
    fn read(block: &[u8], to: &mut Integers) {
        for index in 0..SUB_BLOCKS {
            let bits = u32_at(&block[66..], index);
            to.scales[index] = scale(f16(block), bits >> 28, 2.0);
            for i in 0..8 {
                let signs = even_signs(bits >> (i / 2 * 7)) >> (i % 2 * 4);
                let group = 8 * index + i;
                to.put::<4>(group, IQ3_XXS_GRID.entry(block[2 + group].into()), signs);
            }
        }
    }
}

/// An f16 scale, the low 8 bits of 64 indices into a grid, the high bits of the indices, 32 bytes
/// of signs, eight 4-bit scales.
pub(crate) struct Iq3S;

impl Converted for Iq3S {
    const BLOCK_BYTES: usize = 110;
    const SCALES: usize = 1;
    fn read(block: &[u8], to: &mut Integers) {
        let (low, high, signs) = (&block[2..66], &block[66..74], &block[74..106]);
        for index in 0..BLOCK_LEN / 4 {
            let high = usize::from(high[index / 8] >> (index % 8) & 1);
            let weights = IQ3_S_GRID.entry(usize::from(low[index]) | high << 8);
            to.put::<4>(index, weights, signs[index / 2] >> (index % 2 * 4));
        }
        for index in 0..SUB_BLOCKS {
            let bits = block[106 + index / 2] >> (index % 2 * 4) & 15;
            to.scales[index] = scale(f16(block), bits.into(), 0.5);
        }
    }
}

/// Eight weights of the IQ1 formats: eight times the entry of the grid, plus or minus one. In ggml
/// an eighth is added instead.
fn iq1_weights(index: usize, minus: bool) -> [i8; 8] {
    IQ1_GRID.entry::<8>(index).map(|weight| 8 * weight + if minus { -1 } else { 1 })
}

/// An f16 scale, the low 8 bits of 32 indices into a grid; for each 32 weights a 16-bit integer
/// with the high 3 bits of four indices, a 3-bit scale and the sign of the addend.
pub(crate) struct Iq1S;

impl Converted for Iq1S {
    const BLOCK_BYTES: usize = 50;
    const SCALES: usize = 1;
    fn read(block: &[u8], to: &mut Integers) {
        for index in 0..SUB_BLOCKS {
            let bits = u16_at(&block[34..], index);
            to.scales[index] = scale(f16(block), u32::from(bits >> 12 & 7), 4.0);
            for i in 0..4 {
                let group = 4 * index + i;
                let high = usize::from(bits >> (3 * i) & 7) << 8;
                let entry = usize::from(block[2 + group]) | high;
                to.put::<8>(group, iq1_weights(entry, bits >> 15 == 1), 0);
            }
        }
    }
}

/// The low 8 bits of 32 indices into a grid, the high 3 bits of the indices with the sign of the
/// addend, and four 16-bit integers with four 3-bit scales and a quarter of the f16 scale each.
pub(crate) struct Iq1M;

impl Converted for Iq1M {
    const BLOCK_BYTES: usize = 56;
    const SCALES: usize = 2;
    fn read(block: &[u8], to: &mut Integers) {
        let scales = &block[48..];
        let d = (0..4).fold(0, |d, i| d | u16_at(scales, i) >> 12 << (4 * i));
        let d = half::f16::from_bits(d).to_f32();
        for (index, to) in to.scales.iter_mut().enumerate() {
            *to = scale(d, u32::from(u16_at(scales, index / 4) >> (index % 4 * 3) & 7), 4.0);
        }
        for index in 0..BLOCK_LEN / 8 {
            let high = block[32 + index / 2] >> (index % 2 * 4);
            let entry = usize::from(block[index]) | usize::from(high & 7) << 8;
            to.put::<8>(index, iq1_weights(entry, high & 8 != 0), 0);
        }
    }
}

/// Weights -1, 0 and 1 as digits of base 3: 48 bytes with five digits each, four bytes with four
/// digits each, an f16 scale.
pub(crate) struct Tq1_0;

impl Converted for Tq1_0 {
    const BLOCK_BYTES: usize = 54;
    const SCALES: usize = 1;
    fn read(block: &[u8], to: &mut Integers) {
        let mut at = 0;
        // Within each part, the first digits of all bytes come first.
        for (part, digits) in [(0..32, 5), (32..48, 5), (48..52, 4)] {
            for digit in 0..digits {
                for byte in &block[part.clone()] {
                    let rest = byte.wrapping_mul(3_u8.pow(digit));
                    let digit = (u16::from(rest) * 3) >> 8;
                    to.weights[at] = digit as i8 - 1;
                    at += 1;
                }
            }
        }
        to.scales[..SUB_BLOCKS].fill(f16(&block[52..]));
    }
}

/// Weights -1, 0, 1 and 2 of two bits each, an f16 scale.
pub(crate) struct Tq2_0;

impl Converted for Tq2_0 {
    const BLOCK_BYTES: usize = 66;
    const SCALES: usize = 1;
    fn read(block: &[u8], to: &mut Integers) {
        for (index, weight) in to.weights.iter_mut().enumerate() {
            let byte = block[index / 128 * 32 + index % 32];
            *weight = (byte >> (index % 128 / 32 * 2) & 3) as i8 - 1;
        }
        to.scales[..SUB_BLOCKS].fill(f16(&block[64..]));
    }
}
