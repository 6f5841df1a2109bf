//! Vectors of 16 words of four bytes, with which quantized weights are unpacked in registers.
#![allow(unsafe_code, reason = "the trait's methods run instruction sets")]

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::map;
use super::vector::LANES;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Four;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{One, Two};

/// Number of bytes of a vector of 16 words.
pub(crate) const WORD_VECTOR_BYTES: usize = 4 * LANES;

/// A vector of 16 words as bytes.
///
/// # Safety of the methods
/// The instruction set of the implementing type is available. Pointers are valid for
/// [`WORD_VECTOR_BYTES`] bytes and need no alignment.
pub(crate) trait Bytes: Copy {
    /// Loads 16 words.
    unsafe fn load(from: *const u8) -> Self;
    /// Stores 16 words.
    unsafe fn store(self, to: *mut u8);
    /// Bitwise or.
    unsafe fn or(self, other: Self) -> Self;
    /// Subtracts `value` from each byte, wrapping.
    unsafe fn sub(self, value: u8) -> Self;
    /// Shifts each byte right by `count` bits, then masks it. The upper `count` bits of `mask` are
    /// zero.
    unsafe fn right(self, count: usize, mask: u8) -> Self;
    /// Shifts each byte left by `count` bits, then masks it. The lower `count` bits of `mask` are
    /// zero.
    unsafe fn left(self, count: usize, mask: u8) -> Self;
    /// Replaces each byte, which is below 16, by the entry of `table` with that index.
    unsafe fn look_up(self, table: &[i8; 16]) -> Self;
    /// The entries of `table` with these indices, modulo its length, which is a power of two.
    #[inline(always)]
    unsafe fn gather<const N: usize>(table: &[u32; N], indices: [u32; LANES]) -> [u32; LANES] {
        map(indices, |index| table[index as usize & (N - 1)])
    }
}

/// A vector of 16 words in portable Rust.
#[derive(Clone, Copy)]
pub(crate) struct PlainBytes(pub(crate) [u8; WORD_VECTOR_BYTES]);

impl Bytes for PlainBytes {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: `from` is readable for 64 bytes by the contract of `Bytes`.
        PlainBytes(unsafe { from.cast::<[u8; WORD_VECTOR_BYTES]>().read() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: `to` is writable for 64 bytes by the contract of `Bytes`.
        unsafe { to.cast::<[u8; WORD_VECTOR_BYTES]>().write(self.0) }
    }
    #[inline(always)]
    unsafe fn or(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(byte, other)| *byte |= other);
        self
    }
    #[inline(always)]
    unsafe fn sub(self, value: u8) -> Self {
        PlainBytes(map(self.0, |byte| byte.wrapping_sub(value)))
    }
    #[inline(always)]
    unsafe fn right(self, count: usize, mask: u8) -> Self {
        PlainBytes(map(self.0, |byte| (byte >> count) & mask))
    }
    #[inline(always)]
    unsafe fn left(self, count: usize, mask: u8) -> Self {
        PlainBytes(map(self.0, |byte| (byte << count) & mask))
    }
    #[inline(always)]
    unsafe fn look_up(self, table: &[i8; 16]) -> Self {
        PlainBytes(map(self.0, |byte| table[usize::from(byte & 15)].cast_unsigned()))
    }
}
