//! Random weights in the formats of quantized blocks that GGUF files have.

use half::f16;
use stolon_checkpoint::TensorType;
use stolon_loadgen::rng::SeededRng;

/// A format of blocks whose bytes may all be random, except for a few factors.
#[derive(Debug)]
pub(super) struct Format {
    pub(super) dtype: TensorType,
    /// The first byte of each factor in a block, and a value with which random codes are weights
    /// with a mean of 0 and a standard deviation of about 0.08, like those in f32.
    factors: &'static [(usize, f32)],
}

/// The formats that candle multiplies by as they are.
pub(super) const FORMATS: [Format; 10] = [
    Format { dtype: TensorType::Q4_0, factors: &[(0, power(6))] },
    Format { dtype: TensorType::Q4_1, factors: &[(0, power(6)), (2, -7.5 * power(6))] },
    Format { dtype: TensorType::Q5_0, factors: &[(0, power(7))] },
    Format { dtype: TensorType::Q5_1, factors: &[(0, power(7)), (2, -15.5 * power(7))] },
    Format { dtype: TensorType::Q8_0, factors: &[(0, power(10))] },
    Format { dtype: TensorType::Q2K, factors: &[(80, power(7)), (82, 1.5 * power(7))] },
    Format { dtype: TensorType::Q3K, factors: &[(108, power(9))] },
    Format { dtype: TensorType::Q4K, factors: &[(0, power(12)), (2, 7.5 * power(12))] },
    Format { dtype: TensorType::Q5K, factors: &[(0, power(13)), (2, 15.5 * power(13))] },
    Format { dtype: TensorType::Q6K, factors: &[(208, power(14))] },
];

/// 2 to the power of `-exponent`.
const fn power(exponent: u32) -> f32 {
    1.0 / (1_u32 << exponent) as f32
}

impl Format {
    /// Blocks of `elements` elements.
    pub(super) fn random(&self, elements: usize, random: &mut SeededRng) -> Vec<u8> {
        let mut bytes = vec![0; self.dtype.bytes_of(elements).unwrap_or_default()];
        bytes.fill_with(|| random.between(0, 255) as u8);
        for block in bytes.chunks_exact_mut(self.dtype.block_bytes()) {
            for &(at, factor) in self.factors {
                block[at..at + 2].copy_from_slice(&f16::from_f32(factor).to_le_bytes());
            }
        }
        bytes
    }
}
