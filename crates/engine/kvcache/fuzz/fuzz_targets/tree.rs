//! Arbitrary operations on the tree, compared with its reference model.
#![no_main]

#[path = "../../tests/it/support/model.rs"]
mod model;

use libfuzzer_sys::fuzz_target;
use model::{Model, Op};
use stolon_kvcache::EvictionPolicy;

fuzz_target!(|input: (u8, u8, Vec<Op>)| {
    let (log_block_size, policy, ops) = input;
    let policy = EvictionPolicy::ALL[usize::from(policy) % EvictionPolicy::ALL.len()];
    let mut model = Model::new(1 << (log_block_size % 6), policy);
    ops.into_iter().for_each(|op| model.run(op));
    model.finish();
});
