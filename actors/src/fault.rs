//! Fault injection for tests: makes one part of the engine fail, so that a test can check that the
//! rest survives.

use std::sync::Mutex;
use std::time::Duration;

/// A part of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnginePart {
    /// The admission actor.
    Admission,
    /// The prefix tree's actor.
    PrefixTree,
    /// The block allocator's actor.
    BlockAllocator,
    /// The actor in front of the executor's thread.
    Executor,
    /// The executor's thread, outside the backend.
    ExecutorThread,
}

impl EnginePart {
    /// All parts.
    pub const ALL: [Self; 5] = [
        Self::Admission,
        Self::PrefixTree,
        Self::BlockAllocator,
        Self::Executor,
        Self::ExecutorThread,
    ];
}

/// How a part fails at its next message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It panics.
    Panic,
    /// It returns an error.
    Error,
    /// Its thread sleeps for this long, then continues.
    Stall(Duration),
}

/// An injected error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an error was injected into {0:?}")]
pub(crate) struct Injected(EnginePart);

/// The injected faults that have not taken effect yet. Empty outside of tests.
#[derive(Debug, Default)]
pub(crate) struct FaultPlan {
    armed: std::sync::atomic::AtomicBool,
    faults: Mutex<Vec<(EnginePart, Fault)>>,
}

impl FaultPlan {
    /// Makes a part fail at its next message.
    pub(crate) fn arm(&self, part: EnginePart, fault: Fault) {
        self.lock().push((part, fault));
        self.armed.store(true, std::sync::atomic::Ordering::Release);
    }

    /// Applies a fault injected into `part`, if there is one. Every part calls this once per
    /// message.
    pub(crate) fn trigger(&self, part: EnginePart) -> Result<(), Injected> {
        // Pairs with the store in `arm`; the list itself is behind its lock.
        if !self.armed.load(std::sync::atomic::Ordering::Acquire) {
            return Ok(());
        }
        let fault = {
            let mut faults = self.lock();
            let found = faults.iter().position(|&(at, _)| at == part);
            let fault = found.map(|index| faults.remove(index).1);
            self.armed.store(!faults.is_empty(), std::sync::atomic::Ordering::Release);
            fault
        };
        match fault {
            None => Ok(()),
            Some(Fault::Stall(time)) => {
                std::thread::sleep(time);
                Ok(())
            }
            Some(Fault::Error) => Err(Injected(part)),
            Some(Fault::Panic) => {
                std::panic::panic_any(format!("a panic was injected into {part:?}"))
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(EnginePart, Fault)>> {
        // The list is valid between any two statements, so a poisoned lock is no reason to stop.
        self.faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
