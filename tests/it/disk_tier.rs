//! The disk tier: KV that was evicted, or computed before a restart, is read back with the same
//! bits, and damaged files stop no request.

use std::num::NonZero;
use std::time::Duration;

use stolon::{
    Engine, EngineBuilder, Error, KvType, PrefetchPolicy, Request, TierError, WritePolicy,
};
use stolon_backend::fake::{FakeBackend, FakeLatency, FakeOptions};
use support::{Directory, answer, ask, prompt, records, stop};

use crate::support::tiers as support;

/// An engine on the fake backend, which takes 500 us for a token.
fn slow_fake(block_count: usize) -> EngineBuilder {
    support::slow_fake(block_count, Duration::from_micros(500))
}

/// The same engine for a model with a recurrent state, whose checkpoints take four blocks each.
fn slow_fake_with_state(block_count: usize) -> EngineBuilder {
    let per_prefill_token = Duration::from_micros(500);
    let latency = FakeLatency { per_prefill_token, ..FakeLatency::default() };
    let state = Some((4, 16));
    let options = FakeOptions { block_count, latency, state, ..FakeOptions::default() };
    Engine::builder().backend("fake", Box::new(FakeBackend::new(options)))
}

/// Goal: after a restart, prompts are read from the disk, and the answers have the same bits as in
/// an engine that computes everything, for every KV type.
#[tokio::test]
async fn a_restarted_engine_is_warm_with_the_same_bits() {
    for kv_type in KvType::ALL {
        let directory = Directory::new(&format!("disk-restart-{kv_type}"));
        let tiny = || Engine::builder().model("random:tiny").num_blocks(64).kv_type(kv_type);
        let with_disk = || tiny().kv_cache_dir(&directory.0, 1 << 30);
        let (tokens, longer) = (prompt(200, 1), [prompt(200, 1), prompt(50, 2)].concat());
        let first = with_disk().build().await.expect("an engine");
        answer(&first, &tokens).await;
        stop(first).await;
        assert_eq!(records(&directory.0).len(), 3);
        let cold = tiny().build().await.expect("an engine");
        let warm = with_disk().build().await.expect("the directory is free again");
        let request = Request::tokens(longer.clone());
        let found = warm.tiers().query(&request).expect("tokens");
        assert_eq!(found.object_store, 0, "there is no object store");
        assert_eq!((found.pool, found.disk), (0, 192));
        let estimate = warm.estimate(&request).expect("tokens");
        assert_eq!((estimate.cached_tokens, estimate.stored_tokens), (0, 192));
        let (expected, _) = answer(&cold, &longer).await;
        assert_eq!(answer(&warm, &longer).await, (expected, 192), "{kv_type}");
        assert_eq!(warm.stats().loaded_tokens, 192);
        assert_eq!(warm.tiers().disk_stats().expect("a disk tier").read_tokens, 192);
        stop(warm).await;
    }
}

/// Goal: a prompt that is computed in many steps is copied out of the pool and written once.
#[tokio::test]
async fn every_record_is_stored_once() {
    let directory = Directory::new("disk-once");
    let with_disk = slow_fake(64).max_batched_tokens(64).kv_cache_dir(&directory.0, 1 << 30);
    let engine = with_disk.build().await.expect("an engine");
    ask(&engine, &prompt(645, 1)).await;
    ask(&engine, &prompt(645, 1)).await;
    engine.tiers().flush().await.expect("it runs");
    let disk = engine.tiers().disk_stats().expect("a disk tier");
    assert_eq!((engine.stats().saved_blocks, disk.records_written), (40, 10), "{disk:?}");
    stop(engine).await;
}

/// Goal: prefixes that were evicted from a pool that is much too small are read back from the disk,
/// also while other requests run, and never for the wrong prompt.
#[tokio::test]
async fn evicted_prefixes_are_read_back() {
    let directory = Directory::new("disk-evicted");
    let engine =
        slow_fake(32).kv_cache_dir(&directory.0, 1 << 30).build().await.expect("an engine");
    let prompts: Vec<Vec<u32>> = (0..12).map(|seed| prompt(200, seed)).collect();
    for prompt in &prompts {
        ask(&engine, prompt).await;
    }
    engine.tiers().flush().await.expect("it runs");
    let computed = engine.stats().computed_tokens;
    for prompt in prompts.iter().chain(&prompts) {
        assert!(ask(&engine, prompt).await >= 192, "it is on the disk");
    }
    let stats = engine.stats();
    assert_eq!(stats.computed_tokens - computed, 24 * (8 + 2), "{stats:?}");
    assert!(stats.loaded_tokens >= 20 * 192 && stats.loads_failed == 0, "{stats:?}");
    let engine_ref = &engine;
    let asks = prompts.chunks(2).map(|pair| async move {
        for prompt in pair {
            ask(engine_ref, prompt).await;
        }
    });
    futures::future::join_all(asks).await;
    stop(engine).await;
}

/// Goal: a prefix that is cached when its request arrives, and is evicted while the request waits,
/// is read back when the request runs.
#[tokio::test]
async fn a_prefix_that_is_evicted_while_its_request_waits_is_read_back() {
    for policy in [PrefetchPolicy::BestEffort, PrefetchPolicy::WaitComplete] {
        let directory = Directory::new(&format!("disk-waiting-{policy}"));
        // Computing is so slow that requests wait for reads on a busy machine, too.
        let (per_prefill_token, per_decode) = (Duration::from_millis(2), Duration::from_millis(1));
        let latency = FakeLatency { per_prefill_token, per_decode, ..FakeLatency::default() };
        let builder = support::fake(32, latency).max_running(1).prefetch_policy(policy);
        let engine = builder.kv_cache_dir(&directory.0, 1 << 30).build().await.expect("an engine");
        ask(&engine, &prompt(200, 1)).await;
        engine.tiers().flush().await.expect("it runs");
        // The answer takes the whole pool as it grows.
        let long = Request::tokens(prompt(30, 2)).max_tokens(480).ignore_eos(true);
        let running = engine.generate(long).await.expect("it runs");
        let tokens = prompt(200, 1);
        let waiting = ask(&engine, &tokens);
        let (long, cached) = futures::future::join(running.collect_text(), waiting).await;
        long.expect("an answer");
        assert!(cached >= 192, "{policy}: {cached}");
        assert_eq!(engine.stats().loaded_tokens, 192, "{policy}");
        stop(engine).await;
    }
}

/// Goal: the prompts of a model with a recurrent state are read with the checkpoint of their state,
/// after a restart and after an eviction, and never without it.
#[tokio::test]
async fn a_recurrent_state_is_stored_with_its_prefix() {
    let directory = Directory::new("disk-state");
    let with_disk =
        |blocks| slow_fake_with_state(blocks).kv_cache_dir(&directory.0, 1 << 30).build();
    let first = with_disk(200).await.expect("an engine");
    let question = |seed| [prompt(200, 1), prompt(60, seed)].concat();
    assert_eq!(ask(&first, &prompt(200, 1)).await, 0);
    // Stores the prompt, up to its last whole record, and the checkpoint of this position.
    stop(first).await;
    assert_eq!(records(&directory.0).len(), 3 + 1);
    let again = with_disk(40).await.expect("the directory is free again");
    assert_eq!(ask(&again, &question(2)).await, 192);
    assert_eq!(again.stats().loaded_tokens, 192);
    for seed in 3..8 {
        ask(&again, &prompt(250, seed)).await;
    }
    let computed = again.stats().computed_tokens;
    assert_eq!(ask(&again, &question(9)).await, 192, "it was evicted from the pool");
    assert_eq!(again.stats().computed_tokens - computed, 68 + 2);
    assert_eq!(again.stats().loads_failed, 0);
    stop(again).await;
    let refused = slow_fake_with_state(40).kv_cache_dir(&directory.0, 1 << 30);
    let refused = refused.write_policy(WritePolicy::WriteBack).build().await.map(|_| ());
    assert!(matches!(refused, Err(Error::Engine(_))), "{refused:?}");
}

/// Goal: reads take no more memory than is set for them; the rest is computed.
#[tokio::test]
async fn what_is_read_is_bounded_by_its_memory() {
    let directory = Directory::new("disk-read-memory");
    let with_disk = || slow_fake(64).kv_cache_dir(&directory.0, 1 << 30);
    let engine = with_disk().build().await.expect("an engine");
    ask(&engine, &prompt(400, 1)).await;
    stop(engine).await;
    let record = std::fs::metadata(&records(&directory.0)[0]).expect("a record").len();
    for (memory, cached) in [(record - 1, 0), (2 * record, 128), (100 * record, 384)] {
        let engine = with_disk().kv_read_memory(memory).build().await.expect("an engine");
        assert_eq!(ask(&engine, &prompt(400, 1)).await, cached, "{memory} bytes");
        stop(engine).await;
    }
    let without = slow_fake(64).kv_read_memory(1).build().await.map(|_| ());
    assert!(matches!(without, Err(Error::Engine(_))), "{without:?}");
}

/// Goal: nothing is read for requests that are refused because the queue is full.
#[tokio::test]
async fn refused_requests_read_nothing() {
    let directory = Directory::new("disk-refused");
    let with_disk = || {
        let builder = slow_fake(64).max_running(1).max_queued_requests(1);
        builder.kv_cache_dir(&directory.0, 1 << 30).build()
    };
    let engine = with_disk().await.expect("an engine");
    ask(&engine, &prompt(200, 1)).await;
    stop(engine).await;
    let engine = with_disk().await.expect("the directory is free again");
    let long = |seed| Request::tokens(prompt(30, seed)).max_tokens(700).ignore_eos(true);
    let running = engine.generate(long(2)).await.expect("it runs");
    while engine.stats().running == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let waiting = engine.generate(long(3)).await.expect("it waits");
    for _ in 0..5 {
        let refused = engine.generate(Request::tokens(prompt(200, 1))).await;
        refused.expect_err("the queue is full");
    }
    assert_eq!(engine.tiers().disk_stats().expect("a disk tier").read_tokens, 0);
    drop((running, waiting));
    while engine.stats().running + engine.stats().waiting > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stop(engine).await;
}

/// Goal: with write-back, nothing is written before it is evicted, everything that was evicted is
/// read back, and the prefixes that are in the pool at the end are found after a restart.
#[tokio::test]
async fn write_back_writes_what_leaves_the_pool() {
    let directory = Directory::new("disk-write-back");
    // Computing is so slow that requests wait for reads on a busy machine, too.
    let per_token = Duration::from_millis(2);
    let with_disk = || {
        let builder = support::slow_fake(32, per_token).kv_cache_dir(&directory.0, 1 << 30);
        builder.write_policy(WritePolicy::WriteBack).build()
    };
    let engine = with_disk().await.expect("an engine");
    let prompts: Vec<Vec<u32>> = (0..12).map(|seed| prompt(200, seed)).collect();
    ask(&engine, &prompts[0]).await;
    ask(&engine, &prompts[1]).await;
    engine.audit().await.expect("a consistent accounting");
    assert_eq!(engine.stats().saved_blocks, 0, "both are in the pool");
    for prompt in &prompts {
        ask(&engine, prompt).await;
    }
    let found = |engine: &Engine, prompt: &Vec<u32>| {
        let found = engine.tiers().query(&Request::tokens(prompt.clone())).expect("tokens");
        (found.pool, found.disk)
    };
    for prompt in &prompts {
        let cached = ask(&engine, prompt).await;
        assert!(cached >= 192, "{cached} of {:?}", found(&engine, prompt));
    }
    engine.shutdown().await;
    let engine = with_disk().await.expect("the directory is free again");
    for prompt in &prompts {
        assert_eq!(found(&engine, prompt), (0, 192));
    }
    let disk = engine.tiers().disk_stats().expect("a disk tier");
    assert_eq!(disk.records, 12 * 3, "nothing else: {disk:?}");
    stop(engine).await;
}

/// Goal: with selective writing, a prefix is written when a second request begins with it, and
/// tokens that only one request has are not written.
#[tokio::test]
async fn selective_writing_writes_what_is_used_again() {
    let directory = Directory::new("disk-selective");
    for hits in [1, 2] {
        let builder = slow_fake(128).kv_cache_dir(&directory.0, 1 << 30);
        let hits = NonZero::new(hits).expect("not zero");
        let policy = WritePolicy::WriteThroughSelective { hits };
        let engine = builder.write_policy(policy).build().await.expect("an engine");
        let with_tail = |tail| [prompt(200, 1), prompt(150, tail)].concat();
        let records = async || {
            engine.tiers().flush().await.expect("it runs");
            engine.tiers().disk_stats().expect("a disk tier").records
        };
        for tail in 0..hits.get() {
            ask(&engine, &with_tail(tail)).await;
            assert_eq!(records().await, 0, "after request {tail}");
        }
        ask(&engine, &with_tail(100)).await;
        assert_eq!(records().await, 3, "the common prefix");
        ask(&engine, &with_tail(101)).await;
        // No part of the prefix is computed, so that nothing is committed.
        for _ in 0..hits.get() {
            ask(&engine, &with_tail(101)).await;
        }
        assert_eq!(records().await, 5, "and one of the tails");
        engine.tiers().clear_disk().await.expect("it runs");
        stop(engine).await;
    }
}

/// Goal: the prefetch policy determines how long a request waits for stored KV.
#[tokio::test]
async fn the_prefetch_policy_bounds_the_wait() {
    let directory = Directory::new("disk-prefetch");
    let with_disk = || support::slow_fake(64, Duration::ZERO).kv_cache_dir(&directory.0, 1 << 30);
    let engine = with_disk().build().await.expect("an engine");
    ask(&engine, &prompt(200, 1)).await;
    ask(&engine, &prompt(200, 2)).await;
    stop(engine).await;
    for (policy, expected) in
        [(PrefetchPolicy::WaitComplete, 192), (PrefetchPolicy::Timeout(Duration::ZERO), 0)]
    {
        let engine = with_disk().prefetch_policy(policy).build().await.expect("an engine");
        // Afterward it is known that computing is faster than reading.
        ask(&engine, &prompt(200, 3)).await;
        assert_eq!(ask(&engine, &prompt(200, 1)).await, expected, "{policy}");
        assert_eq!(ask(&engine, &prompt(200, 2)).await, expected, "{policy}");
        stop(engine).await;
    }
}

/// Goal: requests for one prefix at the same time read it once.
#[tokio::test]
async fn a_prefix_is_read_once_for_requests_at_the_same_time() {
    let directory = Directory::new("disk-shared");
    let with_disk = || slow_fake(128).kv_cache_dir(&directory.0, 1 << 30).build();
    let first = with_disk().await.expect("an engine");
    ask(&first, &prompt(640, 1)).await;
    stop(first).await;
    let engine = with_disk().await.expect("an engine");
    let prompts: Vec<Vec<u32>> =
        (0..6).map(|tail| [prompt(640, 1), vec![tail; 5]].concat()).collect();
    futures::future::join_all(prompts.iter().map(|prompt| ask(&engine, prompt))).await;
    let (stats, disk) = (engine.stats(), engine.tiers().disk_stats().expect("a disk tier"));
    assert_eq!(stats.loaded_tokens, 640, "{stats:?}");
    assert!(disk.read_tokens < 6 * 640, "most of them waited for the same read: {disk:?}");
    stop(engine).await;
}

/// Goal: with damaged files, a directory that is removed, and one that cannot be written, requests
/// continue and get right answers.
#[tokio::test]
async fn faults_of_the_disk_do_not_reach_requests() {
    let directory = Directory::new("disk-faults");
    let with_disk = || slow_fake(32).kv_cache_dir(&directory.0, 1 << 30).build();
    let engine = with_disk().await.expect("an engine");
    ask(&engine, &prompt(300, 1)).await;
    stop(engine).await;
    let engine = with_disk().await.expect("an engine");
    for (index, path) in records(&directory.0).iter().enumerate() {
        let mut bytes = std::fs::read(path).expect("readable");
        bytes[500 + index] ^= 1;
        std::fs::write(path, bytes).expect("written");
    }
    ask(&engine, &prompt(300, 1)).await;
    assert_eq!(engine.stats().loaded_tokens, 0);
    assert!(engine.tiers().disk_stats().expect("a disk tier").records_refused >= 1);
    engine.tiers().flush().await.expect("it runs");
    std::fs::remove_dir_all(&directory.0).expect("removed");
    for seed in 1..8 {
        ask(&engine, &prompt(300, seed)).await;
    }
    engine.tiers().flush().await.expect("it runs");
    std::fs::remove_dir_all(directory.0.join("v1")).expect("it was made again");
    std::fs::write(directory.0.join("v1"), "a file in its place").expect("written");
    for seed in 1..8 {
        ask(&engine, &prompt(300, seed)).await;
    }
    engine.tiers().flush().await.expect("it runs");
    let disk = engine.tiers().disk_stats().expect("a disk tier");
    assert!(disk.writes_failed >= 1 && disk.writes_skipped >= 1, "{disk:?}");
    stop(engine).await;
}

/// Goal: a directory that another engine uses is refused by its name, and so is a backend that
/// cannot copy blocks. Tenants do not share stored KV.
#[tokio::test]
async fn directories_in_use_are_refused() {
    let directory = Directory::new("disk-refused");
    let with_disk = || slow_fake(64).kv_cache_dir(&directory.0, 1 << 30).build();
    let engine = with_disk().await.expect("an engine");
    let refused = with_disk().await.expect_err("it is in use");
    assert!(matches!(refused, Error::Tier(TierError::Disk(_))), "{refused}");
    assert!(refused.to_string().contains("another engine"), "{refused}");
    let salted = Request::tokens(prompt(200, 1)).cache_salt("a").max_tokens(1);
    engine.complete(salted.clone()).await.expect("an answer");
    engine.tiers().flush().await.expect("it runs");
    assert_eq!(engine.tiers().query(&salted).expect("tokens").disk, 192);
    for other in [salted.clone().cache_salt("b"), Request::tokens(prompt(200, 1))] {
        assert_eq!(engine.tiers().query(&other).expect("tokens"), Default::default());
    }
    stop(engine).await;
}

/// Goal: requests with a cache salt find their KV after a restart, because the directory keeps the
/// key of the salts. With another key it is not found.
#[tokio::test]
async fn salts_mean_the_same_after_a_restart() {
    let directory = Directory::new("disk-salts");
    let with_disk = || slow_fake(64).kv_cache_dir(&directory.0, 1 << 30);
    let salted = Request::tokens(prompt(200, 1)).cache_salt("tenant").max_tokens(1);
    let stored = |engine: &Engine| engine.tiers().query(&salted).expect("tokens").disk;
    let first = with_disk().build().await.expect("an engine");
    first.complete(salted.clone()).await.expect("an answer");
    stop(first).await;
    let second = with_disk().build().await.expect("an engine");
    assert_eq!(stored(&second), 192);
    stop(second).await;
    let other = with_disk().namespace_key([7; 32]).build().await.expect("an engine");
    assert_eq!(stored(&other), 0);
    other.complete(salted.clone()).await.expect("an answer");
    stop(other).await;
    std::fs::write(directory.0.join("v1/namespace-key"), "damaged").expect("written");
    let damaged = with_disk().build().await.expect("a new key is made");
    assert_eq!(stored(&damaged), 0);
    stop(damaged).await;
    let same = with_disk().namespace_key([7; 32]).build().await.expect("an engine");
    assert_eq!(stored(&same), 192);
    stop(same).await;
}

/// Goal: hundreds of requests with shared prefixes, many of them canceled, on a small pool and a
/// small disk end with right answers and a consistent accounting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_requests_with_cancels_through_all_tiers() {
    let selective = WritePolicy::WriteThroughSelective { hits: NonZero::<u32>::MIN };
    for policy in [WritePolicy::WriteThrough, selective, WritePolicy::WriteBack] {
        many_requests_with_cancels(policy).await;
    }
}

async fn many_requests_with_cancels(policy: WritePolicy) {
    let directory = Directory::new("disk-many");
    let with_disk = slow_fake(48).kv_cache_dir(&directory.0, 40_000).write_policy(policy);
    let engine = with_disk.build().await.expect("an engine");
    let work = (0..8_u32).map(|worker| {
        let engine = engine.clone();
        tokio::spawn(async move {
            for round in 0..20 {
                let group = (worker * 7 + round * 3) % 6;
                let tokens = [prompt(130, group), prompt(70 + round as usize, round % 4)].concat();
                if (worker + round) % 3 == 0 {
                    let stream = engine.generate(Request::tokens(tokens).max_tokens(5)).await;
                    drop(stream.expect("it is accepted"));
                } else {
                    ask(&engine, &tokens).await;
                }
            }
        })
    });
    for worker in work.collect::<Vec<_>>() {
        worker.await.expect("right answers");
    }
    let disk = engine.tiers().disk_stats().expect("a disk tier");
    assert!(disk.bytes <= 40_000 && disk.records_evicted > 0, "{disk:?}");
    assert!(engine.stats().loaded_tokens > 0);
    stop(engine).await;
}
