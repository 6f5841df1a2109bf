//! Draft models: their keys and values are right wherever the blocks come from, they change no bit of
//! an answer, and a model that does not fit is refused.

use std::path::{Path, PathBuf};

use stolon::{
    Completion, DraftSources, Engine, EngineBuilder, Error, PrefetchPolicy, Request,
    SamplingParams, Speculation, WritePolicy,
};

use crate::support::bits::bits;
use crate::support::tiers::{Directory, stop};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/models/demo_model/text")
}

/// An engine that always proposes what its draft model guesses, and nothing else.
fn builder() -> EngineBuilder {
    let sources = Some(DraftSources::new(Vec::new));
    let speculation = Speculation { adaptive: false, sources, ..Speculation::default() };
    Engine::builder().model(demo()).threads(1).num_blocks(32).speculation(speculation)
}

/// A copy of the demo model with changes of two of its files.
fn changed(name: &str, change: impl Fn(&str, String) -> String) -> Directory {
    let copy = Directory::new(&format!("draft-{name}"));
    std::fs::create_dir_all(&copy.0).expect("a new directory");
    for entry in std::fs::read_dir(demo()).expect("it is committed") {
        let path = entry.expect("readable").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        let to = copy.0.join(name);
        if matches!(name, "config.json" | "tokenizer.json") {
            let text = std::fs::read_to_string(&path).expect("a text");
            std::fs::write(to, change(name, text)).expect("writable");
        } else {
            std::fs::copy(&path, to).expect("writable");
        }
    }
    copy
}

fn request(seed: u64) -> Request {
    let (prompt, sampling) = (format!("{seed}. ").repeat(40), SamplingParams::default());
    let temperature = [0.0, 0.8, 1.5][seed as usize % 3];
    let sampling = SamplingParams { temperature, seed: Some(seed), ..sampling };
    Request::text(prompt).sampling(sampling).max_tokens(48).logprobs(2).ignore_eos(true)
}

/// An answer, and how many tokens the draft model has guessed, got right and computed for it.
async fn ask(engine: &Engine, request: Request) -> (Completion, [u64; 3]) {
    let count = |engine: &Engine| {
        let stats = engine.stats();
        [stats.model_drafted_tokens, stats.model_accepted_tokens, stats.model_computed_tokens]
    };
    let before = count(engine);
    let answer = engine.complete(request).await.expect("an answer");
    let after = count(engine);
    (answer, [0, 1, 2].map(|index| after[index] - before[index]))
}

/// Goal: a draft model that is the model itself is always right at any temperature, so its keys and
/// values are right: with a cold and a warm cache, after evictions, and from a disk tier. It computes
/// no prefix twice. The answers have the bits of plain decoding without a cache.
#[tokio::test]
async fn the_model_itself_is_always_right() {
    let plain = Engine::builder().model(demo()).threads(1).speculation(Speculation::off());
    let plain = plain.num_blocks(64).prefix_caching(false).build().await.expect("an engine");
    let directory = Directory::new("draft-tier");
    // What is evicted has been drafted with, so it has the part of the draft model.
    let with_draft = || {
        let builder = builder().draft_model(demo()).kv_cache_dir(&directory.0, 1 << 30);
        builder.write_policy(WritePolicy::WriteBack).prefetch_policy(PrefetchPolicy::WaitComplete)
    };
    let engine = with_draft().build().await.expect("an engine");
    let (mut expected, mut cold) = (Vec::new(), 0);
    for seed in 0..6 {
        expected.push(plain.complete(request(seed)).await.expect("an answer"));
        let (answer, [drafted, accepted, computed]) = ask(&engine, request(seed)).await;
        assert_eq!(bits(&answer), bits(&expected[seed as usize]));
        assert!(drafted > 30 && drafted == accepted, "{accepted} of {drafted}");
        let usage = answer.finish.usage;
        assert!(computed as usize >= usage.prompt_tokens - usage.cached_tokens, "{computed}");
        cold += computed;
        let (_, [drafted, accepted, warm]) = ask(&engine, request(seed)).await;
        assert!(drafted > 30 && drafted == accepted, "{accepted} of {drafted}");
        assert!(warm < 40 && warm < computed / 2, "{warm} of {computed} were computed again");
    }
    assert!(engine.stats().evictions > 0, "the prompts are larger than the pool");
    engine.audit().await.expect("consistent accounting");
    stop(engine).await;
    let engine = with_draft().build().await.expect("the directory is free again");
    let mut loaded = 0;
    for seed in 0..6 {
        let (answer, [drafted, accepted, computed]) = ask(&engine, request(seed)).await;
        assert_eq!(bits(&answer), bits(&expected[seed as usize]));
        assert!(drafted > 30 && drafted == accepted, "{accepted} of {drafted}");
        loaded += computed;
    }
    let tokens = engine.stats().loaded_tokens;
    assert!(tokens > 100 && loaded + tokens / 2 < cold, "{loaded} of {cold}, {tokens} loaded");
    stop(engine).await;
    // A tier of the model without a draft model has other blocks.
    let other = Engine::builder().model(demo()).threads(1).num_blocks(64);
    let other = other.kv_cache_dir(&directory.0, 1 << 30).build().await.expect("an engine");
    let answer = other.complete(request(0)).await.expect("an answer");
    assert_eq!((bits(&answer), other.stats().loaded_tokens), (bits(&expected[0]), 0));
    stop(other).await;
}

/// Goal: the first layer of the model guesses some tokens, whose number is counted by its source, and
/// changes no answer. It divides the memory of the KV cache with the model.
#[tokio::test]
async fn a_smaller_model_guesses_and_shares_the_memory() {
    let smaller = changed("smaller", |name, text| match name {
        "config.json" => {
            let mut config: serde_json::Value = serde_json::from_str(&text).expect("an object");
            config["num_hidden_layers"] = 1.into();
            config.to_string()
        }
        _ => text,
    });
    let alone = Engine::builder().model(demo()).threads(1).kv_memory(8 << 20);
    let alone = alone.speculation(Speculation::off()).build().await.expect("an engine");
    let both = Engine::builder().model(demo()).threads(1).kv_memory(8 << 20);
    let both = both.speculation(Speculation { adaptive: false, ..Speculation::default() });
    let both = both.draft_model(&*smaller.0).build().await.expect("an engine");
    let [few, many] = [&both, &alone].map(|engine| engine.model_info().num_blocks);
    assert!(few < many && 2 * few > many, "{few} blocks, {many} without a draft model");
    assert!(both.model_info().kv_bytes <= 8 << 20);
    for seed in 0..6 {
        let expected = alone.complete(request(seed)).await.expect("an answer");
        let answer = both.complete(request(seed)).await.expect("an answer");
        assert_eq!(bits(&answer), bits(&expected));
    }
    let stats = both.stats();
    assert!(stats.model_drafted_tokens > 20, "{stats:?}");
    assert!(stats.model_drafted_tokens < stats.drafted_tokens, "other sources guess, too");
    assert!(stats.model_accepted_tokens <= stats.accepted_tokens);
}

/// Goal: each draft model that does not fit is refused with a message that says why.
#[tokio::test]
async fn a_draft_model_that_does_not_fit_is_refused() {
    async fn refused(builder: EngineBuilder, parts: &[&str]) {
        let error = builder.build().await.expect_err("it does not fit").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let other = changed("vocabulary", |name, text| match name {
        "tokenizer.json" => {
            let mut file: serde_json::Value = serde_json::from_str(&text).expect("an object");
            let vocab = file["model"]["vocab"].as_object_mut().expect("a vocabulary");
            // Two tokens change places.
            let (first, second) = (vocab["ay"].clone(), vocab["\u{120}and"].clone());
            (vocab["ay"], vocab["\u{120}and"]) = (second, first);
            file.to_string()
        }
        _ => text,
    });
    let tokens = ["draft_model", "expected `ay` as token 301", "got `\u{120}and` as token 301"];
    refused(builder().draft_model(&*other.0), &tokens).await;
    let fixture = |name: &str| stolon_fixtures::path(name);
    let tokenless = |name: &str| builder().model(fixture(name));
    refused(tokenless("llama").draft_model(demo()), &["draft_model", "no tokenizer"]).await;
    refused(builder().draft_model(fixture("llama")), &["draft_model", "with no tokenizer"]).await;
    let state = tokenless("llama").draft_model(fixture("qwen3_5"));
    refused(state, &["draft_model", "without recurrent states"]).await;
    let random = Engine::builder().model("random:tiny").draft_model(fixture("llama"));
    refused(random, &["draft_model"]).await;
    let off = builder().draft_model(demo()).speculation(Speculation::off());
    refused(off, &["draft_model", "`speculation` is off"]).await;
    refused(builder().draft_model("/nowhere/at-all"), &["/nowhere/at-all"]).await;
    let fake = crate::support::tiers::fake(16, Default::default()).draft_model(demo());
    refused(fake, &["draft_model", "custom `backend`"]).await;
    let Err(Error::Load(_)) = builder().draft_model(demo()).num_blocks(0).build().await else {
        panic!("no blocks");
    };
}
