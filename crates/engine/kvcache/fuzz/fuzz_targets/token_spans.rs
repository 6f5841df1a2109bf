//! Arbitrary prompts of text and atomic token spans, compared with a reference model.
#![no_main]

#[path = "../../tests/it/support/token_span_model.rs"]
mod token_span_model;

use token_span_model::Round;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, Vec<Round>)| {
    let (log_block_size, rounds) = input;
    token_span_model::run(1 << (log_block_size % 6), &rounds);
});
