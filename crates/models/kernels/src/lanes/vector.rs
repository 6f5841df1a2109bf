//! The interface of a SIMD vector of 16 `f32` lanes, which each instruction set implements.
#![allow(unsafe_code, reason = "the methods run instructions that not every processor has")]

/// Number of lanes of a vector, and number of output features in a panel of packed weights.
pub(crate) const LANES: usize = 16;

use crate::int4::LEVELS;

/// A kernel that is compiled once for each instruction set, as a separate function.
///
/// See [`Lanes::call`] for the reason.
pub(crate) trait Kernel {
    /// Runs the kernel. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The instruction set of `L` is available. A kernel documents what it requires of its fields.
    unsafe fn run<L: Lanes>(self);
}

/// Implements [`Lanes::call`] for a type that needs these instruction sets.
macro_rules! call {
    ($($features:literal)?) => {
        #[inline(always)]
        unsafe fn call<K: Kernel>(kernel: K) {
            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn run<L: Lanes, K: Kernel>(kernel: K) {
                // SAFETY: this function enables the instruction set of the type; the caller meets
                // the requirements of `kernel`.
                unsafe { kernel.run::<L>() }
            }
            // SAFETY: the instruction set is available by the contract of `Lanes`; the caller meets
            // the requirements of `kernel`.
            unsafe { run::<Self, K>(kernel) }
        }
    };
}
pub(super) use call;

/// Implements methods of [`Lanes`] that apply an intrinsic to the registers of two vectors, as the
/// macro `$each` of the type does.
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
macro_rules! binary {
    ($each:ident: $($method:ident = $intrinsic:ident),+ $(,)?) => {$(
        #[inline(always)]
        unsafe fn $method(self, other: Self) -> Self {
            // SAFETY: computes in registers; the instruction set is available by the contract of
            // `Lanes`.
            unsafe { $each!($intrinsic(self, other)) }
        }
    )+};
}
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
pub(super) use binary;

/// A vector of 16 `f32` lanes.
///
/// Every operation rounds each lane once, so a result does not depend on the lane that holds it.
///
/// # Safety of the methods
/// The instruction set of the implementing type must be available on this processor. A value of
/// [`Path`](crate::Path) is the proof of that. Pointers need no alignment. They must be valid for
/// 16 values of their type (`load_bf16_firsts` and `load_bf16_seconds`: 32 values).
pub(crate) trait Lanes: Copy {
    /// Number of vectors of this type that fit in the registers of the processor.
    const REGISTERS: usize;
    /// Maximum number of rows in a register tile.
    const GROUP_MAX: usize;

    /// Runs a kernel in a separate function, for which this instruction set is enabled.
    ///
    /// Kernels are generic over `Lanes` and `#[inline(always)]`, because a generic function cannot
    /// enable an instruction set itself. Without this boundary each kernel would be copied into
    /// every caller. The resulting functions would be so large that they dominate the build time.
    ///
    /// # Safety
    /// As for [`Kernel::run`].
    unsafe fn call<K: Kernel>(kernel: K);
    /// A vector with all lanes set to `value`.
    unsafe fn splat(value: f32) -> Self;
    /// Loads 16 f32 values.
    unsafe fn load(from: *const f32) -> Self;
    /// Stores 16 f32 values.
    unsafe fn store(self, to: *mut f32);
    /// Loads 16 bf16 values and widens them.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Loads 16 f16 values and widens them.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Loads and widens 16 f16 values whose low bytes and high bytes are stored apart, 16 bytes
    /// each.
    #[inline(always)]
    unsafe fn load_f16_bytes(low: *const u8, high: *const u8) -> Self {
        // SAFETY: `low` and `high` are readable for 16 bytes each, and `bits` holds 16 values.
        unsafe {
            let low = low.cast::<[u8; LANES]>().read();
            let high = high.cast::<[u8; LANES]>().read();
            let mut bits = [0_u16; LANES];
            for (bits, (low, high)) in bits.iter_mut().zip(low.into_iter().zip(high)) {
                *bits = u16::from_le_bytes([low, high]);
            }
            Self::load_f16(bits.as_ptr())
        }
    }
    /// Loads the first values of 16 pairs of bf16 values, widened.
    unsafe fn load_bf16_firsts(from: *const u16) -> Self;
    /// Loads the second values of 16 pairs of bf16 values, widened.
    unsafe fn load_bf16_seconds(from: *const u16) -> Self;
    /// Loads 16 unsigned bytes and converts them to f32.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// Loads 16 signed bytes and converts them to f32.
    unsafe fn load_i8(from: *const u8) -> Self;
    /// Loads 16 codes of 4 bits from 8 bytes, the first of a byte in its low bits, and converts them
    /// to their [`LEVELS`].
    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 codes, which are 8 bytes.
        let bytes = unsafe { from.cast::<[u8; LANES / 2]>().read_unaligned() };
        let mut levels = [0; LANES];
        for (levels, byte) in levels.chunks_exact_mut(2).zip(bytes) {
            (levels[0], levels[1]) =
                (LEVELS[usize::from(byte & 15)], LEVELS[usize::from(byte >> 4)]);
        }
        // SAFETY: `levels` has 16 values; the instruction set is available as for every method.
        unsafe { Self::load_i8(levels.as_ptr().cast()) }
    }
    /// Loads the [`LEVELS`] of the codes in the low 4 bits of 16 bytes.
    #[inline(always)]
    unsafe fn load_i4_firsts(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and the array has as many.
        unsafe {
            let codes = from.cast::<[u8; LANES]>().read_unaligned();
            let levels = codes.map(|byte| LEVELS[usize::from(byte & 15)]);
            Self::load_i8(levels.as_ptr().cast())
        }
    }
    /// Loads the [`LEVELS`] of the codes in the high 4 bits of 16 bytes.
    #[inline(always)]
    unsafe fn load_i4_seconds(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 bytes, and the array has as many.
        unsafe {
            let codes = from.cast::<[u8; LANES]>().read_unaligned();
            let levels = codes.map(|byte| LEVELS[usize::from(byte >> 4)]);
            Self::load_i8(levels.as_ptr().cast())
        }
    }
    /// `self + other`.
    unsafe fn add(self, other: Self) -> Self;
    /// `self - other`.
    unsafe fn sub(self, other: Self) -> Self;
    /// `self * other`.
    unsafe fn mul(self, other: Self) -> Self;
    /// `self / other`.
    unsafe fn div(self, other: Self) -> Self;
    /// `1 / self` with an error of at most two units in the last place. NaN if `self` is infinite.
    #[inline(always)]
    unsafe fn reciprocal(self) -> Self {
        // SAFETY: computes in registers; the instruction set is available as for every method.
        unsafe { Self::splat(1.0).div(self) }
    }
    /// `self * factor + addend`: rounded once if the instruction set has fused multiply-add, twice
    /// otherwise.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `sum` plus the dot products of bf16 pairs. The bits of each f32 lane are one pair.
    ///
    /// # Safety
    /// AVX-512 BF16 is available, in addition to the instruction set of the type.
    ///
    /// # Panics
    /// On every type except the one for AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn dot_pairs(self, _other: Self, _sum: Self) -> Self {
        unreachable!("this instruction set has no dot product of bf16 pairs")
    }
    /// Loads 16 values of 16 bits from each pointer. Lane `i` has value `i` of `first` in its lower
    /// half and value `i` of `second` in its upper half: operands of [`Self::dot_pairs`].
    ///
    /// # Panics
    /// On every type except the one for AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_interleaved(_first: *const u16, _second: *const u16) -> Self {
        unreachable!("this instruction set has no dot product of bf16 pairs")
    }
    /// Loads 16 bytes of two codes of 4 bits each. Lane `i` has the bf16 level of the low code of
    /// byte `i` in its lower half and that of the high code in its upper half.
    ///
    /// # Panics
    /// On every type except the one for AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_i4_pairs(_from: *const u8) -> Self {
        unreachable!("this instruction set has no dot product of bf16 pairs")
    }
    /// As [`Self::load_interleaved`], of the bf16 levels of 16 codes of 4 bits at each pointer, as
    /// [`Self::load_i4`] loads them.
    ///
    /// # Panics
    /// On every type except the one for AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_i4_interleaved(_first: *const u8, _second: *const u8) -> Self {
        unreachable!("this instruction set has no dot product of bf16 pairs")
    }
    /// As [`Self::load_interleaved`], of values that were loaded as f32 and are bf16 numbers. The
    /// lower halves of other numbers are lost.
    ///
    /// # Panics
    /// On every type except the one for AVX-512.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn pair_bf16(self, _second: Self) -> Self {
        unreachable!("this instruction set has no dot product of bf16 pairs")
    }
    /// The larger value. If either is NaN the result is `other`, so `bound.max(x)` propagates the
    /// NaN of `x`.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller value. If either is NaN the result is `other`.
    unsafe fn min(self, other: Self) -> Self;
    /// `self * 2^n`, where `n` is in the low bits of `shifted`: a number to which 1.5 * 2^23 was
    /// added.
    unsafe fn scale_by_power(self, shifted: Self) -> Self;
    /// `self` in lanes where `x >= limit` or either is NaN, zero in the others.
    unsafe fn keep_where_ge(self, x: Self, limit: Self) -> Self;
    /// The sum of the lanes, added in the same tree on every instruction set: the upper half to the
    /// lower half, then quarters, eighths and the last pair.
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        let mut v = [0.0_f32; LANES];
        // SAFETY: `v` holds 16 values; the instruction set is available as for every method.
        unsafe { self.store(v.as_mut_ptr()) };
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                v[i] += v[i + half];
            }
            half /= 2;
        }
        v[0]
    }
    /// The largest lane. It is NaN only if all lanes are.
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        let mut v = [0.0_f32; LANES];
        // SAFETY: `v` holds 16 values; the instruction set is available as for every method.
        unsafe { self.store(v.as_mut_ptr()) };
        v.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    /// Transposes a 16 x 16 matrix in place. Each vector is a row.
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; LANES]) {
        let mut rows = [[0.0_f32; LANES]; LANES];
        let mut columns = [[0.0_f32; LANES]; LANES];
        for (lanes, row) in square.iter().zip(&mut rows) {
            // SAFETY: `row` holds 16 values; the instruction set is available as for every method.
            unsafe { lanes.store(row.as_mut_ptr()) };
        }
        for (i, row) in rows.iter().enumerate() {
            for (j, value) in row.iter().enumerate() {
                columns[j][i] = *value;
            }
        }
        for (lanes, column) in square.iter_mut().zip(&columns) {
            // SAFETY: `column` holds 16 values; the instruction set is available as for every
            // method.
            *lanes = unsafe { Self::load(column.as_ptr()) };
        }
    }
}
