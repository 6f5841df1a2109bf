//! Keys or values of one layer: the memory, and the way into it.

use half::slice::HalfFloatSliceExt;

use super::{KvShape, KvType, zeroes};
use crate::kernels::KvSlice;

/// The largest finite f16.
const F16_MAX: f32 = 65_504.0;
/// Adding it leaves the nearest integer in the low bits of the significand.
const ROUND: f32 = 12_582_912.0;

/// Keys or values of one layer.
#[derive(Debug)]
pub(crate) struct Plane {
    /// Sizes of the whole store.
    shape: KvShape,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    F32(Vec<f32>),
    /// The bits of bf16 values.
    Bf16(Vec<u16>),
    /// The bits of f16 values.
    F16(Vec<u16>),
    Int8 {
        values: Vec<i8>,
        scales: Vec<f32>,
    },
}

impl Plane {
    /// Zeroes; `None` where there is no memory for them.
    pub(super) fn new(shape: &KvShape, block_count: usize) -> Option<Self> {
        let heads = (shape.block_size * shape.kv_heads).checked_mul(block_count)?;
        let len = heads.checked_mul(shape.head_dim)?;
        let memory = match shape.kv_type {
            KvType::F32 => Memory::F32(zeroes(len)?),
            KvType::Bf16 => Memory::Bf16(zeroes(len)?),
            KvType::F16 => Memory::F16(zeroes(len)?),
            KvType::Int8 => Memory::Int8 { values: zeroes(len)?, scales: zeroes(heads)? },
        };
        Some(Self { shape: *shape, memory })
    }

    /// The plane as the kernels read it.
    pub(super) fn slice(&self) -> KvSlice<'_> {
        match &self.memory {
            Memory::F32(values) => KvSlice::F32(values),
            Memory::Bf16(values) => KvSlice::Bf16(values),
            Memory::F16(values) => KvSlice::F16(values),
            Memory::Int8 { values, scales } => KvSlice::Int8 { values, scales },
        }
    }

    /// Writes `rows`, `[positions, kv_heads, head_dim]`, to successive positions of one block: the
    /// first at `offset` in `block`.
    ///
    /// # Panics
    /// If the rows do not lie within the block: a bug of the caller.
    pub(crate) fn write(&mut self, block: usize, offset: usize, rows: &[f32]) {
        let KvShape { block_size, head_dim, kv_heads, .. } = self.shape;
        let room = (block_size - offset) * kv_heads * head_dim;
        assert!(rows.len() <= room, "{} values are out of range for a room of {room}", rows.len());
        let at = (block * block_size + offset) * kv_heads * head_dim;
        let range = at..at + rows.len();
        match &mut self.memory {
            Memory::F32(values) => values[range].copy_from_slice(rows),
            Memory::Bf16(values) => round_to_bf16(rows, &mut values[range]),
            Memory::F16(values) => round_to_f16(rows, &mut values[range]),
            Memory::Int8 { values, scales } => {
                let heads = values[range].chunks_exact_mut(head_dim);
                let scales = &mut scales[at / head_dim..][..rows.len() / head_dim];
                for ((head, scale), row) in heads.zip(scales).zip(rows.chunks_exact(head_dim)) {
                    *scale = quantise(row, head);
                }
            }
        }
    }
}

/// Rounds to the bits of bf16, to nearest even. Both are of one size.
fn round_to_bf16(from: &[f32], to: &mut [u16]) {
    for (value, rounded) in from.iter().zip(to) {
        let bits = value.to_bits();
        // Written without a branch, so that it is compiled to vector code.
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        *rounded = if value.is_nan() { quiet_nan } else { nearest } as u16;
    }
}

/// Rounds to the bits of f16, to nearest even; what is too large becomes the largest. Both are of
/// one size.
fn round_to_f16(from: &[f32], to: &mut [u16]) {
    let mut near = [0.0; 64];
    let mut rounded = [half::f16::ZERO; 64];
    for (from, to) in from.chunks(near.len()).zip(to.chunks_mut(near.len())) {
        let (near, rounded) = (&mut near[..from.len()], &mut rounded[..from.len()]);
        for (near, value) in near.iter_mut().zip(from) {
            *near = value.clamp(-F16_MAX, F16_MAX);
        }
        rounded.convert_from_f32_slice(near);
        for (to, rounded) in to.iter_mut().zip(rounded) {
            *to = rounded.to_bits();
        }
    }
}

/// Rounds a head to integers from -127 to 127; returns what they are to be multiplied with. Both are of
/// one size. A head with a NaN or an infinity gets the scale NaN.
fn quantise(from: &[f32], to: &mut [i8]) -> f32 {
    let largest = from.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    if from.iter().any(|value| !value.is_finite()) {
        to.fill(1);
        return f32::NAN;
    }
    // The inverse of a number below 2^-120 or so would overflow: such a head is taken for zero.
    let inverse = if largest > 1e-36 { 127.0 / largest } else { 0.0 };
    for (value, rounded) in from.iter().zip(to) {
        // The low byte of the sum is the nearest integer, in two's complement.
        *rounded = (value * inverse + ROUND).to_bits() as i8;
    }
    largest / 127.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: bf16 rounding is that of the `half` crate, for every kind of value.
    #[test]
    fn bf16_rounds_as_half_does() {
        let from: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
        let mut to = vec![0; from.len()];
        round_to_bf16(&from, &mut to);
        for (value, bits) in from.iter().zip(to) {
            assert_eq!(bits, half::bf16::from_f32(*value).to_bits(), "{value}");
        }
    }

    /// Goal: f16 rounding is that of the `half` crate within its range, and ends at its largest.
    #[test]
    fn f16_rounds_as_half_does_and_saturates() {
        let from: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
        let mut to = vec![0; from.len()];
        round_to_f16(&from, &mut to);
        for (value, bits) in from.iter().zip(to) {
            let want = half::f16::from_f32(value.clamp(-F16_MAX, F16_MAX));
            let got = half::f16::from_bits(bits);
            assert!(got == want || got.is_nan() && value.is_nan(), "{value}: {got} for {want}");
        }
    }

    /// Goal: integers are off by at most 1/254 of the largest value; zeroes, tiny heads and what is
    /// not finite come back as what they are.
    #[test]
    fn integers_are_near() {
        for scale in [1e-42, 1e-30, 0.01, 1.0, 3e4, 1e38] {
            let from: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin() * scale).collect();
            let mut to = vec![0; 64];
            let factor = quantise(&from, &mut to);
            let largest = from.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
            for (value, integer) in from.iter().zip(&to) {
                let error = (f64::from(*value) - f64::from(*integer) * f64::from(factor)).abs();
                let bound = f64::from(largest) / 254.0 * 1.0001;
                assert!(error <= bound.max(1e-36), "{value}: {integer} x {factor}");
            }
        }
        let mut to = [7; 2];
        assert_eq!((quantise(&[0.0, -0.0], &mut to), to), (0.0, [0, 0]));
        for wild in [f32::NAN, f32::INFINITY] {
            let scale = quantise(&[1.0, wild], &mut to);
            assert!((f32::from(to[0]) * scale).is_nan() && (f32::from(to[1]) * scale).is_nan());
        }
    }
}
