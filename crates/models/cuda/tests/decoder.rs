//! Tests the candle backend on `Device::Cpu`: its logits equal those of transformers and of the CPU
//! backend, and do not depend on batches, chunks, block sizes and cached prefixes.

#[path = "../../checkpoint/tests/it/support/adapter_writer.rs"]
mod adapter_writer;
#[path = "../../checkpoint/tests/it/support/candle_types.rs"]
mod candle_types;
#[path = "../../checkpoint/tests/it/support/model_adapter.rs"]
mod model_adapter;

mod decoder {
    mod adapters;
    mod copies;
    mod fixture;
    mod graphs;
    mod invariance;
    mod parity;
    mod quantized;
    mod refusals;
}

/// The tests that all backends have to pass.
#[path = "../../cpu/tests/suite"]
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
