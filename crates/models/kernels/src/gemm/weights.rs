//! How the weights of a panel are stored, and how the microkernel loads them.
#![allow(unsafe_code, reason = "loads packed weights by pointer")]

#[cfg(target_arch = "x86_64")]
use std::marker::PhantomData;

use super::tile::{CachedPanels, Panels};
use crate::lanes::{Kernel, LANES, Lanes};

/// A stored number, which has one value or several successive ones.
pub(crate) trait Stored: Copy + Default {
    /// Number of successive values of a row in it.
    const VALUES: usize = 1;
}

impl Stored for f32 {}
impl Stored for u16 {}
impl Stored for i8 {}
/// Two codes of 4 bits.
impl Stored for u8 {
    const VALUES: usize = 2;
}

/// A storage form of the weights of a panel.
pub(crate) trait Form {
    /// A stored number.
    type Raw: Stored;
    /// Number of successive weights of an output feature that are stored side by side, and loaded
    /// together: 1 for `[inner][16]`, 2 for `[inner / 2][16][2]`.
    const STEPS: usize;
    /// Whether [`Form::widen`] may convert the weights to f32 before they are multiplied.
    const WIDENS: bool = true;
    /// Loads the 16 weights of step `step`, below [`STEPS`](Form::STEPS), among the steps that are
    /// stored side by side. Each call loads one step, because not all processors have registers for
    /// two in addition to the sums of a tile.
    ///
    /// # Safety
    /// The instruction set of `L` is available, and `from` is the start of the steps of one of
    /// `panels`, which is readable.
    unsafe fn load_step<L: Lanes, B: Panels<Self::Raw>>(
        panels: &B,
        from: *const Self::Raw,
        step: usize,
    ) -> L;
    /// Converts `inner` steps of a panel to f32, `[inner][16]`. Only for forms with
    /// [`Form::WIDENS`].
    ///
    /// # Safety
    /// The instruction set of `L` is available. `from` is readable and `to` is writable for
    /// `16 * inner` values. `inner` is a multiple of [`STEPS`](Form::STEPS).
    #[inline(always)]
    unsafe fn widen<L: Lanes>(from: *const Self::Raw, inner: usize, to: *mut f32) {
        let panel = CachedPanels { first: from, step: 0, inner_step: LANES };
        for k in (0..inner).step_by(Self::STEPS) {
            for step in 0..Self::STEPS {
                // SAFETY: the steps from `k` on are below `inner`, and each reads and writes 16
                // values.
                unsafe {
                    let at = from.add(k * LANES / Self::Raw::VALUES);
                    let weights: L = Self::load_step(&panel, at, step);
                    weights.store(to.add((k + step) * LANES));
                }
            }
        }
    }
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

/// A form whose weights are stored one by one, `[inner][16]`.
pub(crate) trait SingleForm: Form {
    /// Loads 16 weights, one per output feature.
    ///
    /// # Safety
    /// The instruction set of `L` is available, and `from` is readable for 16 values.
    unsafe fn load<L: Lanes>(from: *const Self::Raw) -> L;
}

/// Defines forms of single weights, each with the type of a stored value and the method of
/// [`Lanes`] that loads 16 of them.
macro_rules! single_forms {
    ($($(#[$doc:meta])* $form:ident($raw:ty, $load:ident);)*) => {$(
        $(#[$doc])*
        pub(crate) struct $form;

        impl Form for $form {
            type Raw = $raw;
            const STEPS: usize = 1;
            #[inline(always)]
            unsafe fn load_step<L: Lanes, B: Panels<$raw>>(
                panels: &B,
                from: *const $raw,
                _: usize,
            ) -> L {
                // SAFETY: the conditions are those of this method.
                unsafe { panels.load::<L, Self>(from) }
            }
        }

        impl SingleForm for $form {
            #[inline(always)]
            unsafe fn load<L: Lanes>(from: *const $raw) -> L {
                // SAFETY: `from` is readable for 16 values; the instruction set of `L` is available.
                unsafe { L::$load(from.cast()) }
            }
        }
    )*};
}

single_forms! {
    /// f32 weights.
    F32(f32, load);
    /// f16 weights.
    F16(u16, load_f16);
    /// bf16 values: keys and values of the KV cache.
    Bf16(u16, load_bf16);
    /// Signed bytes: keys and values of the KV cache.
    I8(i8, load_i8);
    /// Codes of 4 bits, two of a row in each byte: keys and values of the KV cache.
    I4(u8, load_i4);
}

/// bf16 weights, `[inner / 2][16][2]`.
pub(crate) struct Bf16Pairs;

impl Form for Bf16Pairs {
    type Raw = u16;
    const STEPS: usize = 2;
    #[inline(always)]
    unsafe fn load_step<L: Lanes, B: Panels<u16>>(_: &B, from: *const u16, step: usize) -> L {
        // SAFETY: two steps of a panel of pairs are 32 readable values; the instruction set of `L`
        // is available.
        unsafe { if step == 0 { L::load_bf16_firsts(from) } else { L::load_bf16_seconds(from) } }
    }
}

/// Codes of 4 bits, `[inner / 2][16][2]`, so that a byte has two successive ones of an output
/// feature: keys of the KV cache.
pub(crate) struct I4Pairs;

impl Form for I4Pairs {
    type Raw = u8;
    const STEPS: usize = 2;
    #[inline(always)]
    unsafe fn load_step<L: Lanes, B: Panels<u8>>(_: &B, from: *const u8, step: usize) -> L {
        // SAFETY: two steps of a panel of codes are 16 readable bytes; the instruction set of `L`
        // is available.
        unsafe { if step == 0 { L::load_i4_firsts(from) } else { L::load_i4_seconds(from) } }
    }
}

/// Two values of bf16, as they are stored for the dot product instruction of AVX-512 BF16.
#[cfg(target_arch = "x86_64")]
pub(crate) trait PairWord: Stored {
    /// Loads 16 pairs, each in the 32 bits of a lane.
    ///
    /// # Safety
    /// L is the type for AVX-512, which is available, and `from` is readable for 16 words.
    unsafe fn load<L: Lanes>(from: *const Self) -> L;
}

/// The bits of a pair: weights and bf16 keys, `[inner / 2][16][2]`.
#[cfg(target_arch = "x86_64")]
impl PairWord for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const f32) -> L {
        // SAFETY: the conditions are those of this method.
        unsafe { L::load(from) }
    }
}

/// Signed bytes, which are bf16 numbers: keys of the KV cache. 16 words are those of one step and
/// then those of the next, `[inner][16]`.
#[cfg(target_arch = "x86_64")]
impl PairWord for [i8; 2] {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const [i8; 2]) -> L {
        let first = from.cast::<i8>();
        // SAFETY: 16 words are 32 bytes; the other conditions are those of this method.
        unsafe { pair_bytes(first, first.add(LANES)) }
    }
}

impl Stored for [i8; 2] {}

/// A byte of two codes of 4 bits, whose levels are bf16 numbers: keys of the KV cache.
#[cfg(target_arch = "x86_64")]
impl PairWord for [u8; 1] {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const [u8; 1]) -> L {
        // SAFETY: 16 words are 16 bytes; the other conditions are those of this method.
        unsafe { L::load_i4_pairs(from.cast()) }
    }
}

impl Stored for [u8; 1] {}

/// Pairs of bf16: the 16 bytes from `first` on, each with the one at the same place of `second`.
///
/// # Safety
/// Both are readable for 16 bytes, and L is the type for AVX-512, which is available.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn pair_bytes<L: Lanes>(first: *const i8, second: *const i8) -> L {
    // SAFETY: the conditions are those of this function.
    unsafe { L::load_i8(first.cast()).pair_bf16(L::load_i8(second.cast())) }
}

/// Pairs of bf16 that are stored as words of type W, for the dot product instruction of AVX-512
/// BF16. Activations are bf16 pairs too. An f32 holds the bits of a pair, and the inner dimension
/// counts pairs.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Bf16Dots<W = f32>(PhantomData<W>);

#[cfg(target_arch = "x86_64")]
impl<W: PairWord> SingleForm for Bf16Dots<W> {
    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const W) -> L {
        // SAFETY: `from` is readable for 16 values; the instruction set of `L` is available.
        unsafe { W::load(from) }
    }
}

#[cfg(target_arch = "x86_64")]
impl<W: PairWord> Form for Bf16Dots<W> {
    type Raw = W;
    const STEPS: usize = 1;
    const WIDENS: bool = false;
    #[inline(always)]
    unsafe fn load_step<L: Lanes, B: Panels<W>>(panels: &B, from: *const W, _: usize) -> L {
        // SAFETY: the conditions are those of this method.
        unsafe { panels.load::<L, Self>(from) }
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
