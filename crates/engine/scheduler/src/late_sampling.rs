//! Sampling that no step waits for: rows of requests whose [`LogitsProcessor`] is not ready.
//!
//! 1. A row whose processor is ready is sampled on the executor thread when its step has ended. Any
//!    other row is returned with its sampler, as a [`LateRow`].
//! 2. [`LateSampling::start`] samples it on a separate thread. The threads are bounded, and no tenant
//!    has all of them. Meanwhile its sequence takes part in no step and keeps its KV.
//! 3. When the token is chosen, the scheduler is woken, and continues the sequence.
//!
//! [`LogitsProcessor`]: stolon_backend::LogitsProcessor

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use stolon_backend::{Sampled, SamplerState, SamplingError};

use crate::tenant::TenantId;
use crate::verify::{Rows, Verified};

/// A row of logits from which a token is still to be sampled, and the rows of the tokens that were
/// proposed to follow.
#[derive(Debug)]
pub struct LateRow {
    /// Samples from the rows.
    pub(crate) sampler: Box<SamplerState>,
    /// `[1 + proposals, width]`: the rows, as the backend returned them.
    pub(crate) logits: Vec<f32>,
    /// Number of values of a row.
    pub(crate) width: usize,
    /// The tokens that were proposed.
    pub(crate) proposals: Vec<u32>,
}

/// The tokens that were sampled from a [`LateRow`].
#[derive(Debug)]
pub(crate) struct LateToken {
    /// The sequence's id.
    pub(crate) id: u64,
    tenant: TenantId,
    /// `None` if sampling panicked.
    pub(crate) sampler: Option<Box<SamplerState>>,
    /// The tokens in their order.
    pub(crate) sampled: Vec<Sampled>,
    /// Why no further token could be sampled.
    pub(crate) failure: Option<SamplingError>,
}

/// The rows that are being sampled, or wait for a thread.
pub(crate) struct LateSampling {
    done: Arc<Mutex<Vec<LateToken>>>,
    /// Makes the owner of the scheduler call it, from any thread.
    wake: Arc<dyn Fn() + Send + Sync>,
    /// Maximum number of threads. One tenant has at most half of them.
    threads_max: usize,
    /// Number of threads of each tenant that has one. Threads of requests that have ended count for
    /// as long as their processors do not return.
    threads: HashMap<TenantId, usize>,
    /// Rows without a thread, oldest first.
    waiting: VecDeque<(u64, TenantId, LateRow)>,
}

impl LateSampling {
    pub(crate) fn new(threads_max: usize) -> LateSampling {
        LateSampling {
            done: Arc::default(),
            wake: Arc::new(|| {}),
            threads_max,
            threads: HashMap::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Sets the function that is called, on any thread, when a token was sampled.
    pub(crate) fn set_wake(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.wake = wake;
    }

    /// Samples a row of the sequence `id` of `tenant` on a separate thread, as soon as the tenant can
    /// have one.
    pub(crate) fn start(&mut self, id: u64, tenant: TenantId, row: LateRow) {
        self.waiting.push_back((id, tenant, row));
        self.start_waiting();
    }

    /// The tokens that were sampled since the last call. Drops the waiting rows of sequences that
    /// do not run any longer.
    pub(crate) fn take(&mut self, is_running: impl Fn(u64) -> bool) -> Vec<LateToken> {
        let done = std::mem::take(&mut *self.done.lock().unwrap_or_else(PoisonError::into_inner));
        for LateToken { tenant, .. } in &done {
            let Some(count) = self.threads.get_mut(tenant) else { continue };
            *count -= 1;
            if *count == 0 {
                self.threads.remove(tenant);
            }
        }
        self.waiting.retain(|(id, ..)| is_running(*id));
        self.start_waiting();
        done
    }

    /// Starts threads for the rows whose tenants can have one more.
    fn start_waiting(&mut self) {
        let each = self.threads_max.div_ceil(2);
        loop {
            if self.threads.values().sum::<usize>() >= self.threads_max {
                return;
            }
            let count = |tenant| self.threads.get(tenant).copied().unwrap_or(0);
            let next = self.waiting.iter().position(|(_, tenant, _)| count(tenant) < each);
            let Some((id, tenant, row)) = next.and_then(|next| self.waiting.remove(next)) else {
                return;
            };
            *self.threads.entry(tenant).or_default() += 1;
            self.start_thread(id, tenant, row);
        }
    }

    fn start_thread(&self, id: u64, tenant: TenantId, row: LateRow) {
        let (done, wake) = (Arc::clone(&self.done), Arc::clone(&self.wake));
        let finish = move |sampler, Verified { sampled, failure, .. }: Verified| {
            let token = LateToken { id, tenant, sampler, sampled, failure };
            done.lock().unwrap_or_else(PoisonError::into_inner).push(token);
            wake();
        };
        let finish_here = finish.clone();
        let sample = move || {
            let LateRow { mut sampler, mut logits, width, proposals } = row;
            // After a panic, nothing of the sampler is used.
            let verified = catch_unwind(AssertUnwindSafe(|| {
                let rows = Rows { logits: &mut logits, width, proposals: &proposals };
                let verified = rows.verify(&mut sampler, true);
                (Some(sampler), verified)
            }));
            let reason = "sampling panicked".to_owned();
            let failed = |_| (None, failed(SamplingError::ProcessorPanicked { reason }));
            let (sampler, verified) = verified.unwrap_or_else(failed);
            finish(sampler, verified);
        };
        let thread = thread::Builder::new().name("stolon-sampling".to_owned()).spawn(sample);
        if let Err(error) = thread {
            let reason = format!("a thread for the logits processor: {error}");
            finish_here(None, failed(SamplingError::ProcessorBusy { reason }));
        }
    }
}

fn failed(error: SamplingError) -> Verified {
    Verified { failure: Some(error), ..Verified::default() }
}

impl fmt::Debug for LateSampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateSampling").field("threads_max", &self.threads_max).finish()
    }
}
