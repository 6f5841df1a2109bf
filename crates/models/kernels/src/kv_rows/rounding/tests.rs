//! Rounding of keys and values to the stored types.

use super::*;

/// Goal: bf16 rounding equals the rounding of the `half` crate for every kind of value.
#[test]
fn bf16_rounds_as_half_does() {
    let from: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
    let mut to = vec![0; from.len()];
    round_to_bf16(&from, &mut to);
    for (value, bits) in from.iter().zip(to) {
        assert_eq!(bits, half::bf16::from_f32(*value).to_bits(), "{value}");
    }
}

/// Goal: f16 rounding equals that of the `half` crate within the range of f16 and saturates
/// beyond.
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

/// Goal: the error of 8-bit values is at most 1/254 of the head's largest value; heads of
/// zeroes and tiny values are stored as such, and heads with values that are not finite become
/// NaN.
#[test]
fn int8_error_is_bounded() {
    for scale in [1e-42, 1e-30, 0.01, 1.0, 3e4, 1e38] {
        let from: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin() * scale).collect();
        let mut to = vec![0; 64];
        let (factor, inverse) = scale_of(&from);
        round_to_int8(&from, inverse, &mut to);
        let largest = from.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
        for (value, integer) in from.iter().zip(&to) {
            let error = (f64::from(*value) - f64::from(*integer) * f64::from(factor)).abs();
            let bound = f64::from(largest) / 254.0 * 1.0001;
            assert!(error <= bound.max(1e-36), "{value}: {integer} x {factor}");
        }
    }
    let mut to = [7; 2];
    let (scale, inverse) = scale_of(&[0.0, -0.0]);
    round_to_int8(&[0.0, -0.0], inverse, &mut to);
    assert_eq!((scale, to), (0.0, [0, 0]));
    for wild in [f32::NAN, f32::INFINITY] {
        assert!(scale_of(&[1.0, wild]).0.is_nan(), "a NaN scale makes the whole head NaN");
    }
}
