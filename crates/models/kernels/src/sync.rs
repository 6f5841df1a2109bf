//! The only place that chooses between the synchronization types of std and those of loom. The
//! thread pool takes every atomic, lock and thread from here, so that the loom models in
//! `loom_tests` see all of them.

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    hint::spin_loop,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread::{Builder, JoinHandle, yield_now},
};
#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread::{Builder, JoinHandle, yield_now},
};

/// `std::cell::UnsafeCell` with the interface of loom's type, which sees when an access begins and
/// ends.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    /// Calls `f` with a pointer for reading.
    #[inline(always)]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Calls `f` with a pointer for writing.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Locks `mutex`, also after a thread that held it has panicked: no code panics between two changes
/// of the data that this crate keeps behind locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The ordering of the store with which a call opens the gate of the thread pool.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn open_order() -> Ordering {
    Ordering::Release
}
#[cfg(loom)]
pub(crate) fn open_order() -> Ordering {
    if planted::is(planted::Bug::RelaxedOpen) { Ordering::Relaxed } else { Ordering::Release }
}

/// The ordering with which a worker of the thread pool leaves a call.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn leave_order() -> Ordering {
    Ordering::Release
}
#[cfg(loom)]
pub(crate) fn leave_order() -> Ordering {
    if planted::is(planted::Bug::RelaxedLeave) { Ordering::Relaxed } else { Ordering::Release }
}

/// Whether a call of the thread pool waits for the workers that have entered it.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn waits_for_workers() -> bool {
    true
}
#[cfg(loom)]
pub(crate) fn waits_for_workers() -> bool {
    !planted::is(planted::Bug::NoWait)
}

/// Defects that loom models plant on purpose, to show that the models would find them.
#[cfg(loom)]
pub mod planted {
    use std::cell::Cell;

    /// A defect.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Bug {
        /// The gate is opened with a relaxed store, so that a worker may not see the call behind
        /// it.
        RelaxedOpen,
        /// A worker leaves with a relaxed operation, so that the caller may not see what it wrote.
        RelaxedLeave,
        /// The caller returns without waiting for the workers that have entered.
        NoWait,
    }

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Plants `bug` in all models that this test thread runs from now on. (Loom runs all threads of
    /// a model on the thread that calls it.)
    pub fn plant(bug: Bug) {
        PLANTED.with(|planted| planted.set(Some(bug)));
    }

    pub(crate) fn is(bug: Bug) -> bool {
        PLANTED.with(|planted| planted.get() == Some(bug))
    }
}
