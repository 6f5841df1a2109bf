//! LoRA adapters: each request is computed with the adapter that it names, and never uses KV that
//! another adapter, or other weights of the same name, have computed.

use std::path::Path;
use std::time::Duration;

use futures::future::join_all;
use model_adapter::whole_adapter;
use stolon::backend::AdapterLoadError;
use stolon::{
    AdapterError, Engine, EngineBuilder, Error, Request, SessionError, SessionOptions, TokenStream,
};
use stolon_backend::Adapter;
use stolon_backend::fake::{
    FakeBackend, FakeLatency, FakeOptions, expected_next_with, fake_adapter,
};
use stolon_checkpoint::{LoadOptions, ModelSource};
use tempfile::TempDir;

use crate::support::{fake, model_adapter};

/// The greedy answer of the fake backend.
fn expected(adapter: Option<&Adapter>, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        tokens.push(expected_next_with(adapter, &tokens, 256));
    }
    tokens.split_off(prompt.len())
}

fn prompt(len: u32, seed: u32) -> Vec<u32> {
    (0..len).map(|n| (n * 31 + n * n * 7 + seed * 13) % 256).collect()
}

/// The tokens of an answer, and how many prompt tokens came from the cache.
async fn read(stream: TokenStream) -> (Vec<u32>, usize) {
    let answer = stream.collect_text().await.expect("an answer");
    (answer.token_ids.clone(), answer.finish.usage.cached_tokens)
}

async fn ask(engine: &Engine, adapter: Option<&str>, tokens: &[u32]) -> (Vec<u32>, usize) {
    let request = Request::tokens(tokens).max_tokens(12).ignore_eos(true);
    let request = adapter.into_iter().fold(request, |request, name| request.adapter(name));
    read(engine.generate(request).await.expect("an accepted request")).await
}

/// Writes an adapter of the fake backend.
fn write(dir: &TempDir, name: &str, contents: &str) -> std::path::PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, contents).expect("a file");
    path
}

/// Goal: requests of two adapters and of the model run at the same time, each is answered with the
/// weights of its adapter, and cached prefixes are shared only between requests of the same
/// adapter.
#[tokio::test]
async fn requests_use_the_adapter_that_they_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let (builder, handle) = fake::builder(128);
    let builder = builder.adapter("one", write(&dir, "one", "first"));
    let engine = builder.build().await.expect("an engine");
    engine.load_adapter("two", write(&dir, "two", "second")).await.expect("a valid adapter");
    let weights = [None, Some(fake_adapter(b"first")), Some(fake_adapter(b"second"))];
    let names = [None, Some("one"), Some("two")];
    let tokens = prompt(100, 1);
    for cached in [0, 96] {
        let answers = join_all(names.map(|name| ask(&engine, name, &tokens))).await;
        for (weights, (answer, from_cache)) in weights.iter().zip(answers) {
            assert_eq!(answer, expected(weights.as_ref(), &tokens, 12));
            assert_eq!(from_cache.min(96), cached);
        }
    }
    let request = Request::tokens(tokens).adapter("two").cache_salt("another tenant");
    assert_eq!(engine.cache().query_match_len(&request).expect("a known adapter"), 0);
    // A request holds its adapter a little longer than its answer takes, and so does a recorded
    // batch.
    engine.audit().await.expect("a consistent accounting");
    drop(handle.take_batches());
    let infos = engine.adapters();
    assert_eq!(infos.iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["one", "two"]);
    assert_eq!(infos.iter().map(|info| info.requests).collect::<Vec<_>>(), [2, 2]);
    assert!(infos.iter().all(|info| info.in_memory && !info.in_use && info.rank == 1));
}

/// Goal: while requests run and arrive, an adapter is replaced again and again. Each answer is
/// computed with one version from its first to its last token: requests that were submitted before
/// a replacement end with the old weights, and requests that were submitted after it get the new
/// ones. No KV of another version is read, which the fake backend would report.
#[tokio::test]
async fn a_reload_under_load_serves_no_old_kv() {
    let dir = tempfile::tempdir().expect("a directory");
    let latency = FakeLatency { fixed: Duration::from_micros(300), ..FakeLatency::default() };
    let options = FakeOptions { block_count: 192, latency, ..FakeOptions::default() };
    let builder = Engine::builder().backend("fake", Box::new(FakeBackend::new(options)));
    let engine = builder.build().await.expect("an engine");
    let tokens = prompt(90, 3);
    let request = || Request::tokens(tokens.clone()).max_tokens(20).adapter("live");
    let mut running = Vec::new();
    for version in 0..12 {
        let contents = format!("version {}", version % 5);
        let path = write(&dir, "live", &contents);
        engine.replace_adapter("live", path).await.expect("a valid adapter");
        let answer = expected(Some(&fake_adapter(contents.as_bytes())), &tokens, 20);
        // Some of these requests are still running when the adapter is replaced.
        for index in 0..6 {
            let stream = engine.generate(request()).await.expect("an accepted request");
            running.push((answer.clone(), stream));
            if index == 3 {
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        }
    }
    engine.unload_adapter("live").expect("it is loaded");
    for (answer, stream) in running {
        assert_eq!(read(stream).await.0, answer);
    }
    let gone = engine.generate(request()).await.expect_err("it was unloaded");
    assert!(matches!(&gone, Error::Adapter(AdapterError::Unknown { name }) if name == "live"));
    engine.audit().await.expect("a consistent accounting");
}

/// Goal: an adapter whose files are loaded again unchanged finds its KV again, and one whose files
/// have changed does not.
#[tokio::test]
async fn the_generation_follows_from_the_contents() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine = fake::builder(64).0.build().await.expect("an engine");
    let tokens = prompt(64, 2);
    let mut generations = Vec::new();
    for (contents, cached) in [("a", 0), ("a", 63), ("b", 0), ("a", 63)] {
        let path = write(&dir, "adapter", contents);
        generations.push(engine.replace_adapter("x", path).await.expect("valid").generation);
        let (_, from_cache) = ask(&engine, Some("x"), &tokens).await;
        assert!(from_cache >= cached && (cached > 0 || from_cache == 0), "{contents}");
    }
    assert_eq!(generations[0], generations[1]);
    assert_eq!(generations[0], generations[3]);
    assert_ne!(generations[0], generations[2]);
}

/// Goal: idle adapters make room in the memory for others, the least recently used first, and are
/// loaded again on their next request, unless their files have changed. While adapters in use take
/// up the memory, others are refused with an error that says that a retry can succeed.
#[tokio::test]
async fn idle_adapters_make_room_for_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let latency = FakeLatency { fixed: Duration::from_millis(2), ..FakeLatency::default() };
    let options = FakeOptions { latency, ..FakeOptions::default() };
    let builder = Engine::builder().backend("fake", Box::new(FakeBackend::new(options)));
    let engine = builder.adapter_memory(20).build().await.expect("an engine");
    let in_memory = || -> Vec<String> {
        let infos = engine.adapters().into_iter().filter(|info| info.in_memory);
        infos.map(|info| info.name).collect()
    };
    for name in ["a", "b", "c"] {
        // 8 bytes each.
        let path = write(&dir, name, &format!("adapter{name}"));
        engine.load_adapter(name, path).await.expect("a valid adapter");
    }
    assert_eq!((in_memory(), engine.adapter_evictions()), (vec!["b".into(), "c".into()], 1));
    let tokens = prompt(20, 1);
    let answer = expected(Some(&fake_adapter(b"adaptera")), &tokens, 12);
    assert_eq!(ask(&engine, Some("a"), &tokens).await.0, answer);
    assert_eq!(in_memory(), ["a", "c"]);
    let too_large = write(&dir, "large", &"x".repeat(21));
    let error = engine.load_adapter("large", too_large).await.expect_err("no room");
    assert!(matches!(error, AdapterError::Load { reason: AdapterLoadError::TooLarge(_), .. }));

    let long = |name: &str| Request::tokens(prompt(20, 2)).max_tokens(500).adapter(name);
    let held = [engine.generate(long("a")).await, engine.generate(long("c")).await];
    let error = engine.generate(long("b")).await.expect_err("no room");
    assert!(matches!(error, Error::Adapter(AdapterError::OutOfMemory { in_use: 16, .. })));
    assert!(error.is_retryable());
    drop(held);
    while engine.adapters().iter().any(|info| info.in_use) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    ask(&engine, Some("b"), &tokens).await;

    let evicted = engine.adapters().into_iter().find(|info| !info.in_memory).expect("one").name;
    write(&dir, &evicted, "other 8.");
    let error = engine.generate(long(&evicted)).await.expect_err("other files");
    assert!(matches!(error, Error::Adapter(AdapterError::Changed { .. })), "{error}");
    std::fs::remove_file(dir.path().join(&evicted)).expect("a file");
    let error = engine.generate(long(&evicted)).await.expect_err("no files");
    let missing = |reason: &AdapterLoadError| matches!(reason, AdapterLoadError::NotFound(_));
    assert!(matches!(&error, Error::Adapter(AdapterError::Load { reason, .. }) if missing(reason)));
}

/// Goal: names and paths that cannot be used are refused, and change nothing.
#[tokio::test]
async fn unusable_names_and_files_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let good = write(&dir, "good", "x");
    let builder = fake::builder(16).0.adapter("first", &good);
    let engine = builder.build().await.expect("an engine");
    for name in ["", "fake", "a\nb", &"x".repeat(257)] {
        let error = engine.load_adapter(name, &good).await.expect_err(name);
        assert!(matches!(error, AdapterError::InvalidName { .. }), "{error}");
    }
    let error = engine.load_adapter("first", &good).await.expect_err("it exists");
    assert!(matches!(error, AdapterError::Exists { .. }));
    let error = engine.replace_adapter("first", write(&dir, "empty", "")).await.expect_err("empty");
    assert!(matches!(error, AdapterError::Load { reason: AdapterLoadError::Invalid(_), .. }));
    assert!(matches!(engine.unload_adapter("second"), Err(AdapterError::Unknown { .. })));
    assert_eq!(engine.adapters().len(), 1);
    let request = Request::tokens([1, 2, 3]).adapter("second");
    let error = engine.cache().query_match_len(&request).expect_err("unknown");
    assert!(matches!(error, Error::Adapter(AdapterError::Unknown { .. })));
    let missing = fake::builder(16).0.adapter("x", dir.path().join("nothing")).build().await;
    assert!(matches!(missing, Err(Error::Adapter(AdapterError::Load { .. }))));
}

/// Goal: a session belongs to an adapter, and to its weights as they were when it was opened.
#[tokio::test]
async fn sessions_belong_to_an_adapter() {
    let dir = tempfile::tempdir().expect("a directory");
    let engine = fake::builder(64).0.build().await.expect("an engine");
    engine.load_adapter("x", write(&dir, "x", "one")).await.expect("a valid adapter");
    let options = SessionOptions::default().adapter("x");
    let id = engine.sessions().open(options).expect("a session").id;
    let turn = || Request::tokens(prompt(40, 1)).max_tokens(4).session(&id);
    engine.complete(turn().adapter("x")).await.expect("a turn");
    let other = |error: &Error| error.to_string().contains("session");
    assert!(other(&engine.complete(turn()).await.expect_err("another namespace")));
    engine.replace_adapter("x", write(&dir, "x", "two")).await.expect("a valid adapter");
    let error = engine.complete(turn().adapter("x")).await.expect_err("other weights");
    assert!(other(&error), "{error}");
    let _ = SessionError::Unknown { id };
}

/// A small random model, and a directory with an adapter for it.
fn tiny(dir: &Path, seed: u64) -> EngineBuilder {
    let source: ModelSource = "random:tiny".parse().expect("a preset");
    let config = stolon_checkpoint::load(&source, &LoadOptions::default()).expect("a model").config;
    whole_adapter(&config, 4, "F32", seed).write(dir);
    Engine::builder().model("random:tiny").num_blocks(64)
}

/// The tokens of an answer with the bits of their log-probabilities, and how many prompt tokens
/// came from the cache.
async fn bits(engine: &Engine, adapter: Option<&str>, tokens: &[u32]) -> (Vec<(u32, u32)>, usize) {
    let request = Request::tokens(tokens).max_tokens(8).logprobs(2).ignore_eos(true);
    let request = adapter.into_iter().fold(request, |request, name| request.adapter(name));
    let answer = engine.complete(request).await.expect("an answer");
    let logprobs = answer.logprobs.iter().map(|token| (token.token_id, token.logprob.to_bits()));
    (logprobs.collect(), answer.finish.usage.cached_tokens)
}

/// Goal: with a real model, an answer has the same bits with a warm and a cold cache, alone and
/// next to requests with another adapter and without one, and the answers of the model itself equal
/// those of an engine without adapters.
#[tokio::test]
async fn answers_have_the_same_bits_warm_and_cold_and_in_any_company() {
    let dirs = [tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("one")];
    let start = async || {
        let (first, second) = (dirs[0].path(), dirs[1].path());
        drop(tiny(second, 2));
        let builder = tiny(first, 1).adapter("one", first).adapter("two", second);
        builder.build().await.expect("an engine")
    };
    let tokens = prompt(120, 4);
    let names = [None, Some("one"), Some("two")];
    let mut alone = Vec::new();
    for name in names {
        alone.push(bits(&start().await, name, &tokens).await.0);
    }
    let plain = tiny(dirs[0].path(), 1).build().await.expect("an engine");
    assert_eq!(bits(&plain, None, &tokens).await.0, alone[0]);
    assert!(alone[0] != alone[1] && alone[1] != alone[2]);
    let together = start().await;
    for cached in [0, 112] {
        let answers = join_all(names.map(|name| bits(&together, name, &tokens))).await;
        for (index, (answer, from_cache)) in answers.into_iter().enumerate() {
            assert_eq!(answer, alone[index], "{:?}", names[index]);
            assert!(from_cache >= cached && (cached > 0 || from_cache == 0));
        }
    }
}

/// Goal: KV of an adapter that was stored on the disk is read after a restart only if the adapter
/// has the same weights.
#[cfg(feature = "tiers")]
#[tokio::test]
async fn stored_kv_belongs_to_the_weights() {
    let (disk, dir) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("one"));
    let start = async |seed| {
        let builder = tiny(dir.path(), seed).adapter("x", dir.path());
        builder.kv_cache_dir(disk.path(), 1 << 30).build().await.expect("an engine")
    };
    let tokens = prompt(200, 1);
    let request = Request::tokens(tokens.clone()).adapter("x");
    let first = start(1).await;
    let (expected, _) = bits(&first, Some("x"), &tokens).await;
    assert!(first.shutdown().await);
    drop(first);
    let changed = start(2).await;
    assert_eq!(changed.tiers().query(&request).expect("tokens").disk, 0);
    assert_ne!(bits(&changed, Some("x"), &tokens).await.0, expected);
    assert!(changed.shutdown().await);
    drop(changed);
    let same = start(1).await;
    assert_eq!(same.tiers().query(&request).expect("tokens").disk, 192);
    assert_eq!(bits(&same, Some("x"), &tokens).await, (expected, 192));
    assert!(same.shutdown().await);
}
