//! Selects loom's synchronization types for the code that is model-checked, std's otherwise, and
//! plants defects that the models must find.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicUsize, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicUsize, Ordering},
};

/// Locks `mutex`. A poisoned lock is taken too: the data behind the locks of this crate is valid
/// between any two statements that can panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}

/// Defects that a model can plant, to show that it would find them.
#[cfg(loom)]
pub mod planted {
    use std::cell::Cell;

    /// A defect.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Bug {
        /// The sender of an event channel pauses on a length that was read under an earlier lock.
        StaleLength,
        /// A session keeps the lease of a turn that another turn or a flush has followed.
        AnyRevision,
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
