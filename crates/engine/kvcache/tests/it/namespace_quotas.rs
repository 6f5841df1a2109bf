//! Quotas of namespaces: one tenant's prompts evict only that tenant's blocks.

use proptest::prelude::*;
use quota_model::{Model, Op};
use stolon_kvcache::{
    BlockId, ConfigError, EvictionPolicy, Namespace, PrefixCache, TokenSpan, TokenSpanInterner,
    TreeBuilder, TreeWriter,
};

use crate::support::quota_model;

fn tenant(name: &str) -> Namespace {
    Namespace::builder().key([0; 32]).salt(name).build()
}

fn writer(quota: usize) -> TreeWriter {
    TreeBuilder::new(1).namespace_quota(quota).build().expect("valid settings").0
}

/// Commits a prompt in blocks with ids from `first` on, and drops its lease.
fn put(writer: &mut TreeWriter, namespace: &Namespace, prompt: &[u32], first: u32) {
    let mut lease = writer.acquire(namespace, prompt);
    let have = lease.blocks().len() as u32;
    let blocks: Vec<BlockId> = (have..prompt.len() as u32).map(|n| BlockId(first + n)).collect();
    let _ = writer.commit(&mut lease, prompt, &blocks).expect("a valid commit");
}

fn cached(writer: &TreeWriter, namespace: &Namespace, prompt: &[u32]) -> usize {
    writer.reader().query_match_len(namespace, prompt)
}

fn check(writer: &mut TreeWriter) {
    writer.audit().expect("consistent");
}

/// Goal: a namespace that exceeds its quota loses its own least recently used leaves, exactly as
/// many blocks as necessary, and no other namespace loses a block.
#[test]
fn a_namespace_over_its_quota_evicts_its_own_oldest_leaves() {
    let mut writer = writer(5);
    let (flood, other) = (tenant("flood"), tenant("other"));
    put(&mut writer, &other, &[1, 2, 3, 4, 5], 0);
    put(&mut writer, &Namespace::default(), &[1, 2, 3, 4, 5, 6, 7], 10);
    put(&mut writer, &flood, &[1, 2], 20);
    put(&mut writer, &flood, &[3, 4], 30);
    drop(writer.acquire(&flood, &[1, 2]));
    put(&mut writer, &flood, &[5, 6], 40);
    check(&mut writer);
    assert_eq!(cached(&writer, &flood, &[3, 4]), 1, "the oldest leaf has lost its last block");
    assert_eq!(cached(&writer, &flood, &[1, 2]), 2);
    put(&mut writer, &flood, &[7, 8, 9], 50);
    check(&mut writer);
    assert_eq!(cached(&writer, &flood, &[3, 4]), 0);
    assert_eq!(cached(&writer, &flood, &[1, 2]), 0);
    assert_eq!(cached(&writer, &flood, &[5, 6]), 2);
    assert_eq!(cached(&writer, &other, &[1, 2, 3, 4, 5]), 5);
    let base = Namespace::default();
    assert_eq!(cached(&writer, &base, &[1, 2, 3, 4, 5, 6, 7]), 7, "it has no default quota");
    let counts = writer.counts();
    assert_eq!((counts.cached, counts.freed, counts.detached), (17, 4, 4));
    assert_eq!(writer.stats().evicted_for_quota, 4);
    let mut freed: Vec<u32> = writer.evict(4).iter().map(|block| block.id.0).collect();
    freed.sort_unstable();
    assert_eq!(freed, [20, 21, 30, 31], "the next eviction returns what left for the quota");
    assert_eq!(writer.stats().evicted_for_room, 0);
    assert_eq!(writer.counts().cached, 17);
}

/// Goal: a prompt longer than the quota stays whole while a lease or a pin holds it, and is then
/// cut to the quota from its end.
#[test]
fn what_is_locked_exceeds_the_quota_until_it_is_unlocked() {
    let mut writer = writer(2);
    let (a, prompt) = (tenant("a"), [1, 2, 3, 4]);
    let mut lease = writer.acquire(&a, &prompt);
    let blocks = [0, 1, 2, 3].map(BlockId);
    let _ = writer.commit(&mut lease, &prompt, &blocks).expect("a valid commit");
    check(&mut writer);
    assert_eq!(cached(&writer, &a, &prompt), 4);
    let pin = writer.pin(&a, &prompt[..3]).expect("within the budget");
    drop(lease);
    check(&mut writer);
    assert_eq!(cached(&writer, &a, &prompt), 3, "what the pin holds");
    put(&mut writer, &a, &[9], 9);
    check(&mut writer);
    assert_eq!(cached(&writer, &a, &[9]), 0, "nothing else fits next to the pin");
    assert!(writer.unpin(pin));
    assert_eq!(cached(&writer, &a, &prompt), 2, "at once, not with the next operation");
    check(&mut writer);
}

/// Goal: a quota of one namespace replaces the default, may be no limit, and applies at once. The
/// base namespace can have one too.
#[test]
fn a_namespace_can_have_a_quota_of_its_own() {
    let mut writer = writer(2);
    let (a, base, prompt) = (tenant("a"), Namespace::default(), [1, 2, 3, 4]);
    assert_eq!((writer.namespace_quota(&a), writer.namespace_quota(&base)), (Some(2), None));
    writer.set_namespace_quota(&a, Some(usize::MAX)).expect("a free place");
    assert_eq!(writer.namespace_quota(&a), None);
    put(&mut writer, &a, &prompt, 0);
    put(&mut writer, &base, &prompt, 10);
    check(&mut writer);
    assert_eq!(cached(&writer, &a, &prompt), 4);
    writer.set_namespace_quota(&a, Some(3)).expect("a free place");
    assert_eq!(cached(&writer, &a, &prompt), 3);
    writer.set_namespace_quota(&a, None).expect("a removal");
    assert_eq!(cached(&writer, &a, &prompt), 2, "the default again");
    writer.set_namespace_quota(&base, Some(0)).expect("a free place");
    check(&mut writer);
    assert_eq!(cached(&writer, &base, &prompt), 0);
    put(&mut writer, &base, &prompt, 20);
    assert_eq!(writer.counts().cached, 2);
    writer.set_namespace_quota(&base, None).expect("a removal");
    put(&mut writer, &base, &prompt, 30);
    check(&mut writer);
    assert_eq!(cached(&writer, &base, &prompt), 4);
}

/// Goal: quotas that are set for namespaces take a bounded amount of memory, and a removed one
/// makes room for another.
#[test]
fn the_number_of_quotas_is_bounded() {
    let mut writer = writer(2);
    let numbered = |n: u32| {
        let mut digest = [1; 32];
        digest[..4].copy_from_slice(&n.to_le_bytes());
        Namespace::from_bytes(digest)
    };
    let max = 1 << 16;
    (0..max).for_each(|n| writer.set_namespace_quota(&numbered(n), Some(1)).expect("a place"));
    let full = Err(ConfigError::NamespaceQuotas { max: max as usize });
    assert_eq!(writer.set_namespace_quota(&numbered(max), Some(1)), full);
    assert_eq!(writer.set_namespace_quota(&numbered(0), Some(7)), Ok(()), "a replacement");
    assert_eq!(writer.set_namespace_quota(&numbered(0), None), Ok(()));
    assert_eq!(writer.set_namespace_quota(&numbered(max), Some(1)), Ok(()));
}

/// Goal: a namespace whose last block left for its quota is pruned, and can come back.
#[test]
fn a_quota_of_zero_keeps_nothing() {
    let mut writer = writer(0);
    for round in 0..3 {
        put(&mut writer, &tenant("a"), &[1, 2], round * 2);
        check(&mut writer);
        assert_eq!((writer.counts().cached, writer.counts().namespaces), (0, 0));
    }
    assert_eq!(writer.evict(0).len() + writer.flush().len(), 6, "a flush returns them too");
}

/// Goal: where the quota cuts an atomic token span, the rest of the span is the next to leave, as
/// no match can use it.
#[test]
fn the_rest_of_a_cut_span_leaves_first() {
    let mut writer = writer(4);
    let (a, interner) = (tenant("a"), TokenSpanInterner::new(10));
    let mut image = vec![1];
    let span = TokenSpan::Image { content_hash: 7, kv_len: 3, columns: 0 };
    interner.append(span, &mut image).expect("a span");
    put(&mut writer, &a, &image, 0);
    put(&mut writer, &a, &[8], 10);
    put(&mut writer, &a, &[9], 20);
    check(&mut writer);
    assert_eq!(cached(&writer, &a, &image), 1, "the text before the image");
    assert_eq!((cached(&writer, &a, &[8]), cached(&writer, &a, &[9])), (1, 1));
    put(&mut writer, &a, &[10], 30);
    check(&mut writer);
    assert_eq!(cached(&writer, &a, &image), 1);
    assert_eq!(writer.counts().cached, 4);
}

/// Goal: with the pool, blocks that left for a quota are reserved again before anything else is
/// evicted.
#[test]
fn the_pool_gets_the_blocks_before_others_are_evicted() {
    let mut cache: PrefixCache =
        TreeBuilder::new(1).namespace_quota(1).build_cache(8).expect("valid settings");
    let mut base = cache.begin(&Namespace::default(), &[1, 2, 3]).expect("room");
    cache.commit(&mut base, 3).expect("a valid commit");
    drop(base);
    let mut flood = cache.begin(&tenant("a"), &[1, 2, 3, 4, 5]).expect("room");
    cache.commit(&mut flood, 5).expect("a valid commit");
    drop(flood);
    assert_eq!(cache.tree_counts().freed, 4);
    let four = cache.begin(&tenant("b"), &[1, 2, 3, 4]).expect("what left for the quota");
    assert_eq!(cache.reader().query_match_len(&Namespace::default(), &[1, 2, 3]), 3);
    cache.audit().expect("consistent");
    drop(four);
    cache.set_namespace_quota(&Namespace::default(), Some(1)).expect("a free place");
    assert_eq!(cache.tree_counts().cached, 2);
    cache.audit().expect("consistent");
}

fn op() -> impl Strategy<Value = Op> {
    let prompt = || proptest::collection::vec(0u32..2, 0..16);
    prop_oneof![
        4 => (0usize..4, prompt()).prop_map(|(n, p)| Op::Acquire(n, p)),
        7 => (0usize..6, prompt()).prop_map(|(n, p)| Op::Commit(n, p)),
        3 => (0usize..6).prop_map(Op::Drop),
        1 => (0usize..8).prop_map(Op::Evict),
        1 => (0usize..4, prompt()).prop_map(|(n, p)| Op::Pin(n, p)),
        1 => (0usize..3).prop_map(Op::Unpin),
        1 => (0usize..4).prop_map(Op::EvictNamespace),
        1 => (0usize..4, prompt()).prop_map(|(n, p)| Op::EvictPrefix(n, p)),
        1 => (0usize..4, proptest::option::of(0usize..9)).prop_map(|(n, q)| Op::SetQuota(n, q)),
        1 => proptest::sample::select(&EvictionPolicy::ALL[..]).prop_map(Op::SetPolicy),
        1 => Just(Op::Flush),
    ]
}

/// Goal: the writer's data for quotas is part of the size of the index: 1,000 leaves, 100
/// namespaces with the default quota, and 100 quotas of their own.
#[test]
fn quotas_count_in_the_size_of_the_index() {
    let bytes = |default: Option<usize>, own: bool| {
        let builder = TreeBuilder::new(1);
        let builder = match default {
            Some(quota) => builder.namespace_quota(quota),
            None => builder,
        };
        let (mut writer, _) = builder.build().expect("valid settings");
        for number in 0..100 {
            let namespace = tenant(&number.to_string());
            if own {
                writer.set_namespace_quota(&namespace, Some(10)).expect("a free place");
            }
            for leaf in 0..10 {
                put(&mut writer, &namespace, &[leaf], 10 * number + leaf);
            }
        }
        writer.index_bytes()
    };
    let (none, default, both) = (bytes(None, false), bytes(Some(10), false), bytes(Some(10), true));
    assert!((38_000..=45_000).contains(&(default - none)), "{none}, {default} bytes");
    assert!((4_000..=5_000).contains(&(both - default)), "{default}, {both} bytes");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    /// Goal: after any operations, each namespace has exactly as many blocks as its quota and its
    /// locks permit, and no namespace has lost a block to the quota of another.
    #[test]
    fn quotas_equal_their_model(
        log_block_size in 0u32..3,
        quota in proptest::option::of(0usize..8),
        ops in proptest::collection::vec(op(), 1..60),
    ) {
        let mut model = Model::new(1 << log_block_size, quota);
        ops.into_iter().for_each(|op| model.run(op));
        model.finish();
    }
}
