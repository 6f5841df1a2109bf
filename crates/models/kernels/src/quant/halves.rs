//! f16 numbers that bf16 can represent exactly. F16 files that were made from BF16 files have only
//! such numbers, and processors multiply bf16 faster.

/// Whether bf16 can represent each of these little-endian f16 numbers exactly.
#[must_use]
pub fn is_bf16(numbers: &[u8]) -> bool {
    let bits = numbers.as_chunks::<2>().0.iter().fold(0, |all, number| all | widen(*number));
    bits.trailing_zeros() >= u16::BITS
}

/// Converts little-endian f16 numbers for which [`is_bf16`] is true to bf16.
pub(crate) fn to_bf16(numbers: &[u8]) -> Vec<u8> {
    let mut converted = vec![0; numbers.len()];
    let pairs = converted.as_chunks_mut::<2>().0.iter_mut().zip(numbers.as_chunks::<2>().0);
    for (to, number) in pairs {
        let [_, _, low, high] = widen(*number).to_le_bytes();
        *to = [low, high];
    }
    converted
}

/// The bits of an f16 number as f32.
#[inline(always)]
pub(super) fn widen(number: [u8; 2]) -> u32 {
    /// 2^112: the biases of the exponents are 15 and 127.
    const BIAS: f32 = f32::from_bits((112 + 127) << 23);
    let bits = u32::from(u16::from_le_bytes(number));
    let magnitude = bits & 0x7fff;
    // This product is exact, also of subnormal numbers.
    let finite = (f32::from_bits(magnitude << 13) * BIAS).to_bits();
    let infinite = if magnitude < 0x7c00 { 0 } else { 0xff << 23 };
    (bits & 0x8000) << 16 | finite | infinite
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Goal: `is_bf16` is true for exactly those f16 numbers whose value bf16 can represent, and
    /// these are converted without a change. Payloads of NaN do not count.
    #[test]
    fn bf16_numbers_are_found() {
        let numbers = (0..=u16::MAX).map(f16::from_bits);
        for number in numbers.filter(|number| !number.is_nan()) {
            let (bytes, value) = (number.to_le_bytes(), number.to_f32());
            let rounded = bf16::from_f32(value);
            assert_eq!(widen(bytes), value.to_bits(), "{number}");
            assert_eq!(is_bf16(&bytes), rounded.to_f32() == value, "{number}");
            if rounded.to_f32() == value {
                assert_eq!(to_bf16(&bytes), rounded.to_le_bytes(), "{number}");
            }
        }
        let mut many = vec![0; 40_960];
        assert!(is_bf16(&many));
        many[36_864] = 1;
        many[36_865] = 0x3c;
        assert!(!is_bf16(&many), "1 + 2^-10");
    }

    /// Goal: bf16 can represent every bf16 number after it was rounded to f16, also a small one
    /// that lost bits.
    #[test]
    fn files_made_from_bf16_are_bf16() {
        let numbers = (0..=u16::MAX).map(|bits| f16::from_f32(bf16::from_bits(bits).to_f32()));
        let numbers = numbers.filter(|number| !number.is_nan());
        assert!(is_bf16(&numbers.flat_map(f16::to_le_bytes).collect::<Vec<_>>()));
    }
}
