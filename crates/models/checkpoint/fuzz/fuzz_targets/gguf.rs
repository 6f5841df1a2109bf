//! Arbitrary bytes after the magic number and version of a GGUF file: an error, or a model whose
//! tensors can be read.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    stolon_checkpoint::fuzzing::gguf(&[b"GGUF\x03\0\0\0", bytes].concat());
});
