//! Rounding of keys and values to the stored types. The functions that are `#[inline(always)]` are
//! vectorized for the instruction set of their caller.

use half::slice::HalfFloatSliceExt;

/// The largest finite f16.
const F16_MAX: f32 = 65_504.0;
/// 1.5 * 2^23. Adding it to a number between -2^22 and 2^22 leaves the nearest integer in the low
/// bits of the significand.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// Rounds to the bits of bf16, to nearest with ties to even. Both slices have the same length.
#[inline(always)]
pub(super) fn round_to_bf16(from: &[f32], to: &mut [u16]) {
    for (value, rounded) in from.iter().zip(to) {
        let bits = value.to_bits();
        // Without a branch, so that the compiler vectorizes the loop.
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        *rounded = if value.is_nan() { quiet_nan } else { nearest } as u16;
    }
}

/// Rounds to the bits of f16, to nearest with ties to even. Magnitudes above the largest finite f16
/// become that number. Both slices have the same length.
pub(super) fn round_to_f16(from: &[f32], to: &mut [u16]) {
    let mut clamped = [0.0; 64];
    let mut rounded = [half::f16::ZERO; 64];
    for (from, to) in from.chunks(clamped.len()).zip(to.chunks_mut(clamped.len())) {
        let (clamped, rounded) = (&mut clamped[..from.len()], &mut rounded[..from.len()]);
        for (clamped, value) in clamped.iter_mut().zip(from) {
            *clamped = value.clamp(-F16_MAX, F16_MAX);
        }
        rounded.convert_from_f32_slice(clamped);
        for (to, rounded) in to.iter_mut().zip(rounded) {
            *to = rounded.to_bits();
        }
    }
}

/// The scale of a head that is stored as bytes, and its inverse: the factor that brings the values
/// into -127..=127 before they are rounded. A head that contains a NaN or an infinity gets the
/// scale NaN.
pub(super) fn scale_of(head: &[f32]) -> (f32, f32) {
    // The bits of non-negative floats have the same order as the floats; infinity and NaN come
    // last.
    let largest = head.iter().fold(0, |largest, value| largest.max(value.abs().to_bits()));
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        return (f32::NAN, 0.0);
    }
    // The inverse of a number below about 2^-120 would overflow. Such a head is stored as zeroes.
    (largest / 127.0, if largest > 1e-36 { 127.0 / largest } else { 0.0 })
}

/// Multiplies values by `inverse`, which brings them into -127..=127, and rounds them to integers,
/// to nearest with ties to even. Both slices have the same length.
#[inline(always)]
pub(super) fn round_to_int8(from: &[f32], inverse: f32, to: &mut [i8]) {
    for (value, rounded) in from.iter().zip(to) {
        // The low byte of the sum is the nearest integer in two's complement.
        *rounded = (value * inverse + ROUND_TO_INTEGER).to_bits() as i8;
    }
}

/// Rounds one head of keys or values to signed bytes, as they are stored in [`KvSliceMut::Int8`], and
/// returns the scale by which the bytes are multiplied when they are read. Both slices have the same
/// length. If the head contains a NaN or an infinity, the scale is NaN, and the bytes mean nothing.
///
/// [`KvSliceMut::Int8`]: super::KvSliceMut::Int8
#[must_use]
pub fn int8_head(head: &[f32], to: &mut [i8]) -> f32 {
    let (scale, inverse) = scale_of(head);
    round_to_int8(head, inverse, to);
    scale
}

#[cfg(test)]
mod tests;
