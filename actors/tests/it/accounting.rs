//! The counts of requests add up at every moment and after any fault, and `drain` waits for exactly
//! the requests that are counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::executor::block_on;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_actors::{EngineHandle, EnginePart, Fault, SequenceStream};
use stolon_backend::fake::{FakeBackend, FakeFault};
use stolon_scheduler::{EngineConfig, EngineError, EngineHealth, EngineStats, SequenceRequest};
use support::{Harness, options, prompt, read_to_end, start};

use crate::support::harness as support;

/// Fails unless the counts of requests add up.
fn check_sum(stats: &EngineStats) {
    let ended = stats.finished + stats.canceled + stats.failed;
    let in_flight = (stats.running + stats.waiting) as u64;
    assert_eq!(stats.requests, ended + in_flight, "{stats:?}");
}

/// Fails unless the counts and gauges describe an engine without requests and without a cache.
fn check_stopped(stats: &EngineStats) {
    check_sum(stats);
    assert_eq!((stats.running, stats.waiting, stats.queued_tokens), (0, 0, 0));
    assert_eq!((stats.blocks_free, stats.blocks_reserved), (stats.blocks_total, 0));
    assert_eq!((stats.blocks_cached, stats.blocks_evictable), (0, 0));
}

/// Submits, reads, drops and breaks things at random, and checks the counts after each. Returns
/// the numbers of requests that were accepted, that ended in their stream, and that failed in it.
async fn random_life(harness: &Harness, rng: &mut SmallRng, actions: usize) -> [u64; 3] {
    let mut streams: Vec<SequenceStream> = Vec::new();
    let [mut accepted, mut finished, mut failed] = [0; 3];
    for _ in 0..actions {
        match rng.random_range(0..20) {
            0..9 => {
                let tokens = prompt(rng.random_range(0..4), rng.random_range(1..150));
                let mut request = SequenceRequest::new(tokens, rng.random_range(1..20));
                let timeout = rng.random_bool(0.2).then_some(Duration::from_millis(1));
                request.options.timeout = timeout;
                request.options.skip_writing_prefix_cache = rng.random_bool(0.1);
                if let Ok(stream) = harness.engine.submit(request) {
                    accepted += 1;
                    streams.push(stream);
                }
            }
            9..14 if !streams.is_empty() => {
                let index = rng.random_range(0..streams.len());
                match read_to_end(streams.swap_remove(index)).await {
                    Ok(_) => finished += 1,
                    Err(_) => failed += 1,
                }
            }
            14..17 if !streams.is_empty() => {
                let stream = streams.swap_remove(rng.random_range(0..streams.len()));
                match rng.random_bool(0.5) {
                    true => stream.complete(),
                    false => drop(stream),
                }
            }
            17 => harness.fake.inject_next(match rng.random_bool(0.5) {
                true => FakeFault::Fail,
                false => FakeFault::Panic,
            }),
            18 => {
                let fault = if rng.random_bool(0.5) { Fault::Error } else { Fault::Panic };
                let part = EnginePart::ALL[rng.random_range(0..EnginePart::ALL.len())];
                harness.engine.inject(part, fault);
            }
            _ => tokio::task::yield_now().await,
        }
        check_sum(&harness.engine.context().stats());
    }
    [accepted, finished, failed]
}

/// Goal: at every moment, seen from another thread too, each request is counted in exactly one
/// state: through cancellations, timeouts, failed steps, panics, restarts and the shutdown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_of_requests_add_up_through_random_faults() {
    for seed in 0..12 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let config = EngineConfig { max_queued_requests: 20, max_running: 4, ..Default::default() };
        let harness = start(options(16, 48), config).await;
        let ended = Arc::new(AtomicBool::new(false));
        let observer = std::thread::spawn({
            let (engine, ended) = (harness.engine.clone(), Arc::clone(&ended));
            move || {
                while !ended.load(Ordering::Relaxed) {
                    check_sum(&engine.context().stats());
                    std::thread::yield_now();
                }
            }
        });
        let [accepted, finished, failed] = random_life(&harness, &mut rng, 150).await;
        let stream = harness.engine.submit(SequenceRequest::new(prompt(1, 60), 500));
        harness.engine.shutdown().await;
        let stats = harness.engine.context().stats();
        check_stopped(&stats);
        assert_eq!(stats.requests, accepted + u64::from(stream.is_ok()), "{stats:?}");
        assert!(stats.finished >= finished && stats.failed >= failed, "{stats:?}");
        ended.store(true, Ordering::Relaxed);
        observer.join().expect("the counts always add up");
    }
}

/// Goal: requests that a shutdown ends count as failed, and a drain after it returns at once.
#[tokio::test]
async fn a_shutdown_counts_what_it_ends() {
    let harness = start(options(16, 64), EngineConfig::default()).await;
    harness.check_greedy(&prompt(1, 40), 4).await;
    harness.check_nothing_held().await;
    let streams: Vec<_> = (0..40).map(|n| harness.submit(&prompt(n, 60), 500)).collect();
    harness.wait_for_steps(6).await;
    harness.engine.shutdown().await;
    let stats = harness.engine.context().stats();
    check_stopped(&stats);
    assert_eq!((stats.requests, stats.finished, stats.failed), (41, 1, 40));
    assert!(harness.engine.drain(Duration::MAX).await, "nothing is left to wait for");
    drop(streams);
}

/// Goal: a drain refuses new requests with `Draining`, completes those it has, and returns true.
#[tokio::test]
async fn a_drain_completes_requests_and_refuses_new_ones() {
    let harness = start(options(16, 64), EngineConfig::default()).await;
    let hold = harness.fake.hold();
    let stream = harness.submit(&prompt(1, 60), 8);
    let engine = harness.engine.clone();
    let drain = tokio::spawn(async move { engine.drain(Duration::MAX).await });
    while harness.engine.health() != EngineHealth::Draining {
        tokio::task::yield_now().await;
    }
    let refused = harness.engine.submit(SequenceRequest::new(prompt(2, 20), 1));
    assert_eq!(refused.expect_err("it drains"), EngineError::Draining);
    drop(hold);
    assert_eq!(read_to_end(stream).await.expect("it is completed").tokens.len(), 8);
    assert!(drain.await.expect("no panic"), "all requests ended");
    check_stopped(&harness.engine.context().stats());
    assert_eq!(harness.engine.health(), EngineHealth::Stopped);
}

/// Goal: a drain whose time is over ends the rest with `Stopped`, and returns false. Its caller
/// needs neither a runtime nor a timer.
#[test]
fn a_drain_works_off_the_runtime_and_reports_what_it_cut() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let harness = runtime.block_on(start(options(16, 64), EngineConfig::default()));
    let hold = harness.fake.hold();
    let stream = harness.submit(&prompt(1, 60), 8);
    let drained = std::thread::scope(|scope| {
        let drain = scope.spawn(|| block_on(harness.engine.drain(Duration::from_millis(20))));
        // The step must end before the backend can be dropped.
        assert_eq!(block_on(read_to_end(stream)).expect_err("it was cut"), EngineError::Stopped);
        drop(hold);
        drain.join().expect("no panic")
    });
    assert!(!drained);
    let stats = harness.engine.context().stats();
    check_stopped(&stats);
    assert_eq!((stats.requests, stats.failed), (1, 1));
}

/// Goal: without a runtime, or on one without timers, an engine cannot start, and the error says
/// what is missing.
#[test]
fn a_runtime_with_timers_is_required() {
    let start = || {
        EngineHandle::start(Box::new(FakeBackend::new(options(16, 64))), EngineConfig::default())
    };
    let error = block_on(start()).expect_err("no runtime");
    assert!(error.to_string().contains("tokio runtime"), "{error}");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let error = runtime.block_on(start()).expect_err("no time driver");
    assert!(error.to_string().contains("enable_time"), "{error}");
}
