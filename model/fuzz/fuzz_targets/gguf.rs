//! Arbitrary bytes as a GGUF file: an error, or a model whose tensors can be read.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| stolon_model::fuzzing::gguf(bytes));
