//! Goal: `commit_from` loses no block, for any part of the offered blocks that the tree takes.

use stolon_kvcache::{
    AuditError, BlockId, BlockPool, CommitError, Namespace, PoolCounts, TokenSpan,
    TokenSpanInterner, TreeWriter, prefix_tree,
};

/// Evicts everything that is not locked and expects that the whole pool is free afterward.
fn assert_all_blocks_come_back(writer: &mut TreeWriter, pool: &mut BlockPool) {
    pool.release(writer.evict(usize::MAX));
    let all = PoolCounts { free: pool.block_count(), ..PoolCounts::default() };
    assert_eq!(pool.counts(), all);
    writer.audit().expect("consistent tree");
    pool.audit().expect("consistent pool");
}

/// A prompt of 10 text tokens, an image of 60 positions, and 2 more tokens.
fn prompt_with_image(interner: &TokenSpanInterner, content_hash: u128) -> Vec<u32> {
    let mut prompt = vec![1; 10];
    let image = TokenSpan::Image { content_hash, kv_len: 60, columns: 0 };
    interner.append(image, &mut prompt).expect("an image within the limits");
    prompt.extend([2, 3]);
    prompt
}

/// Goal: when a prefill chunk ends inside an image, the tree takes none of the blocks that the
/// image covers. They stay private, and all of them come back.
#[test]
fn blocks_of_a_chunk_that_ends_inside_an_image_come_back() {
    let (mut writer, reader) = prefix_tree(16).expect("a block size");
    let (mut pool, _fence) = BlockPool::new(100).expect("a valid count");
    let interner = TokenSpanInterner::new(8);
    let base = Namespace::default();
    for content_hash in 0..3 {
        let prompt = prompt_with_image(&interner, content_hash);
        let mut prefix = writer.acquire(&base, &prompt);
        let mut private = pool.reserve(prompt.len().div_ceil(16)).expect("free blocks");
        assert_eq!(writer.commit_from(&mut prefix, &prompt[..64], &mut private), Ok(0));
        assert_eq!((prefix.blocks().len(), private.len()), (0, 5), "all blocks stay private");
        assert_eq!(reader.query_match_len(&base, &prompt), 0);
    }
    assert_all_blocks_come_back(&mut writer, &mut pool);
}

/// Goal: a tree has blocks of one pool only, or blocks that no pool manages, so that an evicted block
/// cannot be freed in a pool that it did not come from.
#[test]
fn a_tree_has_blocks_of_one_pool() {
    let base = Namespace::default();
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    let (mut pool, _fence) = BlockPool::new(4).expect("a valid count");
    let (mut other, _fence) = BlockPool::new(4).expect("a valid count");
    let mut prefix = writer.acquire(&base, &[1]);
    let mut private = pool.reserve(1).expect("free blocks");
    assert_eq!(writer.commit_from(&mut prefix, &[1], &mut private), Ok(1));
    let mut foreign = other.reserve(1).expect("free blocks");
    let refused = CommitError::OtherPool;
    assert_eq!(writer.commit_from(&mut prefix, &[1, 2], &mut foreign), Err(refused.clone()));
    assert_eq!(writer.commit(&mut prefix, &[1, 2], &[BlockId(3)]), Err(refused.clone()));
    assert_eq!(foreign.len(), 1, "the caller keeps the blocks");

    let (mut by_ids, _reader) = prefix_tree(1).expect("a block size");
    let mut lease = by_ids.acquire(&base, &[1]);
    let _ = by_ids.commit(&mut lease, &[1], &[BlockId(0)]).expect("valid");
    assert_eq!(by_ids.commit_from(&mut lease, &[1, 2], &mut foreign), Err(refused));
    drop(lease);
    other.release(by_ids.evict(1));
    let misuse = AuditError::Misuse { expected: "committed", count: 1 };
    assert_eq!(other.audit(), Err(misuse), "not a block of this pool");
    drop(prefix);
    assert_all_blocks_come_back(&mut writer, &mut pool);
}

/// Goal: full blocks move to the prefix; the partial block at the end stays private.
#[test]
fn full_blocks_move_from_the_private_lease_to_the_prefix() {
    let (mut writer, reader) = prefix_tree(4).expect("a block size");
    let (mut pool, _fence) = BlockPool::new(10).expect("a valid count");
    let base = Namespace::default();
    let prompt: Vec<u32> = (0..10).collect();
    let mut prefix = writer.acquire(&base, &prompt);
    let mut private = pool.reserve(3).expect("free blocks");
    assert_eq!(
        writer.commit_from(&mut prefix, &prompt[..7], &mut private),
        Ok(1),
        "5 to 7 are partial"
    );
    assert_eq!(
        writer.commit_from(&mut prefix, &prompt[..7], &mut private),
        Ok(0),
        "nothing is new"
    );
    assert_eq!(writer.commit_from(&mut prefix, &prompt, &mut private), Ok(1));
    assert_eq!(prefix.blocks(), [0, 1].map(BlockId));
    assert_eq!(private.blocks(), [BlockId(2)]);
    assert_eq!(reader.query_match_len(&base, &prompt), 8);
    let counts = PoolCounts { free: 7, reserved: 1, committed: 2, fenced: 0 };
    assert_eq!(pool.counts(), counts);
    drop((prefix, private));
    assert_all_blocks_come_back(&mut writer, &mut pool);
}

/// Goal: when two requests computed the same prompt, the second one continues with the tree's
/// blocks, and its own copies return to the pool by themselves, after the step that may use them.
#[test]
fn duplicates_return_to_the_pool() {
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    let (mut pool, fence) = BlockPool::new(8).expect("a valid count");
    let base = Namespace::default();
    let mut first = (writer.acquire(&base, &[1, 2, 3]), pool.reserve(3).expect("free blocks"));
    let mut second = (writer.acquire(&base, &[1, 2, 4]), pool.reserve(3).expect("free blocks"));
    assert_eq!(writer.commit_from(&mut first.0, &[1, 2, 3], &mut first.1), Ok(3));
    let step = fence.begin();
    assert_eq!(writer.commit_from(&mut second.0, &[1, 2, 4], &mut second.1), Ok(3));
    assert_eq!(second.0.blocks(), [0, 1, 5].map(BlockId), "two blocks are shared");
    let counts = PoolCounts { free: 2, fenced: 2, reserved: 0, committed: 4 };
    assert_eq!(pool.counts(), counts, "the running step may still use the copies");
    drop(step);
    assert_eq!(pool.counts().free, 4);
    drop((first, second));
    assert_all_blocks_come_back(&mut writer, &mut pool);
}

/// Goal: a commit that does not fit the lease changes nothing and leaves all blocks private.
#[test]
fn a_refused_commit_leaves_the_blocks_private() {
    let (mut writer, _reader) = prefix_tree(1).expect("a block size");
    let (mut other_tree, _) = prefix_tree(1).expect("a block size");
    let (mut pool, _fence) = BlockPool::new(4).expect("a valid count");
    let base = Namespace::default();
    let mut prefix = writer.acquire(&base, &[1, 2]);
    let mut private = pool.reserve(4).expect("free blocks");
    assert_eq!(writer.commit_from(&mut prefix, &[1, 2], &mut private), Ok(2));
    let unrelated = [7, 8, 9];
    let refused = writer.commit_from(&mut prefix, &unrelated, &mut private);
    assert_eq!(refused, Err(CommitError::OtherPrefix { locked: 2 }));
    let refused = other_tree.commit_from(&mut prefix, &[1, 2, 3], &mut private);
    assert_eq!(refused, Err(CommitError::OtherTree));
    assert_eq!((prefix.len(), private.blocks()), (2, &[2, 3].map(BlockId)[..]));
    drop((prefix, private));
    assert_all_blocks_come_back(&mut writer, &mut pool);
}
