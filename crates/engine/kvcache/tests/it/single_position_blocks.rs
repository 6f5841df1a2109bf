//! Cases that prefix caches with blocks of one position easily get wrong: splits, atomic token
//! spans, locks, ownership of blocks, idempotence, conservation, namespaces. Behavior that needs a
//! model (logits, generated tokens) is tested with the engine.

use stolon_kvcache::{
    BlockId, Commit, Namespace, Shortage, TokenSpan, TokenSpanInterner, prefix_tree,
};
use support::{Cache, Running};

use crate::support::cache as support;

const IMAGE: TokenSpan = TokenSpan::Image { content_hash: 12345, kv_len: 729, columns: 0 };

fn prompt_with_image(interner: &TokenSpanInterner, tail: &[u32]) -> Vec<u32> {
    let mut prompt = vec![0];
    interner.append(IMAGE, &mut prompt).expect("an image within the limits");
    prompt.extend_from_slice(tail);
    prompt
}

/// Goal: a match that ends inside a run splits it there; both parts keep their blocks.
#[test]
fn a_match_inside_a_run_splits_it() {
    let mut cache = Cache::new(1, 8);
    cache.run(&[1, 2, 3, 4]);
    let lease = cache.writer.acquire(&cache.base, &[1, 2, 9]);
    assert_eq!(lease.len(), 2);
    assert_eq!(lease.blocks(), [BlockId(0), BlockId(1)]);
    assert_eq!(cache.writer.counts().nodes, 2);
    let whole = cache.writer.acquire(&cache.base, &[1, 2, 3, 4]);
    assert_eq!(whole.blocks(), [0, 1, 2, 3].map(BlockId));
    cache.audit();
}

/// Goal: an image occupies all its positions, and is matched as a whole or not at all.
#[test]
fn an_image_counts_as_all_its_positions_or_none() {
    let interner = TokenSpanInterner::new(8);
    let mut cache = Cache::new(1, 1000);
    let prompt = prompt_with_image(&interner, &[1, 2]);
    cache.run(&prompt);
    assert_eq!(cache.match_len(&prompt), 732);
    assert_eq!(cache.match_len(&prompt[..730]), 730, "the first token and the image");
    assert_eq!(cache.match_len(&prompt[..400]), 1, "never a part of the image");
    let lease = cache.writer.acquire(&cache.base, &prompt[..400]);
    assert_eq!(lease.len(), 1);
    let mut other = vec![0];
    let longer = TokenSpan::Image { content_hash: 12345, kv_len: 730, columns: 0 };
    interner.append(longer, &mut other).expect("an image within the limits");
    assert_eq!(
        cache.match_len(&other),
        1,
        "the same image with another length is a different span"
    );
}

/// Goal: a lease locks all ancestors, and dropping it unlocks them exactly once.
#[test]
fn a_lease_locks_all_ancestors_and_unlocks_them_once() {
    let mut cache = Cache::new(1, 8);
    cache.run(&[1, 2]);
    cache.run(&[1, 2, 3]);
    let lease = cache.writer.acquire(&cache.base, &[1, 2, 3]);
    assert_eq!(cache.writer.counts().locked, 3);
    assert!(cache.writer.evict(8).is_empty());
    drop(lease);
    assert_eq!(cache.writer.counts().locked, 0);
    cache.audit();
}

/// Goal: after a miss, a partial hit and a hit of one position, the tree owns all blocks of the
/// prompts until they are evicted, and only the blocks after the hit are new.
#[test]
fn the_tree_owns_the_blocks_of_what_was_computed() {
    let prompt: Vec<u32> = (0..10).collect();
    for (cached, prompt, hit) in
        [(&[][..], &prompt[..], 0), (&prompt[..5], &prompt, 5), (&prompt, &[0, 100, 101], 1)]
    {
        let mut cache = Cache::new(1, 100);
        cache.run(cached);
        let mut running = cache.start(prompt).expect("fits");
        assert_eq!((running.lease.len(), running.private.len()), (hit, prompt.len() - hit));
        assert_eq!(cache.publish(&mut running, prompt).blocks.len(), prompt.len() - hit);
        drop(running);
        let owned = cached.len() + prompt.len() - hit;
        assert_eq!((cache.writer.counts().cached, cache.pool.counts().free), (owned, 100 - owned));
        cache.audit();
        assert_eq!(cache.evict(100).len(), owned);
        assert_eq!(cache.pool.counts().free, 100);
        cache.audit();
    }
}

/// Goal: when two requests have computed the same prompt, the tree keeps one copy.
#[test]
fn the_same_prompt_computed_twice_is_stored_once() {
    let mut cache = Cache::new(1, 8);
    let mut first = cache.start(&[1, 2, 3]).expect("fits");
    let mut second = cache.start(&[1, 2, 3]).expect("fits");
    let one = cache.publish(&mut first, &[1, 2, 3]);
    let two = cache.publish(&mut second, &[1, 2, 3]);
    assert_eq!(one.blocks, two.blocks, "both continue with the same blocks");
    assert_eq!(two.duplicates, [3, 4, 5].map(BlockId));
    assert_eq!(cache.writer.counts().cached, 3);
    assert_eq!(cache.pool.counts().free, 5);
    drop((first, second));
    cache.audit();
}

/// Goal: a commit of positions that the lease covers already changes nothing, and keeps one lock.
#[test]
fn a_commit_of_what_the_lease_covers_keeps_one_lock() {
    let mut cache = Cache::new(1, 8);
    cache.run(&[1, 2, 3]);
    let mut running = cache.start(&[1, 2, 3]).expect("fits");
    assert_eq!(cache.publish(&mut running, &[1, 2, 3]), Commit::default());
    assert_eq!(running.lease.len(), 3);
    assert_eq!(cache.writer.counts().locked, 3);
    drop(running);
    assert_eq!(cache.writer.counts().locked, 0);
    cache.audit();
}

/// Goal: an engine that must compute at least one position uses a full match except for its last
/// position, which it computes in a private block. That block returns; the cached ones stay.
#[test]
fn a_full_match_leaves_its_last_position_to_a_private_block() {
    let mut cache = Cache::new(1, 100);
    let prompt = [0, 1, 2, 3];
    cache.run(&prompt);
    let free = cache.pool.counts().free;
    let lease = cache.writer.acquire(&cache.base, &prompt[..prompt.len() - 1]);
    let private = cache.pool.reserve(1).expect("free");
    assert_eq!(lease.len(), 3);
    assert!(!lease.blocks().contains(&private.blocks()[0]));
    drop((lease, private));
    assert_eq!(cache.pool.counts().free, free);
    cache.audit();
}

/// Goal: requests that run at the same time read the same prefix and write to different blocks.
#[test]
fn concurrent_requests_share_the_prefix_and_write_to_private_blocks() {
    let interner = TokenSpanInterner::new(8);
    let mut cache = Cache::new(1, 2000);
    let prompt = prompt_with_image(&interner, &[1]);
    let mut first = cache.start(&prompt).expect("fits");
    let _ = cache.publish(&mut first, &prompt);
    let second = cache.start(&prompt).expect("fits");
    assert_eq!(first.lease.blocks(), second.lease.blocks());
    let (one, two) = (cache.pool.reserve(10).expect("free"), cache.pool.reserve(10).expect("free"));
    assert!(one.blocks().iter().all(|block| !two.blocks().contains(block)));
    drop((first, second, one, two));
    cache.audit();
}

/// Goal: while everything is locked, a reservation fails with a shortage. Unlocked prefixes are
/// evicted to satisfy it.
#[test]
fn a_request_fits_only_after_prefixes_were_unlocked() {
    let mut cache = Cache::new(1, 100);
    let mut running: Vec<Running> = (0..100)
        .map(|i| {
            let mut running = cache.start(&[i]).expect("fits");
            let _ = cache.publish(&mut running, &[i]);
            running
        })
        .collect();
    let prompt: Vec<u32> = (1000..1010).collect();
    let shortage = cache.start(&prompt).err().expect("all is locked");
    assert_eq!(shortage, Shortage { requested: 10, free: 0, fenced: 0 });
    running.truncate(50);
    assert_eq!(cache.start(&prompt).expect("50 can be evicted").private.len(), 10);
    cache.audit();
}

/// Goal: in many requests with all kinds of matches, no block is lost or owned twice.
#[test]
fn a_thousand_requests_lose_no_block() {
    let mut cache = Cache::new(1, 99);
    for round in 0u32..1000 {
        let length = round % 10 + 1;
        let prompt: Vec<u32> = (0..length).map(|i| i * (1 + round / 7 % 3)).collect();
        cache.run(&prompt);
        if round % 50 == 0 {
            cache.audit();
        }
    }
    let evicted = cache.writer.evict(99);
    cache.pool.release(evicted);
    assert_eq!(cache.pool.counts().free, 99);
    assert_eq!(cache.writer.counts().nodes, 0);
    cache.audit();
}

/// Goal: a namespace is removed with its last block, and created again when it is used.
#[test]
fn empty_namespaces_are_pruned_and_can_return() {
    let mut cache = Cache::new(1, 100);
    let of = |i: u32| Namespace::builder().image(u128::from(i)).build();
    for i in 0..10 {
        cache.base = of(i);
        cache.run(&[0, 1, 2]);
    }
    assert_eq!(cache.writer.counts().namespaces, 10);
    let evicted = cache.writer.evict(100);
    cache.pool.release(evicted);
    assert_eq!(cache.writer.counts().namespaces, 0);
    cache.base = of(0);
    cache.run(&[0, 1]);
    assert_eq!(cache.writer.counts().namespaces, 1);
    cache.audit();
}

/// Goal: queries, and acquires that find nothing, create no namespace.
#[test]
fn a_query_creates_no_namespace() {
    let mut cache = Cache::new(1, 8);
    for i in 0..100u128 {
        let namespace = Namespace::builder().image(i).build();
        assert_eq!(cache.reader.query_match_len(&namespace, &[0, 1, 2]), 0);
        assert!(cache.writer.acquire(&namespace, &[0, 1, 2]).is_empty());
    }
    assert_eq!(cache.writer.counts().namespaces, 0);
    cache.base = Namespace::builder().image(42).build();
    cache.run(&[0, 1, 2]);
    assert_eq!(cache.match_len(&[0, 1, 2]), 3);
    cache.audit();
}

/// Goal: the blocks after an image are counted in positions; the image is not one position.
#[test]
fn blocks_after_an_image_are_counted_in_positions() {
    let interner = TokenSpanInterner::new(8);
    let mut cache = Cache::new(1, 1000);
    let tail: Vec<u32> = (0..10).collect();
    let full = prompt_with_image(&interner, &tail);
    cache.run(&full[..730]);
    let mut running = cache.start(&full).expect("fits");
    assert_eq!(running.lease.len(), 730);
    assert_eq!(cache.publish(&mut running, &full).blocks.len(), 10);
    let expected: Vec<BlockId> = (0..740).map(BlockId).collect();
    assert_eq!(running.lease.blocks(), expected);
}

/// Goal: with several images that cross block boundaries, matches and commits end between the
/// images.
#[test]
fn spans_that_cross_block_boundaries_are_matched_as_a_whole() {
    let interner = TokenSpanInterner::new(8);
    let mut prompt = vec![1, 2, 3];
    for content_hash in [7, 8] {
        interner
            .append(TokenSpan::Image { content_hash, kv_len: 10, columns: 0 }, &mut prompt)
            .expect("an image within the limits");
    }
    prompt.extend([4, 5]);
    let (mut writer, reader) = prefix_tree(4).expect("a block size");
    let base = Namespace::default();
    let mut lease = writer.acquire(&base, &prompt);
    // 25 positions, 6 whole blocks; the images cover 3..13 and 13..23: only 24 is a boundary.
    let commit = writer
        .commit(&mut lease, &prompt[..20], &[0, 1, 2, 3, 4].map(BlockId))
        .expect("a valid commit");
    assert_eq!(commit, Commit::default(), "20 is inside the second image, as are all before");
    let blocks = [0, 1, 2, 3, 4, 5].map(BlockId);
    assert_eq!(writer.commit(&mut lease, &prompt, &blocks).expect("a valid commit").blocks, blocks);
    assert_eq!(reader.query_match_len(&base, &prompt), 24);
    assert_eq!(reader.query_match_len(&base, &prompt[..23]), 0);
    drop(lease);
    // The same start with another second image: the blocks in common end inside the first image.
    let mut other = prompt[..13].to_vec();
    interner
        .append(TokenSpan::Image { content_hash: 9, kv_len: 10, columns: 0 }, &mut other)
        .expect("an image within the limits");
    other.extend([4, 5]);
    assert_eq!(reader.query_match_len(&base, &other), 0);
    let mut lease = writer.acquire(&base, &other);
    let blocks = [10, 11, 12, 13, 14, 15].map(BlockId);
    let commit = writer.commit(&mut lease, &other, &blocks).expect("a valid commit");
    assert_eq!(commit.duplicates, [10, 11, 12].map(BlockId), "equal blocks are shared");
    assert_eq!(reader.query_match_len(&base, &other), 24);
    assert_eq!(reader.query_match_len(&base, &prompt), 24);
    writer.audit().expect("consistent");
}
