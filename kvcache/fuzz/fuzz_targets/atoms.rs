//! Any prompts of text and atoms, beside their model.
#![no_main]

#[path = "../../tests/support/atom_model.rs"]
mod atom_model;

use atom_model::Round;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, Vec<Round>)| {
    let (log_block_size, rounds) = input;
    atom_model::run(1 << (log_block_size % 6), &rounds);
});
