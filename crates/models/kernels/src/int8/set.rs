//! Selection of the dot-product instructions of a [`Path`], which are detected separately.
#![allow(unsafe_code, reason = "calls functions compiled for the detected instruction set")]

use super::activations::{self, GroupRows, PackedGroup};
use super::chunk::{self, Int8Chunk, QuantPanel};
use super::dots::{Dots, PlainDots};
#[cfg(target_arch = "aarch64")]
use super::neon::NeonDots;
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2Pairs, Avx512Pairs, Avx512Vnni, AvxVnni};
use crate::lanes::LANES;
use crate::path::{Path, PathKind};
use crate::quant::{Expanded, Format, ScaledBytes};
use crate::tensor_type::{TensorType, with_format};
use crate::threads::Threads;

/// Number of groups of rows from which the panels of most formats are unpacked once for all rows.
const EXPANDED_GROUPS_MIN: usize = 4;

/// The dot-product instructions.
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

/// A set of instructions for dot products of bytes. A value proves that this processor has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DotSet(Kind);

/// Defines a method that runs `body(args..., D)` compiled for the dot-product set. `D` is a value
/// of the type that implements [`Dots`] for the set.
macro_rules! dispatch_dots {
    (
        $(#[$doc:meta])*
        fn $name:ident $(<$format:ident: $bound:ident>)? ($($arg:ident: $type:ty),*) = $body:ident
    ) => {
        $(#[$doc])*
        #[inline(never)]
        pub(super) unsafe fn $name$(<$format: $bound>)?(self, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn avx2$(<$format: $bound>)?($($arg: $type),*) {
                    // SAFETY: this function enables AVX2, FMA and F16C; its caller meets the
                    // requirements of the method.
                    unsafe { $body::<$($format,)? _>($($arg),*, Avx2Pairs) }
                }
                #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
                unsafe fn avx_vnni$(<$format: $bound>)?($($arg: $type),*) {
                    // SAFETY: this function enables AVX2, FMA, F16C and AVX-VNNI; its caller meets
                    // the requirements of the method.
                    unsafe { $body::<$($format,)? _>($($arg),*, AvxVnni) }
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                unsafe fn avx512$(<$format: $bound>)?($($arg: $type),*) {
                    // SAFETY: this function enables AVX-512 F, BW, VL and DQ; its caller meets the
                    // requirements of the method.
                    unsafe { $body::<$($format,)? _>($($arg),*, Avx512Pairs) }
                }
                #[target_feature(
                    enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"
                )]
                unsafe fn avx512_vnni$(<$format: $bound>)?($($arg: $type),*) {
                    // SAFETY: this function enables AVX-512 F, BW, VL, DQ and VNNI; its caller
                    // meets the requirements of the method.
                    unsafe { $body::<$($format,)? _>($($arg),*, Avx512Vnni) }
                }
                // SAFETY: a `DotSet` of a kind exists only if `DotSet::of` detected its
                // instructions; the caller meets the requirements of the method.
                unsafe {
                    match self.0 {
                        Kind::Plain => {}
                        Kind::Avx2 => return avx2$(::<$format>)?($($arg),*),
                        Kind::AvxVnni => return avx_vnni$(::<$format>)?($($arg),*),
                        Kind::Avx512 => return avx512$(::<$format>)?($($arg),*),
                        Kind::Avx512Vnni | Kind::Tiles => return avx512_vnni$(::<$format>)?($($arg),*),
                    }
                }
            }
            #[cfg(target_arch = "aarch64")]
            {
                #[target_feature(enable = "neon,dotprod")]
                unsafe fn neon_dot$(<$format: $bound>)?($($arg: $type),*) {
                    // SAFETY: this function enables FEAT_DotProd; its caller meets the requirements
                    // of the method.
                    unsafe { $body::<$($format,)? _>($($arg),*, NeonDots::<true>) }
                }
                // SAFETY: a `DotSet` of a kind exists only if `DotSet::of` detected its
                // instructions; the caller meets the requirements of the method.
                unsafe {
                    match self.0 {
                        Kind::Plain => {}
                        Kind::Neon => return $body::<$($format,)? _>($($arg),*, NeonDots::<false>),
                        Kind::NeonDot => return neon_dot$(::<$format>)?($($arg),*),
                    }
                }
            }
            // SAFETY: portable Rust needs no instruction set; the caller meets the requirements of
            // the method.
            unsafe { $body::<$($format,)? _>($($arg),*, PlainDots) }
        }
    };
}

impl DotSet {
    /// The best dot-product set that a path allows on this processor.
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

    /// The best dot-product set that a path allows on this processor.
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

    /// Every dot-product set of this processor, for tests. The first one is portable.
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
        // Without AMX, the tests emulate the tile instructions.
        #[cfg(target_arch = "x86_64")]
        if sets.contains(&DotSet(Kind::Avx512Vnni)) && !sets.contains(&DotSet(Kind::Tiles)) {
            sets.push(DotSet(Kind::Tiles));
        }
        sets
    }

    /// Whether large batches are multiplied by AMX tiles.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn has_tiles(self) -> bool {
        self.0 == Kind::Tiles
    }

    /// Maximum number of rows of a group.
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

    /// Number of bytes of four packed activations of a row.
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
        /// `packed` is writable for the group (see [`PackedGroup`]).
        fn pack(rows: GroupRows<'_>, packed: PackedGroup) = pack_with
    }

    /// Computes a task with weights of type `dtype`.
    ///
    /// # Safety
    /// `args` is valid (see [`Int8Chunk`]), and its rows were packed by this set.
    pub(super) unsafe fn chunk(self, threads: &Threads, args: &Int8Chunk, dtype: TensorType) {
        let groups = args.rows.div_ceil(self.group_max());
        // SAFETY: the requirements are the same, for panels of blocks of `F`. The conditions are
        // constant so that a format has only the functions that it uses.
        with_format!(dtype, F => unsafe {
            match const { F::EXPANDED } {
                Expanded::Never => self.chunk_of::<F>(args),
                Expanded::ForManyRows if groups < EXPANDED_GROUPS_MIN => self.chunk_of::<F>(args),
                Expanded::ForManyRows | Expanded::Always => {
                    self.chunk_of_expanded::<F>(threads, args);
                }
            }
        });
    }

    /// [`DotSet::chunk`] for blocks of `F` that are [expanded](Format::EXPANDED), in scratch memory
    /// that stays in the cache.
    ///
    /// # Safety
    /// As for [`DotSet::chunk`].
    unsafe fn chunk_of_expanded<F: Format>(self, threads: &Threads, args: &Int8Chunk) {
        let mut memory = threads.scratch::<u8>(chunk::scaled_panel_len::<F>(args.inner));
        let expanded = memory.slice_mut::<u8>().as_mut_ptr();
        for index in 0..args.features.div_ceil(LANES) {
            let panel = QuantPanel::at::<F>(args.inner, args.panels, index);
            let args = Int8Chunk {
                panels: expanded,
                out: args.out.wrapping_add(index * LANES),
                features: LANES.min(args.features - index * LANES),
                ..*args
            };
            // SAFETY: panel `index` is one of the task's, and `expanded` has room for it. Its
            // features of `out` exist.
            unsafe {
                self.expand::<F>(panel, expanded);
                match const { (F::SCALES, F::MINS) } {
                    (1, false) => self.chunk_of::<ScaledBytes<1, false>>(&args),
                    (1, true) => self.chunk_of::<ScaledBytes<1, true>>(&args),
                    (_, false) => self.chunk_of::<ScaledBytes<2, false>>(&args),
                    (_, true) => self.chunk_of::<ScaledBytes<2, true>>(&args),
                }
            }
        }
    }

    dispatch_dots! {
        /// Unpacks a panel with blocks of `F`.
        ///
        /// # Safety
        /// As for [`chunk::expand_to_scaled`].
        fn expand<F: Format>(panel: QuantPanel, to: *mut u8) = expand_with
    }

    dispatch_dots! {
        /// [`DotSet::chunk`] for blocks of `F`.
        ///
        /// # Safety
        /// As for [`DotSet::chunk`].
        fn chunk_of<F: Format>(args: &Int8Chunk) = chunk_with
    }
}

/// # Safety
/// As for [`activations::pack`].
#[inline(always)]
unsafe fn pack_with<D: Dots>(rows: GroupRows<'_>, packed: PackedGroup, _: D) {
    // SAFETY: the requirements are the same.
    unsafe { activations::pack::<D>(rows, packed) }
}

/// # Safety
/// As for [`chunk::expand_to_scaled`].
#[inline(always)]
unsafe fn expand_with<F: Format, D: Dots>(panel: QuantPanel, to: *mut u8, _: D) {
    // SAFETY: the requirements are the same.
    unsafe { chunk::expand_to_scaled::<D, F>(panel, to) }
}

/// # Safety
/// As for [`chunk::chunk`].
#[inline(always)]
unsafe fn chunk_with<F: Format, D: Dots>(args: &Int8Chunk, _: D) {
    // SAFETY: the requirements are the same.
    unsafe { chunk::chunk::<D, F>(args) }
}
