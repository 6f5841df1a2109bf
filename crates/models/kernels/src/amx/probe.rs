//! Whether this process may use AMX: the processor must report it, the operating system must permit
//! it, and a child process must survive trying it.
//!
//! Some virtual machines report instructions that raise an illegal-instruction fault all the same.
//! Therefore each kind of tile product is tried once in a child process, which shares no memory
//! with this process, runs one product and exits. If the child is killed, this kind of product is
//! not used.
#![allow(unsafe_code, reason = "makes system calls and executes the instructions that it tries")]

/// The kinds of tile products that this process may use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AllowedProducts {
    /// `tdpbf16ps`: products of bf16 with sums in f32.
    pub bf16: bool,
    /// `tdpbssd`: products of signed bytes with sums in i32.
    pub int8: bool,
}

/// The kinds of tile products that this process may use. The first call finds out, which includes
/// the request for permission from Linux; the permission holds for the process and for all threads.
#[cfg(target_os = "linux")]
pub(crate) fn allowed() -> AllowedProducts {
    use std::sync::OnceLock;
    static ALLOWED: OnceLock<AllowedProducts> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        let reported = reported();
        if !(reported.bf16 || reported.int8) || !request_permission() {
            return AllowedProducts::default();
        }
        AllowedProducts {
            bf16: reported.bf16 && child_survives(Trial::Bf16),
            int8: reported.int8 && child_survives(Trial::Int8),
        }
    })
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn allowed() -> AllowedProducts {
    AllowedProducts::default()
}

/// The kinds that the processor reports.
#[cfg(target_os = "linux")]
fn reported() -> AllowedProducts {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    #[allow(unused_unsafe, reason = "a safe function on newer compilers")]
    // SAFETY: every x86-64 processor has the CPUID instruction with leaf 0.
    let last_leaf = unsafe { __cpuid(0) }.eax;
    if last_leaf < 7 {
        return AllowedProducts::default();
    }
    #[allow(unused_unsafe, reason = "a safe function on newer compilers")]
    // SAFETY: leaf 7 exists, since the last leaf is 7 or higher.
    let edx = unsafe { __cpuid_count(7, 0) }.edx;
    // Bit 22 is AMX-BF16, bit 24 AMX-TILE, bit 25 AMX-INT8.
    let has = |bit: u32| edx & (1 << bit) != 0;
    AllowedProducts { bf16: has(24) && has(22), int8: has(24) && has(25) }
}

/// Requests the permission to use the tile data registers, which Linux requires (since 5.16,
/// because they enlarge the saved state of a thread by 8 KiB). Returns whether it was granted.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: `arch_prctl` with this code takes one integer and accesses no memory of the process.
    // A kernel that does not know the code returns an error.
    let answer =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    answer == 0
}

/// The instruction that the child executes.
#[derive(Clone, Copy)]
#[cfg(target_os = "linux")]
enum Trial {
    /// `tdpbf16ps`.
    Bf16,
    /// `tdpbssd`.
    Int8,
    /// `ud2`, which always faults, to test that a fault is noticed.
    #[cfg(test)]
    Invalid,
}

/// Whether a child process that executes the instruction exits without a fault.
#[cfg(target_os = "linux")]
fn child_survives(trial: Trial) -> bool {
    // SAFETY: `clone` without flags copies this process, with this thread only. Locks may be held
    // in the copy by threads that it does not have, so the child may only call async-signal-safe
    // functions: it makes system calls and runs `execute`, none of which takes a lock or allocates,
    // and then leaves by `_exit` without running destructors. The exit signal of the child is 0, so
    // that it raises no SIGCHLD and is seen only by a wait with __WALL. `status` is a local
    // variable that `waitpid` writes.
    unsafe {
        let nothing: libc::c_long = 0;
        let child = libc::syscall(libc::SYS_clone, nothing, nothing, nothing, nothing, nothing);
        if child == 0 {
            // No core file, and no signal handler of the host program.
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::signal(libc::SIGILL, libc::SIG_DFL);
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            execute(trial);
            libc::_exit(0);
        }
        let Ok(child) = libc::pid_t::try_from(child) else { return false };
        if child < 0 {
            return false;
        }
        let mut status = 0;
        loop {
            let ended = libc::waitpid(child, &raw mut status, libc::__WALL);
            if ended == child {
                return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
            }
            let interrupted = *libc::__errno_location() == libc::EINTR;
            if ended != -1 || !interrupted {
                return false;
            }
        }
    }
}

/// Executes the instruction on tiles of zeroes.
///
/// # Safety
/// This is the probe's child process: it may be killed by an illegal-instruction fault.
#[cfg(target_os = "linux")]
unsafe fn execute(trial: Trial) {
    use crate::amx::tile::{configure, release, tile_asm};
    // SAFETY: an instruction that is not supported ends the child, which the caller allows. The
    // tile products access no memory, and the tile registers are declared as outputs.
    unsafe {
        configure(16, 16, true);
        match trial {
            Trial::Bf16 => tile_asm!("tdpbf16ps tmm0, tmm4, tmm5",),
            Trial::Int8 => tile_asm!("tdpbssd tmm0, tmm4, tmm5",),
            #[cfg(test)]
            Trial::Invalid => tile_asm!("ud2",),
        }
        release();
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Goal: a fault of the child is noticed and does not harm this process, and AMX is allowed
    /// exactly where the child survives.
    #[test]
    fn a_fault_of_the_child_is_noticed() {
        if !request_permission() {
            return;
        }
        assert!(!child_survives(Trial::Invalid));
        assert_eq!(child_survives(Trial::Bf16), allowed().bf16);
        assert_eq!(child_survives(Trial::Int8), allowed().int8);
    }
}
