//! An engine on the fake backend, whose text is plain bytes and whose KV tells every wrong block.

use stolon::{Engine, EngineBuilder, TextModel};
use stolon_model::{
    FakeBackend, FakeHandle, FakeOptions, GenerationDefaults, TextSource, TokenizerSource,
};

/// A builder on a fake backend of so many blocks of 16 positions, and the test's hand on it.
pub(crate) fn builder(block_count: usize) -> (EngineBuilder, FakeHandle) {
    let options = FakeOptions { block_count, record: true, ..FakeOptions::default() };
    let backend = FakeBackend::new(options);
    let handle = backend.handle();
    (Engine::builder().backend("fake", Box::new(backend), Some(bytes(&[]))), handle)
}

/// Text whose tokens are bytes, ended by any of these.
pub(crate) fn bytes(eos_token_ids: &[u32]) -> TextModel {
    let source = TextSource {
        tokenizer: TokenizerSource::Bytes { vocab_size: 256 },
        tokenizer_config: None,
        chat_template: None,
    };
    let generation =
        GenerationDefaults { eos_token_ids: eos_token_ids.to_vec(), ..Default::default() };
    TextModel::new(&source, &generation).expect("bytes need no file")
}
