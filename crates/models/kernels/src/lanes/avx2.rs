//! [`Lanes`] with AVX2: two registers.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_LT_OQ, _mm_and_si128, _mm_loadl_epi64, _mm_loadu_si128,
    _mm_set1_epi8, _mm_shuffle_epi8, _mm_srli_epi16, _mm_srli_si128, _mm_unpacklo_epi8,
    _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_andnot_ps, _mm256_castps_si256,
    _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_div_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps,
};

use crate::int4::LEVELS;
use crate::lanes::vector::{Kernel, Lanes, binary, call};

/// Two 256-bit registers.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(pub(crate) __m256, pub(crate) __m256);

/// Mask of the upper 16 bits of a 32-bit lane: the second value of a bf16 pair, as f32 bits.
pub(super) const UPPER_HALF: i32 = 0xffff_0000_u32.cast_signed();

impl Avx2 {
    /// The levels of 16 codes of 4 bits, each in a byte whose high bits are zero.
    ///
    /// # Safety
    /// AVX2, FMA and F16C are available.
    #[inline(always)]
    unsafe fn of_codes(codes: __m128i) -> Self {
        // SAFETY: there are 16 levels of a byte each, and AVX2 is available.
        unsafe {
            let levels = _mm_shuffle_epi8(_mm_loadu_si128(LEVELS.as_ptr().cast()), codes);
            let widen = |levels| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(levels));
            Avx2(widen(levels), widen(_mm_srli_si128::<8>(levels)))
        }
    }
}

/// Applies an intrinsic to both registers.
macro_rules! both {
    ($f:ident($a:expr, $b:expr)) => {
        Avx2($f($a.0, $b.0), $f($a.1, $b.1))
    };
}

impl Lanes for Avx2 {
    const REGISTERS: usize = 8;
    const GROUP_MAX: usize = 6;

    call!("avx2,fma,f16c");
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: computes in registers; AVX2, FMA and F16C are available.
        unsafe { Avx2(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: `from` is readable for 16 values, and AVX2, FMA and F16C are available.
        unsafe { Avx2(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: `to` is writable for 16 values, and AVX2, FMA and F16C are available.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 16 values, and AVX2, FMA and F16C are available.
        unsafe {
            let widen = |from: *const u16| {
                let raw = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(raw))
            };
            Avx2(widen(from), widen(from.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 16 values, and AVX2, FMA and F16C are available.
        unsafe {
            let low = _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast()));
            Avx2(low, high)
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_firsts(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 32 values, and AVX2, FMA and F16C are available.
        unsafe {
            let low = _mm256_loadu_si256(from.cast::<__m256i>());
            let high = _mm256_loadu_si256(from.add(16).cast::<__m256i>());
            let (low, high) = (_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high));
            Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_seconds(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 32 values, and AVX2, FMA and F16C are available.
        unsafe {
            let low = _mm256_loadu_si256(from.cast::<__m256i>());
            let high = _mm256_loadu_si256(from.add(16).cast::<__m256i>());
            let mask = _mm256_set1_epi32(UPPER_HALF);
            let (low, high) = (_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
            Avx2(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX2, FMA and F16C are available.
        unsafe {
            let widen = |from: *const u8| {
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())))
            };
            Avx2(widen(from), widen(from.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX2, FMA and F16C are available.
        unsafe {
            let widen = |from: *const u8| {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())))
            };
            Avx2(widen(from), widen(from.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 8 bytes, and AVX2, FMA and F16C are available.
        unsafe {
            let bytes = _mm_loadl_epi64(from.cast());
            let low_bits = _mm_set1_epi8(15);
            let firsts = _mm_and_si128(bytes, low_bits);
            let seconds = _mm_and_si128(_mm_srli_epi16::<4>(bytes), low_bits);
            Self::of_codes(_mm_unpacklo_epi8(firsts, seconds))
        }
    }
    #[inline(always)]
    unsafe fn load_i4_firsts(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX2, FMA and F16C are available.
        unsafe {
            let bytes = _mm_loadu_si128(from.cast());
            Self::of_codes(_mm_and_si128(bytes, _mm_set1_epi8(15)))
        }
    }
    #[inline(always)]
    unsafe fn load_i4_seconds(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX2, FMA and F16C are available.
        unsafe {
            let bytes = _mm_srli_epi16::<4>(_mm_loadu_si128(from.cast()));
            Self::of_codes(_mm_and_si128(bytes, _mm_set1_epi8(15)))
        }
    }
    binary!(
        both: add = _mm256_add_ps, sub = _mm256_sub_ps, mul = _mm256_mul_ps,
        div = _mm256_div_ps, max = _mm256_max_ps, min = _mm256_min_ps,
    );
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: computes in registers; AVX2, FMA and F16C are available.
        unsafe {
            let low = _mm256_fmadd_ps(self.0, factor.0, addend.0);
            Avx2(low, _mm256_fmadd_ps(self.1, factor.1, addend.1))
        }
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, shifted: Self) -> Self {
        // SAFETY: computes in registers; AVX2, FMA and F16C are available.
        unsafe {
            let scale = |value, shifted| {
                let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), n))
            };
            Avx2(scale(self.0, shifted.0), scale(self.1, shifted.1))
        }
    }
    #[inline(always)]
    unsafe fn keep_where_ge(self, x: Self, limit: Self) -> Self {
        // SAFETY: computes in registers; AVX2, FMA and F16C are available.
        unsafe {
            let keep =
                |value, x, limit| _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, limit), value);
            Avx2(keep(self.0, x.0, limit.0), keep(self.1, x.1, limit.1))
        }
    }
}
