//! Sampling that no step waits for: rows of requests whose [`LogitsProcessor`] is not ready.
//!
//! 1. A row whose processor is ready is sampled on the executor thread when its step has ended. Any
//!    other row is returned with its sampler, as a [`LateRow`].
//! 2. [`LateSampling::start`] samples it on a separate thread. Meanwhile its sequence takes part
//!    in no step and keeps its KV.
//! 3. When the token is chosen, the scheduler is woken, and continues the sequence.
//!
//! [`LogitsProcessor`]: stolon_backend::LogitsProcessor

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use stolon_backend::{Sampled, SamplerState, SamplingError};

/// A row of logits from which a token is still to be sampled.
#[derive(Debug)]
pub struct LateRow {
    /// Samples from the row.
    pub(crate) sampler: Box<SamplerState>,
    /// `[vocab_size]`.
    pub(crate) logits: Vec<f32>,
}

/// What was sampled from a [`LateRow`].
#[derive(Debug)]
pub(crate) struct LateToken {
    /// The sequence's id.
    pub(crate) id: u64,
    /// `None` if sampling panicked.
    pub(crate) sampler: Option<Box<SamplerState>>,
    pub(crate) sampled: Result<Sampled, SamplingError>,
}

/// The rows that are being sampled. Each thread holds a clone of `done`, whose count bounds them.
pub(crate) struct LateSampling {
    done: Arc<Mutex<Vec<LateToken>>>,
    /// Makes the owner of the scheduler call it, from any thread.
    wake: Arc<dyn Fn() + Send + Sync>,
    /// Maximum number of threads. Threads of requests that have ended count as long as their
    /// processors do not return.
    threads_max: usize,
}

impl LateSampling {
    pub(crate) fn new(threads_max: usize) -> LateSampling {
        LateSampling { done: Arc::default(), wake: Arc::new(|| {}), threads_max }
    }

    /// Sets what is called, on any thread, when a token was sampled.
    pub(crate) fn set_wake(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.wake = wake;
    }

    /// Samples a row of the sequence `id` on a separate thread.
    ///
    /// # Errors
    /// [`SamplingError::ProcessorFailed`] if there can be no further thread.
    pub(crate) fn start(&self, id: u64, row: LateRow) -> Result<(), SamplingError> {
        let failed = |reason: String| SamplingError::ProcessorFailed { reason };
        if Arc::strong_count(&self.done) > self.threads_max {
            let max = self.threads_max;
            return Err(failed(format!(
                "expected at most {max} calls of logits processors at a time, got one more"
            )));
        }
        let (done, wake) = (Arc::clone(&self.done), Arc::clone(&self.wake));
        let sample = move || {
            let LateRow { mut sampler, mut logits } = row;
            // Nothing of it is used after a panic.
            let sampled = catch_unwind(AssertUnwindSafe(|| {
                let sampled = sampler.sample(&mut logits);
                (Some(sampler), sampled)
            }));
            let (sampler, sampled) = sampled.unwrap_or_else(|_| {
                let reason = "sampling panicked".to_owned();
                (None, Err(SamplingError::ProcessorFailed { reason }))
            });
            done.lock().unwrap_or_else(PoisonError::into_inner).push(LateToken {
                id,
                sampler,
                sampled,
            });
            drop(done);
            wake();
        };
        let thread = thread::Builder::new().name("stolon-sampling".to_owned()).spawn(sample);
        thread.map_err(|error| failed(format!("a thread for the logits processor: {error}")))?;
        Ok(())
    }

    /// The tokens that were sampled since the last call.
    pub(crate) fn take(&self) -> Vec<LateToken> {
        std::mem::take(&mut self.done.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for LateSampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateSampling").field("threads_max", &self.threads_max).finish()
    }
}
