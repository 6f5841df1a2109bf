//! The tokio runtime of the process, and what belongs to one process alone.
//!
//! A forked process has a copy of the memory but none of the threads, so that a call of the engine
//! would wait forever. Everything with threads is therefore [`ProcessBound`].

use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use crate::error::{Failure, raise};

/// The time between two looks for signals, such as Ctrl-C, while a call waits.
const TICK: Duration = Duration::from_millis(50);

/// The runtime of the process with this id. It is never dropped: its threads end with the process.
static RUNTIME: Mutex<Option<(u32, &'static Runtime)>> = Mutex::new(None);

/// The runtime of this process. The lock is held by a thread that is attached to the interpreter,
/// as one that forks is, so that no forked process finds it locked.
pub(crate) fn runtime(_: Python<'_>) -> PyResult<&'static Runtime> {
    let mut slot = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((owner, runtime)) = *slot
        && owner == process
    {
        return Ok(runtime);
    }
    // The engine computes on its own threads; these only forward events.
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let runtime: &'static Runtime = Box::leak(Box::new(runtime));
    *slot = Some((process, runtime));
    Ok(runtime)
}

/// Waits for a future without the interpreter's lock. Every [`TICK`], it runs the handlers of
/// signals and `tick`. If one of them raises, the future is dropped, which cancels its work.
pub(crate) fn wait_with<T: Send>(
    py: Python<'_>,
    future: impl Future<Output = T> + Send,
    mut tick: impl FnMut(Python<'_>) -> PyResult<()>,
) -> PyResult<T> {
    let runtime = runtime(py)?;
    let mut future = Box::pin(future);
    loop {
        let result =
            py.detach(|| runtime.block_on(async { tokio::time::timeout(TICK, &mut future).await }));
        if let Ok(value) = result {
            return Ok(value);
        }
        py.check_signals()?;
        tick(py)?;
    }
}

/// [`wait_with`] for a future that can fail.
pub(crate) fn wait<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    future: impl Future<Output = Result<T, E>> + Send,
) -> PyResult<T> {
    wait_with(py, future, |_| Ok(()))?.map_err(|error| error.into().into())
}

/// A value that only the process that made it can use. A forked process gets an error, and leaves
/// the value alone when it is dropped: what would be told to end is not there.
#[derive(Debug)]
pub(crate) struct ProcessBound<T> {
    /// `None` only while it is being dropped.
    value: Option<T>,
    process: u32,
}

impl<T> ProcessBound<T> {
    pub(crate) fn new(value: T) -> ProcessBound<T> {
        ProcessBound { value: Some(value), process: std::process::id() }
    }

    /// The value.
    ///
    /// # Errors
    /// `ForkedProcessError` in another process than the one that made it.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        let (expected, got) = (self.process, std::process::id());
        match &self.value {
            Some(value) if expected == got => Ok(value),
            _ => {
                let message = format!(
                    "expected a call in the process {expected}, which made this object, got one in \
                     the process {got}, which was forked from it: an engine's threads are not in a \
                     forked process. Make an engine in each process, or start processes with the \
                     method `spawn` of multiprocessing"
                );
                Err(raise(py, "ForkedProcessError", message, None))
            }
        }
    }
}

impl<T: Clone> ProcessBound<T> {
    /// Another owner of the value.
    ///
    /// # Errors
    /// As [`ProcessBound::get`].
    pub(crate) fn share(&self, py: Python<'_>) -> PyResult<ProcessBound<T>> {
        Ok(ProcessBound::new(self.get(py)?.clone()))
    }
}

impl<T> Drop for ProcessBound<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.value.take());
        }
    }
}
