//! Asking memory for what will be read soon.
//!
//! What a product does with a cache line of weights takes longer the more rows there are, so the lines that
//! the processor looks ahead by itself last ever less time: with 8 rows it waits for memory
//! as long as it computes. So kernels that read weights or a cache once name what they want some time before.
#![allow(unsafe_code, reason = "a hint takes a raw pointer, which it does not read")]

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Asks for the line at `at`, into the nearest cache. Any address will do.
#[inline(always)]
pub(super) fn fetch_near<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint; no memory is accessed that the program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Asks for the line at `at`, into the second cache. Any address will do.
#[inline(always)]
pub(super) fn fetch_second<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
