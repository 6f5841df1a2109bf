//! Random operations on the tree and on its reference model, with all eviction policies and many
//! block sizes, namespaces, leases and pins.

use model::{Model, Op};
use proptest::prelude::*;
use stolon_kvcache::EvictionPolicy;

use crate::support::model;

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        proptest::collection::vec(0u8..2, 0..24),
        (0u8..3, 0usize..80).prop_map(|(byte, count)| vec![byte; count]),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (0u8..3, bytes()).prop_map(|(n, b)| Op::Query(n, b)),
        4 => (0u8..3, bytes()).prop_map(|(n, b)| Op::Acquire(n, b)),
        6 => (0u8..6, bytes()).prop_map(|(n, b)| Op::Commit(n, b)),
        3 => (0u8..6).prop_map(Op::Drop),
        3 => (0u8..12).prop_map(Op::Evict),
        1 => (0u8..3, bytes()).prop_map(|(n, b)| Op::Pin(n, b)),
        1 => (0u8..3).prop_map(Op::Unpin),
        1 => (0u8..3).prop_map(Op::EvictNamespace),
        2 => (0u8..3, bytes()).prop_map(|(n, b)| Op::EvictPrefix(n, b)),
        1 => Just(Op::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    /// Goal: every answer of the tree equals the answer of the reference model.
    #[test]
    fn the_tree_equals_its_model(
        log_block_size in 0u32..6,
        policy in proptest::sample::select(&EvictionPolicy::ALL[..]),
        ops in proptest::collection::vec(op(), 1..60),
    ) {
        let mut model = Model::new(1 << log_block_size, policy);
        ops.into_iter().for_each(|op| model.run(op));
        model.finish();
    }
}
