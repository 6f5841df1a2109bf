//! A fast `e^x` for `x <= 0`, used by the other files of this module.
//!
//! Sampling needs the exponential of every logit of the vocabulary for each token. The standard
//! library's `exp` is one function call per element; this one consists of a few multiplications
//! that the compiler vectorizes. It does not use fused multiply-add, so its results are
//! bit-identical on all machines.

/// `e^x` for `x <= 0`, with a relative error below 3e-7. Returns 0 for `x` below -87 (including
/// `-inf`), where the result would be subnormal.
#[inline(always)]
pub(super) fn exp_at_most_one(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 as a sum of two parts. The first has so few bits that its small multiples are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = (clamped - whole * LN2_HIGH) - whole * LN2_LOW;
    // The Taylor series up to the seventh power; |rest| is at most ln(2)/2.
    let mut sum = 1.0 / 5040.0;
    sum = sum * rest + 1.0 / 720.0;
    sum = sum * rest + 1.0 / 120.0;
    sum = sum * rest + 1.0 / 24.0;
    sum = sum * rest + 1.0 / 6.0;
    sum = sum * rest + 0.5;
    sum = sum * rest + 1.0;
    sum = sum * rest + 1.0;
    // 2^whole, built from the exponent bits; `whole` is -126 to 0.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    let value = sum * f32::from_bits(exponent);
    if x >= -87.0 { value } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::exp_at_most_one;

    /// Goal: the relative error is below the documented bound over the whole range.
    #[test]
    fn is_close_to_the_exponential_of_the_standard_library() {
        assert_eq!(exp_at_most_one(0.0), 1.0);
        assert_eq!(exp_at_most_one(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_at_most_one(-88.0), 0.0);
        for step in 0..870_000 {
            let x = -(step as f32) * 1e-4;
            let (got, want) = (f64::from(exp_at_most_one(x)), f64::from(x).exp());
            assert!((got - want).abs() <= 3e-7 * want, "exp({x}): got {got}, expected {want}");
        }
    }
}
