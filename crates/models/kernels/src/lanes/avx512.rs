//! [`Lanes`] with AVX-512: one register.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::{
    __m256i, __m512, __m512bh, __m512i, _CMP_NLT_UQ, _MM_FROUND_TO_NEG_INF, _mm_add_ps, _mm_add_ss,
    _mm_cvtss_f32, _mm_loadl_epi64, _mm_loadu_si128, _mm_movehdup_ps, _mm_movehl_ps,
    _mm_unpacklo_epi8, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_si256,
    _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castpd_ps, _mm512_castps_pd,
    _mm512_castps_si512, _mm512_castps512_ps256, _mm512_castsi256_si512, _mm512_castsi512_ps,
    _mm512_cmp_ps_mask, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32,
    _mm512_cvtepu8_epi64, _mm512_cvtepu16_epi64, _mm512_cvtne2ps_pbh, _mm512_cvtph_ps,
    _mm512_div_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_inserti64x4,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_blend_epi16, _mm512_maskz_mov_ps,
    _mm512_maskz_permutexvar_epi16, _mm512_maskz_scalef_ps, _mm512_max_ps, _mm512_min_ps,
    _mm512_mul_ps, _mm512_or_si512, _mm512_permutexvar_epi16, _mm512_permutexvar_ps,
    _mm512_rcp14_ps, _mm512_reduce_max_ps, _mm512_reduce_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_slli_epi64, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
    _mm512_unpacklo_ps,
};

use super::avx2::UPPER_HALF;
use crate::int4::LEVELS;
use crate::lanes::vector::{Kernel, LANES, Lanes, binary, call};

/// The levels of 4-bit codes as f32.
static F32_LEVELS: [f32; LANES] = {
    let mut levels = [0.0; LANES];
    let mut code = 0;
    while code < LANES {
        levels[code] = LEVELS[code] as f32;
        code += 1;
    }
    levels
};

/// The levels of 4-bit codes as bf16, twice, so that the bit above a code has no effect.
static BF16_LEVELS: [u16; 2 * LANES] = {
    let mut levels = [0; 2 * LANES];
    let mut code = 0;
    while code < levels.len() {
        levels[code] = ((LEVELS[code % LANES] as f32).to_bits() >> 16) as u16;
        code += 1;
    }
    levels
};

/// One 512-bit register.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(pub(crate) __m512);

impl Avx512 {
    /// The levels of the codes in the low 4 bits of each 32-bit lane. Higher bits have no effect.
    ///
    /// # Safety
    /// AVX-512 F is available.
    #[inline(always)]
    unsafe fn of_codes(codes: __m512i) -> Self {
        // SAFETY: there are 16 levels, and AVX-512 F is available.
        Avx512(unsafe { _mm512_permutexvar_ps(codes, _mm512_loadu_ps(F32_LEVELS.as_ptr())) })
    }

    /// The bf16 levels of the codes in the low 4 bits of each 16-bit lane. Higher bits have no
    /// effect.
    ///
    /// # Safety
    /// AVX-512 F and BW are available.
    #[inline(always)]
    unsafe fn pairs_of_codes(codes: __m512i) -> Self {
        // SAFETY: there are 32 levels, and AVX-512 F and BW are available.
        unsafe {
            let levels = _mm512_loadu_si512(BF16_LEVELS.as_ptr().cast());
            Avx512(_mm512_castsi512_ps(_mm512_permutexvar_epi16(codes, levels)))
        }
    }

    /// Rounds the 16 values of `self` and then the 16 values of `high` to bf16. Denormal values
    /// become zero.
    ///
    /// # Safety
    /// AVX-512 F and BF16 are available.
    #[inline(always)]
    pub(crate) unsafe fn round_pairs(self, high: Self) -> Self {
        // SAFETY: AVX-512 F and BF16 are available. Both types are 512 bits of plain data.
        unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high.0, self.0)) }
    }

    /// 2^x for `x <= 126` with a relative error below 8.6e-5, for results that are then rounded to
    /// bf16. Exactly 1 at zero, zero below -126, NaN for NaN.
    ///
    /// # Safety
    /// AVX-512 F and DQ are available.
    #[inline(always)]
    pub(crate) unsafe fn exp2_rough(self) -> Self {
        /// The polynomial of degree 3 through (0, 1) whose maximum relative error over `0 <= r <
        /// 1` is minimal, highest degree first.
        const MINIMAX: [f32; 4] = [0.077_067_05, 0.227_644_98, 0.695_116_76, 1.0];
        // SAFETY: computes in registers; AVX-512 F and DQ are available.
        unsafe {
            // x minus the integer below it, which `scalef` computes from x itself.
            let rest = _mm512_reduce_ps::<_MM_FROUND_TO_NEG_INF>(self.0);
            let [mut sum, coefficients @ ..] = MINIMAX.map(|c| _mm512_set1_ps(c));
            for coefficient in coefficients {
                sum = _mm512_fmadd_ps(sum, rest, coefficient);
            }
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(-126.0));
            Avx512(_mm512_maskz_scalef_ps(normal, sum, self.0))
        }
    }
}

/// Permutation that interleaves the lower and the upper half of 32 values of 16 bits.
static HALVES_INTERLEAVED: [u16; 2 * LANES] = {
    let mut order = [0; 2 * LANES];
    let mut i = 0;
    while i < LANES {
        order[2 * i] = i as u16;
        order[2 * i + 1] = (LANES + i) as u16;
        i += 1;
    }
    order
};

/// Permutation that moves 16 values of 16 bits to the upper halves of 16 lanes of 32 bits. The
/// entries of the lower halves are unused because a mask zeroes these.
static TO_UPPER_HALVES: [u16; 2 * LANES] = {
    let mut order = [0; 2 * LANES];
    let mut lane = 0;
    while lane < LANES {
        order[2 * lane + 1] = lane as u16;
        lane += 1;
    }
    order
};

/// Applies an intrinsic to the register.
macro_rules! one {
    ($f:ident($a:expr, $b:expr)) => {
        Avx512($f($a.0, $b.0))
    };
}

impl Lanes for Avx512 {
    const REGISTERS: usize = 32;
    const GROUP_MAX: usize = 12;

    call!("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c");
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        Avx512(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: `from` is readable for 16 values, and AVX-512 F, BW, VL and DQ are available.
        Avx512(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: `to` is writable for 16 values, and AVX-512 F, BW, VL and DQ are available.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 16 values, and AVX-512 F, BW, VL and DQ are available.
        unsafe {
            // One permutation moves each value to the upper half of its lane, instead of an integer
            // conversion and a shift.
            let raw = _mm512_castsi256_si512(_mm256_loadu_si256(from.cast::<__m256i>()));
            let order = _mm512_loadu_si512(TO_UPPER_HALVES.as_ptr().cast());
            let high = _mm512_maskz_permutexvar_epi16(0xaaaa_aaaa, order, raw);
            Avx512(_mm512_castsi512_ps(high))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 16 values, and AVX-512 F, BW, VL and DQ are available.
        Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast::<__m256i>())) })
    }
    #[inline(always)]
    unsafe fn load_bf16_firsts(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 32 values, and AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let raw = _mm512_loadu_si512(from.cast::<__m512i>());
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(raw)))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_seconds(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 32 values, and AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let raw = _mm512_loadu_si512(from.cast::<__m512i>());
            let second = _mm512_and_si512(raw, _mm512_set1_epi32(UPPER_HALF));
            Avx512(_mm512_castsi512_ps(second))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX-512 F, BW, VL and DQ are available.
        Avx512(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) })
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX-512 F, BW, VL and DQ are available.
        Avx512(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) })
    }
    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 8 bytes, and AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(from.cast()));
            // The second code of a byte becomes the low bits of the upper half.
            Self::of_codes(_mm512_or_si512(bytes, _mm512_slli_epi64::<28>(bytes)))
        }
    }
    #[inline(always)]
    unsafe fn load_i4_firsts(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX-512 F, BW, VL and DQ are available.
        unsafe { Self::of_codes(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_i4_seconds(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            Self::of_codes(_mm512_srli_epi32::<4>(bytes))
        }
    }
    #[inline(always)]
    unsafe fn load_i4_pairs(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            Self::pairs_of_codes(_mm512_or_si512(bytes, _mm512_slli_epi32::<12>(bytes)))
        }
    }
    #[inline(always)]
    unsafe fn load_i4_interleaved(first: *const u8, second: *const u8) -> Self {
        // SAFETY: both are readable for 8 bytes, and AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let (first, second) = (_mm_loadl_epi64(first.cast()), _mm_loadl_epi64(second.cast()));
            // The codes of `first` and `second` at bits 0 and 8 of each 64-bit lane, then also at
            // bits 0 and 16, then also the high codes at bits 32 and 48.
            let bytes = _mm512_cvtepu16_epi64(_mm_unpacklo_epi8(first, second));
            let bytes = _mm512_or_si512(bytes, _mm512_slli_epi64::<8>(bytes));
            Self::pairs_of_codes(_mm512_or_si512(bytes, _mm512_slli_epi64::<28>(bytes)))
        }
    }
    binary!(
        one: add = _mm512_add_ps, sub = _mm512_sub_ps, mul = _mm512_mul_ps,
        div = _mm512_div_ps, max = _mm512_max_ps, min = _mm512_min_ps,
    );
    #[inline(always)]
    unsafe fn reciprocal(self) -> Self {
        // A division of 16 lanes takes as long as the rest of a sigmoid. Instead, an approximation
        // of
        // 14 bits is refined by one Newton step.
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let near = _mm512_rcp14_ps(self.0);
            let error = _mm512_fnmadd_ps(self.0, near, _mm512_set1_ps(1.0));
            Avx512(_mm512_fmadd_ps(near, error, near))
        }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        Avx512(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }
    #[inline(always)]
    unsafe fn dot_pairs(self, other: Self, sum: Self) -> Self {
        // SAFETY: AVX-512 F and BF16 are available by the contract of this method. The types are
        // 512 bits of plain data each.
        unsafe {
            let (a, b): (__m512bh, __m512bh) = std::mem::transmute((self.0, other.0));
            Avx512(_mm512_dpbf16_ps(sum.0, a, b))
        }
    }
    #[inline(always)]
    unsafe fn load_interleaved(first: *const u16, second: *const u16) -> Self {
        // SAFETY: both are readable for 16 values, and AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let first = _mm512_castsi256_si512(_mm256_loadu_si256(first.cast()));
            let both = _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(second.cast()));
            let order = _mm512_loadu_si512(HALVES_INTERLEAVED.as_ptr().cast());
            Avx512(_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both)))
        }
    }
    #[inline(always)]
    unsafe fn pair_bf16(self, second: Self) -> Self {
        const UPPER_HALVES: u32 = 0xAAAA_AAAA;
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let first = _mm512_srli_epi32::<16>(_mm512_castps_si512(self.0));
            let second = _mm512_castps_si512(second.0);
            Avx512(_mm512_castsi512_ps(_mm512_mask_blend_epi16(UPPER_HALVES, first, second)))
        }
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, shifted: Self) -> Self {
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted.0));
            Avx512(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(self.0), n)))
        }
    }
    #[inline(always)]
    unsafe fn keep_where_ge(self, x: Self, limit: Self) -> Self {
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, limit.0);
            Avx512(_mm512_maskz_mov_ps(keep, self.0))
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let halves = _mm512_shuffle_f32x4::<0b01_00_11_10>(self.0, self.0);
            let eight = _mm512_castps512_ps256(_mm512_add_ps(self.0, halves));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; LANES]) {
        // SAFETY: computes in registers; AVX-512 F, BW, VL and DQ are available.
        unsafe {
            let mut a = [square[0].0; LANES];
            // Transpose 2 x 2 blocks within each 128-bit part.
            for i in (0..LANES).step_by(2) {
                a[i] = _mm512_unpacklo_ps(square[i].0, square[i + 1].0);
                a[i + 1] = _mm512_unpackhi_ps(square[i].0, square[i + 1].0);
            }
            // Transpose 4 x 4 blocks within each 128-bit part: row 4g + j then holds column j of
            // the rows 4g..4g+4.
            let mut b = [square[0].0; LANES];
            for g in (0..LANES).step_by(4) {
                for h in 0..2 {
                    let low = _mm512_castps_pd(a[g + h]);
                    let high = _mm512_castps_pd(a[g + h + 2]);
                    b[g + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                    b[g + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
                }
            }
            // Transpose the 128-bit parts themselves.
            for j in 0..4 {
                let low_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(b[j], b[4 + j]);
                let low_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(b[j], b[4 + j]);
                let high_even = _mm512_shuffle_f32x4::<0b10_00_10_00>(b[8 + j], b[12 + j]);
                let high_odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(b[8 + j], b[12 + j]);
                square[j] = Avx512(_mm512_shuffle_f32x4::<0b10_00_10_00>(low_even, high_even));
                square[8 + j] = Avx512(_mm512_shuffle_f32x4::<0b11_01_11_01>(low_even, high_even));
                square[4 + j] = Avx512(_mm512_shuffle_f32x4::<0b10_00_10_00>(low_odd, high_odd));
                square[12 + j] = Avx512(_mm512_shuffle_f32x4::<0b11_01_11_01>(low_odd, high_odd));
            }
        }
    }
}
