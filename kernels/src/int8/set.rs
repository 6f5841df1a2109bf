//! Which dot products of bytes a path has: one more step of detection below [`Path`].
#![allow(unsafe_code, reason = "runs what was detected")]

use super::activations::{self, PackedGroup, Rows};
use super::chunk::{self, ChunkArgs};
use super::dots::{Dots, PlainDots};
use super::format::{Format, Q4K, Q5K, Q6K, Q8_0};
#[cfg(target_arch = "aarch64")]
use super::neon::NeonDots;
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2Pairs, Avx512Pairs, Avx512Vnni, AvxVnni};
use crate::tensor_type::TensorType;
use crate::{Path, PathKind};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Tiles,
}

/// A set of instructions for products of bytes. A value is the proof that this machine has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DotSet(Kind);

/// Makes a method that runs `body::<D>(args...)` compiled for the set.
macro_rules! dispatch_dots {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) = $body:expr) => {
        $(#[$doc])*
        #[inline(never)]
        pub(super) unsafe fn $name(self, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn avx2($($arg: $type),*) {
                    // SAFETY: the set is enabled; the rest is the caller's promise.
                    unsafe { ($body)($($arg),*, Avx2Pairs) }
                }
                #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
                unsafe fn avx_vnni($($arg: $type),*) {
                    // SAFETY: as above.
                    unsafe { ($body)($($arg),*, AvxVnni) }
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                unsafe fn avx512($($arg: $type),*) {
                    // SAFETY: as above.
                    unsafe { ($body)($($arg),*, Avx512Pairs) }
                }
                #[target_feature(
                    enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"
                )]
                unsafe fn avx512_vnni($($arg: $type),*) {
                    // SAFETY: as above.
                    unsafe { ($body)($($arg),*, Avx512Vnni) }
                }
                // SAFETY: a set is only made where it is available; the rest is the caller's
                // promise.
                unsafe {
                    match self.0 {
                        Kind::Plain => {}
                        Kind::Avx2 => return avx2($($arg),*),
                        Kind::AvxVnni => return avx_vnni($($arg),*),
                        Kind::Avx512 => return avx512($($arg),*),
                        Kind::Avx512Vnni | Kind::Tiles => return avx512_vnni($($arg),*),
                    }
                }
            }
            #[cfg(target_arch = "aarch64")]
            {
                #[target_feature(enable = "neon,dotprod")]
                unsafe fn neon_dot($($arg: $type),*) {
                    // SAFETY: the set is enabled; the rest is the caller's promise.
                    unsafe { ($body)($($arg),*, NeonDots::<true>) }
                }
                // SAFETY: a set is only made where it is available; the rest is the caller's
                // promise.
                unsafe {
                    match self.0 {
                        Kind::Plain => {}
                        Kind::Neon => return ($body)($($arg),*, NeonDots::<false>),
                        Kind::NeonDot => return neon_dot($($arg),*),
                    }
                }
            }
            // SAFETY: plain Rust runs everywhere; the rest is the caller's promise.
            unsafe { ($body)($($arg),*, PlainDots) }
        }
    };
}

impl DotSet {
    /// The best set that belongs to a path.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn of(path: Path) -> DotSet {
        use std::arch::is_x86_feature_detected as has;
        let kind = match path.kind() {
            PathKind::Portable | PathKind::Neon => Kind::Plain,
            PathKind::Avx2 if has!("avxvnni") => Kind::AvxVnni,
            PathKind::Avx2 => Kind::Avx2,
            _ if !has!("avx512vnni") => Kind::Avx512,
            PathKind::Amx if crate::amx::probe::allowed().int8 => Kind::Tiles,
            PathKind::Avx512 | PathKind::Avx512Bf16 | PathKind::Amx => Kind::Avx512Vnni,
        };
        DotSet(kind)
    }

    /// The best set that belongs to a path.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn of(path: Path) -> DotSet {
        DotSet(match path.kind() {
            #[cfg(target_arch = "aarch64")]
            PathKind::Neon if std::arch::is_aarch64_feature_detected!("dotprod") => Kind::NeonDot,
            #[cfg(target_arch = "aarch64")]
            PathKind::Neon => Kind::Neon,
            _ => Kind::Plain,
        })
    }

    /// Every set of this machine, for the tests.
    #[cfg(test)]
    pub(super) fn supported() -> Vec<DotSet> {
        let mut sets = vec![DotSet(Kind::Plain)];
        for path in Path::supported() {
            let plain = match path.kind() {
                #[cfg(target_arch = "aarch64")]
                PathKind::Neon => Kind::Neon,
                #[cfg(target_arch = "x86_64")]
                PathKind::Avx2 => Kind::Avx2,
                #[cfg(target_arch = "x86_64")]
                PathKind::Avx512 | PathKind::Avx512Bf16 | PathKind::Amx => Kind::Avx512,
                _ => Kind::Plain,
            };
            for set in [DotSet(plain), DotSet::of(path)] {
                if !sets.contains(&set) {
                    sets.push(set);
                }
            }
        }
        sets
    }

    /// Whether many rows are multiplied on tiles.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn has_tiles(self) -> bool {
        self.0 == Kind::Tiles
    }

    /// Most rows of a group.
    pub(super) fn group_max(self) -> usize {
        match self.0 {
            Kind::Plain => PlainDots::GROUP_MAX,
            #[cfg(target_arch = "aarch64")]
            Kind::Neon | Kind::NeonDot => NeonDots::<true>::GROUP_MAX,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Avx2Pairs::GROUP_MAX,
            #[cfg(target_arch = "x86_64")]
            Kind::AvxVnni => AvxVnni::GROUP_MAX,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Avx512Pairs::GROUP_MAX,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni | Kind::Tiles => Avx512Vnni::GROUP_MAX,
        }
    }

    /// Bytes of four activations of a row.
    pub(super) fn word_bytes(self) -> usize {
        match self.0 {
            Kind::Plain => PlainDots::WORD,
            #[cfg(target_arch = "aarch64")]
            Kind::Neon | Kind::NeonDot => NeonDots::<true>::WORD,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Avx2Pairs::WORD,
            #[cfg(target_arch = "x86_64")]
            Kind::AvxVnni => AvxVnni::WORD,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Avx512Pairs::WORD,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni | Kind::Tiles => Avx512Vnni::WORD,
        }
    }

    dispatch_dots! {
        /// Packs a group of rows.
        ///
        /// # Safety
        /// `packed` has room for the group.
        fn pack(rows: Rows<'_>, packed: PackedGroup) = pack_with
    }

    /// Computes a task.
    ///
    /// # Safety
    /// The pointers of `args` are valid for its sizes, and what is written is touched by
    /// nobody else.
    pub(super) unsafe fn chunk(self, args: &ChunkArgs, dtype: TensorType) {
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                TensorType::Q8_0 => self.chunk_q8_0(args),
                TensorType::Q4K => self.chunk_q4_k(args),
                TensorType::Q5K => self.chunk_q5_k(args),
                TensorType::Q6K => self.chunk_q6_k(args),
                TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {
                    unreachable!("{dtype:?} weights have no blocks")
                }
            }
        }
    }

    dispatch_dots! {
        /// [`DotSet::chunk`] of `Q8_0` weights.
        fn chunk_q8_0(args: &ChunkArgs) = chunk_with::<Q8_0, _>
    }
    dispatch_dots! {
        /// [`DotSet::chunk`] of `Q4_K` weights.
        fn chunk_q4_k(args: &ChunkArgs) = chunk_with::<Q4K, _>
    }
    dispatch_dots! {
        /// [`DotSet::chunk`] of `Q5_K` weights.
        fn chunk_q5_k(args: &ChunkArgs) = chunk_with::<Q5K, _>
    }
    dispatch_dots! {
        /// [`DotSet::chunk`] of `Q6_K` weights.
        fn chunk_q6_k(args: &ChunkArgs) = chunk_with::<Q6K, _>
    }
}

#[inline(always)]
unsafe fn pack_with<D: Dots>(rows: Rows<'_>, packed: PackedGroup, _: D) {
    // SAFETY: the caller's promise.
    unsafe { activations::pack::<D>(rows, packed) }
}

#[inline(always)]
unsafe fn chunk_with<F: Format, D: Dots>(args: &ChunkArgs, _: D) {
    // SAFETY: the caller's promise.
    unsafe { chunk::chunk::<D, F>(args) }
}
