//! A model's own head for multi-token prediction: it changes no bit of an answer, its keys and values
//! are right wherever the blocks come from, and a model without a head is refused.

use std::path::{Path, PathBuf};

use stolon::inspect::{InspectOptions, inspect};
use stolon::{
    Completion, DraftSources, Drafting, Engine, EngineBuilder, ModelSource, PrefetchPolicy,
    Request, SamplingParams, Speculation, WritePolicy,
};

use crate::support::bits::bits;
use crate::support::tiers::{Directory, stop};

/// Number of KV blocks. They do not hold all prompts and answers of a test.
const BLOCKS: usize = 96;

/// A random model with the structure of Qwen3.5, and its head.
fn fixture() -> PathBuf {
    stolon_fixtures::path("mtp/qwen3_5")
}

/// An engine that always proposes what the head guesses, and nothing else.
pub(crate) fn builder(model: &Path) -> EngineBuilder {
    let sources = Some(DraftSources::new(Vec::new));
    let speculation = Speculation { adaptive: false, sources, ..Speculation::default() };
    Engine::builder().model(model).threads(1).num_blocks(BLOCKS).speculation(speculation)
}

pub(crate) fn plain(model: &Path) -> EngineBuilder {
    let builder = Engine::builder().model(model).threads(1).speculation(Speculation::off());
    builder.num_blocks(256).prefix_caching(false)
}

fn request(seed: u64) -> Request {
    let tokens: Vec<u32> =
        (0..100).map(|at| ((at * at + 7 * at + 13 * seed) % 96) as u32).collect();
    let temperature = [0.0, 0.7, 1.2][seed as usize % 3];
    let sampling = SamplingParams { temperature, seed: Some(seed), ..SamplingParams::default() };
    Request::tokens(tokens).sampling(sampling).max_tokens(48).logprobs(2).ignore_eos(true)
}

/// A copy of the fixture `source` with other values of some tensors. `change` gets the name of each
/// tensor, the number of its columns and its values.
pub(crate) fn changed(
    name: &str,
    source: &Path,
    change: impl Fn(&str, usize, &mut [f32]),
) -> Directory {
    let copy = Directory::new(&format!("head-{name}"));
    std::fs::create_dir_all(&copy.0).expect("a new directory");
    let path = |directory: &Path, name: &str| directory.join(name);
    std::fs::copy(path(source, "config.json"), path(&copy.0, "config.json")).expect("a file");
    let mut bytes = std::fs::read(path(source, "model.safetensors")).expect("a file");
    let len = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let (header, data) = bytes[8..].split_at_mut(len);
    let header: serde_json::Value = serde_json::from_slice(header).expect("a header");
    for (name, tensor) in header.as_object().expect("an object") {
        let Some([start, end]) = tensor["data_offsets"]
            .as_array()
            .map(|ends| [0, 1].map(|index| ends[index].as_u64().expect("an offset") as usize))
        else {
            continue;
        };
        let columns = tensor["shape"].as_array().and_then(|shape| shape.last()?.as_u64());
        let values = data[start..end].chunks_exact(4);
        let mut values: Vec<f32> =
            values.map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes"))).collect();
        change(name, columns.unwrap_or(1) as usize, &mut values);
        let changed = values.into_iter().flat_map(f32::to_le_bytes);
        data[start..end].iter_mut().zip(changed).for_each(|(to, byte)| *to = byte);
    }
    std::fs::write(path(&copy.0, "model.safetensors"), bytes).expect("writable");
    copy
}

/// A model whose layers add nothing, so that a token follows from the one before it, and whose head
/// computes the same from the embedding. It is always right.
fn always_right() -> Directory {
    changed("right", &fixture(), |name, columns, values| {
        let is_output = ["o_proj", "out_proj", "down_proj"].iter().any(|part| name.contains(part));
        // The weights of these norms are stored minus one.
        if is_output || name.contains("pre_fc_norm") || name.ends_with(".norm.weight") {
            values.fill(0.0);
        }
        if name == "mtp.fc.weight" {
            for (row, values) in values.chunks_exact_mut(columns).enumerate() {
                values.fill(0.0);
                values[row] = 1.0;
            }
        }
    })
}

/// An answer, and how many tokens the head has guessed and got right.
async fn ask(engine: &Engine, request: Request) -> (Completion, [u64; 2]) {
    let count = |engine: &Engine| {
        let stats = engine.stats();
        [stats.model_drafted_tokens, stats.model_accepted_tokens]
    };
    let before = count(engine);
    let answer = engine.complete(request).await.expect("an answer");
    let after = count(engine);
    (answer, [0, 1].map(|index| after[index] - before[index]))
}

/// Generates answers cold, warm, after evictions and from a disk tier, and compares them with those
/// of an engine without a cache and without a head. `with_head` adds the head to the engine of a
/// model, and `check` gets the numbers of guessed and right tokens of each answer.
pub(crate) async fn compare(
    name: &str,
    model: &Path,
    with_head: impl Fn(EngineBuilder) -> EngineBuilder,
    check: impl Fn(u64, u64),
) {
    let plain = plain(model).build().await.expect("an engine");
    let directory = Directory::new(&format!("head-tier-{name}"));
    let with_head = || {
        let builder = with_head(builder(model)).kv_cache_dir(&directory.0, 1 << 30);
        builder
            .write_policy(WritePolicy::WriteThrough)
            .prefetch_policy(PrefetchPolicy::WaitComplete)
    };
    let engine = with_head().build().await.expect("an engine");
    let mut expected = Vec::new();
    for seed in 0..9 {
        expected.push(bits(&plain.complete(request(seed)).await.expect("an answer")));
        for _ in 0..2 {
            let (answer, [drafted, accepted]) = ask(&engine, request(seed)).await;
            assert_eq!(bits(&answer), expected[seed as usize], "{seed}");
            check(drafted, accepted);
        }
    }
    assert!(engine.stats().evictions > 0 && engine.stats().cached_tokens > 0);
    // Several at the same time, which preempt each other.
    let requests = (0..9).map(|seed| engine.complete(request(seed)));
    let answers = futures::future::join_all(requests).await;
    for (answer, expected) in answers.into_iter().zip(&expected) {
        assert_eq!(bits(&answer.expect("an answer")), *expected);
    }
    engine.audit().await.expect("consistent accounting");
    stop(engine).await;
    let engine = with_head().build().await.expect("the directory is free again");
    for seed in 0..9 {
        let (answer, [drafted, accepted]) = ask(&engine, request(seed)).await;
        assert_eq!(bits(&answer), expected[seed as usize], "{seed}");
        check(drafted, accepted);
    }
    assert!(engine.stats().loaded_tokens > 0);
    stop(engine).await;
}

/// Goal: a head that must be right always is, at any temperature: with a cold and a warm cache,
/// after evictions, and from a disk tier. The answers have the bits of plain decoding.
#[tokio::test]
async fn a_head_that_must_be_right_always_is() {
    let model = always_right();
    let with_head = |builder: EngineBuilder| builder.mtp(true);
    compare("right", &model.0, with_head, |drafted, accepted| {
        assert!(drafted > 30 && drafted == accepted, "{accepted} of {drafted}");
    })
    .await;
}

/// Goal: a head with random weights, which is mostly wrong, changes no bit of an answer either.
#[tokio::test]
async fn a_head_that_is_wrong_changes_no_answer() {
    let with_head = |builder: EngineBuilder| builder.mtp(true);
    compare("wrong", &fixture(), with_head, |drafted, accepted| {
        assert!(drafted > 30 && accepted < drafted / 2, "{accepted} of {drafted}");
    })
    .await;
}

/// Goal: inspection tells whether a model has a head and what it needs, and refuses what loading
/// refuses. The head is a part of the memory.
#[tokio::test]
async fn inspection_knows_heads() {
    let of = |model: PathBuf, mtp| {
        let mut options = InspectOptions::default();
        options.load.mtp = mtp;
        inspect(&ModelSource::Directory(model), &options).expect("a description")
    };
    let with = of(fixture(), true);
    let head = with.mtp.expect("a head");
    // Keys, values and the hidden state of a position, in f32.
    assert_eq!(head.kv_per_token, 4 * (2 * 2 * 16 + 48));
    assert!(head.weights > 4 * 48 * 96 && with.refusals.is_empty(), "{:?}", with.refusals);
    let without = of(stolon_fixtures::path("qwen3_5"), true);
    assert!(without.mtp.is_none() && without.refusals[0].contains("mtp"), "{without:?}");
    assert!(of(stolon_fixtures::path("qwen3_5"), false).refusals.is_empty());
    let malformed = changed("malformed", &fixture(), |_, _, _| ());
    let file = malformed.0.join("model.safetensors");
    let text = std::fs::read(&file).expect("a file");
    let name = b"mtp.layers.0.self_attn.k_proj.weight";
    let at = text.windows(name.len()).position(|part| part == name).expect("a tensor");
    let mut text = text;
    text[at..at + 3].copy_from_slice(b"xyz");
    std::fs::write(&file, text).expect("writable");
    let refused = of(malformed.0.clone(), true).refusals;
    let error = builder(&malformed.0).mtp(true).build().await.expect_err("a tensor is missing");
    assert!(refused[0].contains("k_proj") && error.to_string().contains(&refused[0]), "{error}");
    assert!(of(malformed.0.clone(), false).refusals.is_empty());
    let memory = |mtp| builder(&fixture()).mtp(mtp).memory_needed().expect("a size");
    let added = head.weights + (BLOCKS * 16) as u64 * head.kv_per_token;
    assert_eq!(memory(true), memory(false) + added);
    let info = async |model: &Path, mtp| {
        let engine = builder(model).mtp(mtp).build().await.expect("an engine");
        let info = engine.model_info();
        (info.drafting, info.kv_bytes as u64)
    };
    let (plain, bytes) = info(&fixture(), false).await;
    assert_eq!(plain, Drafting::UnusedMtp);
    let added = (BLOCKS * 16) as u64 * head.kv_per_token;
    assert_eq!(info(&fixture(), true).await, (Drafting::Mtp, bytes + added));
    assert_eq!(info(&stolon_fixtures::path("qwen3_5"), false).await.0, Drafting::None);
    let draft = stolon_fixtures::path("llama");
    let drafted = builder(&stolon_fixtures::path("llama")).draft_model(draft).build();
    let drafted = drafted.await.expect("an engine");
    assert_eq!(drafted.model_info().drafting, Drafting::DraftModel);
}

/// Goal: what has no head, or cannot use it, is refused with a message that says why.
#[tokio::test]
async fn what_cannot_use_a_head_is_refused() {
    async fn refused(builder: EngineBuilder, parts: &[&str]) {
        let error = builder.mtp(true).build().await.expect_err("no head").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let none = ["mtp", "Qwen3.5", "which has none"];
    refused(builder(&stolon_fixtures::path("llama")), &none).await;
    refused(builder(&stolon_fixtures::path("qwen3_5")), &none).await;
    refused(builder(&stolon_fixtures::path("deepseek_v3")), &none).await;
    refused(Engine::builder().model("random:tiny"), &none).await;
    let off = builder(&fixture()).speculation(Speculation::off());
    refused(off, &["mtp", "`speculation` is off"]).await;
    let both = builder(&fixture()).draft_model(stolon_fixtures::path("llama"));
    refused(both, &["mtp", "`draft_model`"]).await;
    let fake = crate::support::tiers::fake(16, Default::default());
    refused(fake, &["mtp", "custom `backend`"]).await;
}
