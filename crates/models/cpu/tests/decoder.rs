//! Tests the logits of the CPU backend: they equal those of transformers, and are bit-identical for
//! all batchings, chunk sizes, block sizes and thread counts.

#[path = "../../checkpoint/tests/it/support/adapter_writer.rs"]
mod adapter_writer;
#[path = "../../checkpoint/tests/it/support/candle_types.rs"]
mod candle_types;
#[path = "../../checkpoint/tests/it/support/gguf_model.rs"]
#[allow(clippy::unwrap_used, dead_code, reason = "shared between tests")]
mod gguf_model;
#[path = "../../checkpoint/tests/it/support/gguf_writer.rs"]
#[allow(dead_code, reason = "shared between tests")]
mod gguf_writer;
#[path = "../../checkpoint/tests/it/support/model_adapter.rs"]
mod model_adapter;

mod decoder {
    mod adapters;
    mod checkpoints;
    mod converted;
    mod draft_heads;
    mod fixture;
    mod invariance;
    mod mapped;
    mod parity;
    mod published;
    mod quantized;
    mod refusals;
}

/// The tests that all backends have to pass. `crates/models/cuda/tests/decoder.rs` uses them too.
#[path = "suite"]
mod suite {
    pub(crate) mod adapters;
    pub(crate) mod fixture;
    pub(crate) mod invariance;
    pub(crate) mod open;
    pub(crate) mod parity;
    pub(crate) mod refusals;
    pub(crate) mod run;

    pub(crate) use open::{Open, Sizes};
}
