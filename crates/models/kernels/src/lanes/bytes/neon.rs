//! [`Bytes`] on aarch64.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::aarch64::{
    uint8x16_t, vandq_u8, vdupq_n_s8, vdupq_n_u8, vld1q_u8, vorrq_u8, vqtbl1q_u8, vshlq_u8,
    vst1q_u8, vsubq_u8,
};

use super::Bytes;
use crate::lanes::each;

/// 16 words in four registers.
pub(crate) type Four = [uint8x16_t; 4];

impl Bytes for Four {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 64 bytes, and every aarch64 has NEON.
        unsafe {
            let (low, high) = (from, from.add(32));
            [vld1q_u8(low), vld1q_u8(low.add(16)), vld1q_u8(high), vld1q_u8(high.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        for (index, register) in self.into_iter().enumerate() {
            // SAFETY: `to` is writable for four times 16 bytes, and every aarch64 has NEON.
            unsafe { vst1q_u8(to.add(16 * index), register) }
        }
    }
    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        // SAFETY: computes in registers; every aarch64 has NEON.
        unsafe { each!(vorrq_u8(self, other)) }
    }
    #[inline(always)]
    unsafe fn sub(self, value: u8) -> Self {
        // SAFETY: computes in registers; every aarch64 has NEON.
        unsafe {
            let value = [vdupq_n_u8(value); 4];
            each!(vsubq_u8(self, value))
        }
    }
    #[inline(always)]
    unsafe fn right(self, count: usize, mask: u8) -> Self {
        // SAFETY: computes in registers; every aarch64 has NEON. A left shift by a negative
        // count is a right shift.
        unsafe { shift(self, (count as i8).wrapping_neg(), mask) }
    }
    #[inline(always)]
    unsafe fn left(self, count: usize, mask: u8) -> Self {
        // SAFETY: computes in registers; every aarch64 has NEON.
        unsafe { shift(self, count as i8, mask) }
    }
    #[inline(always)]
    unsafe fn look_up(self, table: &[i8; 16]) -> Self {
        // SAFETY: `table` is readable for 16 bytes, and every aarch64 has NEON.
        unsafe {
            let table = [vld1q_u8(table.as_ptr().cast()); 4];
            each!(vqtbl1q_u8(table, self))
        }
    }
}

/// Shifts each byte left by `left` bits (right if negative), then masks it.
///
/// # Safety
/// Every call is sound: every aarch64 has NEON.
#[inline(always)]
unsafe fn shift(bytes: Four, left: i8, mask: u8) -> Four {
    // SAFETY: computes in registers; every aarch64 has NEON.
    unsafe {
        let (left, mask) = ([vdupq_n_s8(left); 4], [vdupq_n_u8(mask); 4]);
        let shifted = each!(vshlq_u8(bytes, left));
        each!(vandq_u8(shifted, mask))
    }
}
