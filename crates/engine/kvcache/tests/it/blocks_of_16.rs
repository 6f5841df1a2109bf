//! A prefix cache with blocks of 16 positions: matching, locks, the order of eviction, allocation,
//! pins, and how many tokens are saved. Behavior that needs a model is tested with the engine.

use stolon_kvcache::{BlockId, Namespace, Shortage};
use support::Cache;

use crate::support::cache as support;

const BLOCK: usize = 16;

/// Whether `block` holds a part of the cached prefix of `prompt`.
fn holds(cache: &mut Cache, prompt: &[u32], block: BlockId) -> bool {
    cache.writer.acquire(&cache.base, prompt).blocks().contains(&block)
}

/// Number of tokens that a request could use now: in free blocks, and in blocks that can be
/// evicted.
fn token_capacity(cache: &mut Cache) -> usize {
    (cache.pool.counts().free + cache.writer.counts().evictable) * BLOCK
}

/// A prompt of one block per letter.
fn blocks(letters: &str) -> Vec<u32> {
    letters.bytes().flat_map(|letter| (0..16).map(move |i| u32::from(letter) * 100 + i)).collect()
}

/// Goal: a prompt matches the whole blocks that it has in common with a cached one, and no part of
/// a block. A partial block stays private.
#[test]
fn whole_blocks_are_matched() {
    let changed = |at: usize| {
        let mut prompt = blocks("ABCD");
        prompt[at] += 1;
        prompt
    };
    let long: Vec<u32> = (0..1060).collect();
    for (cached, prompt, matched) in [
        (vec![], blocks("ABCD"), 0),
        (vec![], vec![], 0),
        (blocks("ABCD"), blocks("ABCDE"), 4),
        (blocks("ABCD"), blocks("ABXY"), 2),
        (blocks("ABCD"), changed(40), 2),
        (blocks("ABCD"), blocks("ABCD"), 4),
        (long.clone(), long, 66),
        (blocks("A")[..15].to_vec(), blocks("A")[..15].to_vec(), 0),
    ] {
        let mut cache = Cache::new(BLOCK, 67);
        cache.run(&cached);
        assert_eq!(cache.match_len(&prompt), matched * BLOCK);
        let lease = cache.writer.acquire(&cache.base, &prompt);
        let expected: Vec<BlockId> = (0..matched as u32).map(BlockId).collect();
        assert_eq!((lease.len(), lease.blocks()), (matched * BLOCK, &expected[..]));
        assert_eq!(cache.writer.counts().cached, cached.len() / BLOCK);
        assert_eq!(cache.pool.counts().free, 67 - cached.len() / BLOCK);
        drop(lease);
        cache.audit();
    }
}

#[test]
fn blocks_are_evictable_after_the_last_lease_was_dropped() {
    let mut cache = Cache::new(BLOCK, 4);
    let prompt = blocks("AB");
    cache.run(&prompt);
    assert_eq!(cache.writer.counts().evictable, 2);
    let first = cache.writer.acquire(&cache.base, &prompt);
    assert_eq!(cache.writer.counts().evictable, 0);
    let second = cache.writer.acquire(&cache.base, &prompt);
    assert_eq!(cache.reader.dump().nodes[0].locks, 2);
    drop(first);
    assert!(cache.evict(2).is_empty(), "one request still uses the blocks");
    assert_eq!(cache.writer.counts().evictable, 0);
    drop(second);
    assert_eq!(cache.writer.counts().evictable, 2);
    assert_eq!(cache.evict(2).len(), 2);
    cache.audit();
}

#[test]
fn the_evictable_count_follows_the_locks() {
    let mut cache = Cache::new(BLOCK, 8);
    cache.run(&blocks("ABC"));
    cache.run(&blocks("ABD"));
    for (letters, evictable) in [("AB", 2), ("ABC", 1), ("ABCX", 1), ("X", 4)] {
        let lease = cache.writer.acquire(&cache.base, &blocks(letters));
        assert_eq!(cache.writer.counts().evictable, evictable, "with {letters} in use");
        drop(lease);
        assert_eq!(cache.writer.counts().evictable, 4);
    }
}

#[test]
fn lru_evicts_the_least_recently_used_leaf() {
    let mut cache = Cache::new(BLOCK, 4);
    cache.run(&blocks("A"));
    cache.run(&blocks("B"));
    drop(cache.writer.acquire(&cache.base, &blocks("A")));
    cache.evict(1);
    assert_eq!((cache.match_len(&blocks("A")), cache.match_len(&blocks("B"))), (16, 0));
}

#[test]
fn one_eviction_removes_leaves_and_then_their_parent() {
    let mut cache = Cache::new(BLOCK, 4);
    cache.run(&blocks("A"));
    cache.run(&blocks("AB"));
    cache.run(&blocks("AC"));
    assert_eq!(cache.writer.counts().nodes, 3);
    assert_eq!(cache.evict(3).len(), 3, "both leaves, then their parent, in one call");
    assert_eq!(cache.writer.counts().nodes, 0);
    cache.audit();
}

#[test]
fn an_evicted_block_is_no_longer_cached() {
    let mut cache = Cache::new(BLOCK, 4);
    let prompt = blocks("ABC");
    cache.run(&prompt);
    assert_eq!(cache.writer.counts().cached, 3);
    assert!((0..3).all(|id| holds(&mut cache, &prompt, BlockId(id))));
    assert!(!holds(&mut cache, &prompt, BlockId(3)));
    assert_eq!(cache.evict(1), [BlockId(2)]);
    assert!(!holds(&mut cache, &prompt, BlockId(2)));
    assert_eq!(cache.writer.counts().cached, 2);
}

#[test]
fn nothing_is_evicted_while_everything_is_locked() {
    let mut cache = Cache::new(BLOCK, 4);
    cache.run(&blocks("ABCD"));
    let lease = cache.writer.acquire(&cache.base, &blocks("ABCD"));
    assert!(cache.evict(4).is_empty());
    let shortage = Shortage { requested: 1, free: 0, fenced: 0 };
    assert_eq!(
        cache.start(&blocks("X")).err(),
        Some(shortage),
        "a request that does not fit is refused"
    );
    drop(lease);
    assert!(cache.start(&blocks("X")).is_ok());
    cache.audit();
}

#[test]
fn allocation_reuses_a_cached_prefix() {
    let mut cache = Cache::new(BLOCK, 8);
    let mut first = cache.start(&blocks("ABC")).expect("fits");
    assert_eq!((first.lease.len(), first.private.len()), (0, 3), "nothing is cached");
    let _ = cache.publish(&mut first, &blocks("ABC"));
    let second = cache.start(&blocks("ABX")).expect("fits");
    assert_eq!((second.lease.len(), second.private.len()), (32, 1));
    assert_eq!(second.lease.blocks(), &first.lease.blocks()[..2]);
    cache.audit();
}

#[test]
fn the_end_of_a_request_keeps_its_cached_blocks() {
    let mut cache = Cache::new(BLOCK, 8);
    let prompt = &blocks("ABC")[..40];
    let mut slot = cache.start(prompt).expect("fits");
    let _ = cache.publish(&mut slot, prompt);
    assert_eq!((cache.pool.counts().free, cache.writer.counts().locked), (5, 2));
    drop(slot);
    assert_eq!(cache.pool.counts().free, 6, "the partial block is free again");
    assert_eq!((cache.writer.counts().cached, cache.writer.counts().locked), (2, 0));
    cache.audit();
}

#[test]
fn a_failed_request_returns_all_its_blocks() {
    let mut cache = Cache::new(BLOCK, 4);
    cache.run(&blocks("AB"));
    let slot = cache.start(&blocks("ABCD")).expect("fits");
    drop(slot);
    assert_eq!((cache.pool.counts().free, cache.writer.counts().locked), (2, 0));
    let shortage = cache.start(&blocks("ABCDE")).err().expect("5 blocks do not fit");
    assert_eq!(shortage.requested, 3, "its own match is not evicted to make room for it");
    assert_eq!((cache.pool.counts().free, cache.writer.counts().locked), (2, 0));
    assert_eq!(cache.match_len(&blocks("AB")), 32);
    cache.audit();
}

#[test]
fn free_token_capacity_includes_evictable_blocks() {
    let mut cache = Cache::new(BLOCK, 8);
    assert_eq!(token_capacity(&mut cache), 128);
    cache.run(&blocks("ABC"));
    assert_eq!(token_capacity(&mut cache), 128, "cached blocks can be evicted");
    let lease = cache.writer.acquire(&cache.base, &blocks("AB"));
    assert_eq!(token_capacity(&mut cache), 96);
    drop(lease);
    assert_eq!(token_capacity(&mut cache), 128);
}

#[test]
fn a_request_evicts_only_as_much_as_it_needs() {
    let mut cache = Cache::new(BLOCK, 4);
    cache.run(&blocks("ABCD"));
    assert_eq!(cache.pool.counts().free, 0);
    let slot = cache.start(&blocks("XYZ")).expect("three can be evicted");
    assert_eq!(slot.private.len(), 3);
    assert_eq!(cache.match_len(&blocks("ABCD")), 16, "only as much as was needed");
    cache.audit();
}

/// Goal: 48 requests share a system prompt of 1,024 tokens, followed by 32 to 126 tokens of their
/// own. All but the first find the system prompt in the cache.
#[test]
fn a_shared_system_prompt_is_computed_once() {
    let mut cache = Cache::new(BLOCK, 1000);
    let (mut asked, mut found, mut hits) = (0, 0, 0);
    for request in 0..48u32 {
        let mut prompt: Vec<u32> = (0..1024).collect();
        prompt.extend((0..32 + request * 2).map(|i| 10_000 + request * 1000 + i));
        let matched = cache.match_len(&prompt);
        asked += prompt.len();
        found += matched;
        hits += usize::from(matched > 0);
        cache.run(&prompt);
    }
    assert_eq!(hits, 47, "all requests but the first");
    assert_eq!(found, 47 * 1024);
    assert!(found * 100 >= asked * 30, "at least 30 % of the prompt tokens are saved");
    let stats = cache.writer.stats();
    assert_eq!((stats.acquires, stats.acquires_hit), (48, 47));
    assert!(stats.hit_rate() >= 0.6);
    cache.audit();
}

/// Goal: system prompts that are pinned in the namespaces of two tenants stay cached while other
/// requests need all the memory.
#[test]
fn a_pinned_system_prompt_survives_memory_pressure() {
    let mut cache = Cache::new(BLOCK, 12);
    let tenants = ["one", "two"].map(|salt| Namespace::builder().salt(salt).build());
    let mut pins = Vec::new();
    for tenant in &tenants {
        cache.base = *tenant;
        cache.run(&blocks("S"));
        pins.push(cache.writer.pin(tenant, &blocks("S")).expect("cached"));
    }
    assert_eq!(cache.writer.counts().pinned, 2);
    for letters in ["ABCDEFGHIJ", "KLMNOPQRST", "UVWXYZabcd"] {
        cache.base = Namespace::default();
        cache.run(&blocks(letters));
    }
    for tenant in &tenants {
        assert_eq!(cache.reader.query_match_len(tenant, &blocks("SA")), 16);
    }
    assert_eq!(cache.writer.pins().iter().map(|pin| pin.id).collect::<Vec<_>>(), pins);
    assert!(pins.into_iter().all(|pin| cache.writer.unpin(pin)));
    assert_eq!(cache.evict(12).len(), 12);
    cache.audit();
}
