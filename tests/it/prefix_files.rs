//! Exported prefixes: an imported prefix is served from the cache, and the answers equal those of
//! an engine that has computed everything itself.
use stolon::{Engine, EngineBuilder, Error, FormatError, KvType, Request, TierError};
use stolon_backend::fake::{FakeBackend, FakeOptions};

use crate::support::copies::copy_all;

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|n| (n * 31 + n * n * 7 + seed * 13) % 256).collect()
}

fn tiny() -> EngineBuilder {
    Engine::builder().model("random:tiny").num_blocks(64)
}

async fn start(builder: EngineBuilder) -> Engine {
    builder.build().await.expect("an engine")
}

/// The tokens of a greedy answer with the bits of their log-probabilities, and how many prompt
/// tokens came from the cache.
async fn answer(engine: &Engine, tokens: &[u32]) -> (Vec<(u32, u32)>, usize) {
    let request = Request::tokens(tokens).max_tokens(12).logprobs(3).ignore_eos(true);
    let answer = engine.complete(request).await.expect("an answer");
    let logprobs = answer.logprobs.iter().map(|token| (token.token_id, token.logprob.to_bits()));
    (logprobs.collect(), answer.finish.usage.cached_tokens)
}

async fn export(engine: &Engine, tokens: &[u32]) -> Vec<u8> {
    let exported = engine.cache().export(&Request::tokens(tokens)).await.expect("it is cached");
    let announced = exported.file_bytes();
    let bytes: Vec<u8> = exported.flatten().collect();
    assert_eq!(bytes.len(), announced);
    bytes
}

async fn import(engine: &Engine, bytes: &[u8]) -> Result<usize, Error> {
    let mut import = engine.cache().import().await?;
    for piece in bytes.chunks(10_000) {
        import.push(piece)?;
    }
    import.finish().await
}

/// Goal: for every KV type and both layouts of keys (blocks of 8 positions have keys in rows), an
/// imported prefix gives the answer of a cold engine, bit for bit.
#[tokio::test]
async fn imported_prefixes_give_the_same_bits_as_computed_ones() {
    for kv_type in KvType::ALL {
        for block_size in [8, 16] {
            let with = || tiny().kv_type(kv_type).block_size(block_size);
            let (from, to, cold) = (start(with()).await, start(with()).await, start(with()).await);
            let document = prompt(150, 1);
            let bytes = export(&from, &document).await;
            let whole = 150 / block_size * block_size;
            assert_eq!(import(&to, &bytes).await.expect("the same model"), whole);
            let question = [document.clone(), prompt(21, 2)].concat();
            let (expected, _) = answer(&cold, &question).await;
            let (warm, cached) = answer(&to, &question).await;
            assert_eq!((warm, cached), (expected, whole), "{kv_type} {block_size}");
            // An imported prefix can be exported again.
            assert!(export(&to, &document).await == bytes, "{kv_type} {block_size}");
            for engine in [from, to, cold] {
                engine.audit().await.expect("a consistent accounting");
            }
        }
    }
}

/// Goal: a file of another model, or with another setting that changes its bits, is refused, and
/// the engine keeps running.
#[tokio::test]
async fn files_of_other_models_and_settings_are_refused() {
    let bytes = export(&start(tiny()).await, &prompt(100, 1)).await;
    for other in [
        tiny().model("random:tiny@7"),
        tiny().kv_type(KvType::Int8),
        tiny().block_size(32),
        tiny().weights(stolon::WeightType::Q8_0),
    ] {
        let engine = start(other).await;
        let refused = import(&engine, &bytes).await.expect_err("another KV format");
        assert!(
            matches!(refused, Error::Tier(TierError::StoredKv(FormatError::Fingerprint))),
            "{refused}"
        );
        assert_eq!(answer(&engine, &prompt(100, 1)).await.1, 0);
    }
}

/// Goal: damaged and truncated files are refused and change nothing.
#[tokio::test]
async fn damaged_files_are_refused() {
    let engine = start(tiny()).await;
    let tokens = prompt(100, 1);
    let bytes = export(&engine, &tokens).await;
    engine.cache().flush().await.expect("it runs");
    for at in (0..bytes.len()).step_by(bytes.len() / 50) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        assert!(import(&engine, &damaged).await.is_err(), "byte {at}");
        assert!(import(&engine, &bytes[..at]).await.is_err(), "cut at {at}");
    }
    assert_eq!(engine.cache().query_match_len(&Request::tokens(tokens)).expect("tokens"), 0);
    assert_eq!(import(&engine, &bytes).await.expect("undamaged"), 96);
    assert_eq!(engine.audit().await.expect("consistent").blocks_reserved, 0);
}

/// Goal: prefixes can be written to files and read from them, and an error that concerns a file
/// names it. A prompt without a full block and one with a cache salt are refused.
#[tokio::test]
async fn prefixes_are_written_to_files_and_read_from_them() {
    let directory = std::env::temp_dir().join(format!("stolon-prefix-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let (path, engine) = (directory.join("document.kv"), start(tiny()).await);
    let request = Request::tokens(prompt(100, 1));
    assert_eq!(engine.cache().export_to(&request, &path).await.expect("written"), 96);
    let other = start(tiny()).await;
    assert_eq!(other.cache().import_from(&path).await.expect("read"), 96);
    let missing = other.cache().import_from(directory.join("missing.kv")).await;
    assert!(missing.expect_err("no file").to_string().contains("missing.kv"));
    let directory_error = other.cache().import_from(&directory).await.expect_err("a directory");
    assert!(directory_error.to_string().contains("stolon-prefix"), "{directory_error}");
    let short = engine.cache().export(&Request::tokens(prompt(15, 1))).await;
    assert!(matches!(short, Err(Error::Tier(TierError::NotCached { expected: 16, got: 0 }))));
    let salted = engine.cache().export(&request.clone().cache_salt("tenant")).await;
    assert!(salted.expect_err("a salt").to_string().contains("cache_salt"));
    let longest = export(&engine, &prompt(16 * 63, 3)).await;
    let small = start(tiny().num_blocks(32)).await;
    let refused = import(&small, &longest).await.expect_err("longer than the pool");
    assert!(refused.to_string().contains("at most"), "{refused}");
    std::fs::remove_dir_all(directory).expect("removed");
}

/// Goal: a prefix of a model with a recurrent state is exported with its state, and a question about
/// it resumes where the prefix ends.
#[tokio::test]
async fn a_prefix_is_exported_with_its_recurrent_state() {
    let with_state = || {
        let options = FakeOptions { state: Some((3, 8)), ..FakeOptions::default() };
        start(Engine::builder().backend("fake", Box::new(FakeBackend::new(options))))
    };
    let (from, to) = (with_state().await, with_state().await);
    let document = prompt(150, 1);
    let bytes = export(&from, &document).await;
    assert_eq!(import(&to, &bytes).await.expect("the same model"), 128);
    let question = [document.clone(), prompt(21, 2)].concat();
    let (expected, _) = answer(&from, &question).await;
    let (warm, cached) = answer(&to, &question).await;
    assert_eq!((warm, cached), (expected, 128));
    assert_eq!(to.stats().loaded_tokens, 128);
    let short = from.cache().export(&Request::tokens(prompt(16, 3))).await.map(|_| ());
    assert!(matches!(short, Err(Error::Tier(TierError::NotCached { .. }))), "{short:?}");
}

/// Goal: the weights are not read once more until KV leaves the pool for the first time. A file that
/// was changed meanwhile is then refused by name, and the engine keeps answering.
#[tokio::test]
async fn a_model_that_was_changed_after_it_was_loaded_exports_nothing() {
    let original = stolon_fixtures::path("qwen3");
    let copy = tempfile::tempdir().expect("a directory");
    copy_all(&original, copy.path());
    let builder = || Engine::builder().model(copy.path()).num_blocks(64);
    let document: Vec<u32> = (0..40).map(|n| n * 7 % 50).collect();
    let [unchanged, changed] = [start(builder()).await, start(builder()).await];
    let bytes = export(&unchanged, &document).await;
    let weights = copy.path().join("model.safetensors");
    let file = std::fs::File::options().write(true).open(&weights).expect("a file");
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("a time");
    // What was computed before stays.
    assert!(export(&unchanged, &document).await == bytes);
    let refused = changed.cache().export(&Request::tokens(&document[..])).await.map(|_| ());
    let error = refused.expect_err("a changed file");
    assert!(matches!(error, Error::Tier(TierError::KvFormat(_))), "{error}");
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert!(import(&changed, &bytes).await.is_err());
    assert_eq!(answer(&changed, &document).await.0, answer(&unchanged, &document).await.0);
    // Loaded again, it is the same model.
    let again = start(builder()).await;
    assert_eq!(import(&again, &bytes).await.expect("the same weights"), 32);
}
