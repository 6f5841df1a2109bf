//! Commits whose lease, positions and blocks do not belong together are refused with an error, and
//! change nothing.

use stolon_kvcache::{
    BlockId, BlockPool, Commit, CommitError, Namespace, TokenSpan, TokenSpanInterner, TreeBuilder,
    TreeReader, TreeWriter, prefix_tree,
};

/// A tree over 100 blocks of one position each, in which the blocks 0 to 2 hold the prompt 1, 2, 3.
fn tree() -> (TreeWriter, TreeReader) {
    let (mut writer, reader) =
        TreeBuilder::new(1).block_count(100).build().expect("a valid block size");
    let mut lease = writer.acquire(&Namespace::default(), &[]);
    let blocks = [0, 1, 2].map(BlockId);
    let commit = writer.commit(&mut lease, &[1, 2, 3], &blocks).expect("a valid commit");
    assert_eq!(commit.blocks, blocks);
    (writer, reader)
}

/// Offers `blocks` for `positions` after the cached prefix of `positions`, expects the error, and
/// that nothing has changed.
fn check(positions: &[u32], blocks: &[u32], expected: CommitError) {
    let (mut writer, reader) = tree();
    let mut lease = writer.acquire(&Namespace::default(), positions);
    let locked = lease.len();
    let (counts, version) = (writer.counts(), reader.tree_version());
    let blocks: Vec<BlockId> = blocks.iter().copied().map(BlockId).collect();
    assert_eq!(writer.commit(&mut lease, positions, &blocks), Err(expected));
    assert_eq!((writer.counts(), reader.tree_version()), (counts, version));
    assert_eq!(lease.len(), locked);
    writer.audit().expect("consistent");
    // None of the offered blocks was recorded, so those that are valid can be offered again.
    let fresh: Vec<BlockId> = (50..50 + positions.len() as u32).map(BlockId).collect();
    let mut lease = writer.acquire(&Namespace::default(), &[]);
    let again = vec![9; positions.len()];
    assert!(writer.commit(&mut lease, &again, &fresh).is_ok());
    writer.audit().expect("consistent");
}

/// Goal: a block id outside of the KV memory is never served.
#[test]
fn blocks_out_of_range_are_refused() {
    for block in [100, 101, u32::MAX] {
        let block = BlockId(block);
        let expected = CommitError::BlockOutOfRange { block, block_count: 100 };
        check(&[1, 2, 3, 4, 5], &[50, block.0], expected);
    }
}

/// Goal: a block that the tree has in another place is refused, also where the tree would not take
/// it, because it would return it as a duplicate and the caller would free it.
#[test]
fn blocks_in_two_places_are_refused() {
    let in_use = |block| CommitError::BlockInUse { block: BlockId(block) };
    check(&[1, 2, 3, 4], &[1], in_use(1));
    check(&[7, 8], &[50, 50], in_use(50));
    let (mut writer, _reader) = tree();
    let mut early = writer.acquire(&Namespace::default(), &[]);
    let swapped = [1, 0, 2].map(BlockId);
    assert_eq!(writer.commit(&mut early, &[1, 2, 3], &swapped), Err(in_use(1)));
    let doubled = [50, 50, 51].map(BlockId);
    assert_eq!(writer.commit(&mut early, &[1, 2, 3], &doubled), Err(in_use(50)));
    let own = [0, 1, 2].map(BlockId);
    let commit = Commit { blocks: own.to_vec(), duplicates: Vec::new() };
    assert_eq!(writer.commit(&mut early, &[1, 2, 3], &own), Ok(commit), "already there");
}

/// Goal: a block can be offered again after it has left the tree, on each way out.
#[test]
fn returned_blocks_can_be_offered_again() {
    let (mut writer, _reader) = tree();
    let base = Namespace::default();
    for round in 0..4 {
        let held = writer.acquire(&base, &[1]);
        let first = match round {
            0 => writer.evict(2),
            1 => writer.flush(),
            _ => writer.evict_namespace(&base),
        };
        drop(held);
        let rest = match round {
            3 => writer.evict_namespace(&base),
            _ => writer.evict(usize::MAX),
        };
        let mut out: Vec<BlockId> = first.iter().chain(&*rest).map(|block| block.id).collect();
        out.sort_unstable();
        assert_eq!(out, [0, 1, 2].map(BlockId));
        writer.audit().expect("consistent");
        let mut lease = writer.acquire(&base, &[]);
        let _ = writer.commit(&mut lease, &[1, 2, 3], &out).expect("a valid commit");
    }
}

/// Goal: duplicates belong to the caller, who may offer them elsewhere.
#[test]
fn duplicates_can_be_offered_again() {
    let (mut writer, _reader) = tree();
    let mut early = writer.acquire(&Namespace::default(), &[]);
    let commit = writer.commit(&mut early, &[1, 2], &[50, 51].map(BlockId)).expect("valid");
    assert_eq!(commit.duplicates, [50, 51].map(BlockId));
    let mut other = writer.acquire(&Namespace::default(), &[8, 9]);
    let commit = writer.commit(&mut other, &[8, 9], &commit.duplicates).expect("valid");
    assert_eq!(commit.blocks, [50, 51].map(BlockId));
    writer.audit().expect("consistent");
}

/// Goal: a lease of another tree and positions of another prompt are refused by name.
#[test]
fn a_lease_is_used_with_its_own_tree_and_prompt() {
    let (mut writer, _reader) = tree();
    let (mut other, _) = prefix_tree(1).expect("a valid block size");
    let mut foreign = other.acquire(&Namespace::default(), &[]);
    let refused = writer.commit(&mut foreign, &[1, 2, 3, 4], &[BlockId(4)]);
    assert_eq!(refused, Err(CommitError::OtherTree));
    let mut lease = writer.acquire(&Namespace::default(), &[1, 2]);
    let refused = writer.commit(&mut lease, &[1, 9, 3], &[BlockId(4)]);
    assert_eq!(refused, Err(CommitError::OtherPrefix { locked: 2 }));
}

/// Goal: token ids with bit 31 set are refused by index, and never cached where no match can find
/// them. A prompt that the caller cuts inside a span is accepted.
#[test]
fn token_ids_with_bit_31_are_refused() {
    let invalid = |index, got| CommitError::InvalidPosition { index, got };
    check(&[1, 2, 3, u32::MAX], &[50], invalid(3, u32::MAX));
    check(&[1, u32::MAX, 5], &[50, 51], invalid(1, u32::MAX));
    check(&[0xC000_0001, 5], &[50, 51], invalid(0, 0xC000_0001));

    let (mut writer, _reader) = tree();
    let mut prompt = vec![8];
    let image = TokenSpan::Image { content_hash: 1, kv_len: 3, columns: 0 };
    TokenSpanInterner::new(1).append(image, &mut prompt).expect("in range");
    let mut lease = writer.acquire(&Namespace::default(), &prompt);
    let blocks = [50, 51, 52, 53].map(BlockId);
    let commit = writer.commit(&mut lease, &prompt[..2], &blocks).expect("valid");
    assert_eq!(commit.blocks, [BlockId(50)]);
    let commit = writer.commit(&mut lease, &prompt, &blocks[1..]).expect("valid");
    assert_eq!(commit.blocks, [51, 52, 53].map(BlockId));
}

/// Goal: a refused commit from a lease leaves all blocks in the lease, whether the tree has blocks
/// that no pool manages or the KV memory is smaller than the pool.
#[test]
fn a_refused_commit_from_a_lease_loses_no_block() {
    let small = TreeBuilder::new(1).block_count(1).build().expect("a valid block size");
    let out_of_range = CommitError::BlockOutOfRange { block: BlockId(1), block_count: 1 };
    for ((mut writer, _reader), expected) in
        [(tree(), CommitError::OtherPool), (small, out_of_range)]
    {
        let (mut pool, _fence) = BlockPool::new(200).expect("a valid count");
        let counts = writer.counts();
        let mut prefix = writer.acquire(&Namespace::default(), &[7, 8]);
        let mut private = pool.reserve(2).expect("free blocks");
        assert_eq!(writer.commit_from(&mut prefix, &[7, 8], &mut private), Err(expected));
        assert_eq!((private.blocks(), prefix.len()), (&[0, 1].map(BlockId)[..], 0));
        assert_eq!(writer.counts(), counts);
        drop(private);
        assert_eq!(pool.counts().free, 200);
        pool.audit().expect("consistent");
        writer.audit().expect("consistent");
    }
}
