//! Checkpoints of recurrent states: where a request can resume, and which checkpoints are evicted.

use proptest::prelude::*;
use stolon_kvcache::{
    BlockLease, BlockPool, CacheEvent, EvictionCandidate, EvictionOrder, EvictionRank, Namespace,
    PrefixMatch, TreeBuilder, TreeReader, TreeWriter,
};

fn base() -> Namespace {
    Namespace::default()
}

/// A tree with checkpoints, and the pool of its blocks.
struct Cache {
    writer: TreeWriter,
    reader: TreeReader,
    pool: BlockPool,
    block_size: usize,
    checkpoint_blocks: usize,
}

impl Cache {
    fn new(block_size: usize, checkpoint_blocks: usize, block_count: usize) -> Cache {
        let builder = TreeBuilder::new(block_size).checkpoint_blocks(checkpoint_blocks);
        let (writer, reader) = builder.build().expect("supported sizes");
        let (pool, _fence) = BlockPool::new(block_count).expect("a valid count");
        Cache { writer, reader, pool, block_size, checkpoint_blocks }
    }

    fn reserve(&mut self, count: usize) -> BlockLease {
        let shortage = match self.pool.reserve(count) {
            Ok(lease) => return lease,
            Err(shortage) => shortage,
        };
        let evicted = self.writer.evict(shortage.missing());
        self.pool.release(evicted);
        self.pool.reserve(count).expect("nothing is locked")
    }

    /// Caches the full blocks of `positions`.
    fn commit(&mut self, positions: &[u32]) {
        let mut lease = self.writer.acquire(&base(), positions);
        let missing = (positions.len() - lease.len()) / self.block_size;
        let mut private = self.reserve(missing);
        self.writer.commit_from(&mut lease, positions, &mut private).expect("valid");
    }

    /// Adds a checkpoint after `positions`.
    fn checkpoint(&mut self, positions: &[u32]) -> bool {
        let mut private = self.reserve(self.checkpoint_blocks);
        self.writer.commit_checkpoint(&base(), positions, &mut private).expect("valid").is_some()
    }

    fn resume(&self, positions: &[u32]) -> (usize, usize) {
        let PrefixMatch { cached, resume } = self.reader.query_resume(&base(), positions);
        (cached, resume)
    }

    fn evict(&mut self, count: usize) -> usize {
        let evicted = self.writer.evict(count);
        let count = evicted.len();
        self.pool.release(evicted);
        count
    }

    fn check(&mut self) {
        self.writer.audit().expect("the tree");
        self.pool.audit().expect("the pool");
        let (tree, pool) = (self.writer.counts(), self.pool.counts());
        assert_eq!(tree.cached + tree.detached, pool.committed);
    }

    /// Whether there is a checkpoint after `positions`, by a query for its positions.
    fn has_checkpoint(&self, positions: &[u32]) -> bool {
        let span = self.checkpoint_blocks * self.block_size;
        let mut whole = positions.to_vec();
        whole.extend(std::iter::repeat_n(0xF000_0000, span - 1));
        whole.push(0xB000_0000);
        self.reader.query_match_len(&base(), &whole) == whole.len()
    }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

/// Goal: a request resumes at the deepest checkpoint before its last position, wherever its prompt
/// differs from the cached ones, and the checkpoint changes no match.
#[test]
fn a_request_resumes_at_the_deepest_checkpoint_of_its_prefix() {
    for checkpoint_blocks in [1, 3] {
        let mut cache = Cache::new(4, checkpoint_blocks, 64);
        let prompt = tokens(0..20);
        cache.commit(&prompt);
        assert_eq!(cache.resume(&prompt), (20, 0));
        assert!(cache.checkpoint(&prompt[..8]));
        assert!(cache.checkpoint(&prompt[..16]));
        assert_eq!(cache.resume(&prompt), (20, 16));
        assert_eq!(cache.resume(&prompt[..17]), (16, 16));
        assert_eq!(cache.resume(&prompt[..16]), (16, 8), "one position must be computed");
        assert_eq!(cache.resume(&[&prompt[..14], &[99; 9]].concat()), (12, 8));
        assert_eq!(cache.resume(&prompt[..8]), (8, 0));
        assert_eq!(cache.resume(&[7; 9]), (0, 0));
        // A continuation of the last checkpoint, and one from between the two.
        cache.commit(&tokens(0..28));
        cache.commit(&[&prompt[..12], &[50; 8]].concat());
        assert_eq!(cache.resume(&tokens(0..40)), (28, 16));
        assert_eq!(cache.resume(&[&prompt[..12], &[50; 9]].concat()), (20, 8));
        cache.check();
    }
}

/// Goal: a checkpoint is locked with its prefix, its blocks are those that were committed, and it
/// is published only after its prefix.
#[test]
fn a_checkpoint_is_locked_with_its_prefix() {
    let mut cache = Cache::new(4, 2, 16);
    let prompt = tokens(0..12);
    let mut private = cache.reserve(2);
    let blocks = private.blocks().to_vec();
    let committed = cache.writer.commit_checkpoint(&base(), &prompt[..8], &mut private);
    assert!(committed.is_ok_and(|lease| lease.is_none()) && private.len() == 2, "no prefix");
    cache.commit(&prompt);
    let committed = cache.writer.commit_checkpoint(&base(), &prompt[..8], &mut private);
    let committed = committed.ok().flatten().expect("it is cached");
    assert_eq!((committed.len(), committed.blocks(), private.len()), (8, &blocks[..], 0));
    drop(committed);
    assert!(cache.checkpoint(&prompt[..8]), "it is there already");
    assert_eq!(cache.pool.counts().committed, 5, "and the second copy was returned");
    assert!(cache.writer.acquire_checkpoint(&base(), &prompt[..8], 0).is_none());
    let lease = cache.writer.acquire_checkpoint(&base(), &prompt, 0).expect("it is cached");
    assert_eq!((lease.len(), lease.blocks()), (8, &blocks[..]));
    assert_eq!(cache.evict(9), 1, "all but the third block is locked");
    drop(lease);
    assert_eq!(cache.evict(9), 4);
    cache.check();
}

/// Goal: blocks that no request can use are evicted first; then checkpoints in the order of
/// eviction, each before its prefix and as a whole. Blocks of one that were not needed are used
/// next.
#[test]
fn checkpoints_are_evicted_before_their_prefix() {
    let mut cache = Cache::new(4, 3, 32);
    let prompt = tokens(0..12);
    cache.commit(&prompt);
    assert!(cache.checkpoint(&prompt[..8]));
    assert!(cache.checkpoint(&prompt));
    assert!(cache.writer.acquire_checkpoint(&base(), &prompt, 0).is_some());
    cache.commit(&tokens(100..108));
    assert_eq!((cache.evict(2), cache.resume(&tokens(100..109))), (2, (0, 0)), "unusable KV");
    assert_eq!((cache.evict(1), cache.resume(&tokens(0..13))), (1, (12, 8)), "the older one");
    let counts = cache.writer.counts();
    assert_eq!((counts.cached, counts.freed, counts.returnable()), (6, 2, 8));
    assert_eq!((cache.evict(3), cache.resume(&tokens(0..13))), (3, (8, 8)), "and its KV");
    assert_eq!((cache.evict(1), cache.resume(&prompt)), (1, (8, 0)));
    assert_eq!((cache.evict(9), cache.writer.counts().cached), (4, 0));
    cache.check();
}

/// Goal: an order learns how many blocks a checkpoint saves: those from the one before it.
#[test]
fn an_order_learns_what_a_checkpoint_saves() {
    let mut cache = Cache::new(4, 3, 64);
    cache.writer.set_eviction_order(Box::new(LeastSaved));
    let (long, short) = (tokens(0..48), [&tokens(0..48)[..], &[7; 4]].concat());
    for prompt in [&long, &short] {
        cache.commit(prompt);
        assert!(cache.checkpoint(prompt));
    }
    assert_eq!(cache.evict(3), 3);
    let after = |prompt: &[u32]| cache.resume(&[prompt, &[1]].concat()).1;
    assert_eq!((after(&short), after(&long)), (48, 48), "the short one saved one block only");
    cache.check();
}

/// Evicts the leaf that saves the least first; of equal ones, the one with the fewest
/// continuations.
#[derive(Debug)]
struct LeastSaved;

impl EvictionOrder for LeastSaved {
    fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
        EvictionRank(leaf.saved_blocks as u64, leaf.continuations as u64)
    }
}

/// Goal: a lock that only keeps a checkpoint, such as a pin, does not count as a use of it.
#[test]
fn a_lock_is_no_hit() {
    /// Evicts the leaf with the fewest hits first.
    #[derive(Debug)]
    struct LeastHit;

    impl EvictionOrder for LeastHit {
        fn rank(&mut self, leaf: &EvictionCandidate) -> EvictionRank {
            EvictionRank(u64::from(leaf.hits), 0)
        }
    }
    let mut cache = Cache::new(4, 3, 64);
    cache.writer.set_eviction_order(Box::new(LeastHit));
    let (used, kept) = (tokens(0..16), tokens(100..116));
    for prompt in [&used, &kept] {
        cache.commit(prompt);
        assert!(cache.checkpoint(&prompt[..12]));
    }
    assert!(cache.writer.acquire_checkpoint(&base(), &used, 0).is_some());
    let stats = cache.writer.stats().clone();
    for _ in 0..3 {
        let lease = cache.writer.lock_checkpoint(&base(), &kept).expect("it is cached");
        assert_eq!((lease.len(), cache.writer.lock(&base(), &kept).len()), (12, 16));
        let pin = cache.writer.pin(&base(), &kept).expect("no budget");
        assert!(cache.writer.unpin(pin));
    }
    assert_eq!(*cache.writer.stats(), stats);
    // The KV after the checkpoints goes first.
    assert_eq!(cache.evict(2 + 3), 5);
    assert_eq!((cache.resume(&used).1, cache.resume(&kept).1), (12, 0));
}

/// Goal: subscribers learn of KV only, and a snapshot has the same.
#[test]
fn events_name_no_checkpoint() {
    let mut cache = Cache::new(4, 2, 32);
    let events = cache.writer.subscribe(100).expect("a capacity");
    let prompt = tokens(0..8);
    cache.commit(&prompt);
    assert!(cache.checkpoint(&prompt));
    assert!(cache.checkpoint(&prompt[..4]));
    let stored = cache.writer.snapshot().events;
    let count = |events: &[CacheEvent]| -> usize {
        let hashes = |event: &CacheEvent| match event {
            CacheEvent::Stored { hashes, positions, .. } => {
                assert_eq!(positions.len(), 4 * hashes.len());
                hashes.len()
            }
            CacheEvent::Removed { hashes } => hashes.len(),
            _ => 0,
        };
        events.iter().map(hashes).sum()
    };
    assert_eq!(count(&stored), 2);
    let dump = cache.reader.dump();
    let shown = dump.nodes.iter().map(|node| (node.position_count, node.checkpoint));
    assert_eq!(shown.collect::<Vec<_>>(), [(4, true), (4, true)]);
    assert_eq!(cache.writer.counts().cached, 6);
    let mut prefixes = Vec::new();
    let evicted = cache.writer.evict_prefixes(6, &mut prefixes);
    assert_eq!(evicted.len(), 6);
    cache.pool.release(evicted);
    let evicted: usize = prefixes.iter().map(|prefix| prefix.blocks.len() - prefix.evicted).sum();
    assert_eq!(evicted, 2);
    let events: Vec<CacheEvent> = events.drain().into_iter().map(|event| event.event).collect();
    assert_eq!(count(&events), 4, "two blocks stored and two removed");
    cache.check();
}

/// Goal: a flush and the end of a namespace free the blocks of checkpoints. Blocks that a lease
/// holds are free after it was dropped.
#[test]
fn flushed_checkpoints_are_freed() {
    let mut cache = Cache::new(2, 2, 16);
    let prompt = tokens(0..6);
    cache.commit(&prompt);
    assert!(cache.checkpoint(&prompt[..4]));
    let lease = cache.writer.acquire_checkpoint(&base(), &prompt, 0).expect("it is cached");
    let flushed = cache.writer.flush();
    cache.pool.release(flushed);
    assert_eq!(cache.resume(&prompt), (0, 0));
    assert_eq!(cache.pool.counts().committed, 4);
    drop(lease);
    assert_eq!(cache.evict(16), 4);
    cache.check();
}

/// Goal: a pin keeps the last checkpoint of its prefix, within the budget, until it ends.
#[test]
fn a_pin_keeps_the_last_checkpoint_of_its_prefix() {
    let tree = TreeBuilder::new(4).checkpoint_blocks(2).pin_budget(5);
    let (writer, reader) = tree.build().expect("supported sizes");
    let (pool, _fence) = BlockPool::new(32).expect("a valid count");
    let mut cache = Cache { writer, reader, pool, block_size: 4, checkpoint_blocks: 2 };
    let prompt = tokens(0..16);
    cache.commit(&prompt);
    assert!(cache.checkpoint(&prompt[..8]));
    assert!(cache.checkpoint(&prompt[..12]));
    assert!(cache.writer.pin(&base(), &prompt).is_err(), "four blocks and two of a checkpoint");
    let pin = cache.writer.pin(&base(), &prompt[..12]).expect("three blocks and two");
    assert_eq!(cache.writer.pins()[0].block_count, 5);
    assert_eq!(cache.evict(32), 1 + 2, "all else");
    assert_eq!(cache.resume(&prompt), (12, 12));
    cache.check();
    assert!(cache.writer.unpin(pin));
    assert_eq!(cache.evict(32), 5);
    cache.commit(&prompt);
    assert!(cache.checkpoint(&prompt[..12]));
    cache.writer.pin(&base(), &prompt[..12]).expect("within the budget");
    let flushed = cache.writer.flush();
    assert_eq!(flushed.len(), 6, "a flush ends pins");
    cache.pool.release(flushed);
    cache.check();
}

/// Goal: the whole cache does the same: blocks for a checkpoint are reserved, published behind a
/// sequence's cached positions only, and found by the next request.
#[test]
fn a_cache_of_its_own_has_checkpoints() {
    let tree = TreeBuilder::new(4).checkpoint_blocks(2);
    let mut cache = tree.build_cache(8).expect("supported sizes");
    let prompt = tokens(0..13);
    let mut sequence = cache.begin(&base(), &prompt).expect("free blocks");
    let mut blocks = cache.reserve_checkpoint().expect("free blocks");
    assert!(cache.commit_checkpoint(&sequence, 12, &mut blocks).is_err(), "nothing is committed");
    cache.commit(&mut sequence, 13).expect("valid");
    let lease = cache.commit_checkpoint(&sequence, 12, &mut blocks).expect("valid");
    assert_eq!((lease.map(|lease| lease.len()), blocks.len()), (Some(12), 0));
    drop(sequence);
    let lease = cache.acquire_checkpoint(&base(), &prompt).expect("it is cached");
    assert_eq!((lease.len(), lease.blocks().len()), (12, 2));
    assert_eq!(cache.make_room(8).len(), 0, "it is locked");
    drop(lease);
    assert_eq!(cache.make_room(8).len(), 5);
    cache.audit().expect("consistent");
}

/// Goal: a tree without checkpoints has none, and a prompt cannot contain one.
#[test]
fn prompts_contain_no_checkpoints() {
    let mut cache = Cache::new(2, 0, 16);
    cache.commit(&[1, 2, 3, 4]);
    assert!(!cache.checkpoint(&[1, 2]));
    assert_eq!(cache.resume(&[1, 2, 3, 4, 5]), (4, 4));
    let mut lease = cache.writer.acquire(&base(), &[]);
    let mut private = cache.reserve(1);
    let forged = [0xF000_0000, 0xB000_0000];
    assert!(cache.writer.commit_from(&mut lease, &forged, &mut private).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Goal: after any history, a query finds the deepest checkpoint that a query for the
    /// checkpoint's own positions finds, the writer locks the same one, and every block is
    /// accounted for.
    #[test]
    fn queries_find_the_deepest_checkpoint(
        sizes in (0u32..3, 1usize..4),
        steps in prop::collection::vec((0u8..5, prop::collection::vec(0u32..2, 1..24)), 1..60),
    ) {
        let block_size = 1 << sizes.0;
        let mut cache = Cache::new(block_size, sizes.1, 64);
        for (step, prompt) in steps {
            let whole = prompt.len() / block_size * block_size;
            match step {
                0 | 1 => cache.commit(&prompt),
                2 | 3 => {
                    let cached = cache.reader.query_match_len(&base(), &prompt);
                    cache.checkpoint(&prompt[..whole.min(cached)]);
                }
                _ => {
                    cache.evict(prompt.len() / 2);
                }
            }
            let ends = (1..prompt.len()).filter(|len| len % block_size == 0);
            let expected = ends.filter(|&len| cache.has_checkpoint(&prompt[..len])).max();
            let found = cache.reader.query_resume(&base(), &prompt);
            prop_assert_eq!(found.resume, expected.unwrap_or(0));
            prop_assert_eq!(found.cached, cache.reader.query_match_len(&base(), &prompt));
            let lease = cache.writer.acquire_checkpoint(&base(), &prompt, 0);
            prop_assert_eq!(lease.map(|lease| lease.len()), expected);
            cache.check();
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Goal: the order of eviction follows from the content of the cache at that time, and not from
    /// its content when a checkpoint was ranked. Ranking everything anew changes nothing.
    #[test]
    fn ranks_follow_from_what_is_cached(
        steps in prop::collection::vec(
            (0u8..7, 0usize..20, prop::collection::vec(0u32..3, 2..12)), 20..80,
        ),
    ) {
        let mut caches = [Cache::new(2, 1, 256), Cache::new(2, 1, 256)];
        for cache in &mut caches {
            cache.writer.set_eviction_order(Box::new(LeastSaved));
        }
        for (step, shared, own) in steps {
            // Prompts share a long prefix, so that there are checkpoints before others.
            let prompt = [&vec![0; shared][..], &own].concat();
            let mut evicted = [Vec::new(), Vec::new()];
            for (index, cache) in caches.iter_mut().enumerate() {
                let cached = cache.reader.query_match_len(&base(), &prompt);
                match step {
                    0 | 1 => cache.commit(&prompt),
                    2 | 3 => {
                        cache.checkpoint(&prompt[..cached]);
                    }
                    4 => {
                        cache.checkpoint(&prompt[..shared.min(cached) / 2 * 2]);
                    }
                    _ => {
                        if index == 1 {
                            cache.writer.set_eviction_order(Box::new(LeastSaved));
                        }
                        let blocks = cache.writer.evict(1);
                        evicted[index].extend(blocks.iter().map(|block| block.hash));
                        cache.pool.release(blocks);
                    }
                }
                cache.check();
            }
            let [first, second] = evicted;
            prop_assert_eq!(first, second);
        }
    }
}
