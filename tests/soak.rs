//! Thousands of random requests on a KV pool that is too small for them.

#[path = "support/fake.rs"]
mod fake;

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stolon::{Engine, EngineError, Error, Request};
use stolon_backend::fake::expected_next;

const REQUESTS: usize = 2000;
const CLIENTS: usize = 40;

/// A random prompt from one of six families. Prompts of a family share prefixes of various lengths.
fn prompt(rng: &mut SmallRng) -> Vec<u32> {
    let family = rng.random_range(0..6u32);
    let shared = rng.random_range(0..120);
    let own = rng.random_range(1..60);
    let mut tokens: Vec<u32> = (0..shared).map(|n| (n * n + family * 37) % 256).collect();
    tokens.extend((0..own).map(|_| rng.random_range(0..256u32)));
    tokens
}

/// Sends one request and either reads it to its end or drops it early. Returns the number of events
/// or tokens that were read.
async fn one_request(engine: &Engine, rng: &mut SmallRng) -> usize {
    let prompt = prompt(rng);
    let max_tokens = rng.random_range(1..40);
    let request = Request::tokens(prompt.clone()).max_tokens(max_tokens);
    let mut stream = loop {
        match engine.generate(request.clone()).await {
            Ok(stream) => break stream,
            Err(Error::Engine(EngineError::Overloaded { .. })) => {
                tokio::time::sleep(Duration::from_millis(2)).await
            }
            Err(other) => panic!("{other}"),
        }
    };
    if rng.random_range(0..3) > 0 {
        let completion = stream.collect_text().await.expect("it ends");
        assert_eq!(completion.token_ids.len(), max_tokens);
        let mut tokens = prompt;
        for id in completion.token_ids {
            assert_eq!(id, expected_next(&tokens, 256));
            tokens.push(id);
        }
        return max_tokens;
    }
    let enough = rng.random_range(0..12);
    for read in 0..enough {
        match stream.next().await {
            Some(event) => drop(event.expect("no error")),
            None => return read,
        }
    }
    enough
}

/// Goal: of 2,000 random requests, many of them cancelled, on a pool that is too small for all,
/// each completed one gets the right tokens. Afterwards the accounting is consistent and no block
/// is reserved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_requests_on_a_small_pool_leave_no_block_reserved() {
    let (builder, _) = fake::builder(48);
    let engine = builder
        .max_batched_tokens(96)
        .max_running(12)
        .max_queued_requests(20)
        .event_capacity(16)
        .build()
        .await
        .expect("valid settings");
    let engine = Arc::new(engine);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let engine = Arc::clone(&engine);
            tokio::spawn(async move {
                let mut rng = SmallRng::seed_from_u64(client as u64);
                for _ in 0..REQUESTS / CLIENTS {
                    one_request(&engine, &mut rng).await;
                }
            })
        })
        .collect();
    for client in clients {
        client.await.expect("no panic");
    }
    while engine.stats().running + engine.stats().waiting > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let audit = engine.audit().await.expect("consistent accounting");
    assert_eq!(audit.blocks_reserved, 0);
    assert_eq!(audit.blocks_free + audit.blocks_evictable, audit.blocks_total);
    let stats = engine.stats();
    assert_eq!(stats.requests as usize, REQUESTS);
    assert_eq!(stats.failed, 0);
    assert_eq!((stats.finished + stats.cancelled) as usize, REQUESTS);
    assert!(stats.evictions > 0 && stats.cached_tokens > 0, "{stats:?}");
    engine.flush().await.expect("it runs");
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_free, 48);
}
