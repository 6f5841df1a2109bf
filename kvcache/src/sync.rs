//! The one switch between std's synchronisation types and loom's. Every atomic, lock and
//! reference count that two threads can meet on is taken from here, so that the models in
//! `loom_tests` see all of them.

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
