//! How many requests are in which state, and whether new ones may enter.
//!
//! Each request holds a [`RequestRecord`] from its submission to its end, wherever it is: in a
//! mailbox, in the queue, running. A record that is dropped before an end was recorded counts as
//! failed. So the counts add up however a request ends, even if an actor panics or the
//! runtime is dropped:
//!
//! `requests = finished + canceled + failed + running + waiting`
//!
//! All counts are behind one mutex that is held for a few instructions, so that this also holds
//! for every single reading of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tracing::Span;

use crate::error::EngineError;
use crate::gauges::Gauges;

/// The shared counts.
#[derive(Debug, Default)]
pub(crate) struct RequestCounts {
    state: Mutex<State>,
    /// No new request may enter. It is written with the mutex locked, so that a request that was
    /// let in is counted before the entrance is closed; reading it alone needs no lock.
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    numbers: RequestNumbers,
    /// Tasks that wait until no request is waiting or running.
    idle_wakers: Vec<Waker>,
}

/// One reading of the counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestNumbers {
    pub(crate) requests: u64,
    /// All requests that completed, including those in `finished_length`.
    pub(crate) finished: u64,
    pub(crate) finished_length: u64,
    pub(crate) canceled: u64,
    pub(crate) failed: u64,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It completed, but not because its answer had become as long as it may be.
    Finished,
    /// Its answer has become as long as it may be.
    FinishedLength,
    Canceled,
    Failed,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Outcome::Finished | Outcome::FinishedLength => "finished",
            Outcome::Canceled => "canceled",
            Outcome::Failed => "failed",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    Running,
    Ended,
}

/// The entry of one request in the counts.
#[derive(Debug)]
pub(crate) struct RequestRecord {
    gauges: Arc<Gauges>,
    phase: Phase,
    /// Whether it is a prompt that is computed in the background. It is in none of the counts.
    is_background: bool,
    /// The request's span, a child of the span in which it was submitted.
    pub(crate) span: Span,
}

impl RequestCounts {
    pub(crate) fn read(&self) -> RequestNumbers {
        self.lock().numbers
    }

    /// Refuses requests from now on.
    pub(crate) fn close(&self) {
        let _state = self.lock();
        self.closed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Ready when no request is waiting or running.
    pub(crate) fn poll_idle(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if state.numbers.is_idle() {
            return Poll::Ready(());
        }
        if !state.idle_wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            state.idle_wakers.push(context.waker().clone());
        }
        Poll::Pending
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The counts are valid between any two statements, so a poisoned lock is taken too.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RequestNumbers {
    /// The gauge of a phase; `None` for ended requests, which are counted by outcome.
    fn in_phase(&mut self, phase: Phase) -> Option<&mut usize> {
        match phase {
            Phase::Waiting => Some(&mut self.waiting),
            Phase::Running => Some(&mut self.running),
            Phase::Ended => None,
        }
    }

    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting == 0
    }
}

impl RequestRecord {
    /// Counts a new request, which is waiting.
    ///
    /// # Errors
    /// [`EngineError::Draining`] if no request may enter any longer.
    pub(crate) fn new(gauges: &Arc<Gauges>, span: Span) -> Result<RequestRecord, EngineError> {
        let mut state = gauges.request_counts.lock();
        if gauges.request_counts.is_closed() {
            return Err(EngineError::Draining);
        }
        state.numbers.requests += 1;
        state.numbers.waiting += 1;
        drop(state);
        Ok(RequestRecord {
            gauges: Arc::clone(gauges),
            phase: Phase::Waiting,
            is_background: false,
            span,
        })
    }

    /// For a prompt that is computed in the background, which is no request.
    ///
    /// # Errors
    /// [`EngineError::Draining`] if no request may enter any longer.
    pub(crate) fn background(gauges: &Arc<Gauges>) -> Result<RequestRecord, EngineError> {
        if gauges.request_counts.is_closed() {
            return Err(EngineError::Draining);
        }
        let gauges = Arc::clone(gauges);
        let (phase, span) = (Phase::Waiting, Span::none());
        Ok(RequestRecord { gauges, phase, is_background: true, span })
    }

    /// The engine's counters.
    pub(crate) fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// The request has left the queue.
    pub(crate) fn run(&mut self) {
        self.change(Phase::Running, |_| {});
    }

    /// The request was preempted.
    pub(crate) fn wait(&mut self) {
        self.change(Phase::Waiting, |_| {});
    }

    /// The request has ended. Only the first end counts.
    pub(crate) fn end(&mut self, outcome: Outcome) {
        if self.phase != Phase::Ended {
            self.span.record("outcome", outcome.name());
            if self.is_background {
                let ended = match outcome {
                    Outcome::Finished | Outcome::FinishedLength => &self.gauges.background_finished,
                    Outcome::Canceled | Outcome::Failed => &self.gauges.background_dropped,
                };
                ended.add(1);
            }
        }
        self.change(Phase::Ended, |numbers| match outcome {
            Outcome::Finished => numbers.finished += 1,
            Outcome::FinishedLength => {
                numbers.finished += 1;
                numbers.finished_length += 1;
            }
            Outcome::Canceled => numbers.canceled += 1,
            Outcome::Failed => numbers.failed += 1,
        });
    }

    fn change(&mut self, next: Phase, count: impl FnOnce(&mut RequestNumbers)) {
        if self.phase == Phase::Ended {
            return;
        }
        if self.is_background {
            self.phase = next;
            return;
        }
        let mut state = self.gauges.request_counts.lock();
        if let Some(number) = state.numbers.in_phase(self.phase) {
            *number -= 1;
        }
        if let Some(number) = state.numbers.in_phase(next) {
            *number += 1;
        }
        count(&mut state.numbers);
        let wakers = match state.numbers.is_idle() {
            true => std::mem::take(&mut state.idle_wakers),
            false => Vec::new(),
        };
        drop(state);
        self.phase = next;
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        self.end(Outcome::Failed);
        if self.is_background {
            return;
        }
        // What is known about the request is in the fields of its span. The span is entered, not
        // given as the parent, because the JSON log shows only entered spans.
        self.span.in_scope(|| tracing::info!(target: "stolon", "request ended"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(gauges: &Gauges) -> [u64; 6] {
        let n = gauges.request_counts.read();
        [n.requests, n.finished, n.canceled, n.failed, n.running as u64, n.waiting as u64]
    }

    /// Goal: each way through the states is counted once, and a record that is dropped counts as
    /// failed.
    #[test]
    fn every_request_is_counted_in_exactly_one_state() {
        let gauges = Arc::new(Gauges::default());
        let new = || RequestRecord::new(&gauges, Span::none()).expect("open");
        let (mut finished, mut canceled, mut lost, waiting) = (new(), new(), new(), new());
        assert_eq!(numbers(&gauges), [4, 0, 0, 0, 0, 4]);
        finished.run();
        finished.wait();
        finished.run();
        lost.run();
        assert_eq!(numbers(&gauges), [4, 0, 0, 0, 2, 2]);
        finished.end(Outcome::Finished);
        canceled.end(Outcome::Canceled);
        canceled.end(Outcome::Finished);
        drop((finished, canceled));
        assert_eq!(numbers(&gauges), [4, 1, 1, 0, 1, 1]);
        drop((lost, waiting));
        assert_eq!(numbers(&gauges), [4, 1, 1, 2, 0, 0]);
    }

    /// Goal: no request enters after the close, and the end of the last one wakes the waiting task.
    #[test]
    fn a_close_is_final_and_the_last_end_wakes_the_waiting_task() {
        let gauges = Arc::new(Gauges::default());
        let record = RequestRecord::new(&gauges, Span::none()).expect("open");
        gauges.close();
        let refused = RequestRecord::new(&gauges, Span::none());
        assert_eq!(refused.expect_err("closed"), EngineError::Draining);
        let task = std::thread::spawn({
            let gauges = Arc::clone(&gauges);
            move || {
                futures::executor::block_on(std::future::poll_fn(|context| {
                    gauges.poll_idle(context)
                }));
            }
        });
        drop(record);
        task.join().expect("it was woken");
        assert_eq!(numbers(&gauges), [1, 0, 0, 1, 0, 0]);
    }
}
