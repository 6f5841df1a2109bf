//! Control and observation of the prefix cache through the public API: eviction policies, pins,
//! events and dumps.

use std::collections::HashSet;
use std::time::Duration;

use fake::builder;
use stolon::{
    CacheEvent, Engine, EngineError, Error, EvictionPolicy, PinError, PinOptions, Request,
};
use stolon_backend::fake::FakeFault;

use crate::support::fake;

/// A prompt of one block that begins with `first`. Its one generated token does not fill a block.
fn prompt(first: u32) -> Request {
    Request::tokens((0..16).map(|n| (first + n) % 256).collect::<Vec<_>>()).max_tokens(1)
}

/// A prompt of `count` blocks that begins with `first`.
fn blocks(first: u32, count: u32) -> Request {
    Request::tokens((0..16 * count).map(|n| (first + n * 7) % 256).collect::<Vec<_>>())
        .max_tokens(1)
}

fn cached(engine: &Engine, request: &Request) -> usize {
    engine.cache().query_match_len(request).expect("tokens")
}

/// Goal: the configured eviction policy decides which prefix is evicted first.
#[tokio::test]
async fn the_eviction_policy_can_be_chosen() {
    for (policy, survivor) in [(EvictionPolicy::Lru, 0), (EvictionPolicy::Mru, 100)] {
        let (builder, _) = builder(4);
        let builder = builder.eviction_policy(policy);
        let engine = builder.build().await.expect("valid settings");
        for first in [0, 100, 0] {
            engine.cache().warm(prompt(first)).await.expect("it fits");
        }
        // Two of the four blocks are cached. The next prompt needs three, so one is evicted.
        engine.cache().warm(blocks(200, 3)).await.expect("it fits");
        for first in [0, 100] {
            let expected = if first == survivor { 16 } else { 0 };
            assert_eq!(cached(&engine, &prompt(first)), expected, "{policy}: {first}");
        }
    }
    for policy in EvictionPolicy::ALL {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    let unknown = "newest".parse::<EvictionPolicy>().expect_err("no such policy").to_string();
    assert!(unknown.contains("`newest`") && unknown.contains("cost-aware"), "{unknown}");
}

/// Goal: a pinned prompt is not evicted until it is unpinned, and the list of pins describes it.
#[tokio::test]
async fn pinned_prompts_are_not_evicted() {
    let (builder, _) = builder(8);
    let engine = builder.pin_budget(2).build().await.expect("valid settings");
    let system = blocks(3, 2);
    assert!(matches!(
        engine.cache().pin(&system, None).await,
        Err(Error::Engine(EngineError::Pin(PinError::NotCached)))
    ));
    engine.cache().warm(system.clone()).await.expect("it fits");
    let pin = engine.cache().pin(&system, None).await.expect("cached, within the budget");
    let pins = engine.cache().pins().await.expect("it runs");
    assert_eq!((pins[0].id, pins[0].tokens, pins[0].blocks, pins[0].ends_in), (pin, 32, 2, None));
    let error = engine.cache().pin(&system, None).await.expect_err("over the budget");
    assert!(matches!(
        error,
        Error::Engine(EngineError::Pin(PinError::OverBudget { budget: 2, pinned: 2, .. }))
    ));
    for first in 50..60 {
        engine.cache().warm(blocks(first, 6)).await.expect("it fits next to the pinned blocks");
    }
    assert_eq!(cached(&engine, &system), 32);
    assert_eq!(engine.cache().stats().await.expect("it runs").blocks_pinned, 2);
    assert!(engine.cache().unpin(pin).await.expect("it runs"));
    assert!(!engine.cache().unpin(pin).await.expect("it runs"), "the pin has ended");
    engine.cache().warm(blocks(99, 6)).await.expect("it fits");
    engine.cache().warm(blocks(88, 6)).await.expect("it fits");
    assert_eq!(cached(&engine, &system), 0);
    engine.audit().await.expect("consistent accounting");
}

/// Goal: a pin with a time to live expires, and a flush ends all pins.
#[tokio::test]
async fn pins_expire_and_end_with_a_flush() {
    let (builder, _) = builder(8);
    let engine = builder.pin_budget(4).build().await.expect("valid settings");
    engine.cache().warm(prompt(0)).await.expect("it fits");
    engine.cache().pin(&prompt(0), Some(Duration::from_millis(30))).await.expect("cached");
    engine.cache().pin(&prompt(0), Some(Duration::from_secs(3600))).await.expect("cached");
    let ends_in = engine.cache().pins().await.expect("it runs")[1].ends_in.expect("a time to live");
    assert!(ends_in <= Duration::from_secs(3600) && ends_in > Duration::from_secs(3500));
    while engine.cache().pins().await.expect("it runs").len() == 2 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_evictable, 0);
    engine.cache().flush().await.expect("it runs");
    assert!(engine.cache().pins().await.expect("it runs").is_empty());
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_free, 8);
}

/// Goal: every request that is accepted completes although blocks are pinned; a request that could
/// not complete is refused.
#[tokio::test]
async fn pins_do_not_starve_requests() {
    let (builder, _) = builder(8);
    let engine = builder.pin_budget(3).build().await.expect("valid settings");
    engine.cache().warm(blocks(3, 3)).await.expect("it fits");
    engine.cache().pin(&blocks(3, 3), None).await.expect("cached, within the budget");
    let error = engine.generate(blocks(7, 6)).await.expect_err("five blocks are left");
    assert!(
        matches!(error, Error::Engine(EngineError::PromptTooLong { got: 96, limit: 80, .. })),
        "{error}"
    );
    assert!(error.to_string().contains("3 are pinned, by 1 pin; unpin"), "{error}");
    let answer =
        engine.generate(Request::tokens(vec![9; 70]).max_tokens(1000)).await.expect("it fits");
    assert_eq!(answer.collect_text().await.expect("it ends").token_ids.len(), 11);
    let all = fake::builder(8).0.pin_budget(8);
    let refused = all.build().await.expect_err("no block would be left for requests").to_string();
    assert!(refused.contains("pin_budget") && refused.contains("got 8"), "{refused}");
}

/// Goal: a prompt is limited by the blocks that are pinned, not by the pin budget. No pin can take
/// its blocks while it is in flight, and afterward pins limit prompts again.
#[tokio::test]
async fn prompts_are_limited_by_what_is_pinned() {
    let (builder, fake) = builder(8);
    let engine = builder.pin_budget(3).build().await.expect("valid settings");
    let long = Request::tokens(vec![9; 120]).max_tokens(1000);
    let hold = fake.hold();
    let stream = engine.generate(long.clone()).await.expect("it fits the pool");
    let error = engine.cache().pin(&prompt(0), None).await.expect_err("a long prompt is in flight");
    assert!(matches!(error, Error::Engine(EngineError::PinBudgetInUse)), "{error}");
    assert!(error.is_retryable());
    drop(hold);
    // 120 tokens and 9 more fill the pool; the last one needs no position.
    assert_eq!(stream.collect_text().await.expect("it ends").token_ids.len(), 9);
    engine.cache().warm(prompt(0)).await.expect("it fits");
    let pin = engine.cache().pin(&prompt(0), None).await.expect("nothing long is in flight");
    let error = engine.generate(long.clone()).await.expect_err("something is pinned");
    assert!(
        matches!(error, Error::Engine(EngineError::PromptTooLong { limit: 112, .. })),
        "{error}"
    );
    let shorter = Request::tokens(vec![9; 110]).max_tokens(1000);
    let answer = engine.generate(shorter).await.expect("it fits next to the pinned block");
    assert_eq!(answer.collect_text().await.expect("it ends").token_ids.len(), 3);
    assert!(engine.cache().unpin(pin).await.expect("it runs"));
    engine.cache().warm(long).await.expect("nothing is pinned");
    engine.audit().await.expect("consistent accounting");
}

/// Goal: if no pin budget is set, pins may occupy a quarter of the pool, and a prompt of the whole
/// context length is still accepted.
#[tokio::test]
async fn pins_have_a_default_budget_that_refuses_no_prompt() {
    let engine = builder(12).0.max_positions(128).build().await.expect("valid settings");
    engine.cache().warm(blocks(3, 4)).await.expect("it fits");
    let error = engine.cache().pin(&blocks(3, 4), None).await.expect_err("a quarter is 3 blocks");
    assert!(
        error.to_string().contains("at most 3 pinned blocks, got 4 in addition to the 0"),
        "{error}"
    );
    engine.cache().pin(&blocks(3, 3), None).await.expect("cached, within the budget");
    let longest = Request::tokens(vec![9; 127]).max_tokens(1);
    let answer = engine.generate(longest).await.expect("it fits next to the pinned blocks");
    assert_eq!(answer.collect_text().await.expect("it ends").token_ids.len(), 1);
    engine.audit().await.expect("consistent accounting");
}

/// Applies an event to a copy of the cache, the set of the hashes of all cached blocks.
fn apply(copy: &mut HashSet<u64>, event: &CacheEvent) {
    match event {
        CacheEvent::Stored { parent, hashes, .. } => {
            assert!(parent.is_none_or(|parent| copy.contains(&parent)), "parents come first");
            copy.extend(hashes);
        }
        CacheEvent::Removed { hashes } => {
            assert!(hashes.iter().all(|hash| copy.remove(hash)), "removed once");
        }
        CacheEvent::Cleared => copy.clear(),
        CacheEvent::Reset { .. } => panic!("the queue was large enough"),
    }
}

/// Goal: a snapshot and the events after it reproduce the content of the cache, and the event
/// stream ends when the engine stops.
#[tokio::test]
async fn events_reproduce_the_content_of_the_cache() {
    let (builder, _) = builder(16);
    let engine = builder.build().await.expect("valid settings");
    engine.cache().warm(blocks(1, 4)).await.expect("it fits");
    let mut events = engine.cache().events(1000).await.expect("it runs");
    let mut copy = HashSet::new();
    events.snapshot().events.iter().for_each(|event| apply(&mut copy, event));
    assert_eq!(copy.len(), 4);
    let mut last = events.snapshot().number;
    let listener = tokio::spawn(async move {
        while let Some(next) = events.next().await {
            assert_eq!(next.number, last + 1, "no gap");
            last = next.number;
            apply(&mut copy, &next.event);
        }
        copy
    });
    for first in 2..12 {
        engine.cache().warm(blocks(first, 5)).await.expect("it fits");
    }
    engine.cache().warm(blocks(1, 4).cache_salt("tenant")).await.expect("it fits");
    assert!(engine.stats().evictions > 0);
    let expected = engine.cache().stats().await.expect("it runs").blocks;
    engine.shutdown().await;
    assert_eq!(listener.await.expect("no panic").len(), expected);
}

/// Goal: the engine does not wait for a slow subscriber, which gets the number of missed events.
#[tokio::test]
async fn a_slow_subscriber_gets_a_reset() {
    let (builder, _) = builder(16);
    let engine = builder.build().await.expect("valid settings");
    let mut events = engine.cache().events(2).await.expect("it runs");
    for first in 0..5 {
        engine.cache().warm(prompt(first)).await.expect("it fits");
    }
    let mut counted = 0;
    while counted < 5 {
        match events.next().await.expect("the engine runs").event {
            CacheEvent::Reset { missed } => counted += missed,
            _ => counted += 1,
        }
    }
    assert_eq!(counted, 5);
    let refused = engine.cache().events(0).await.expect_err("no queue").to_string();
    assert!(refused.contains("capacity") && refused.contains("got 0"), "{refused}");
}

/// Goal: a restart after a failure ends all pins and event streams of the old cache.
#[tokio::test]
async fn a_restart_ends_pins_and_events() {
    let (builder, handle) = builder(16);
    let engine = builder.pin_budget(4).build().await.expect("valid settings");
    engine.cache().warm(prompt(0)).await.expect("it fits");
    engine.cache().pin(&prompt(0), None).await.expect("cached");
    let mut events = engine.cache().events(100).await.expect("it runs");
    handle.inject_next(FakeFault::Panic);
    engine.cache().warm(prompt(1)).await.expect_err("it is interrupted");
    assert!(events.next().await.is_none());
    while engine.stats().restarts == 0 || engine.cache().pins().await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(engine.cache().pins().await.expect("it runs again").is_empty());
    assert_eq!(cached(&engine, &prompt(0)), 0);
}

/// Goal: the prefix tree can be exported and drawn while the engine runs.
#[tokio::test]
async fn dump_exports_the_tree() {
    let (builder, _) = builder(16);
    let engine = builder.build().await.expect("valid settings");
    engine.cache().warm(blocks(1, 3)).await.expect("it fits");
    engine.cache().warm(blocks(1, 3)).await.expect("it fits");
    let dump = engine.cache().dump().expect("it runs");
    assert_eq!((dump.nodes.len(), dump.nodes[0].block_count), (1, 3));
    assert_eq!(dump.nodes[0].hits, 1, "the second request found it");
    assert!(dump.to_graphviz().contains("3 blocks"));
    let stats = engine.cache().stats().await.expect("it runs");
    assert_eq!((stats.blocks, stats.nodes, stats.blocks_committed), (3, 1, 3));
    assert!(stats.index_bytes > 0 && stats.average_match > 0.0);
}

/// Goal: the priority of a request reaches the prefixes that it uses, and the policy `priority`
/// evicts those of the lowest priority first, whichever was used last.
#[tokio::test]
async fn priorities_of_requests_decide_what_is_evicted() {
    for (policy, survivor) in [(EvictionPolicy::Priority, 0), (EvictionPolicy::Lru, 100)] {
        let (builder, _) = builder(4);
        let engine = builder.eviction_policy(policy).build().await.expect("valid settings");
        engine.cache().warm(prompt(0).priority(7)).await.expect("it fits");
        engine.cache().warm(prompt(100).priority(-7)).await.expect("it fits");
        // Two of the four blocks are cached. The next prompt needs three, so one is evicted.
        engine.cache().warm(blocks(200, 3)).await.expect("it fits");
        let kept = [0, 100].map(|first| cached(&engine, &prompt(first)) > 0);
        assert_eq!(kept, [survivor == 0, survivor == 100], "{policy}");
    }
}

/// Goal: the eviction policy can be changed while the engine runs. The new policy also holds for
/// the prefixes that are cached already.
#[tokio::test]
async fn the_eviction_policy_can_be_changed() {
    let (builder, _) = builder(4);
    let engine = builder.build().await.expect("valid settings");
    assert_eq!(engine.cache().eviction_policy(), Some(EvictionPolicy::Lru));
    engine.cache().warm(prompt(0)).await.expect("it fits");
    engine.cache().warm(prompt(100)).await.expect("it fits");
    engine.cache().set_eviction_policy(EvictionPolicy::Mru).expect("it runs");
    assert_eq!(engine.cache().eviction_policy(), Some(EvictionPolicy::Mru));
    engine.cache().warm(blocks(200, 3)).await.expect("it fits");
    assert_eq!((cached(&engine, &prompt(0)), cached(&engine, &prompt(100))), (16, 0));
}

/// Goal: the blocks of a prefix or of a salt can be evicted and are free afterward. Blocks that
/// others share, that pins hold or that other salts have cached stay. Several prompts can be
/// queried at once.
#[tokio::test]
async fn prefixes_and_salts_can_be_evicted() {
    let (builder, _) = builder(16);
    let engine = builder.pin_budget(4).build().await.expect("valid settings");
    let tokens = |tail: u32| (0..16).chain(tail..tail + 16).collect::<Vec<u32>>();
    let request = |tail: u32| Request::tokens(tokens(tail)).max_tokens(1);
    let salted = request(40).cache_salt("tenant");
    for prompt in [request(40), request(80), salted.clone()] {
        engine.cache().warm(prompt).await.expect("it fits");
    }
    let all = [request(40), request(80), salted.clone(), request(90)];
    assert_eq!(engine.cache().query_match_lens(&all).expect("tokens"), [32, 32, 32, 16]);
    assert_eq!(engine.cache().evict_prefix(&request(40)).await.expect("it runs"), 1);
    assert_eq!(engine.cache().query_match_lens(&all).expect("tokens"), [16, 32, 32, 16]);
    engine.cache().pin(&request(80), None).await.expect("cached");
    assert_eq!(
        engine.cache().evict_prefix(&request(80)).await.expect("it runs"),
        0,
        "it is pinned"
    );
    assert_eq!(engine.cache().evict_salt(Some("tenant")).await.expect("it runs"), 2);
    assert_eq!(engine.cache().query_match_lens(&all).expect("tokens"), [16, 32, 0, 16]);
    assert_eq!(engine.cache().evict_salt(None).await.expect("it runs"), 2, "with the pin");
    assert!(engine.cache().pins().await.expect("it runs").is_empty());
    assert_eq!(engine.audit().await.expect("consistent accounting").blocks_free, 16);
    assert_eq!(engine.stats().evictions_requested, 5);
    // The cached logits of evicted prompts are gone too: the answer is computed again.
    engine.cache().warm(request(40)).await.expect("it fits");
    assert_eq!(engine.stats().cached_tokens, 16, "of the second prompt, nothing since");
}

/// Goal: each use of its prefix restarts the time to live of a pin with `refresh_on_hit`, and the
/// list of pins says so at once.
#[tokio::test]
async fn a_use_prolongs_a_pin_at_once() {
    let (builder, _) = builder(8);
    let engine = builder.pin_budget(4).build().await.expect("valid settings");
    engine.cache().warm(prompt(0)).await.expect("it fits");
    let ttl = Some(Duration::from_secs(3_600));
    let options = PinOptions { ttl, refresh_on_hit: true, ..PinOptions::default() };
    engine.cache().pin_with(&prompt(0), options).await.expect("cached");
    engine.cache().pin(&prompt(0), ttl).await.expect("cached");
    let ends = async || -> Vec<Duration> {
        let pins = engine.cache().pins().await.expect("it runs");
        pins.iter().map(|pin| pin.ends_in.expect("a time to live")).collect()
    };
    assert!(ends().await.is_sorted(), "the first pin ends first");
    engine.cache().warm(prompt(0)).await.expect("it fits");
    assert!(!ends().await.is_sorted(), "the first pin was prolonged, the other one was not");
}

/// Goal: a pin with `refresh_on_hit` is renewed while its prefix is used, and the list of pins says
/// which blocks each pin holds and why.
#[tokio::test]
async fn used_pins_live_on() {
    let (builder, _) = builder(8);
    let engine = builder.pin_budget(4).build().await.expect("valid settings");
    engine.cache().warm(prompt(0)).await.expect("it fits");
    let ttl = Some(Duration::from_millis(100));
    let options = PinOptions { ttl, refresh_on_hit: true, ..PinOptions::default() };
    let described = PinOptions {
        reason: Some("release".to_owned()),
        description: Some("system prompt".to_owned()),
        ..options
    };
    engine.cache().pin_with(&prompt(0), described.clone()).await.expect("cached");
    engine.cache().pin(&prompt(0), ttl).await.expect("cached");
    let pins = engine.cache().pins().await.expect("it runs");
    assert_eq!((pins.len(), &pins[0].options), (2, &described));
    assert_eq!(*pins[0].token_ids, (0..16).collect::<Vec<u32>>()[..]);
    // The prefix is used until well after the end of the other pin.
    while engine.cache().pins().await.expect("it runs").len() == 2 {
        engine.cache().warm(prompt(0)).await.expect("it fits");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let left = engine.cache().pins().await.expect("it runs");
    assert_eq!((left.len(), left[0].id), (1, pins[0].id));
    // From here on it is not used.
    while !engine.cache().pins().await.expect("it runs").is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    engine.audit().await.expect("consistent accounting");
}
