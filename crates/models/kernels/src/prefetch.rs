//! Software prefetching.
//!
//! The more rows a GEMM multiplies with each cache line of weights, the longer it computes per
//! line, and the less time the lines that the hardware prefetcher requested in advance cover. With
//! 8 rows the processor waits for memory about as long as it computes. Kernels that read weights or
//! the KV cache only once therefore prefetch explicitly what they will read a little later.
#![allow(unsafe_code, reason = "the prefetch intrinsics are unsafe functions")]

/// Bytes of a cache line on all processors that the kernels are tuned for.
pub(super) const CACHE_LINE_BYTES: usize = 64;

/// Prefetches the cache line that contains `address` into the L2 cache. Any address is allowed,
/// also one outside all allocations. Does nothing on architectures other than x86-64.
#[inline(always)]
pub(super) fn prefetch_l2<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: PREFETCHT1 is part of SSE, which every x86-64 processor has. It is a hint that
        // neither faults nor changes memory, even if the address is invalid.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
