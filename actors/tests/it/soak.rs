//! Thousands of random requests while parts of the engine fail at random. Every request ends, the
//! accounting stays consistent, and memory does not grow.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_actors::{EnginePart, Fault};
use stolon_backend::fake::{FakeFault, FakeOptions, expected_next};
use stolon_scheduler::{EngineConfig, EngineError, Event, SequenceRequest};
use support::{Harness, prompt, read_to_end, start};

use crate::support::harness as support;

const CLIENTS: usize = 48;
const BLOCKS: usize = 40;
const VOCAB_SIZE: usize = 64;

/// How many requests ended in each way, and how many submissions were refused.
#[derive(Debug, Default)]
struct Outcomes {
    finished: AtomicUsize,
    canceled: AtomicUsize,
    interrupted: AtomicUsize,
    refused: AtomicUsize,
}

/// Submits a random request and reads it to its end, or cancels it after a few events.
async fn run_random_request(harness: &Harness, rng: &mut SmallRng, outcomes: &Outcomes) {
    // With only six seeds, many prompts share prefixes of any length and some are repeated.
    let mut tokens = prompt(rng.random_range(0..6), rng.random_range(1..100));
    tokens.iter_mut().for_each(|token| *token %= VOCAB_SIZE as u32);
    let max_tokens = rng.random_range(1..12);
    let mut request = SequenceRequest::new(tokens.clone(), max_tokens);
    request.options.priority = rng.random_range(0..3);
    request.options.skip_writing_prefix_cache = rng.random_bool(0.1);
    request.options.skip_reading_prefix_cache = rng.random_bool(0.1);
    let events_read_max =
        if rng.random_range(0..4) == 0 { rng.random_range(0..8) } else { usize::MAX };
    // A refused request is submitted again, so that the test passes on slow machines, too.
    let mut stream = loop {
        match harness.engine.submit(request.clone()) {
            Ok(stream) => break stream,
            Err(EngineError::Overloaded { .. } | EngineError::Interrupted { .. }) => {
                outcomes.refused.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            Err(other) => panic!("{other}"),
        }
    };
    for _ in 0..events_read_max {
        match stream.next().await {
            Some(Ok(Event::Token(token))) => {
                let id = token.id.expect("every token event has an id");
                assert_eq!(id, expected_next(&tokens, VOCAB_SIZE));
                tokens.push(id);
            }
            Some(Ok(Event::Finished(finish))) => {
                assert_eq!(finish.usage.completion_tokens, max_tokens);
                outcomes.finished.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Some(Ok(_)) => {}
            Some(Err(EngineError::Interrupted { .. } | EngineError::StepFailed { .. })) => {
                outcomes.interrupted.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Some(Err(other)) => panic!("{other}"),
            None => panic!("the stream ended without a final event"),
        }
    }
    outcomes.canceled.fetch_add(1, Ordering::Relaxed);
}

/// Injects a fault each time about 50 more requests have finished, until its task is aborted.
/// Faults follow the work done, not the time, so that a slow machine does not see more faults per
/// request.
async fn inject_faults(harness: Arc<Harness>, mut rng: SmallRng, outcomes: Arc<Outcomes>) {
    let mut next = 0;
    loop {
        next += rng.random_range(25..75);
        while outcomes.finished.load(Ordering::Relaxed) < next {
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        let stall = Duration::from_micros(rng.random_range(0..2000));
        if rng.random_range(0..3) == 0 {
            let faults = [FakeFault::Fail, FakeFault::Panic, FakeFault::Stall(stall)];
            harness.fake.inject_next(faults[rng.random_range(0..3)]);
        } else {
            let faults = [Fault::Panic, Fault::Error, Fault::Stall(stall)];
            harness
                .engine
                .inject(EnginePart::ALL[rng.random_range(0..5)], faults[rng.random_range(0..3)]);
        }
    }
}

/// Anonymous resident memory of this process in bytes; `None` if the system does not report it.
fn resident_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<usize>().ok()? * 1024)
}

/// With `checkpoint_blocks`, the model has a recurrent state, and this is the size of a checkpoint in
/// blocks.
async fn soak(requests: usize, checkpoint_blocks: Option<usize>) {
    silence_injected_panics();
    let options = FakeOptions {
        vocab_size: VOCAB_SIZE,
        block_count: BLOCKS,
        max_positions: 512,
        state: checkpoint_blocks.map(|blocks| (blocks, 12)),
        ..FakeOptions::default()
    };
    let config = EngineConfig {
        max_batched_tokens: 96,
        max_running: 12,
        max_queued_requests: 24,
        event_capacity: 16,
        logit_cache_bytes: 4096,
        ..EngineConfig::default()
    };
    let harness = Arc::new(start(options, config).await);
    let outcomes = Arc::new(Outcomes::default());
    let rng = SmallRng::seed_from_u64(1);
    let injector = tokio::spawn(inject_faults(Arc::clone(&harness), rng, Arc::clone(&outcomes)));
    let mut sizes = Vec::new();
    // Memory is measured after each tenth of the requests.
    for part in 0..10_u64 {
        let clients: Vec<_> = (0..CLIENTS as u64)
            .map(|client| {
                let (harness, outcomes) = (Arc::clone(&harness), Arc::clone(&outcomes));
                tokio::spawn(async move {
                    let mut rng = SmallRng::seed_from_u64(part << 32 | client);
                    for _ in 0..requests / CLIENTS / 10 {
                        run_random_request(&harness, &mut rng, &outcomes).await;
                    }
                })
            })
            .collect();
        for client in clients {
            client.await.expect("no panic");
        }
        sizes.extend(resident_bytes());
    }
    injector.abort();
    // The last fault may take effect only at the next message of its part.
    for round in 0.. {
        assert!(round < 100, "the engine does not recover");
        let stream = harness.engine.submit(SequenceRequest::new(vec![round; 20], 2));
        if let Ok(stream) = stream
            && read_to_end(stream).await.is_ok()
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    harness.check_nothing_held().await;
    let count = |end: &AtomicUsize| end.load(Ordering::Relaxed);
    let ended = [&outcomes.finished, &outcomes.canceled, &outcomes.interrupted];
    assert_eq!(ended.into_iter().map(count).sum::<usize>(), requests / CLIENTS / 10 * CLIENTS * 10);
    let stats = harness.engine.context().stats();
    assert!(count(&outcomes.finished) > requests / 4, "{outcomes:?} {stats:?}");
    assert!(stats.restarts > 0 && count(&outcomes.interrupted) > 0, "{outcomes:?} {stats:?}");
    assert!(stats.evictions > 0 && stats.first_tokens_from_cache > 0, "{stats:?}");
    assert_eq!(stats.checkpoints > 0, checkpoint_blocks.is_some(), "{stats:?}");
    harness.engine.flush().await.expect("the engine runs");
    assert_eq!(harness.engine.audit().await.expect("a consistent accounting").blocks_free, BLOCKS);
    if let [_, second, .., last] = sizes[..] {
        assert!(last < second + (8 << 20), "memory grows: {sizes:?}");
    }
}

/// Keeps the many messages of injected panics off the terminal.
fn silence_injected_panics() {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let payload = info.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default();
        if !text.contains("was injected") {
            default_hook(info);
        }
    }));
}

/// Goal: while parts fail at random, every request ends with the right tokens or the right error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_and_faults_leak_nothing() {
    soak(4_800, None).await;
}

/// Goal: the same for a hundred thousand requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; .ci/deep runs it"]
async fn a_hundred_thousand_random_requests_leak_nothing() {
    soak(100_320, None).await;
}

/// Goal: the same for a model with a recurrent state, whose slots and checkpoints are accounted for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_with_recurrent_states_leak_nothing() {
    soak(2_400, Some(3)).await;
}

/// Goal: the same for fifty thousand requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; .ci/deep runs it"]
async fn fifty_thousand_random_requests_with_recurrent_states_leak_nothing() {
    soak(50_400, Some(3)).await;
}
