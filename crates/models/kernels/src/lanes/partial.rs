//! Vectors that are loaded or stored in part, at the end of a row.
#![allow(unsafe_code, reason = "runs on SIMD lanes, whose methods are unsafe")]

use super::vector::{LANES, Lanes};

/// Loads `min(16, left)` values and sets the other lanes to `fill`.
///
/// # Safety
/// The instruction set of `L` is available, and `from` is readable for `min(16, left)` values.
#[inline(always)]
pub(crate) unsafe fn load_some<L: Lanes>(from: *const f32, left: usize, fill: f32) -> L {
    // SAFETY: a full vector is only loaded if 16 values are readable; otherwise `left` values are
    // copied to an array of 16.
    unsafe {
        if left >= LANES {
            return L::load(from);
        }
        let mut padded = [fill; LANES];
        std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), left);
        L::load(padded.as_ptr())
    }
}

/// Stores the first `min(16, left)` lanes.
///
/// # Safety
/// The instruction set of `L` is available, and `to` is writable for `min(16, left)` values.
#[inline(always)]
pub(crate) unsafe fn store_some<L: Lanes>(value: L, to: *mut f32, left: usize) {
    // SAFETY: a full vector is only stored if 16 values are writable; otherwise `left` values are
    // copied from an array of 16.
    unsafe {
        if left >= LANES {
            return value.store(to);
        }
        let mut padded = [0.0; LANES];
        value.store(padded.as_mut_ptr());
        std::ptr::copy_nonoverlapping(padded.as_ptr(), to, left);
    }
}
