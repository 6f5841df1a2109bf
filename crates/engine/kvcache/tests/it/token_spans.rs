//! Random prompts of text and atomic token spans, with blocks of every size.

use proptest::prelude::*;
use token_span_model::{Part, Round};

use crate::support::token_span_model;

fn round() -> impl Strategy<Value = Round> {
    let part = prop_oneof![
        3 => Just(Part::Text),
        1 => any::<bool>().prop_map(Part::Value),
        2 => any::<(bool, u8)>().prop_map(|(content, kv_len)| Part::Image { content, kv_len }),
    ];
    let prompt = proptest::collection::vec(part, 0..12);
    (prompt, any::<bool>(), any::<u8>()).prop_map(|(prompt, store, evict)| Round {
        prompt,
        store,
        evict,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Goal: matches, leases and pins end between spans, exactly where the reference model says.
    #[test]
    fn matches_end_between_spans(
        log_block_size in 0u32..6,
        rounds in proptest::collection::vec(round(), 1..20),
    ) {
        token_span_model::run(1 << log_block_size, &rounds);
    }
}
