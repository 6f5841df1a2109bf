//! The cases that a prefix cache of single-position blocks is known to get wrong, each by name:
//! splits, atoms, locks, ownership of blocks, idempotence, conservation, namespaces. What needs a
//! model (logits, generated tokens) is tested where there is one.

#[path = "support/cache.rs"]
mod support;

use stolon_kvcache::{
    BlockId, Commit, Namespace, Shortage, TokenSpan, TokenSpanInterner, prefix_tree,
};
use support::{Cache, Running};

const IMAGE: TokenSpan = TokenSpan::Image { content_hash: 12345, kv_len: 729 };

fn prompt_with_image(atoms: &TokenSpanInterner, tail: &[u32]) -> Vec<u32> {
    let mut prompt = vec![0];
    atoms.append(IMAGE, &mut prompt).expect("room");
    prompt.extend_from_slice(tail);
    prompt
}

/// Case 1: a match that ends inside a run splits it there; both parts keep their blocks.
#[test]
fn case_01_split_correctness() {
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

/// Case 2: an image counts as all its positions, and only as a whole.
#[test]
fn case_02_image_kv_length() {
    let atoms = TokenSpanInterner::new(8);
    let mut cache = Cache::new(1, 1000);
    let prompt = prompt_with_image(&atoms, &[1, 2]);
    cache.run(&prompt);
    assert_eq!(cache.match_len(&prompt), 732);
    assert_eq!(cache.match_len(&prompt[..730]), 730, "the first token and the image");
    assert_eq!(cache.match_len(&prompt[..400]), 1, "never a part of the image");
    let lease = cache.writer.acquire(&cache.base, &prompt[..400]);
    assert_eq!(lease.len(), 1);
    let mut other = vec![0];
    let longer = TokenSpan::Image { content_hash: 12345, kv_len: 730 };
    atoms.append(longer, &mut other).expect("room");
    assert_eq!(cache.match_len(&other), 1, "the same image in another length is another atom");
}

/// Case 3: a lock holds on all ancestors and ends with its lease, exactly once.
#[test]
fn case_03_lock_invariants() {
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

/// Case 4: after a miss the prompt's blocks belong to the tree until they are evicted.
#[test]
fn case_04_cache_miss_page_ownership() {
    let mut cache = Cache::new(1, 100);
    let prompt: Vec<u32> = (0..10).collect();
    cache.run(&prompt);
    assert_eq!(cache.pool.counts().free, 90);
    let evicted = cache.writer.evict(10);
    cache.pool.release(evicted);
    assert_eq!(cache.pool.counts().free, 100);
    cache.audit();
}

/// Case 5: after a partial hit all blocks of the prompt are the tree's, only the rest being new.
#[test]
fn case_05_partial_hit_page_ownership() {
    let mut cache = Cache::new(1, 100);
    let prompt: Vec<u32> = (0..10).collect();
    cache.run(&prompt[..5]);
    let mut running = cache.start(&prompt).expect("fits");
    assert_eq!((running.lease.len(), running.private.len()), (5, 5));
    assert_eq!(cache.publish(&mut running, &prompt).blocks.len(), 5);
    drop(running);
    assert_eq!(cache.writer.counts().cached, 10);
    assert_eq!(cache.pool.counts().free, 90);
    cache.audit();
}

/// Case 6: two requests that computed the same prompt leave one copy in the tree.
#[test]
fn case_06_insert_idempotency() {
    let mut cache = Cache::new(1, 8);
    let mut first = cache.start(&[1, 2, 3]).expect("fits");
    let mut second = cache.start(&[1, 2, 3]).expect("fits");
    let one = cache.publish(&mut first, &[1, 2, 3]);
    let two = cache.publish(&mut second, &[1, 2, 3]);
    assert_eq!(one.blocks, two.blocks, "both go on with the same blocks");
    assert_eq!(two.duplicates, [3, 4, 5].map(BlockId));
    assert_eq!(cache.writer.counts().cached, 3);
    assert_eq!(cache.pool.counts().free, 5);
    drop((first, second));
    cache.audit();
}

/// Case 7: committing what the lease covers already keeps exactly one lock.
#[test]
fn case_07_lock_transfer_identity() {
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

/// Case 8 and 10: a full match is used but for its last position, which goes to a private block;
/// that block comes back, the cached ones stay.
#[test]
fn case_08_and_10_full_match_recomputes_its_last_position() {
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

/// Case 9: requests that run at once read the same prefix and write to blocks of their own.
#[test]
fn case_09_multi_batch_shared_pages() {
    let atoms = TokenSpanInterner::new(8);
    let mut cache = Cache::new(1, 2000);
    let prompt = prompt_with_image(&atoms, &[1]);
    let mut first = cache.start(&prompt).expect("fits");
    cache.publish(&mut first, &prompt);
    let second = cache.start(&prompt).expect("fits");
    assert_eq!(first.lease.blocks(), second.lease.blocks());
    let (one, two) = (cache.pool.reserve(10).expect("free"), cache.pool.reserve(10).expect("free"));
    assert!(one.blocks().iter().all(|block| !two.blocks().contains(block)));
    drop((first, second, one, two));
    cache.audit();
}

/// Case 11: a hit of one position loses no block.
#[test]
fn case_11_tiny_hit() {
    let mut cache = Cache::new(1, 99);
    let prompt: Vec<u32> = (0..10).collect();
    cache.run(&prompt);
    let mut running = cache.start(&[0, 100, 101]).expect("fits");
    assert_eq!(running.lease.len(), 1);
    assert_eq!(cache.publish(&mut running, &[0, 100, 101]).blocks.len(), 2);
    drop(running);
    cache.audit();
    assert_eq!(cache.writer.evict(99).len(), 12);
}

/// Case 13: with everything locked an allocation fails and says so; unlocked prefixes then make
/// room.
#[test]
fn case_13_memory_pressure() {
    let mut cache = Cache::new(1, 100);
    let mut running: Vec<Running> = (0..100)
        .map(|i| {
            let mut running = cache.start(&[i]).expect("fits");
            cache.publish(&mut running, &[i]);
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

/// Cases 14 and 15: over many requests with all kinds of matches no block is lost or owned twice.
#[test]
fn case_14_and_15_page_conservation() {
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

/// Case 16: namespaces that hold nothing are gone, and come back when needed.
#[test]
fn case_16_namespace_pruning() {
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

/// Case 17: queries, and acquires that find nothing, make no namespace.
#[test]
fn case_17_match_only_creates_no_root() {
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

/// Case 18: after an image, blocks are counted in positions and not in atoms.
#[test]
fn case_18_blocks_align_after_an_image() {
    let atoms = TokenSpanInterner::new(8);
    let mut cache = Cache::new(1, 1000);
    let tail: Vec<u32> = (0..10).collect();
    let full = prompt_with_image(&atoms, &tail);
    cache.run(&full[..730]);
    let mut running = cache.start(&full).expect("fits");
    assert_eq!(running.lease.len(), 730);
    assert_eq!(cache.publish(&mut running, &full).blocks.len(), 10);
    let expected: Vec<BlockId> = (0..740).map(BlockId).collect();
    assert_eq!(running.lease.blocks(), expected);
}

/// Several images in one prompt, in blocks that do not fit them: a match ends between atoms or
/// not at all, and what is committed ends there too.
#[test]
fn atoms_that_cross_blocks() {
    let atoms = TokenSpanInterner::new(8);
    let mut prompt = vec![1, 2, 3];
    for content_hash in [7, 8] {
        atoms.append(TokenSpan::Image { content_hash, kv_len: 10 }, &mut prompt).expect("room");
    }
    prompt.extend([4, 5]);
    let (mut writer, reader) = prefix_tree(4).expect("a block size");
    let base = Namespace::default();
    let mut lease = writer.acquire(&base, &prompt);
    // 25 positions, 6 whole blocks; the images cover 3..13 and 13..23: only 24 is a border.
    let commit = writer.commit(&mut lease, &prompt[..20], &[0, 1, 2, 3, 4].map(BlockId));
    assert_eq!(commit, Commit::default(), "20 is inside the second image, as are all before");
    let blocks = [0, 1, 2, 3, 4, 5].map(BlockId);
    assert_eq!(writer.commit(&mut lease, &prompt, &blocks).blocks, blocks);
    assert_eq!(reader.query_match_len(&base, &prompt), 24);
    assert_eq!(reader.query_match_len(&base, &prompt[..23]), 0);
    drop(lease);
    // The same start with another second image: the blocks in common end inside the first image.
    let mut other = prompt[..13].to_vec();
    atoms.append(TokenSpan::Image { content_hash: 9, kv_len: 10 }, &mut other).expect("room");
    other.extend([4, 5]);
    assert_eq!(reader.query_match_len(&base, &other), 0);
    let mut lease = writer.acquire(&base, &other);
    let blocks = [10, 11, 12, 13, 14, 15].map(BlockId);
    let commit = writer.commit(&mut lease, &other, &blocks);
    assert_eq!(commit.duplicates, [10, 11, 12].map(BlockId), "what is the same is shared");
    assert_eq!(reader.query_match_len(&base, &other), 24);
    assert_eq!(reader.query_match_len(&base, &prompt), 24);
    writer.audit().expect("consistent");
}
