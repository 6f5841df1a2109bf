//! Runs the parsers of weight files on bytes in memory, for the fuzz targets in
//! `crates/models/checkpoint/fuzz/`.

use crate::mmap::Bytes;
use crate::weights::Weights;

/// Parses a GGUF file and reads all of its tensors.
pub fn gguf(bytes: &[u8]) {
    let bytes = Bytes::Owned(bytes.to_vec());
    let Ok(header) = crate::gguf::read("fuzz.gguf", &bytes) else { return };
    let _ = crate::load::gguf::tokenizer(&header);
    if let Ok((_, weights)) = crate::load::gguf::parse(&header, vec![bytes]) {
        read_all(&weights);
    }
}

/// Parses a safetensors file and reads all of its tensors.
pub fn safetensors(bytes: &[u8]) {
    let bytes = Bytes::Owned(bytes.to_vec());
    if let Ok(weights) = Weights::from_safetensors("fuzz.safetensors", bytes) {
        read_all(&weights);
    }
}

fn read_all(weights: &Weights) {
    for name in weights.names() {
        let shape = weights.shape(name).unwrap_or_default();
        let _ = weights.tensor(name, shape).map(|tensor| tensor.bytes.iter().max().copied());
    }
}
