//! Tests the logits of the CPU backend: they equal those of transformers, and are bit-identical for
//! all batchings, chunk sizes, block sizes and thread counts.

#[path = "support/candle_types.rs"]
mod candle_types;

mod decoder {
    mod checkpoints;
    mod fixture;
    mod invariance;
    mod parity;
    mod quantized;
    mod refusals;
    mod run;
}
