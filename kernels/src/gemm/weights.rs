//! How the weights of a panel are stored, and how the microkernel loads them.
#![allow(unsafe_code, reason = "loads packed weights by pointer")]

use crate::lanes::{Kernel, LANES, Lanes};

/// A storage form of the weights of a panel.
pub(crate) trait Form {
    /// A stored value.
    type Raw: Copy + Default;
    /// Whether two successive weights of an output feature are stored side by side:
    /// `[inner / 2][16][2]`.
    const PAIRS: bool;
    /// Whether [`Form::widen`] may convert the weights to f32 before they are multiplied.
    const WIDENS: bool;
    /// Converts `inner` steps of a panel to f32, `[inner][16]`. Only for forms with
    /// [`Form::WIDENS`].
    ///
    /// # Safety
    /// The instruction set of `L` is available. `from` is readable and `to` is writable for
    /// `16 * inner` values. `inner` is even if the form has pairs.
    #[inline(always)]
    unsafe fn widen<L: Lanes>(from: *const Self::Raw, inner: usize, to: *mut f32) {
        // SAFETY: step `k < inner` reads and writes the 16 values from `16 * k` on, or the 32
        // values of two steps for pairs, of which `inner` is a multiple.
        unsafe {
            if Self::PAIRS {
                for k in (0..inner).step_by(2) {
                    let (first, second) = Self::load_pairs::<L>(from.add(k * LANES));
                    first.store(to.add(k * LANES));
                    second.store(to.add((k + 1) * LANES));
                }
            } else {
                for k in 0..inner {
                    Self::load::<L>(from.add(k * LANES)).store(to.add(k * LANES));
                }
            }
        }
    }
    /// Loads 16 weights, one per output feature. Not used for pairs.
    ///
    /// # Safety
    /// The instruction set of `L` is available, and `from` is readable for 16 values.
    unsafe fn load<L: Lanes>(from: *const Self::Raw) -> L;
    /// Loads 16 pairs of weights, one per output feature; returns the first weights and the second
    /// weights. Only used for pairs.
    ///
    /// # Safety
    /// The instruction set of `L` is available, and `from` is readable for 32 values.
    unsafe fn load_pairs<L: Lanes>(from: *const Self::Raw) -> (L, L);
    /// Runs `kernel` as [`Lanes::call`] does, with the instructions enabled that the form needs in
    /// addition to the instruction set of `L`.
    ///
    /// # Safety
    /// The instruction set of `L` and the additional instructions are available, and the
    /// requirements of `kernel` are met.
    #[inline(always)]
    unsafe fn call<L: Lanes, K: Kernel>(kernel: K) {
        // SAFETY: this form needs no additional instructions; the other requirements are the same.
        unsafe { L::call(kernel) }
    }
    /// `sum` plus the products of one step.
    ///
    /// # Safety
    /// The instruction set of `L`, and what [`Form::call`] enables, are available.
    #[inline(always)]
    unsafe fn accumulate<L: Lanes>(weights: L, x: L, sum: L) -> L {
        // SAFETY: computes in registers; the instruction set of `L` is available.
        unsafe { weights.mul_add(x, sum) }
    }
}

/// f32 weights, `[inner][16]`.
pub(crate) struct F32;
/// f16 weights, `[inner][16]`.
pub(crate) struct F16;
/// bf16 values, `[inner][16]`: keys and values of the KV cache.
pub(crate) struct Bf16;
/// bf16 weights, `[inner / 2][16][2]`.
pub(crate) struct Bf16Pairs;
/// Signed bytes, `[inner][16]`: keys and values of the KV cache.
pub(crate) struct I8;

/// bf16 weights, `[inner / 2][16][2]`, for the dot product instruction of AVX-512 BF16. Activations
/// are bf16 pairs too. An f32 holds the bits of a pair, and the inner dimension counts pairs.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Bf16Dots;

impl Form for F32 {
    type Raw = f32;
    const PAIRS: bool = false;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L {
        // SAFETY: `from` is readable for 16 values; the instruction set of `L` is available.
        unsafe { L::load(from) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const f32) -> (L, L) {
        unreachable!("these weights are not stored as pairs")
    }
}

impl Form for F16 {
    type Raw = u16;
    const PAIRS: bool = false;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L {
        // SAFETY: `from` is readable for 16 values; the instruction set of `L` is available.
        unsafe { L::load_f16(from) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const u16) -> (L, L) {
        unreachable!("these weights are not stored as pairs")
    }
}

impl Form for Bf16 {
    type Raw = u16;
    const PAIRS: bool = false;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u16) -> L {
        // SAFETY: `from` is readable for 16 values; the instruction set of `L` is available.
        unsafe { L::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const u16) -> (L, L) {
        unreachable!("these weights are not stored as pairs")
    }
}

impl Form for I8 {
    type Raw = i8;
    const PAIRS: bool = false;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const i8) -> L {
        // SAFETY: `from` is readable for 16 values; the instruction set of `L` is available.
        unsafe { L::load_i8(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const i8) -> (L, L) {
        unreachable!("these weights are not stored as pairs")
    }
}

impl Form for Bf16Pairs {
    type Raw = u16;
    const PAIRS: bool = true;
    const WIDENS: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(_: *const u16) -> L {
        unreachable!("these weights are stored as pairs")
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(from: *const u16) -> (L, L) {
        // SAFETY: `from` is readable for 32 values; the instruction set of `L` is available.
        unsafe { L::load_bf16_pairs(from) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Form for Bf16Dots {
    type Raw = f32;
    const PAIRS: bool = false;
    const WIDENS: bool = false;
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L {
        // SAFETY: `from` is readable for 16 values; the instruction set of `L` is available.
        unsafe { L::load(from) }
    }
    #[inline(always)]
    unsafe fn load_pairs<L: Lanes>(_: *const f32) -> (L, L) {
        unreachable!("these weights are not stored as pairs")
    }
    #[inline(always)]
    unsafe fn call<L: Lanes, K: Kernel>(kernel: K) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
        #[inline(never)]
        unsafe fn run<L: Lanes, K: Kernel>(kernel: K) {
            // SAFETY: the caller of `call` vouches for the instruction set of `L`, for AVX-512 BF16
            // and for the requirements of `kernel`.
            unsafe { kernel.run::<L>() }
        }
        // SAFETY: AVX-512 BF16 is the additional instruction set that `call` requires for this
        // form.
        unsafe { run::<L, K>(kernel) }
    }
    #[inline(always)]
    unsafe fn accumulate<L: Lanes>(weights: L, x: L, sum: L) -> L {
        // SAFETY: computes in registers; AVX-512 BF16 is available, as `call` requires for this
        // form.
        unsafe { weights.dot_pairs(x, sum) }
    }
}
