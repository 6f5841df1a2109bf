//! KV events of the disk tier over real sockets: the index of a subscriber equals the blocks that
//! an engine could read from its disk.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use omq_tokio::Socket;
use stolon::{Engine, Namespace, PrefetchPolicy, Request};
use stolon_backend::fake::{FakeBackend, FakeOptions};
use stolon_fleet::{KvEventPublisher, KvEventsConfig};
use stolon_kvcache::TreeBuilder;
use support::{Copy, cached, config, replay, subscribe, tokens};

use crate::support::subscriber as support;

/// An engine that stores everything at once, and reads whatever is stored.
async fn engine(directory: &Path, records: u64) -> Engine {
    let options = FakeOptions { block_count: 64, max_positions: 8192, ..FakeOptions::default() };
    let backend = Box::new(FakeBackend::new(options));
    let builder = Engine::builder().backend("fake", backend);
    let builder = builder.kv_cache_dir(directory, records * RECORD_BYTES);
    let builder = builder.prefetch_policy(PrefetchPolicy::WaitComplete);
    builder.build().await.expect("an engine")
}

/// Size of the file of a full record of the fake backend.
const RECORD_BYTES: u64 = 176 + 64 * (24 + 4) + 32;

async fn start(engine: &Engine, config: &KvEventsConfig) -> (KvEventPublisher, Socket) {
    let publisher = KvEventPublisher::start(engine, config).await.expect("free ports");
    let subscriber = subscribe(&publisher, "").await;
    (publisher, subscriber)
}

/// Computes a prompt and waits until it is stored.
async fn store(engine: &Engine, (seed, blocks): (u32, u32)) {
    let request = Request::tokens(tokens(seed, blocks)).max_tokens(1);
    engine.cache().warm(request).await.expect("it fits");
    engine.tiers().flush().await.expect("a running engine");
}

/// The blocks that the engine could read from its disk, of these prompts.
fn on_disk(engine: &Engine, prompts: &[(u32, u32)]) -> HashSet<u64> {
    let hasher = TreeBuilder::new(16).block_hasher().expect("a power of two");
    let hashes = prompts.iter().flat_map(|&(seed, blocks)| {
        let tokens = tokens(seed, blocks);
        let request = Request::tokens(tokens.clone());
        let stored = engine.tiers().query(&request).expect("tokens").disk;
        hasher.block_hashes(&Namespace::default(), &tokens[..stored])
    });
    hashes.collect()
}

/// Receives until a copy knows what is in the cache and on the disk.
async fn follow(copy: &mut Copy, subscriber: &Socket, engine: &Engine, prompts: &[(u32, u32)]) {
    let (cached, disk) = (cached(engine).await, on_disk(engine, prompts));
    let is_exact = |copy: &Copy| copy.cached() == cached && copy.disk == disk;
    copy.receive_until(subscriber, "", is_exact).await;
}

/// The files of all records.
fn records(directory: &Path) -> Vec<PathBuf> {
    let list = |path: &Path| {
        let entries = std::fs::read_dir(path).into_iter().flatten();
        entries.map(|entry| entry.expect("readable").path()).collect::<Vec<_>>()
    };
    list(&directory.join("v1")).iter().flat_map(|folder| list(folder)).collect()
}

/// Goal: a subscriber knows the content of each tier, through storing, eviction from one tier and
/// from the other, flushes of one tier and of the other, and the loss of a damaged file.
#[tokio::test(flavor = "multi_thread")]
async fn subscribers_follow_both_tiers() {
    let directory = tempfile::tempdir().expect("a directory");
    let engine = engine(directory.path(), 24).await;
    let (publisher, subscriber) = start(&engine, &config("")).await;
    let mut copy = Copy::default();
    let prompts: Vec<(u32, u32)> = (0..16).map(|seed| (seed, 4 + seed % 9)).collect();
    for &prompt in &prompts {
        store(&engine, prompt).await;
        follow(&mut copy, &subscriber, &engine, &prompts).await;
    }
    let stats = engine.tiers().disk_stats().expect("a disk tier");
    assert!(copy.removed > 0 && stats.records_evicted > 0, "some were evicted: {stats:?}");
    assert!(copy.disk.iter().any(|hash| !copy.parents.contains_key(hash)), "only on the disk");
    assert!(copy.disk.iter().any(|hash| copy.parents.contains_key(hash)), "in both");
    engine.cache().flush().await.expect("a running engine");
    follow(&mut copy, &subscriber, &engine, &prompts).await;
    assert!(copy.parents.is_empty() && !copy.disk.is_empty());
    for path in records(directory.path()) {
        std::fs::write(path, "damaged").expect("writable");
    }
    store(&engine, prompts[prompts.len() - 1]).await;
    follow(&mut copy, &subscriber, &engine, &prompts).await;
    assert!(engine.tiers().disk_stats().expect("a disk tier").records_refused > 0);
    engine.tiers().clear_disk().await.expect("a running engine");
    follow(&mut copy, &subscriber, &engine, &prompts).await;
    assert!(copy.disk.is_empty() && !copy.parents.is_empty());
    assert_eq!((publisher.counts().batches, publisher.counts().snapshots), (copy.next, 3));
    engine.shutdown().await;
}

/// Goal: after a restart of the worker, the content of its disk becomes known again; and a router
/// that connects late learns all of it, from the batches that are kept or from a snapshot.
#[tokio::test(flavor = "multi_thread")]
async fn restarts_and_replays_have_the_disk() {
    let directory = tempfile::tempdir().expect("a directory");
    let prompts: Vec<(u32, u32)> = (0..10).map(|seed| (seed, 12)).collect();
    let first = engine(directory.path(), 1000).await;
    for &prompt in &prompts {
        store(&first, prompt).await;
    }
    let expected = on_disk(&first, &prompts);
    assert_eq!(expected.len(), 120);
    first.shutdown().await;
    for steps in [10_000, 0] {
        let engine = engine(directory.path(), 1000).await;
        let config = config(&format!(r#", "buffer_steps": {steps}"#));
        let publisher = KvEventPublisher::start(&engine, &config).await.expect("free ports");
        let mut copy = Copy::default();
        while copy.disk != expected {
            copy = Copy::default();
            replay(&publisher, 0).await.iter().for_each(|(_, batch)| copy.apply(batch));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(copy.parents.is_empty(), "{steps}");
        engine.shutdown().await;
    }
}

/// Goal: events that come faster than they can be published are replaced by everything.
#[tokio::test(flavor = "multi_thread")]
async fn an_overflow_publishes_everything() {
    let directory = tempfile::tempdir().expect("a directory");
    let engine = engine(directory.path(), 1000).await;
    let config = config(r#", "max_queue_size": 1"#);
    let (publisher, subscriber) = start(&engine, &config).await;
    let mut copy = Copy::default();
    let mut prompts = Vec::new();
    while publisher.counts().snapshots < 4 {
        prompts.push((prompts.len() as u32, 40));
        assert!(prompts.len() < 200, "{:?}", publisher.counts());
        store(&engine, prompts[prompts.len() - 1]).await;
        follow(&mut copy, &subscriber, &engine, &prompts).await;
    }
    engine.shutdown().await;
}
