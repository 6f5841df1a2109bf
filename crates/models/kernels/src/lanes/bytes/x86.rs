//! [`Bytes`] on x86-64: one register with AVX-512, two with AVX2.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::{
    __m256i, __m512i, _mm_cvtsi64_si128, _mm_loadu_si128, _mm256_and_si256,
    _mm256_broadcastsi128_si256, _mm256_i32gather_epi32, _mm256_loadu_si256, _mm256_or_si256,
    _mm256_set1_epi8, _mm256_shuffle_epi8, _mm256_sll_epi16, _mm256_srl_epi16, _mm256_storeu_si256,
    _mm256_sub_epi8, _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_i32gather_epi32,
    _mm512_loadu_si512, _mm512_or_si512, _mm512_set1_epi8, _mm512_shuffle_epi8, _mm512_sll_epi16,
    _mm512_srl_epi16, _mm512_storeu_si512, _mm512_sub_epi8,
};

use super::{Bytes, LANES, map};

/// 16 words in one register.
pub(crate) type One = __m512i;
/// 16 words in two registers.
pub(crate) type Two = [__m256i; 2];

impl Bytes for One {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 64 bytes, and AVX-512 F and BW are available.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: `to` is writable for 64 bytes, and AVX-512 F and BW are available.
        unsafe { _mm512_storeu_si512(to.cast(), self) }
    }
    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        // SAFETY: computes in registers; AVX-512 F and BW are available.
        unsafe { _mm512_or_si512(self, other) }
    }
    #[inline(always)]
    unsafe fn sub(self, value: u8) -> Self {
        // SAFETY: computes in registers; AVX-512 F and BW are available.
        unsafe { _mm512_sub_epi8(self, _mm512_set1_epi8(value.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn right(self, count: usize, mask: u8) -> Self {
        // SAFETY: computes in registers; AVX-512 F and BW are available. The mask removes bits from
        // the neighboring byte.
        unsafe {
            let shifted = _mm512_srl_epi16(self, _mm_cvtsi64_si128(count as i64));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask.cast_signed()))
        }
    }
    #[inline(always)]
    unsafe fn left(self, count: usize, mask: u8) -> Self {
        // SAFETY: computes in registers; AVX-512 F and BW are available.
        unsafe {
            let shifted = _mm512_sll_epi16(self, _mm_cvtsi64_si128(count as i64));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask.cast_signed()))
        }
    }
    #[inline(always)]
    unsafe fn look_up(self, table: &[i8; 16]) -> Self {
        // SAFETY: `table` is readable for 16 bytes, and AVX-512 F and BW are available.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, self)
        }
    }
    #[inline(always)]
    unsafe fn gather<const N: usize>(table: &[u32; N], indices: [u32; LANES]) -> [u32; LANES] {
        let indices = map(indices, |index| index & (N as u32 - 1));
        // SAFETY: AVX-512 F is available. The arrays have the size of the vectors, and all indices
        // are below the length of the table, a power of two.
        unsafe {
            let indices = _mm512_loadu_si512(indices.as_ptr().cast());
            std::mem::transmute(_mm512_i32gather_epi32::<4>(indices, table.as_ptr().cast()))
        }
    }
}

impl Bytes for Two {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 64 bytes, and AVX2 is available.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: `to` is writable for 64 bytes, and AVX2 is available.
        unsafe {
            _mm256_storeu_si256(to.cast(), self[0]);
            _mm256_storeu_si256(to.add(32).cast(), self[1]);
        }
    }
    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe { [_mm256_or_si256(self[0], other[0]), _mm256_or_si256(self[1], other[1])] }
    }
    #[inline(always)]
    unsafe fn sub(self, value: u8) -> Self {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe {
            let value = _mm256_set1_epi8(value.cast_signed());
            [_mm256_sub_epi8(self[0], value), _mm256_sub_epi8(self[1], value)]
        }
    }
    #[inline(always)]
    unsafe fn right(self, count: usize, mask: u8) -> Self {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe {
            let (count, mask) = (_mm_cvtsi64_si128(count as i64), mask.cast_signed());
            let mask = _mm256_set1_epi8(mask);
            [
                _mm256_and_si256(_mm256_srl_epi16(self[0], count), mask),
                _mm256_and_si256(_mm256_srl_epi16(self[1], count), mask),
            ]
        }
    }
    #[inline(always)]
    unsafe fn left(self, count: usize, mask: u8) -> Self {
        // SAFETY: computes in registers; AVX2 is available.
        unsafe {
            let (count, mask) = (_mm_cvtsi64_si128(count as i64), mask.cast_signed());
            let mask = _mm256_set1_epi8(mask);
            [
                _mm256_and_si256(_mm256_sll_epi16(self[0], count), mask),
                _mm256_and_si256(_mm256_sll_epi16(self[1], count), mask),
            ]
        }
    }
    #[inline(always)]
    unsafe fn look_up(self, table: &[i8; 16]) -> Self {
        // SAFETY: `table` is readable for 16 bytes, and AVX2 is available.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, self[0]), _mm256_shuffle_epi8(table, self[1])]
        }
    }
    #[inline(always)]
    unsafe fn gather<const N: usize>(table: &[u32; N], indices: [u32; LANES]) -> [u32; LANES] {
        let indices = map(indices, |index| index & (N as u32 - 1));
        // SAFETY: AVX2 is available. The arrays have the size of two vectors, and all indices are
        // below the length of the table, a power of two.
        unsafe {
            let half = |first: usize| {
                let indices = _mm256_loadu_si256(indices[first..].as_ptr().cast());
                _mm256_i32gather_epi32::<4>(table.as_ptr().cast(), indices)
            };
            std::mem::transmute([half(0), half(LANES / 2)])
        }
    }
}
