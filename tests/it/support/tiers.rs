//! Common code of the tests of the disk tier and of the object tier.

use std::path::{Path, PathBuf};
use std::time::Duration;

use stolon::{Engine, EngineBuilder, Request};
use stolon_backend::fake::{FakeBackend, FakeLatency, FakeOptions, expected_next};

const VOCAB_SIZE: usize = 256;

/// A new directory, which is removed at the end of a test.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("stolon-{name}-{}", std::process::id()));
        // The directory exists if an earlier run was interrupted.
        let _ = std::fs::remove_dir_all(&path);
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // A directory that is left behind does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The files of all records below the directory of a tier.
pub(crate) fn records(tier: &Path) -> Vec<PathBuf> {
    let list = |path: &Path| {
        let entries = std::fs::read_dir(path).into_iter().flatten();
        entries.map(|entry| entry.expect("readable").path()).collect::<Vec<_>>()
    };
    list(&tier.join("v1")).iter().flat_map(|folder| list(folder)).collect()
}

pub(crate) fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|n| (n * 31 + n * n * 7 + seed * 13) % VOCAB_SIZE as u32).collect()
}

/// The tokens of a greedy answer with the bits of their log-probabilities, and how many prompt
/// tokens were not computed.
pub(crate) async fn answer(engine: &Engine, tokens: &[u32]) -> (Vec<(u32, u32)>, usize) {
    let request = Request::tokens(tokens).max_tokens(12).logprobs(3).ignore_eos(true);
    let answer = engine.complete(request).await.expect("an answer");
    let logprobs = answer.logprobs.iter().map(|token| (token.token_id, token.logprob.to_bits()));
    (logprobs.collect(), answer.finish.usage.cached_tokens)
}

/// An engine on the fake backend, which takes some time for each token, so that reading is worth
/// it. Its strict mode fails if a block does not have the KV of its prompt.
pub(crate) fn slow_fake(block_count: usize, per_prefill_token: Duration) -> EngineBuilder {
    fake(block_count, FakeLatency { per_prefill_token, ..FakeLatency::default() })
}

/// The same engine with any latency.
pub(crate) fn fake(block_count: usize, latency: FakeLatency) -> EngineBuilder {
    let options =
        FakeOptions { vocab_size: VOCAB_SIZE, block_count, latency, ..FakeOptions::default() };
    Engine::builder().backend("fake", Box::new(FakeBackend::new(options)))
}

/// Requests an answer of an engine on the fake backend, checks its tokens, and returns how many
/// prompt tokens were not computed.
pub(crate) async fn ask(engine: &Engine, tokens: &[u32]) -> usize {
    let request = Request::tokens(tokens).max_tokens(3).ignore_eos(true);
    let answer = engine.complete(request).await.expect("an answer");
    let mut all = tokens.to_vec();
    for token in answer.token_ids {
        assert_eq!(token, expected_next(&all, VOCAB_SIZE), "wrong KV was used");
        all.push(token);
    }
    answer.finish.usage.cached_tokens
}

/// Stops an engine after everything was stored.
pub(crate) async fn stop(engine: Engine) {
    engine.tiers().flush().await.expect("it runs");
    let audit = engine.audit().await.expect("a consistent accounting");
    assert_eq!(audit.blocks_reserved, 0);
    engine.shutdown().await;
}
