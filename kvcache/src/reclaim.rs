//! Deferred freeing of memory that readers may still be looking at.
//!
//! The writer unlinks a node or a child table and *retires* it here. A retired item is freed once
//! every guard that existed when it was retired has been dropped. Readers hold a guard for the
//! length of one query.
//!
//! There are two implementations behind one private interface:
//!
//! - crossbeam-epoch's default collector, in all real builds. Pinning costs a few nanoseconds and
//!   writes only to memory of the pinning thread, except that every 128th pin of a thread collects
//!   garbage and may free what the writer has retired.
//! - [`checked`], in loom models. It reports a use after free instead of causing one, and it keeps
//!   the number of interleavings small enough to explore with several readers. (Models of
//!   crossbeam-epoch itself are built with `--cfg crossbeam_loom` in addition to `--cfg loom`.)
#![allow(unsafe_code, reason = "defers the freeing of nodes and child tables")]

#[cfg(all(loom, not(crossbeam_loom)))]
mod checked;

#[cfg(all(loom, not(crossbeam_loom)))]
pub(crate) use checked::{Guard, Reclaimer};
#[cfg(any(not(loom), crossbeam_loom))]
pub(crate) use crossbeam_epoch::Guard;

/// A type whose values can be retired.
pub(crate) trait Retired: Send + 'static {
    /// Marks the value as freed. The loom models call this instead of freeing, so that any later
    /// access is reported.
    #[cfg(all(loom, not(crossbeam_loom)))]
    fn mark_freed(&self);
}

/// Frees what the writer has unlinked once no reader can hold a pointer to it.
#[cfg(any(not(loom), crossbeam_loom))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reclaimer;

#[cfg(any(not(loom), crossbeam_loom))]
impl Reclaimer {
    pub(crate) fn new() -> Reclaimer {
        Reclaimer
    }

    /// Returns a guard. Everything reachable while the guard lives stays allocated.
    #[inline(always)]
    pub(crate) fn pin(&self) -> Guard {
        crossbeam_epoch::pin()
    }

    /// Frees `item` after all guards that exist now have been dropped.
    ///
    /// # Safety
    ///
    /// `item` came from `Box::into_raw`, a reader that pins from now on cannot reach it, and it is
    /// retired only once.
    pub(crate) unsafe fn retire<T: Retired>(&self, guard: &Guard, item: *mut T) {
        let free = move || {
            // SAFETY: by the contract of `retire`, `item` is a box that no thread can reach any
            // more.
            drop(unsafe { Box::from_raw(item) });
        };
        // SAFETY: `T: Retired` is `Send + 'static`, so the drop may run on any thread at any later
        // time. crossbeam-epoch runs it only after every guard that exists now has been dropped.
        unsafe { guard.defer_unchecked(free) };
    }
}

#[cfg(all(loom, not(crossbeam_loom)))]
impl Reclaimer {
    /// As in real builds: frees `item` after all guards that exist now have been dropped.
    ///
    /// # Safety
    ///
    /// `item` came from `Box::into_raw`, a reader that pins from now on cannot reach it, and it is
    /// retired only once.
    pub(crate) unsafe fn retire<T: Retired>(&self, guard: &Guard, item: *mut T) {
        // SAFETY: by the contract of `retire`, `item` came from a box and has no other owner.
        self.retire_box(guard, unsafe { Box::from_raw(item) });
    }
}
