//! Switches between the synchronization types of std and of loom. Every atomic, lock and reference
//! count through which threads synchronize is imported from here, so that the models in
//! `loom_tests` control all of them. Exceptions are the counters that only dumps read, and the
//! key of namespaces, which never changes once it is set.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(all(loom, crossbeam_loom))]
pub(crate) use loom::thread_local;
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread_local,
};

/// Locks `mutex`, also if a thread panicked while it held the lock: the data behind this crate's
/// locks is valid at every statement that could panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}

/// The memory ordering of stores that make something reachable for readers.
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

/// The memory ordering of the load by which the writer learns that a batch may be freed.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn hand_over_order() -> Ordering {
    Ordering::Acquire
}
#[cfg(loom)]
pub(crate) fn hand_over_order() -> Ordering {
    match planted::is(planted::Bug::RelaxedHandOver) {
        true => Ordering::Relaxed,
        false => Ordering::Acquire,
    }
}

/// A field of objects that readers reach through raw pointers. It is empty in real builds. Under
/// loom it reports an access to an object that was not published correctly, or that is freed.
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

    /// Records a reader's access. It must happen after the construction and before the freeing.
    pub(crate) fn look(&self) {
        let freed = self.freed.load(std::sync::atomic::Ordering::Relaxed);
        assert!(!freed, "access to freed memory");
        self.cell.with(|_| ());
    }

    /// Records that the object is freed. Every access must have happened before.
    pub(crate) fn free(&self) {
        self.cell.with_mut(|_| ());
        let freed = self.freed.swap(true, std::sync::atomic::Ordering::Relaxed);
        assert!(!freed, "freed twice");
    }
}

/// Defects that the loom models plant on purpose, to show that the models detect them.
#[cfg(loom)]
pub mod planted {
    use std::cell::Cell;

    /// A defect.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Bug {
        /// Nodes and tables are published with relaxed stores.
        RelaxedPublish,
        /// A split loses the children of the node.
        SplitDropsChildren,
        /// Eviction removes locked leaves.
        EvictLocked,
        /// Eviction by prefix removes locked nodes.
        EvictLockedPrefix,
        /// A request replaces the priority of its prefix by its own, even by a smaller one.
        ReplacePriority,
        /// The pool hands out blocks that a running step may access.
        NoStepFence,
        /// Unlinked nodes and tables are freed at once, although readers may hold them.
        EagerFree,
        /// Frees the open batch together with the sealed one, although its grace period has not
        /// begun.
        FreeOpenBatch,
        /// The writer learns by a relaxed load that it may free a batch.
        RelaxedHandOver,
    }

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Plants `bug` in all models that this test thread runs from now on. (Loom runs all threads
    /// of a model on the thread that runs the model.)
    pub fn plant(bug: Bug) {
        PLANTED.with(|planted| planted.set(Some(bug)));
    }

    pub(crate) fn is(bug: Bug) -> bool {
        PLANTED.with(|planted| planted.get() == Some(bug))
    }
}
