//! Engines on the fake backend, which detects wrong block tables. Their tokens are bytes.

use stolon::{Engine, EngineBuilder, TextModel};
use stolon_backend::fake::{FakeBackend, FakeHandle, FakeOptions};
use stolon_text::{TextSource, TokenizerSource};

/// A builder with a fake backend of `block_count` blocks of 16 positions, and the handle that
/// observes the backend and injects faults.
pub(crate) fn builder(block_count: usize) -> (EngineBuilder, FakeHandle) {
    let options = FakeOptions { block_count, record: true, ..FakeOptions::default() };
    let backend = FakeBackend::new(options);
    let handle = backend.handle();
    (Engine::builder().backend("fake", Box::new(backend)).text_model(bytes(&[])), handle)
}

/// A text model whose tokens are bytes. The given ids are its end-of-sequence tokens.
pub(crate) fn bytes(eos_token_ids: &[u32]) -> TextModel {
    let source = TextSource {
        named_templates: Vec::new(),
        tokenizer: TokenizerSource::Bytes { vocab_size: 256 },
        tokenizer_config: None,
        chat_template: None,
    };
    TextModel::new(&source, eos_token_ids).expect("a byte tokenizer needs no file")
}
