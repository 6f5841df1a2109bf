//! The object store behind the disk tier: engines with directories of their own share the KV that
//! they have computed, with the same bits, and faults of the store stop no request.
//!
//! The store is a directory. With `STOLON_S3_URL` and the variables of S3's tools, the tests that
//! are ignored by default use a real server.

use std::path::PathBuf;
use std::time::Duration;

use stolon::{Engine, EngineBuilder, Error, PrefetchPolicy, Request, TierError};
use support::{Directory, answer, ask, prompt, records, stop};

use crate::support::tiers as support;

/// A directory with the store and the directories of two engines.
struct Place(Directory);

impl Place {
    fn new(name: &str) -> Place {
        let place = Place(Directory::new(&format!("object-{name}")));
        std::fs::create_dir_all(place.store()).expect("a directory");
        place
    }

    fn store(&self) -> PathBuf {
        self.directory("store")
    }

    fn directory(&self, name: &str) -> PathBuf {
        self.0.0.join(name)
    }

    fn url(&self) -> String {
        format!("file://{}", self.store().display())
    }
}

/// Waits until an engine knows that a prompt's first `tokens` tokens are in the store. The test
/// would hang if that never happened.
async fn wait_for(engine: &Engine, prompt: &[u32], tokens: usize) {
    loop {
        let found = engine.tiers().query(&Request::tokens(prompt)).expect("tokens");
        if found.object_store >= tokens {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn tiny() -> EngineBuilder {
    Engine::builder().model("random:tiny").num_blocks(64)
}

/// One engine computes a prompt, and another one, with an empty directory, gets it from the store.
async fn one_engine_computes_for_another(place: &Place, url: &str) {
    let (tokens, longer) = (prompt(200, 1), [prompt(200, 1), prompt(50, 2)].concat());
    let engine = |directory: &str| {
        tiny().kv_cache_dir(place.directory(directory), 1 << 30).kv_object_store(url).build()
    };
    let first = engine("first").await.expect("an engine");
    answer(&first, &tokens).await;
    first.tiers().flush().await.expect("it runs");
    let stored = first.tiers().object_stats().expect("a store");
    assert_eq!((stored.records, stored.records_stored), (3, 3));
    stop(first).await;
    let cold = tiny().build().await.expect("an engine");
    let second = engine("second").await.expect("an engine");
    wait_for(&second, &longer, 192).await;
    let found = second.tiers().query(&Request::tokens(longer.clone())).expect("tokens");
    assert_eq!((found.pool, found.disk, found.object_store), (0, 0, 192));
    let (expected, _) = answer(&cold, &longer).await;
    assert_eq!(answer(&second, &longer).await, (expected, 192));
    assert_eq!(second.stats().loaded_tokens, 192);
    // The fetched records are on the disk now, and the computed one, a fourth record with the
    // answer, is in the store.
    second.tiers().flush().await.expect("it runs");
    let found = second.tiers().query(&Request::tokens(longer.clone())).expect("tokens");
    assert_eq!((found.disk, found.object_store), (192, 192));
    let stats = second.tiers().object_stats().expect("a store");
    assert_eq!((stats.records_fetched, stats.records_stored, stats.failures), (3, 1, 0));
    stop(second).await;
}

/// Goal: an engine with an empty directory gets the prompts of another one from the store, with the
/// bits of an engine that computes everything.
#[tokio::test]
async fn engines_share_what_they_have_computed() {
    let place = Place::new("share");
    one_engine_computes_for_another(&place, &place.url()).await;
    assert_eq!(records(&place.store()).len(), 4);
}

/// Goal: the states of a hybrid model are shared, too: an engine with an empty directory resumes
/// where another one has stored a state.
#[tokio::test]
async fn engines_share_states() {
    let place = Place::new("states");
    let (tokens, longer) = (prompt(200, 1), [prompt(200, 1), prompt(50, 2)].concat());
    let hybrid = || Engine::builder().model("random:hybrid-tiny").kv_memory(16 << 20);
    let engine = |directory: &str| {
        let builder = hybrid().kv_cache_dir(place.directory(directory), 1 << 30);
        builder.kv_object_store(place.url()).prefetch_policy(PrefetchPolicy::WaitComplete).build()
    };
    let first = engine("first").await.expect("an engine");
    assert!(first.model_info().state_bytes > 0);
    answer(&first, &tokens).await;
    first.tiers().flush().await.expect("it runs");
    stop(first).await;
    let cold = hybrid().prefix_caching(false).build().await.expect("an engine");
    let second = engine("second").await.expect("an engine");
    wait_for(&second, &longer, 192).await;
    let (expected, _) = answer(&cold, &longer).await;
    assert_eq!(answer(&second, &longer).await, (expected, 192));
    assert_eq!(second.stats().loaded_tokens, 192);
    stop(second).await;
}

/// Goal: records that were on the disk before it had an object store behind it are uploaded, except
/// those of another model.
#[tokio::test]
async fn what_was_stored_earlier_is_uploaded() {
    let place = Place::new("earlier");
    let on_disk = |builder: EngineBuilder| builder.kv_cache_dir(place.directory("first"), 1 << 30);
    let other = on_disk(tiny().kv_type(stolon::KvType::Int8)).build().await.expect("an engine");
    answer(&other, &prompt(200, 1)).await;
    stop(other).await;
    let first = on_disk(tiny()).build().await.expect("an engine");
    answer(&first, &prompt(200, 1)).await;
    stop(first).await;
    assert_eq!(records(&place.directory("first")).len(), 6);
    let first = on_disk(tiny()).kv_object_store(place.url()).build().await.expect("an engine");
    while first.tiers().object_stats().expect("a store").records_stored < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop(first).await;
    assert_eq!(records(&place.store()).len(), 3);
    let second = tiny().kv_cache_dir(place.directory("second"), 1 << 30);
    let second = second.kv_object_store(place.url()).build().await.expect("an engine");
    wait_for(&second, &prompt(200, 1), 192).await;
    assert_eq!(answer(&second, &prompt(200, 1)).await.1, 192);
    stop(second).await;
}

/// Goal: engines share KV through the protocol of S3, too.
#[tokio::test]
#[ignore = "needs an S3 server"]
async fn engines_share_through_s3() {
    let url = std::env::var("STOLON_S3_URL").expect("STOLON_S3_URL, such as s3://bucket/folder");
    let place = Place::new("s3");
    one_engine_computes_for_another(&place, &format!("{url}/{}", std::process::id())).await;
}

/// An engine on the fake backend, which takes 1 ms per token.
fn slow_fake(place: &Place, directory: &str) -> EngineBuilder {
    support::slow_fake(64, Duration::from_millis(1))
        .kv_cache_dir(place.directory(directory), 1 << 30)
        .kv_object_store(place.url())
}

/// Goal: records that another engine has stored since the store was listed are looked for and
/// found, also when they follow records on the disk. A record that does not exist is not a failure
/// of the store.
#[tokio::test]
async fn what_was_stored_after_the_listing_is_looked_for() {
    let place = Place::new("look");
    let second = slow_fake(&place, "second").build().await.expect("an engine");
    let known = second.tiers().object_stats().expect("a store");
    assert_eq!((known.records, known.failures), (0, 0));
    let first = slow_fake(&place, "first").build().await.expect("an engine");
    let longer = [prompt(600, 1), prompt(250, 2)].concat();
    assert_eq!(ask(&first, &prompt(600, 1)).await, 0);
    first.tiers().flush().await.expect("it runs");
    assert_eq!(ask(&second, &prompt(600, 1)).await, 576);
    assert_eq!(ask(&first, &longer).await, 592);
    first.tiers().flush().await.expect("it runs");
    // The pool has 600 tokens of the prompt, and the store all.
    let before = second.stats().loaded_tokens;
    ask(&second, &longer).await;
    assert!(second.stats().loaded_tokens > before);
    assert_eq!(ask(&second, &prompt(600, 3)).await, 0);
    let stats = second.tiers().object_stats().expect("a store");
    assert_eq!((stats.failures, stats.records_refused), (0, 0));
    // Each of the three prompts was looked for once, and the last one is not in the store.
    assert_eq!((stats.looks, stats.looks_found), (3, 2));
    stop(first).await;
    stop(second).await;
}

/// Goal: damaged and truncated objects are misses that are counted and not fetched again, and a
/// prompt's records before the first wrong one are used.
#[tokio::test]
async fn damaged_objects_are_misses() {
    let place = Place::new("damaged");
    let first = slow_fake(&place, "first").build().await.expect("an engine");
    ask(&first, &prompt(300, 1)).await;
    ask(&first, &prompt(300, 2)).await;
    stop(first).await;
    for (index, path) in records(&place.store()).iter().enumerate() {
        let mut bytes = std::fs::read(path).expect("readable");
        match index % 2 {
            0 => bytes[200 + index] ^= 1,
            _ => bytes.truncate(bytes.len() - 1),
        }
        std::fs::write(path, bytes).expect("written");
    }
    let second = slow_fake(&place, "second").build().await.expect("an engine");
    for seed in [1, 2] {
        wait_for(&second, &prompt(300, seed), 256).await;
        assert_eq!(ask(&second, &prompt(300, seed)).await, 0);
    }
    let refused = second.tiers().object_stats().expect("a store").records_refused;
    assert!(refused >= 2, "{refused}");
    assert_eq!(second.stats().loaded_tokens, 0);
    stop(second).await;
}

/// Goal: when the store fails, requests continue and the failures are counted. A store that never
/// worked is refused when the engine starts, with an error that names its URL.
#[tokio::test]
async fn a_store_that_fails_stops_nothing() {
    let place = Place::new("fails");
    let engine = slow_fake(&place, "first").build().await.expect("an engine");
    ask(&engine, &prompt(300, 1)).await;
    engine.tiers().flush().await.expect("it runs");
    std::fs::remove_dir_all(place.store()).expect("removed");
    std::fs::write(place.store(), "a file in its place").expect("written");
    for seed in 1..8 {
        ask(&engine, &prompt(300, seed)).await;
    }
    engine.tiers().flush().await.expect("it runs");
    let stats = engine.tiers().object_stats().expect("a store");
    assert!(stats.failures >= 1 && stats.writes_skipped >= 1, "{stats:?}");
    stop(engine).await;
    for url in ["ftp://host/folder", "s3:", "no url"] {
        let directory = place.directory("other");
        let build = tiny().kv_cache_dir(directory, 1 << 30).kv_object_store(url).build();
        let refused = build.await.expect_err("no store");
        assert!(matches!(refused, Error::Tier(TierError::ObjectStore(_))), "{refused}");
        assert!(refused.to_string().contains(url), "{refused}");
    }
    let refused = tiny().kv_object_store(place.url()).build().await.expect_err("no directory");
    assert!(refused.to_string().contains("kv_cache_dir"), "{refused}");
}
