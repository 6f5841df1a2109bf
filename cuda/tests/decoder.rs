//! Tests the candle backend on `Device::Cpu`: its logits equal those of transformers and of the CPU
//! backend, and do not depend on batches, chunks, block sizes and cached prefixes.

#[path = "../../model/tests/decoder/run.rs"]
mod run;

mod decoder {
    mod copies;
    mod fixture;
    mod graphs;
    mod invariance;
    mod parity;
    mod quantized;
    mod refusals;
}
