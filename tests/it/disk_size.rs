//! The size of the disk tier: how it is set, and which records are removed when it is reached.

use std::time::Duration;

use stolon::{Engine, EngineBuilder, EvictionPolicy, Request};
use support::{Directory, ask, prompt, stop};

use crate::support::tiers as support;

/// Size of a record of the fake backend: 64 positions with 24 bytes of KV and a token each.
const RECORD_BYTES: u64 = 176 + 64 * (24 + 4) + 32;

/// An engine on the fake backend, which takes 500 us for a token.
fn slow_fake(block_count: usize) -> EngineBuilder {
    support::slow_fake(block_count, Duration::from_micros(500))
}

/// Goal: a ratio sets the size to this multiple of the KV pool, whether the pool is given in blocks
/// or in bytes, and it limits what is stored.
#[tokio::test]
async fn a_ratio_is_a_multiple_of_the_pool() {
    let tiny = || Engine::builder().model("random:tiny");
    for (name, builder) in [("blocks", tiny().num_blocks(40)), ("bytes", tiny().kv_memory(1 << 20))]
    {
        let directory = Directory::new(&format!("disk-ratio-{name}"));
        let engine = builder.kv_cache_dir_ratio(&directory.0, 2.5).build().await;
        let engine = engine.expect("an engine");
        let pool = engine.model_info().kv_bytes as u64;
        let disk = engine.tiers().disk_stats().expect("a disk tier");
        assert!(pool > 0 && disk.budget_bytes == pool * 5 / 2, "{name}: {pool}, {disk:?}");
        stop(engine).await;
    }
    let directory = Directory::new("disk-ratio-limit");
    let engine = slow_fake(128).kv_cache_dir_ratio(&directory.0, 0.125).build().await;
    let engine = engine.expect("an engine");
    // 128 blocks of 16 positions with 24 bytes of KV.
    let budget = 128 * 16 * 24 / 8;
    for seed in 0..5 {
        ask(&engine, &prompt(70, seed)).await;
        engine.tiers().flush().await.expect("it runs");
    }
    let disk = engine.tiers().disk_stats().expect("a disk tier");
    assert_eq!((disk.budget_bytes, disk.records), (budget, budget / RECORD_BYTES), "{disk:?}");
    assert_eq!(disk.records_evicted, 5 - budget / RECORD_BYTES, "{disk:?}");
    stop(engine).await;
}

/// Goal: ratios out of range, and two sizes at once, are refused with an error that says what was
/// expected.
#[tokio::test]
async fn wrong_ratios_are_refused() {
    let directory = Directory::new("disk-ratio-refused");
    let refused = async |builder: EngineBuilder| {
        let refused = builder.build().await.expect_err("it is refused").to_string();
        assert!(refused.contains("kv_cache_dir_ratio"), "{refused}");
        refused
    };
    for ratio in [0.0, -1.0, 1000.5, f64::NAN, f64::INFINITY] {
        let message = refused(slow_fake(32).kv_cache_dir_ratio(&directory.0, ratio)).await;
        assert!(message.contains("above 0 and at most 1000"), "{message}");
        assert!(message.contains(&ratio.to_string()), "{message}");
    }
    let both = slow_fake(32).kv_cache_dir(&directory.0, 1 << 20);
    let message = refused(both.kv_cache_dir_ratio(&directory.0, 2.0)).await;
    assert!(message.contains("either `kv_cache_dir` or"), "{message}");
    assert!(!directory.0.exists(), "nothing was made");
}

/// Goal: the eviction policy of the engine decides which records are removed from the disk, also
/// when it is changed while the engine runs, and priorities count.
#[tokio::test]
async fn the_eviction_policy_holds_for_the_disk() {
    let after = async |policy, changed: Option<EvictionPolicy>| {
        let directory = Directory::new(&format!("disk-policy-{policy}-{changed:?}"));
        let builder = slow_fake(128).eviction_policy(policy);
        // There is room for three records.
        let builder = builder.kv_cache_dir(&directory.0, 3 * RECORD_BYTES);
        let engine = builder.build().await.expect("an engine");
        // The second prompt is important, the first one is used again.
        for (seed, priority) in [(0, 0), (1, 1), (2, 0), (0, 0), (3, 0)] {
            if let Some(policy) = changed.filter(|_| seed == 3) {
                engine.cache().set_eviction_policy(policy).expect("it runs");
            }
            let request = Request::tokens(prompt(70, seed)).max_tokens(1).priority(priority);
            engine.complete(request).await.expect("an answer");
            engine.tiers().flush().await.expect("it runs");
        }
        let is_there = |seed: &u32| {
            let request = Request::tokens(prompt(70, *seed));
            engine.tiers().query(&request).expect("tokens").disk == 64
        };
        let left: Vec<u32> = (0..4).filter(is_there).collect();
        assert_eq!(engine.tiers().disk_stats().expect("a disk tier").records_evicted, 1);
        stop(engine).await;
        left
    };
    assert_eq!(after(EvictionPolicy::Lru, None).await, [0, 2, 3]);
    assert_eq!(after(EvictionPolicy::Fifo, None).await, [1, 2, 3]);
    assert_eq!(after(EvictionPolicy::Priority, None).await, [0, 1, 3]);
    assert_eq!(after(EvictionPolicy::Lru, Some(EvictionPolicy::Fifo)).await, [1, 2, 3]);
}

/// Goal: records of prefixes that requests find in the pool count as used, so they are not the
/// first to be removed from the disk.
#[tokio::test]
async fn what_is_used_in_the_pool_stays_on_the_disk() {
    let directory = Directory::new("disk-hot");
    let with_budget = |bytes| slow_fake(128).kv_cache_dir(&directory.0, bytes).build();
    let engine = with_budget(1 << 30).await.expect("an engine");
    ask(&engine, &prompt(200, 0)).await;
    engine.tiers().flush().await.expect("it runs");
    let disk = engine.tiers().disk_stats().expect("a disk tier");
    assert_eq!(disk.records, 3);
    stop(engine).await;
    let engine = with_budget(3 * disk.bytes).await.expect("an engine");
    for seed in 1..10 {
        ask(&engine, &prompt(200, 0)).await;
        ask(&engine, &prompt(200, seed)).await;
        engine.tiers().flush().await.expect("it runs");
    }
    let disk = engine.tiers().disk_stats().expect("a disk tier");
    assert_eq!((disk.records_evicted, disk.read_tokens), (3 * 7, 192), "{disk:?}");
    let found = engine.tiers().query(&Request::tokens(prompt(200, 0))).expect("tokens");
    assert_eq!(found.disk, 192, "it is in use");
    stop(engine).await;
}
