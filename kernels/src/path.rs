//! Which instruction set the kernels use: detected at run time, lowered by an environment variable.
//!
//! A [`Path`] can only be made for a set that this processor *and* this operating system allow, so
//! holding one is the proof that the kernels' `unsafe` code relies on.
#![allow(unsafe_code, reason = "asks the processor for its maker")]

use super::error::KernelError;

/// The environment variable that forces a path.
pub(super) const VARIABLE: &str = "STOLON_CPU_PATH";
const NAMES: &str = "portable, neon, avx2, avx512, avx512bf16, amx";

/// The instruction sets, each including those of its architecture before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathKind {
    /// Plain Rust, whatever the compiler makes of it. Every architecture.
    Portable,
    /// aarch64, all of which have it.
    Neon,
    /// x86-64 AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// AVX-512 with dot products of bf16 pairs.
    Avx512Bf16,
    /// Tiles of bf16, and of int8 where they do not trap (Advanced Matrix Extensions).
    Amx,
}

/// A supported instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(PathKind);

impl Path {
    /// Plain Rust: supported everywhere.
    pub const PORTABLE: Path = Path(PathKind::Portable);

    /// The best path of this machine: the last of [`Path::supported`], except that on Intel's
    /// processors without AMX `avx512` comes before `avx512bf16`, whose dot products run there at
    /// half the rate of two fused multiplications. Or the path that the environment variable `STOLON_CPU_PATH`
    /// (`portable`, `neon`, `avx2`, `avx512`, `avx512bf16` or `amx`) names.
    ///
    /// # Errors
    /// [`KernelError::UnknownPath`] and [`KernelError::UnsupportedPath`] for the variable's value.
    pub fn detect() -> Result<Path, KernelError> {
        match std::env::var(VARIABLE) {
            Ok(name) if !name.is_empty() => Path::named(&name),
            _ => Ok(Path::best()),
        }
    }

    /// The path of that name.
    ///
    /// # Errors
    /// [`KernelError::UnknownPath`] for a name that does not exist, [`KernelError::UnsupportedPath`]
    /// for a path this machine cannot run.
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

    /// All paths of this machine, from the slowest to the best.
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

    fn best() -> Path {
        let best = Path::supported().last().copied().unwrap_or(Path::PORTABLE);
        if best.0 == PathKind::Avx512Bf16 && intel() {
            return Path(PathKind::Avx512);
        }
        best
    }

    /// Which instruction set it is.
    #[must_use]
    pub fn kind(self) -> PathKind {
        self.0
    }

    /// Its name, as `STOLON_CPU_PATH` spells it.
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

#[cfg(target_arch = "x86_64")]
fn intel() -> bool {
    #[allow(unused_unsafe, reason = "a safe function on newer compilers")]
    // SAFETY: every x86-64 processor has this instruction and its first leaf.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn detected() -> [(PathKind, bool); 1] {
    [(PathKind::Neon, cfg!(target_arch = "aarch64"))]
}

/// The paths above portable, in order, and whether each adds what it needs.
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
        (PathKind::Amx, super::amx::probe::allowed().bf16),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the portable path always exists, the list ascends, and names round-trip.
    #[test]
    fn supported_paths_ascend_and_are_found_by_name() {
        let paths = Path::supported();
        assert_eq!(paths[0], Path::PORTABLE);
        assert!(paths.windows(2).all(|pair| pair[0] < pair[1]));
        for path in paths {
            assert_eq!(Path::named(path.name()), Ok(path));
        }
    }

    /// Goal: a name that does not exist is refused with the names that do.
    #[test]
    fn unknown_name_is_an_error() {
        let message = Path::named("mmx").map(Path::name).unwrap_err().to_string();
        assert!(message.contains("avx512bf16") && message.contains("mmx"), "{message}");
    }
}
