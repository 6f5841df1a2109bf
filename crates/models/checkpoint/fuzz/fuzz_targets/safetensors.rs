//! Arbitrary bytes as a safetensors file: an error, or tensors that can be read.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| stolon_checkpoint::fuzzing::safetensors(bytes));
