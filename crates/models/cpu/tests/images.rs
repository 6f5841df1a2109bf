//! Vision models against transformers. `fixtures/make_images.py` writes the models and the results.

#[path = "../../checkpoint/tests/it/support/candle_types.rs"]
mod candle_types;
#[path = "../../checkpoint/tests/it/support/gguf_model.rs"]
#[allow(clippy::unwrap_used, dead_code, reason = "shared between tests")]
mod gguf_model;
#[path = "../../checkpoint/tests/it/support/gguf_writer.rs"]
#[allow(dead_code, reason = "shared between tests")]
mod gguf_writer;

mod images {
    mod encoder;
    mod fixture;
    mod loading;
    mod mmproj;
    mod mmproj_siglip;
    mod prompt;
    mod qwen3_vl;
    mod regions;
}
