//! Dot products of bytes on x86-64.
//!
//! VNNI multiplies unsigned by signed bytes. Therefore 128 is added to each weight, and sums start
//! with -128 times the sum of the activations, which cancels it. Without VNNI, even and odd bytes
//! are widened to 16 bits and multiplied in pairs; nothing saturates.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::{
    _mm_cvtsi128_si32, _mm_max_epu32, _mm_shuffle_epi32, _mm256_add_epi32, _mm256_and_si256,
    _mm256_castps_si256, _mm256_castsi256_si128, _mm256_cvtepi32_ps, _mm256_cvtps_epi32,
    _mm256_dpbusd_avx_epi32, _mm256_extracti128_si256, _mm256_loadu_ps, _mm256_madd_epi16,
    _mm256_max_epu32, _mm256_mul_ps, _mm256_packs_epi16, _mm256_packs_epi32,
    _mm256_permutevar8x32_epi32, _mm256_sad_epu8, _mm256_set1_epi8, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_si256, _mm256_shuffle_epi32,
    _mm256_slli_epi16, _mm256_srai_epi16, _mm256_storeu_si256, _mm256_xor_si256, _mm512_add_epi32,
    _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_madd_epi16, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_setzero_si512, _mm512_slli_epi16, _mm512_srai_epi16,
    _mm512_xor_si512,
};

use super::activations::{SubBlock, scale_of};
use super::dots::Dots;
use crate::lanes::{Avx2, Avx512, One, Two};
use crate::quant::SUB_BLOCK;

/// Four successive bytes as an integer.
///
/// # Safety
/// `x` is readable for four bytes.
#[inline(always)]
unsafe fn word(x: *const u8) -> i32 {
    // SAFETY: `x` is readable for four bytes.
    unsafe { x.cast::<i32>().read_unaligned() }
}

/// [`SubBlock::of`] with AVX2.
///
/// # Safety
/// AVX2 is available.
#[inline(always)]
unsafe fn quantize(values: &[f32; SUB_BLOCK]) -> SubBlock {
    // SAFETY: each load reads 8 of the 32 values, and the store writes the 32 bytes. AVX2 is
    // available.
    unsafe {
        let values = [0, 8, 16, 24].map(|from| _mm256_loadu_ps(values.as_ptr().add(from)));
        // Magnitudes are compared as integers, so that NaN is the largest.
        let [a, b, c, d] = values.map(|value| {
            _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fff_ffff))
        });
        let eight = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
        let upper = _mm256_extracti128_si256::<1>(eight);
        let four = _mm_max_epu32(_mm256_castsi256_si128(eight), upper);
        let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
        let largest = _mm_max_epu32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
        let Some((scale, inverse)) = scale_of(_mm_cvtsi128_si32(largest).cast_unsigned()) else {
            return SubBlock::ZERO;
        };
        let [a, b, c, d] =
            values.map(|value| _mm256_cvtps_epi32(_mm256_mul_ps(value, _mm256_set1_ps(inverse))));
        // Each half of a register is packed separately, which leaves groups of four out of order.
        let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let all = _mm256_permutevar8x32_epi32(packed, order);
        let mut bytes = [0; SUB_BLOCK];
        _mm256_storeu_si256(bytes.as_mut_ptr().cast(), all);
        // Sums of eight bytes, after 128 was added to each.
        let unsigned = _mm256_xor_si256(all, _mm256_set1_epi8(i8::MIN));
        let eights = _mm256_sad_epu8(unsigned, _mm256_setzero_si256());
        let sums = _mm256_add_epi32(eights, _mm256_shuffle_epi32::<0b01_00_11_10>(eights));
        let halves = [_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums)];
        SubBlock { scale, bytes, halves: halves.map(|sum| _mm_cvtsi128_si32(sum) - 16 * 128) }
    }
}

/// Writes the even bytes, then the odd bytes, as 16-bit integers.
///
/// # Safety
/// `to` is writable for eight bytes.
#[inline(always)]
unsafe fn put_wide(x: [i8; 4], to: *mut u8) {
    let wide = [x[0], x[2], x[1], x[3]].map(i16::from);
    // SAFETY: `to` is writable for eight bytes.
    unsafe { to.cast::<[i16; 4]>().write_unaligned(wide) }
}

/// Dot products by AVX-512 VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx512Vnni;

impl Dots for Avx512Vnni {
    type Bytes = One;
    type Lanes = Avx512;
    type Weights = One;
    type Sums = One;
    const WORD: usize = 4;
    const GROUP_MAX: usize = 12;

    #[inline(always)]
    unsafe fn quantize(values: &[f32; SUB_BLOCK]) -> SubBlock {
        // SAFETY: AVX2 is available.
        unsafe { quantize(values) }
    }
    #[inline(always)]
    unsafe fn weights(bytes: One) -> One {
        // SAFETY: computes in registers; AVX-512 F is available.
        unsafe { _mm512_xor_si512(bytes, _mm512_set1_epi8(i8::MIN)) }
    }
    #[inline(always)]
    unsafe fn start(offset: i32) -> One {
        // SAFETY: computes in registers; AVX-512 F and VNNI are available.
        unsafe { _mm512_set1_epi32(offset) }
    }
    #[inline(always)]
    unsafe fn dot(sums: One, weights: One, x: *const u8) -> One {
        // SAFETY: `x` is readable for `WORD` bytes, and AVX-512 F and VNNI are available.
        unsafe { _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(word(x))) }
    }
    #[inline(always)]
    unsafe fn widen(sums: One) -> Avx512 {
        // SAFETY: computes in registers; AVX-512 F and VNNI are available.
        Avx512(unsafe { _mm512_cvtepi32_ps(sums) })
    }
}

/// Dot products by AVX-512 BW, for processors without VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx512Pairs;

impl Dots for Avx512Pairs {
    type Bytes = One;
    type Lanes = Avx512;
    type Weights = [One; 2];
    type Sums = One;
    const WORD: usize = 8;
    const GROUP_MAX: usize = 8;

    #[inline(always)]
    unsafe fn quantize(values: &[f32; SUB_BLOCK]) -> SubBlock {
        // SAFETY: AVX2 is available.
        unsafe { quantize(values) }
    }
    #[inline(always)]
    unsafe fn put(x: [i8; 4], to: *mut u8) {
        // SAFETY: `to` is writable for `WORD` bytes, and AVX-512 F and BW are available.
        unsafe { put_wide(x, to) }
    }
    #[inline(always)]
    unsafe fn weights(bytes: One) -> [One; 2] {
        // SAFETY: computes in registers; AVX-512 F and BW are available.
        unsafe {
            let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes));
            [even, _mm512_srai_epi16::<8>(bytes)]
        }
    }
    #[inline(always)]
    unsafe fn start(_: i32) -> One {
        // SAFETY: computes in registers; AVX-512 F and BW are available.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn dot(sums: One, weights: [One; 2], x: *const u8) -> One {
        // SAFETY: `x` is readable for `WORD` bytes, and AVX-512 F and BW are available.
        unsafe {
            let even = _mm512_madd_epi16(weights[0], _mm512_set1_epi32(word(x)));
            let odd = _mm512_madd_epi16(weights[1], _mm512_set1_epi32(word(x.add(4))));
            _mm512_add_epi32(sums, _mm512_add_epi32(even, odd))
        }
    }
    #[inline(always)]
    unsafe fn widen(sums: One) -> Avx512 {
        // SAFETY: computes in registers; AVX-512 F and BW are available.
        Avx512(unsafe { _mm512_cvtepi32_ps(sums) })
    }
}

/// Dot products by AVX-VNNI, for processors without AVX-512.
#[derive(Clone, Copy)]
pub(super) struct AvxVnni;

impl Dots for AvxVnni {
    type Bytes = Two;
    type Lanes = Avx2;
    type Weights = Two;
    type Sums = Two;
    const WORD: usize = 4;
    const GROUP_MAX: usize = 4;

    #[inline(always)]
    unsafe fn quantize(values: &[f32; SUB_BLOCK]) -> SubBlock {
        // SAFETY: AVX2 is available.
        unsafe { quantize(values) }
    }
    #[inline(always)]
    unsafe fn weights(bytes: Two) -> Two {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe {
            let add = _mm256_set1_epi8(i8::MIN);
            [_mm256_xor_si256(bytes[0], add), _mm256_xor_si256(bytes[1], add)]
        }
    }
    #[inline(always)]
    unsafe fn start(offset: i32) -> Two {
        // SAFETY: computes in registers; AVX2 and AVX-VNNI are available.
        unsafe { [_mm256_set1_epi32(offset); 2] }
    }
    #[inline(always)]
    unsafe fn dot(sums: Two, weights: Two, x: *const u8) -> Two {
        // SAFETY: `x` is readable for `WORD` bytes, and AVX2 and AVX-VNNI are available.
        unsafe {
            let x = _mm256_set1_epi32(word(x));
            [
                _mm256_dpbusd_avx_epi32(sums[0], weights[0], x),
                _mm256_dpbusd_avx_epi32(sums[1], weights[1], x),
            ]
        }
    }
    #[inline(always)]
    unsafe fn widen(sums: Two) -> Avx2 {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe { Avx2(_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])) }
    }
}

/// Dot products by AVX2.
#[derive(Clone, Copy)]
pub(super) struct Avx2Pairs;

impl Dots for Avx2Pairs {
    type Bytes = Two;
    type Lanes = Avx2;
    /// Even bytes and odd bytes of the words, as 16-bit integers.
    type Weights = [Two; 2];
    type Sums = Two;
    const WORD: usize = 8;
    const GROUP_MAX: usize = 4;

    #[inline(always)]
    unsafe fn quantize(values: &[f32; SUB_BLOCK]) -> SubBlock {
        // SAFETY: AVX2 is available.
        unsafe { quantize(values) }
    }
    #[inline(always)]
    unsafe fn put(x: [i8; 4], to: *mut u8) {
        // SAFETY: `to` is writable for `WORD` bytes, and AVX2 is available.
        unsafe { put_wide(x, to) }
    }
    #[inline(always)]
    unsafe fn weights(bytes: Two) -> [Two; 2] {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe {
            let (low, high) = (_mm256_slli_epi16::<8>(bytes[0]), _mm256_slli_epi16::<8>(bytes[1]));
            [
                [_mm256_srai_epi16::<8>(low), _mm256_srai_epi16::<8>(high)],
                [_mm256_srai_epi16::<8>(bytes[0]), _mm256_srai_epi16::<8>(bytes[1])],
            ]
        }
    }
    #[inline(always)]
    unsafe fn start(_: i32) -> Two {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe { [_mm256_setzero_si256(); 2] }
    }
    #[inline(always)]
    unsafe fn dot(sums: Two, weights: [Two; 2], x: *const u8) -> Two {
        // SAFETY: `x` is readable for `WORD` bytes, and AVX2 is available.
        unsafe {
            let even = _mm256_set1_epi32(word(x));
            let odd = _mm256_set1_epi32(word(x.add(4)));
            let [[even_low, even_high], [odd_low, odd_high]] = weights;
            let low = _mm256_add_epi32(
                _mm256_madd_epi16(even_low, even),
                _mm256_madd_epi16(odd_low, odd),
            );
            let high = _mm256_add_epi32(
                _mm256_madd_epi16(even_high, even),
                _mm256_madd_epi16(odd_high, odd),
            );
            [_mm256_add_epi32(sums[0], low), _mm256_add_epi32(sums[1], high)]
        }
    }
    #[inline(always)]
    unsafe fn widen(sums: Two) -> Avx2 {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe { Avx2(_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])) }
    }
}
