//! Guards and grace periods by crossbeam-epoch.
//!
//! All trees of a process share one collector, which is not crossbeam-epoch's default one: at every
//! 128th pin a thread runs functions that were deferred in its collector, and those of other
//! crates in the default collector may free any amount of memory. In this one, [`Garbage`] defers
//! one function per batch, which stores a number.
//!
//! [`Garbage`]: super::Garbage

use crate::sync::thread_local;
use crossbeam_epoch::{Collector, Guard, LocalHandle};

/// The collector of all trees.
fn collector() -> &'static Collector {
    #[cfg(not(loom))]
    {
        static COLLECTOR: std::sync::OnceLock<Collector> = std::sync::OnceLock::new();
        COLLECTOR.get_or_init(Collector::new)
    }
    #[cfg(loom)]
    {
        loom::lazy_static! {
            static ref COLLECTOR: Collector = Collector::new();
        }
        &COLLECTOR
    }
}

thread_local! {
    /// The record of this thread in the collector. It is made at the first pin of the thread.
    static HANDLE: LocalHandle = collector().register();
}

/// The epochs in which the readers and the writer of a tree pin.
#[derive(Clone, Debug)]
pub(crate) struct Epochs;

impl Epochs {
    pub(crate) fn new() -> Epochs {
        Epochs
    }

    /// Returns a guard. Everything reachable while the guard lives stays allocated.
    #[inline(always)]
    pub(crate) fn pin(&self) -> Guard {
        // The record is gone if a destructor of another thread-local value pins.
        HANDLE.try_with(LocalHandle::pin).unwrap_or_else(|_| collector().register().pin())
    }

    /// Calls `function` on any thread, after all guards that exist now have been dropped.
    pub(crate) fn defer(&self, guard: &Guard, function: impl FnOnce() + Send + 'static) {
        guard.defer(function);
    }

    /// Tries to end grace periods, and calls the functions that wait for them.
    pub(crate) fn advance(&self, guard: &Guard) {
        guard.flush();
    }
}
