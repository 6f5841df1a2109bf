//! Pins with a disk tier: they refuse no prompt, because their prefixes can be evicted from the
//! pool, and they keep their records on the disk.

use std::time::Duration;

use stolon::{Engine, Pin, PrefetchPolicy, Request, WritePolicy};
use support::{Directory, answer, ask, prompt, records, slow_fake, stop};

use crate::support::tiers as support;

/// Size of a record of the fake backend: 64 positions with 24 bytes of KV and a token each.
const RECORD_BYTES: u64 = 176 + 64 * (24 + 4) + 32;

/// Computes a prompt and pins it.
async fn pin(engine: &Engine, tokens: &[u32]) {
    ask(engine, tokens).await;
    engine.cache().pin(&Request::tokens(tokens.to_vec()), None).await.expect("it is cached");
}

async fn only_pin(engine: &Engine) -> Pin {
    let pins = engine.cache().pins().await.expect("it runs");
    let [pin] = pins.try_into().expect("one pin");
    pin
}

/// Goal: a prompt that fits the pool is accepted although more of it is pinned than the prompt
/// leaves. The pin is demoted, its prefix is read from the disk at its next use, and protected
/// again. This holds under every write policy, also under those that would not have stored the
/// prefix.
#[tokio::test]
async fn pins_are_demoted_for_a_long_prompt() {
    let selective = WritePolicy::WriteThroughSelective { hits: 9.try_into().expect("positive") };
    for policy in [WritePolicy::WriteThrough, WritePolicy::WriteBack, selective] {
        let directory = Directory::new(&format!("stored-pins-{policy:?}"));
        let builder = slow_fake(32, Duration::from_micros(500)).pin_budget(16);
        let builder = builder.kv_cache_dir(&directory.0, 1 << 30).write_policy(policy);
        let engine = builder.build().await.expect("an engine");
        let (pinned, long) = (prompt(256, 1), prompt(480, 2));
        pin(&engine, &pinned).await;
        engine.audit().await.expect("consistent accounting");
        engine.tiers().flush().await.expect("it runs");
        let stored = engine.tiers().query(&Request::tokens(pinned.clone())).expect("tokens");
        assert_eq!((stored.pool, stored.disk), (256, 256), "{policy:?}");
        assert!(!only_pin(&engine).await.demoted);

        assert_eq!(ask(&engine, &long).await, 0);
        assert!(only_pin(&engine).await.demoted, "{policy:?}");
        assert_eq!(ask(&engine, &[pinned.clone(), vec![9; 5]].concat()).await, 256, "{policy:?}");
        assert!(!only_pin(&engine).await.demoted, "{policy:?}");
        assert!(engine.stats().loaded_tokens >= 64, "{policy:?}");
        for seed in 3..9 {
            ask(&engine, &prompt(200, seed)).await;
        }
        assert!(!only_pin(&engine).await.demoted, "others are evicted first");
        engine.audit().await.expect("consistent accounting");
        stop(engine).await;
    }
}

/// Goal: a prefix can be pinned while a prompt runs that needs the whole pool, because the pin
/// takes no blocks from it.
#[tokio::test]
async fn a_long_prompt_delays_no_pin() {
    let directory = Directory::new("stored-pins-long");
    let builder = slow_fake(32, Duration::from_micros(500)).pin_budget(16);
    let engine = builder.kv_cache_dir(&directory.0, 1 << 30).build().await.expect("an engine");
    ask(&engine, &prompt(32, 1)).await;
    let long = Request::tokens(prompt(500, 2)).max_tokens(4);
    let stream = engine.generate(long).await.expect("it fits the pool");
    engine.cache().pin(&Request::tokens(prompt(32, 1)), None).await.expect("it is cached");
    stream.collect_text().await.expect("it completes next to the pin");
    engine.audit().await.expect("consistent accounting");
    stop(engine).await;
}

/// Goal: records of pinned prefixes stay on a disk that is too small for everything, until the pin
/// has ended.
#[tokio::test]
async fn records_of_pins_are_removed_last() {
    let directory = Directory::new("stored-pins-disk");
    let builder = slow_fake(64, Duration::from_micros(500));
    let builder = builder.kv_cache_dir(&directory.0, 3 * RECORD_BYTES);
    let engine = builder.build().await.expect("an engine");
    pin(&engine, &prompt(70, 1)).await;
    let on_disk = async || {
        for seed in 2..8 {
            ask(&engine, &prompt(70, seed)).await;
            engine.tiers().flush().await.expect("it runs");
        }
        let request = Request::tokens(prompt(70, 1));
        engine.tiers().query(&request).expect("tokens").disk
    };
    assert_eq!(on_disk().await, 64, "it is pinned");
    let pin = only_pin(&engine).await.id;
    assert!(engine.cache().unpin(pin).await.expect("it runs"));
    engine.cache().flush().await.expect("it runs");
    assert_eq!(on_disk().await, 0, "it is the oldest, and not pinned");
    stop(engine).await;
}

/// Goal: an answer after a pinned prefix has the same bits when the prefix was evicted and read back
/// from the disk.
#[tokio::test]
async fn a_demoted_prefix_gives_the_same_bits() {
    let directory = Directory::new("stored-pins-bits");
    let builder = Engine::builder().model("random:tiny").num_blocks(24).pin_budget(16);
    let builder = builder.kv_cache_dir(&directory.0, 1 << 30);
    // Requests wait for every read.
    let builder = builder.prefetch_policy(PrefetchPolicy::WaitComplete);
    let engine = builder.build().await.expect("an engine");
    let tokens = prompt(200, 1);
    let (expected, _) = answer(&engine, &tokens).await;
    engine.cache().pin(&Request::tokens(tokens.clone()), None).await.expect("it is cached");
    engine.tiers().flush().await.expect("it runs");
    assert_eq!(records(&directory.0).len(), 3);
    answer(&engine, &prompt(360, 2)).await;
    assert!(only_pin(&engine).await.demoted);
    assert_eq!(answer(&engine, &tokens).await, (expected, 192));
    assert!(engine.stats().loaded_tokens > 0);
    stop(engine).await;
}
