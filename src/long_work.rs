//! [`LongWork`]: runs work that takes longer than a millisecond and is not a step of the model,
//! such as tokenizing a book, rendering a hostile template or parsing a body of megabytes.
//!
//! It runs on threads with a low priority, so that it does not delay the steps of other requests,
//! and clients share these threads fairly.

mod lane;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use stolon_scheduler::{EngineError, yield_to_computing};
use tokio::sync::oneshot;

use crate::Error;
pub(crate) use lane::{Client, FairLane, Slot};

type Job = Box<dyn FnOnce() + Send>;

/// The threads for long work. They end after this was dropped, when their work is done.
#[derive(Debug)]
pub(crate) struct LongWork {
    lane: Arc<FairLane>,
    jobs: Sender<Job>,
}

impl LongWork {
    /// Starts at least two threads: one client never has all of them.
    pub(crate) fn start() -> Result<LongWork, Error> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / 4).max(2);
        let (jobs, receiver) = mpsc::channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..threads {
            let receiver = Arc::clone(&receiver);
            let thread = std::thread::Builder::new().name("stolon-long-work".to_owned());
            thread.spawn(move || serve(&receiver)).map_err(|error| {
                let reason = format!("a thread for long work: {error}");
                EngineError::StartFailed { reason }
            })?;
        }
        Ok(LongWork { lane: FairLane::new(threads, threads - 1), jobs })
    }

    /// Does a client's work when its turn has come. If the future is dropped before the work has
    /// begun, it is not done; if it is dropped later, the result is discarded. Work of more than
    /// some hundred milliseconds is therefore submitted in pieces.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        client: Client,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let slot = self.lane.slot(client).await;
        let (sender, result) = oneshot::channel();
        let job = move || {
            if sender.is_closed() {
                return;
            }
            let result = catch_unwind(AssertUnwindSafe(work));
            drop(slot);
            // Fails if the caller has gone.
            let _ = sender.send(result);
        };
        // The threads receive for as long as there is a sender.
        self.jobs.send(Box::new(job)).map_err(|_| EngineError::Stopped)?;
        match result.await {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(panic)) => resume_unwind(panic),
            Err(_) => Err(EngineError::Stopped.into()),
        }
    }
}

fn serve(jobs: &Mutex<Receiver<Job>>) {
    yield_to_computing();
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::executor::block_on;

    use super::*;

    /// Goal: work is done on another thread, and the work of one client in order.
    #[test]
    fn work_is_done_elsewhere() {
        let long = LongWork::start().expect("threads");
        let here = std::thread::current().id();
        let work = |result: u32| long.run(None, move || (std::thread::current().id(), result));
        let results = block_on(futures::future::join(work(1), work(2)));
        for (result, expected) in [(results.0, 1), (results.1, 2)] {
            let (thread, result) = result.expect("done");
            assert_ne!(thread, here);
            assert_eq!(result, expected);
        }
    }

    /// Goal: a panic reaches the caller that asked for the work, and the threads continue.
    #[test]
    fn a_panic_is_passed_on() {
        let long = LongWork::start().expect("threads");
        for _ in 0..10 {
            let panicking = long.run(None, || panic!("on purpose"));
            let panic = block_on(AssertUnwindSafe(panicking).catch_unwind()).expect_err("a panic");
            assert_eq!(panic.downcast_ref(), Some(&"on purpose"));
        }
        assert_eq!(block_on(long.run(None, || 3)).expect("done"), 3);
    }

    /// Goal: work whose future was dropped before its turn is not begun, and its resources are
    /// released.
    #[test]
    fn work_that_was_given_up_is_not_begun() {
        let long = LongWork::start().expect("threads");
        let (end, ended) = mpsc::channel::<()>();
        let mut running = Box::pin(long.run(None, move || ended.recv()));
        assert!((&mut running).now_or_never().is_none());
        let held = Arc::new(());
        let moved = Arc::clone(&held);
        let mut waiting = Box::pin(long.run(None, move || drop(moved)));
        assert!((&mut waiting).now_or_never().is_none(), "one thread is left for other clients");
        drop(waiting);
        assert_eq!(Arc::strong_count(&held), 1);
        drop(end);
        assert!(block_on(running).expect("done").is_err());
    }
}
