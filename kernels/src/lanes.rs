//! Sixteen `f32` lanes on each instruction set, so that a kernel is written once.
//!
//! Kernels are generic over [`Lanes`] and `#[inline(always)]`; [`dispatch!`] makes the entry that
//! is compiled for each instruction set. All methods are `unsafe` because an implementation may
//! only run where its instruction set exists: whoever holds the fitting [`Path`] may call them.
//!
//! [`Path`]: super::Path
#![allow(unsafe_code, reason = "instruction sets chosen at run time")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: the path's set")]

mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub(super) use math::exp2_rough;
pub(super) use math::{exp, exp2, gelu_tanh, sigmoid};
#[cfg(target_arch = "aarch64")]
pub(super) use neon::{Neon, each};
pub(super) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

/// Lanes of a vector, features of a packed panel.
pub(super) const LANES: usize = 16;

/// Sixteen `f32`s. Every operation rounds once, lane by lane, so results do not depend on the
/// lane a value stands in.
///
/// # Safety of the methods
/// The instruction set of the implementation must be available. Pointers need no alignment and
/// must be valid for 16 values of their type (`load_bf16_pairs`: 32).
pub(super) trait Lanes: Copy {
    /// Values of this type that fit in registers.
    const REGISTERS: usize;
    /// Most rows of a register tile.
    const GROUP_MAX: usize;

    /// Runs a kernel in a function of its own, compiled for the set.
    unsafe fn call<K: Kernel>(kernel: K);
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Sixteen bf16 values widened.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Sixteen f16 values widened.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Sixteen f16 values, given as their low bytes and their high bytes, widened.
    #[inline(always)]
    unsafe fn load_f16_bytes(low: *const u8, high: *const u8) -> Self {
        // SAFETY: the caller gives 16 bytes twice.
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
    /// Sixteen pairs of bf16: the firsts and the seconds, widened.
    unsafe fn load_bf16_pairs(from: *const u16) -> (Self, Self);
    /// Sixteen unsigned bytes.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// Sixteen signed bytes.
    unsafe fn load_i8(from: *const u8) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// 1 / self, off by at most two units of the last place; NaN where self is infinite.
    #[inline(always)]
    unsafe fn reciprocal(self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::splat(1.0).div(self) }
    }
    /// `self * factor + addend`; rounded once where the set has a fused form, twice elsewhere.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `sum` plus the products of bf16 pairs, given as the bits of lanes: AVX-512 BF16 only.
    ///
    /// # Panics
    /// On lanes that have no such instruction.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn dot_pairs(self, _other: Self, _sum: Self) -> Self {
        unreachable!("these lanes have no dot products of bf16 pairs")
    }
    /// The larger; the other's NaN wins, so that `bound.max(x)` keeps x's.
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller; the other's NaN wins.
    unsafe fn min(self, other: Self) -> Self;
    /// `self * 2^n`, with n the low bits of `shifted`: a number to which 1.5 * 2^23 was added.
    unsafe fn scale_by_power(self, shifted: Self) -> Self;
    /// Lanes of `self` where `x >= limit` (or NaN), zero elsewhere.
    unsafe fn keep_where_ge(self, x: Self, limit: Self) -> Self;
    /// The sum of the lanes, in one fixed tree: halves, quarters, eighths, pairs.
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        let mut v = [0.0_f32; LANES];
        // SAFETY: the array holds 16 values; the set is available by the caller's promise.
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
    /// The largest lane, never NaN unless all lanes are.
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        let mut v = [0.0_f32; LANES];
        // SAFETY: as above.
        unsafe { self.store(v.as_mut_ptr()) };
        v.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    /// Transposes a 16 x 16 square in place.
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; LANES]) {
        let mut rows = [[0.0_f32; LANES]; LANES];
        let mut turned = [[0.0_f32; LANES]; LANES];
        for (lanes, row) in square.iter().zip(&mut rows) {
            // SAFETY: as above.
            unsafe { lanes.store(row.as_mut_ptr()) };
        }
        for (i, row) in rows.iter().enumerate() {
            for (j, value) in row.iter().enumerate() {
                turned[j][i] = *value;
            }
        }
        for (lanes, row) in square.iter_mut().zip(&turned) {
            // SAFETY: as above.
            *lanes = unsafe { Self::load(row.as_ptr()) };
        }
    }
}

/// A kernel that runs in a function of its own.
pub(super) trait Kernel {
    unsafe fn run<L: Lanes>(self);
}

/// Makes `fn name(path, args...)`, which runs `body::<L>(args...)` compiled for the path's set.
///
/// `body` is an `#[inline(always)] unsafe fn` generic over [`Lanes`] whose only needs beyond the
/// instruction set are the ones its own Safety section states; `name` is `unsafe` for those.
macro_rules! dispatch {
    ($(#[$doc:meta])* $visibility:vis unsafe fn $name:ident($($arg:ident: $type:ty),* $(,)?)
        $(-> $result:ty)? = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "sizes and pointers of one kernel")]
        $visibility unsafe fn $name(path: $crate::Path, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::PathKind;
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "as above")]
                unsafe fn avx512($($arg: $type),*) $(-> $result)? {
                    // SAFETY: the set is enabled; the rest is the caller's promise.
                    unsafe { $body::<$crate::lanes::Avx512>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "as above")]
                unsafe fn avx2($($arg: $type),*) $(-> $result)? {
                    // SAFETY: the set is enabled; the rest is the caller's promise.
                    unsafe { $body::<$crate::lanes::Avx2>($($arg),*) }
                }
                match path.kind() {
                    PathKind::Amx | PathKind::Avx512Bf16 | PathKind::Avx512 => {
                        // SAFETY: a path is only made where its set is available.
                        return unsafe { avx512($($arg),*) };
                    }
                    PathKind::Avx2 => {
                        // SAFETY: as above.
                        return unsafe { avx2($($arg),*) };
                    }
                    PathKind::Portable | PathKind::Neon => {}
                }
            }
            #[cfg(target_arch = "aarch64")]
            if path.kind() == $crate::PathKind::Neon {
                // SAFETY: every aarch64 has the set; the rest is the caller's promise.
                return unsafe { $body::<$crate::lanes::Neon>($($arg),*) };
            }
            let _ = path;
            // SAFETY: plain Rust runs everywhere; the rest is the caller's promise.
            unsafe { $body::<$crate::lanes::Portable>($($arg),*) }
        }
    };
}
pub(super) use dispatch;

#[cfg(test)]
mod tests;
