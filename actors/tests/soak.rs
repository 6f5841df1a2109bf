//! Thousands of random requests while parts of the core fail at random: every request ends, the
//! books are clean, memory stays flat.

#[path = "support/bench.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon_actors::{CoreConfig, CoreError, Fault, Part, SequenceEvent, SequenceRequest};
use stolon_backend::fake::expected_next;
use stolon_backend::fake::{FakeFault, FakeOptions};
use support::{Bench, bench, prompt};

const CLIENTS: usize = 48;
const VOCAB_SIZE: usize = 64;

/// How the requests of a soak ended, and how often one was refused before.
#[derive(Debug, Default)]
struct Ends {
    finished: AtomicUsize,
    cancelled: AtomicUsize,
    interrupted: AtomicUsize,
    refused: AtomicUsize,
}

/// Sends one request and reads it to its end, or drops it on the way.
async fn one(bench: &Bench, rng: &mut SmallRng, ends: &Ends) {
    // Few families, so that many share prefixes of any length, and some are repeated whole.
    let mut tokens = prompt(rng.random_range(0..6), rng.random_range(1..100));
    tokens.iter_mut().for_each(|token| *token %= VOCAB_SIZE as u32);
    let max_tokens = rng.random_range(1..12);
    let mut request = SequenceRequest::new(tokens.clone(), max_tokens);
    request.priority = rng.random_range(0..3);
    let patience = if rng.random_range(0..4) == 0 { rng.random_range(0..8) } else { usize::MAX };
    // However slow the machine, each request gets in some time.
    let mut stream = loop {
        match bench.core.submit(request.clone()) {
            Ok(stream) => break stream,
            Err(CoreError::Overloaded { .. } | CoreError::Interrupted { .. }) => {
                ends.refused.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
            Err(other) => panic!("{other}"),
        }
    };
    for _ in 0..patience {
        match stream.next().await {
            Some(Ok(SequenceEvent::Token { id, .. })) => {
                assert_eq!(id, expected_next(&tokens, VOCAB_SIZE));
                tokens.push(id);
            }
            Some(Ok(SequenceEvent::Finished(finish))) => {
                assert_eq!(finish.completion_tokens, max_tokens);
                ends.finished.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Some(Ok(_)) => {}
            Some(Err(CoreError::Interrupted { .. })) => {
                ends.interrupted.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Some(Err(other)) => panic!("{other}"),
            None => panic!("a stream ended without an end"),
        }
    }
    ends.cancelled.fetch_add(1, Ordering::Relaxed);
}

/// Makes something fail whenever some 50 requests more have finished, until told to stop: by work,
/// not by time, so that a slow machine fails no more often a request.
async fn trouble(bench: Arc<Bench>, mut rng: SmallRng, ends: Arc<Ends>) {
    const PARTS: [Part; 5] = [
        Part::Admission,
        Part::PrefixTree,
        Part::BlockAllocator,
        Part::Executor,
        Part::ExecutorThread,
    ];
    let mut next = 0;
    loop {
        next += rng.random_range(25..75);
        while ends.finished.load(Ordering::Relaxed) < next {
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        let stall = Duration::from_micros(rng.random_range(0..2000));
        if rng.random_range(0..3) == 0 {
            let faults = [FakeFault::Fail, FakeFault::Panic, FakeFault::Stall(stall)];
            bench.fake.inject_next(faults[rng.random_range(0..3)]);
        } else {
            let faults = [Fault::Panic, Fault::Error, Fault::Stall(stall)];
            bench.core.inject(PARTS[rng.random_range(0..5)], faults[rng.random_range(0..3)]);
        }
    }
}

/// Bytes of memory that belong to no file; `None` where the system does not tell.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<usize>().ok()? * 1024)
}

async fn soak(requests: usize) {
    quieten();
    let options = FakeOptions {
        vocab_size: VOCAB_SIZE,
        block_count: 40,
        max_positions: 512,
        ..FakeOptions::default()
    };
    let config = CoreConfig {
        max_batched_tokens: 96,
        max_running: 12,
        max_queued_requests: 24,
        event_capacity: 16,
        kept_logit_bytes: 4096,
        ..CoreConfig::default()
    };
    let bench = Arc::new(bench(options, config).await);
    let ends = Arc::new(Ends::default());
    let rng = SmallRng::seed_from_u64(1);
    let troubled = tokio::spawn(trouble(Arc::clone(&bench), rng, Arc::clone(&ends)));
    let mut sizes = Vec::new();
    // In ten parts, so that memory is looked at in between.
    for part in 0..10_u64 {
        let clients: Vec<_> = (0..CLIENTS as u64)
            .map(|client| {
                let (bench, ends) = (Arc::clone(&bench), Arc::clone(&ends));
                tokio::spawn(async move {
                    let mut rng = SmallRng::seed_from_u64(part << 32 | client);
                    for _ in 0..requests / CLIENTS / 10 {
                        one(&bench, &mut rng, &ends).await;
                    }
                })
            })
            .collect();
        for client in clients {
            client.await.expect("no panic");
        }
        sizes.extend(resident());
    }
    troubled.abort();
    // What was injected last may still wait for its part's next message.
    for round in 0.. {
        assert!(round < 100, "it does not serve again");
        let stream = bench.core.submit(SequenceRequest::new(vec![round; 20], 2));
        if let Ok(stream) = stream
            && support::read(stream).await.is_ok()
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bench.check_clean().await;
    let count = |end: &AtomicUsize| end.load(Ordering::Relaxed);
    let ended = [&ends.finished, &ends.cancelled, &ends.interrupted];
    assert_eq!(ended.into_iter().map(count).sum::<usize>(), requests / CLIENTS / 10 * CLIENTS * 10);
    let stats = bench.core.stats();
    assert!(count(&ends.finished) > requests / 4, "{ends:?} {stats:?}");
    assert!(stats.restarts > 0 && count(&ends.interrupted) > 0, "{ends:?} {stats:?}");
    assert!(stats.evictions > 0 && stats.first_tokens_kept > 0, "{stats:?}");
    bench.core.flush().await.expect("it runs");
    assert_eq!(bench.core.audit().await.expect("clean books").blocks_free, 40);
    if let [_, second, .., last] = sizes[..] {
        assert!(last < second + (8 << 20), "memory grows: {sizes:?}");
    }
}

/// Keeps injected panics, of which there are many, off the terminal.
fn quieten() {
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let payload = info.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default();
        if !text.contains("was injected") {
            loud(info);
        }
    }));
}

/// Goal: whatever fails, every request ends, with the right tokens or with the right error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_and_faults_leave_nothing_behind() {
    soak(4_800).await;
}

/// Goal: the same with a hundred thousand.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; .ci/deep runs it"]
async fn a_hundred_thousand_random_requests_leave_nothing_behind() {
    soak(100_320).await;
}
