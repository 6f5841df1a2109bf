//! The faults that tests inject.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::EnginePart;

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

/// The injected faults that are still to take effect.
#[derive(Debug, Default)]
pub(crate) struct FaultPlan {
    armed: AtomicBool,
    faults: Mutex<Vec<(EnginePart, Fault)>>,
}

impl FaultPlan {
    /// Makes a part fail at its next message.
    pub(crate) fn arm(&self, part: EnginePart, fault: Fault) {
        self.lock().push((part, fault));
        self.armed.store(true, Ordering::Release);
    }

    /// Applies a fault injected into `part`, if there is one. Every part calls this once per
    /// message.
    pub(crate) fn trigger(&self, part: EnginePart) -> Result<(), Injected> {
        // Pairs with the store in `arm`; the list itself is behind its lock.
        if !self.armed.load(Ordering::Acquire) {
            return Ok(());
        }
        let fault = {
            let mut faults = self.lock();
            let found = faults.iter().position(|&(at, _)| at == part);
            let fault = found.map(|index| faults.remove(index).1);
            self.armed.store(!faults.is_empty(), Ordering::Release);
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

    fn lock(&self) -> MutexGuard<'_, Vec<(EnginePart, Fault)>> {
        // The list is valid between any two statements, so a poisoned lock is no reason to stop.
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
