//! Which instruction set the kernels use. It is detected at run time; an environment variable can
//! select a lower one.
//!
//! **Invariant**: a [`Path`] exists only for an instruction set that both the processor and the
//! operating system support. The `unsafe` code of the kernels relies on this: a function that takes
//! a `Path` may execute the instructions of its set.
#![allow(unsafe_code, reason = "the CPUID intrinsics are unsafe functions on older compilers")]

#[cfg(target_arch = "x86_64")]
use crate::amx::probe;
use crate::error::KernelError;

/// The environment variable that selects an instruction set by name.
const VARIABLE: &str = "STOLON_CPU_PATH";
const NAMES: &str = "portable, neon, avx2, avx512, avx512bf16, amx";

/// The instruction sets. On one architecture each set includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathKind {
    /// Plain Rust without intrinsics. Runs on every architecture.
    Portable,
    /// NEON, which every aarch64 processor has.
    Neon,
    /// AVX2, FMA and F16C of x86-64.
    Avx2,
    /// AVX-512 F, BW, VL and DQ of x86-64.
    Avx512,
    /// [`Avx512`](Self::Avx512) and AVX-512 BF16: dot products of bf16 pairs.
    Avx512Bf16,
    /// Advanced Matrix Extensions: tile products of bf16, and also of int8 if those do not trap on
    /// this machine.
    Amx,
}

/// An instruction set that this machine supports. All public functions of this crate that run
/// vector code take one or contain one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(PathKind);

impl Path {
    /// Plain Rust, supported everywhere.
    pub const PORTABLE: Path = Path(PathKind::Portable);

    /// The instruction set named by the environment variable `STOLON_CPU_PATH` (`portable`, `neon`,
    /// `avx2`, `avx512`, `avx512bf16` or `amx`), or the fastest one of this machine if the variable
    /// is not set or empty.
    ///
    /// The fastest is the last of [`Path::supported`], with one exception: on Intel processors
    /// without AMX, `avx512` is preferred to `avx512bf16`, because a bf16 dot product has half the
    /// throughput of two fused multiply-adds there.
    ///
    /// # Errors
    /// [`KernelError::UnknownPath`] or [`KernelError::UnsupportedPath`] if the variable's value is
    /// not the name of an instruction set, or names one that this machine does not support.
    pub fn detect() -> Result<Path, KernelError> {
        match std::env::var(VARIABLE) {
            Ok(name) if !name.is_empty() => Path::named(&name),
            _ => Ok(Path::best()),
        }
    }

    /// The instruction set of the given name, ignoring case and surrounding white space.
    ///
    /// # Errors
    /// [`KernelError::UnknownPath`] if no instruction set has this name,
    /// [`KernelError::UnsupportedPath`] if this machine does not support it.
    pub fn named(name: &str) -> Result<Path, KernelError> {
        let kind = match name.trim().to_ascii_lowercase().as_str() {
            "portable" => PathKind::Portable,
            "neon" => PathKind::Neon,
            "avx2" => PathKind::Avx2,
            "avx512" => PathKind::Avx512,
            "avx512bf16" => PathKind::Avx512Bf16,
            "amx" => PathKind::Amx,
            _ => return Err(KernelError::UnknownPath { expected: NAMES, got: name.into() }),
        };
        let supported = Path::supported();
        supported.iter().copied().find(|path| path.0 == kind).ok_or_else(|| {
            let names: Vec<_> = supported.iter().map(|path| path.name()).collect();
            KernelError::UnsupportedPath { expected: names.join(", "), got: Path(kind).name() }
        })
    }

    /// All instruction sets that this machine supports, in ascending order, beginning with
    /// [`Path::PORTABLE`].
    #[must_use]
    pub fn supported() -> Vec<Path> {
        let mut paths = vec![Path::PORTABLE];
        for (kind, has) in detected() {
            if !has {
                break;
            }
            paths.push(Path(kind));
        }
        paths
    }

    /// The fastest instruction set of this machine; see [`Path::detect`] for the exception.
    fn best() -> Path {
        let best = Path::supported().last().copied().unwrap_or(Path::PORTABLE);
        if best.0 == PathKind::Avx512Bf16 && intel() {
            return Path(PathKind::Avx512);
        }
        best
    }

    /// The instruction set.
    #[must_use]
    pub fn kind(self) -> PathKind {
        self.0
    }

    /// The name as it is written in `STOLON_CPU_PATH`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            PathKind::Portable => "portable",
            PathKind::Neon => "neon",
            PathKind::Avx2 => "avx2",
            PathKind::Avx512 => "avx512",
            PathKind::Avx512Bf16 => "avx512bf16",
            PathKind::Amx => "amx",
        }
    }
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn intel() -> bool {
    false
}

/// Whether Intel made the processor.
#[cfg(target_arch = "x86_64")]
fn intel() -> bool {
    #[allow(unused_unsafe, reason = "a safe function on newer compilers")]
    // SAFETY: every x86-64 processor has the CPUID instruction with leaf 0.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn detected() -> [(PathKind, bool); 1] {
    [(PathKind::Neon, cfg!(target_arch = "aarch64"))]
}

/// The instruction sets above portable in ascending order, each with a flag that says whether the
/// machine has the features that it adds to the sets before it.
#[cfg(target_arch = "x86_64")]
fn detected() -> [(PathKind, bool); 4] {
    use std::arch::is_x86_feature_detected as has;
    [
        (PathKind::Avx2, has!("avx2") && has!("fma") && has!("f16c")),
        (
            PathKind::Avx512,
            has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq"),
        ),
        (PathKind::Avx512Bf16, has!("avx512bf16")),
        (PathKind::Amx, probe::allowed().bf16),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the portable path is always supported, the list is in ascending order, and each name
    /// leads back to its path.
    #[test]
    fn supported_paths_ascend_and_are_found_by_name() {
        let paths = Path::supported();
        assert_eq!(paths[0], Path::PORTABLE);
        assert!(paths.windows(2).all(|pair| pair[0] < pair[1]));
        for path in paths {
            assert_eq!(Path::named(path.name()), Ok(path));
        }
    }

    /// Goal: an unknown name is an error that lists the known names.
    #[test]
    fn unknown_name_is_an_error() {
        let message = Path::named("mmx").map(Path::name).unwrap_err().to_string();
        assert!(message.contains("avx512bf16") && message.contains("mmx"), "{message}");
    }
}
