//! SIMD vectors of 16 `f32` lanes on each instruction set, so that a kernel is written only once.
//!
//! A kernel is an `#[inline(always)]` function that is generic over [`Lanes`]. [`dispatch!`] makes
//! its entry point: a function that takes a [`Path`](crate::Path) and calls the kernel compiled for
//! that path's instruction set. [`Lanes::call`] makes a function boundary inside a kernel.
//!
//! All methods are `unsafe` because an implementation may only run where its instruction set is
//! available; a value of `Path` proves that.
//!
//! `vector` defines the interface, and `portable`, `avx2`, `avx512` and `neon` implement it. `math`
//! has the functions that are not single instructions, `partial` loads and stores the ends of rows,
//! and `bytes` has vectors of 16 words of four bytes.
#![allow(unsafe_code, reason = "dispatches to functions compiled for an instruction set")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod bytes;
pub(crate) mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod partial;
mod portable;
mod vector;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) use bytes::Four;
pub(crate) use bytes::{Bytes, PlainBytes, WORD_VECTOR_BYTES};
#[cfg(target_arch = "x86_64")]
pub(crate) use bytes::{One, Two};
pub(crate) use math::{exp2, soft_cap};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::{Neon, each};
pub(crate) use partial::{load_some, store_some};
pub(crate) use portable::Portable;
pub(crate) use vector::{Kernel, LANES, Lanes};

/// `f` of each value. `[T; N]::map` is often not inlined, and then it is compiled without the
/// instruction set of the function that calls it.
#[inline(always)]
pub(crate) fn map<T: Copy, U: Copy + Default, const N: usize>(
    values: [T; N],
    f: impl Fn(T) -> U,
) -> [U; N] {
    let mut results = [U::default(); N];
    for (result, value) in results.iter_mut().zip(values) {
        *result = f(value);
    }
    results
}

/// Defines `fn name(path, args...)`, which runs `body::<L>(args...)` compiled for the instruction
/// set of `path`.
///
/// `body` is an `#[inline(always)] unsafe fn` that is generic over [`Lanes`]. Apart from the
/// instruction set, `name` requires of its caller what the `# Safety` section of `body` requires.
macro_rules! dispatch {
    ($(#[$doc:meta])* $visibility:vis unsafe fn $name:ident($($arg:ident: $type:ty),* $(,)?)
        $(-> $result:ty)? = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "sizes and pointers of one kernel")]
        $visibility unsafe fn $name(path: $crate::path::Path, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::path::PathKind;
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "sizes and pointers of one kernel")]
                unsafe fn avx512($($arg: $type),*) $(-> $result)? {
                    // SAFETY: this function enables AVX-512 F, BW, VL and DQ; its caller meets the
                    // requirements of `body`, which are those of the generated function.
                    unsafe { $body::<$crate::lanes::Avx512>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "sizes and pointers of one kernel")]
                unsafe fn avx2($($arg: $type),*) $(-> $result)? {
                    // SAFETY: this function enables AVX2, FMA and F16C; its caller meets the
                    // requirements of `body`, which are those of the generated function.
                    unsafe { $body::<$crate::lanes::Avx2>($($arg),*) }
                }
                match path.kind() {
                    PathKind::Amx | PathKind::Avx512Bf16 | PathKind::Avx512 => {
                        // SAFETY: a `Path` of this kind exists only if AVX-512 F, BW, VL and DQ
                        // were detected.
                        return unsafe { avx512($($arg),*) };
                    }
                    PathKind::Avx2 => {
                        // SAFETY: a `Path` of this kind exists only if AVX2, FMA and F16C were
                        // detected.
                        return unsafe { avx2($($arg),*) };
                    }
                    PathKind::Portable | PathKind::Neon => {}
                }
            }
            #[cfg(target_arch = "aarch64")]
            if path.kind() == $crate::path::PathKind::Neon {
                // SAFETY: NEON is part of every aarch64 target of Rust's standard library; the
                // caller meets the requirements of `body`.
                return unsafe { $body::<$crate::lanes::Neon>($($arg),*) };
            }
            let _ = path;
            // SAFETY: portable Rust needs no instruction set; the caller meets the requirements of
            // `body`.
            unsafe { $body::<$crate::lanes::Portable>($($arg),*) }
        }
    };
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests;
