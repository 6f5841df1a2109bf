//! Whether this process may use tiles: what the processor says, what the operating system
//! answers, and what a child process finds when it tries.
//!
//! Some virtual machines name instructions that trap all the same. So each kind of product is
//! tried once, in a child that has nothing to lose: it shares no memory with this process, runs
//! one product, and ends. If it dies, the kind is not used.
#![allow(unsafe_code, reason = "system calls, and the instructions that are tried")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: the child")]

/// The kinds of products that may be used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Allowed {
    pub bf16: bool,
    pub int8: bool,
}

/// Asks once. Asking is what turns tiles on, for the process and all threads it starts later.
#[cfg(target_os = "linux")]
pub(crate) fn allowed() -> Allowed {
    use std::sync::OnceLock;
    static ALLOWED: OnceLock<Allowed> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        let named = named();
        if !(named.bf16 || named.int8) || !permitted() {
            return Allowed::default();
        }
        Allowed { bf16: named.bf16 && survives(Try::Bf16), int8: named.int8 && survives(Try::Int8) }
    })
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn allowed() -> Allowed {
    Allowed::default()
}

/// What the processor names.
#[cfg(target_os = "linux")]
fn named() -> Allowed {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    #[allow(unused_unsafe, reason = "a safe function on newer compilers")]
    // SAFETY: every x86-64 processor has this instruction and its first leaf.
    let last_leaf = unsafe { __cpuid(0) }.eax;
    if last_leaf < 7 {
        return Allowed::default();
    }
    #[allow(unused_unsafe, reason = "a safe function on newer compilers")]
    // SAFETY: the leaf exists.
    let edx = unsafe { __cpuid_count(7, 0) }.edx;
    // Bit 22 bf16 tiles, bit 24 tiles, bit 25 int8 tiles.
    let has = |bit: u32| edx & (1 << bit) != 0;
    Allowed { bf16: has(24) && has(22), int8: has(24) && has(25) }
}

/// Whether the kernel gives this process the tile registers.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this system call reads its two integers only; an old kernel answers an error.
    let answer =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    answer == 0
}

/// What the child runs.
#[derive(Clone, Copy)]
#[cfg(target_os = "linux")]
enum Try {
    Bf16,
    Int8,
    /// An instruction that is never valid, for the tests.
    #[cfg(test)]
    Invalid,
}

/// Whether a child that runs the instruction ends well.
#[cfg(target_os = "linux")]
fn survives(what: Try) -> bool {
    // SAFETY: the child is a copy of this process with this thread alone. It calls nothing but
    // system calls and the code below, none of which needs a lock or memory from the heap, and
    // always ends here. No signal tells of its end, so no one else's handler or wait sees it.
    unsafe {
        let nothing: libc::c_long = 0;
        let child = libc::syscall(libc::SYS_clone, nothing, nothing, nothing, nothing, nothing);
        if child == 0 {
            // Neither a report nor a core file, and no handler of the host program.
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::signal(libc::SIGILL, libc::SIG_DFL);
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            run(what);
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

/// # Safety
/// The process can afford to be killed.
#[cfg(target_os = "linux")]
unsafe fn run(what: Try) {
    use super::tile_asm;
    // SAFETY: the tiles are this process's own; no memory is touched but the configuration's.
    unsafe {
        super::configure(16, 16, true);
        match what {
            Try::Bf16 => tile_asm!("tdpbf16ps tmm0, tmm4, tmm5",),
            Try::Int8 => tile_asm!("tdpbssd tmm0, tmm4, tmm5",),
            #[cfg(test)]
            Try::Invalid => tile_asm!("ud2",),
        }
        super::release();
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Goal: a child that traps is seen and takes nothing with it; a process that may use tiles
    /// is one whose child ended well.
    #[test]
    fn a_trap_is_noticed() {
        if !permitted() {
            return;
        }
        assert!(!survives(Try::Invalid));
        assert_eq!(survives(Try::Bf16), allowed().bf16);
        assert_eq!(survives(Try::Int8), allowed().int8);
    }
}
