//! The one switch between std's synchronisation types and loom's. Every atomic, lock and
//! reference count by which two threads synchronise is taken from here, so that the models in
//! `loom_tests` see all of them. Not among these are numbers that are only looked at, in dumps,
//! and the count of a namespace's words, which never change.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
};

/// Locks `mutex`, also after a thread that held it panicked: all data behind the locks of this
/// crate is valid between any two statements that could panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}

/// The order of stores that make something reachable for readers.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn publish_order() -> Ordering {
    Ordering::Release
}
#[cfg(loom)]
pub(crate) fn publish_order() -> Ordering {
    match planted::is(planted::Bug::RelaxedPublish) {
        true => Ordering::Relaxed,
        false => Ordering::Release,
    }
}

/// Stands in an object that readers reach through raw pointers. Nothing in real builds; under
/// loom it reports a look at an object that was not properly published, or was freed already.
#[derive(Debug)]
pub(crate) struct Witness {
    #[cfg(loom)]
    cell: loom::cell::UnsafeCell<()>,
    #[cfg(loom)]
    freed: std::sync::atomic::AtomicBool,
}

#[cfg(not(loom))]
impl Witness {
    pub(crate) fn new() -> Witness {
        Witness {}
    }

    #[inline(always)]
    pub(crate) fn look(&self) {}
}

#[cfg(loom)]
impl Witness {
    pub(crate) fn new() -> Witness {
        let cell = loom::cell::UnsafeCell::new(());
        cell.with_mut(|_| ());
        Witness { cell, freed: std::sync::atomic::AtomicBool::new(false) }
    }

    /// A reader looks: the making must have happened before, the freeing must not.
    pub(crate) fn look(&self) {
        assert!(!self.freed.load(std::sync::atomic::Ordering::Relaxed), "looked at freed memory");
        self.cell.with(|_| ());
    }

    /// The object is freed: every look must have happened before.
    #[cfg(not(crossbeam_loom))]
    pub(crate) fn free(&self) {
        self.cell.with_mut(|_| ());
        let freed = self.freed.swap(true, std::sync::atomic::Ordering::Relaxed);
        assert!(!freed, "freed twice");
    }
}

/// Defects that the loom models plant on purpose, to show that they would be caught.
#[cfg(loom)]
pub mod planted {
    use std::cell::Cell;

    /// One defect.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Bug {
        /// Nodes and tables are published with relaxed stores.
        RelaxedPublish,
        /// A split leaves the children behind.
        SplitDropsChildren,
        /// Eviction takes locked leaves.
        EvictLocked,
        /// The pool hands out blocks that a running step may touch.
        NoStepFence,
        /// Retired nodes and tables are freed at once, although readers may hold them.
        EagerFree,
    }

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Plants `bug` in all models that this test thread runs from now on. (Loom runs all threads
    /// of a model on the thread that calls it.)
    pub fn plant(bug: Bug) {
        PLANTED.with(|planted| planted.set(Some(bug)));
    }

    pub(crate) fn is(bug: Bug) -> bool {
        PLANTED.with(|planted| planted.get() == Some(bug))
    }
}
