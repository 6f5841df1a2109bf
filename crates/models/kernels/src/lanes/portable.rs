//! [`Lanes`] in portable Rust, which the compiler vectorizes for its target.
#![allow(unsafe_code, reason = "the trait's methods are unsafe; these only read and write memory")]

use super::map;
use super::vector::{Kernel, LANES, Lanes, call};

/// Sixteen values.
#[derive(Clone, Copy)]
pub(crate) struct Portable(pub(crate) [f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut result = self.0;
        for (a, b) in result.iter_mut().zip(other.0) {
            *a = f(*a, b);
        }
        Portable(result)
    }
}

impl Lanes for Portable {
    const REGISTERS: usize = 4;
    const GROUP_MAX: usize = 4;

    call!();
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: `from` is readable for 16 values by the contract of `Lanes`.
        Portable(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: `to` is writable for 16 values by the contract of `Lanes`.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 16 values by the contract of `Lanes`.
        let raw = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Portable(map(raw, |bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 16 values by the contract of `Lanes`.
        let raw = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Portable(map(raw, |bits| half::f16::from_bits(bits).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_bf16_firsts(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 32 values by the contract of `Lanes`.
        let raw = unsafe { from.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        Portable(map(raw, |pair| f32::from_bits(u32::from(pair[0]) << 16)))
    }
    #[inline(always)]
    unsafe fn load_bf16_seconds(from: *const u16) -> Self {
        // SAFETY: `from` is readable for 32 values by the contract of `Lanes`.
        let raw = unsafe { from.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        Portable(map(raw, |pair| f32::from_bits(u32::from(pair[1]) << 16)))
    }
    #[inline(always)]
    unsafe fn load_u8(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 values by the contract of `Lanes`.
        Portable(map(unsafe { from.cast::<[u8; LANES]>().read_unaligned() }, f32::from))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 16 values by the contract of `Lanes`.
        Portable(map(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }, f32::from))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        let mut result = addend.0;
        for ((sum, a), b) in result.iter_mut().zip(self.0).zip(factor.0) {
            // Every aarch64 has fused multiply-add. On other targets it may be a slow library call.
            if cfg!(target_arch = "aarch64") {
                *sum = a.mul_add(b, *sum);
            } else {
                *sum += a * b;
            }
        }
        Portable(result)
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn scale_by_power(self, shifted: Self) -> Self {
        self.zip(shifted, |a, n| f32::from_bits(a.to_bits().wrapping_add(n.to_bits() << 23)))
    }
    #[inline(always)]
    unsafe fn keep_where_ge(self, x: Self, limit: Self) -> Self {
        let mut result = self.0;
        for ((value, x), limit) in result.iter_mut().zip(x.0).zip(limit.0) {
            if x < limit {
                *value = 0.0;
            }
        }
        Portable(result)
    }
}
