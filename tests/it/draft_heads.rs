//! EAGLE-3 heads and assistants of Gemma 4: they change no bit of an answer, their hidden states are
//! right wherever the blocks come from, and what is no head for the model is refused.

use std::path::{Path, PathBuf};

use stolon::inspect::{InspectOptions, inspect};
use stolon::{DraftSources, Drafting, Engine, EngineBuilder, ModelSource, Speculation, WindowKv};

use crate::mtp::{builder, changed, compare};
use crate::support::tiers::Directory;

/// Number of tokens of the fixtures.
const VOCAB: usize = 96;

/// Number of KV blocks that do not hold all prompts and answers of a test.
const FEW_BLOCKS: usize = 48;

/// A random model with the structure of Qwen3.
fn model() -> PathBuf {
    stolon_fixtures::path("qwen3")
}

/// A random head for it.
fn head() -> PathBuf {
    stolon_fixtures::path("eagle3/qwen3")
}

/// The token that follows a token in the models of [`always_right`], which is another one for each.
fn next(token: usize) -> usize {
    (token * 5 + 7) % VOCAB
}

/// An embedding of a token, whose elements are 1 or -1. Those of two tokens differ in at least 13.
fn embedding(token: usize, values: &mut [f32]) {
    for (index, value) in values.iter_mut().enumerate() {
        // SplitMix64.
        let seed = (token * 64 + index) as u64;
        let bits = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        *value = if (bits ^ bits >> 31) & 1 == 0 { 1.0 } else { -1.0 };
    }
}

/// Sets the output matrix of a model or a head so that `follower` of a token follows it.
fn set_output(values: &mut [f32], columns: usize, follower: impl Fn(usize) -> usize) {
    for token in 0..VOCAB {
        let row = &mut values[follower(token) * columns..][..columns];
        embedding(token, row);
        row.iter_mut().for_each(|value| *value *= 3.0);
    }
}

/// A model whose layers add nothing, so that a token follows from the one before it, and a head that
/// computes the token after that from the hidden state of the position before. Its first guess is
/// always right.
fn always_right() -> [Directory; 2] {
    let adds = |name: &str| ["o_proj", "down_proj"].iter().any(|part| name.contains(part));
    let model = changed("eagle3-model", &model(), |name, columns, values| match name {
        "model.embed_tokens.weight" => {
            values.chunks_exact_mut(columns).enumerate().for_each(|(id, row)| embedding(id, row));
        }
        "lm_head.weight" => set_output(values, columns, next),
        "model.norm.weight" => values.fill(1.0),
        name if adds(name) => values.fill(0.0),
        _ => {}
    });
    let head = changed("eagle3-head", &head(), |name, columns, values| match name {
        // The first of the hidden states is the embedding.
        "fc.weight" => {
            for (row, values) in values.chunks_exact_mut(columns).enumerate() {
                values.fill(0.0);
                values[row] = 1.0;
            }
        }
        "lm_head.weight" => set_output(values, columns, |token| next(next(token))),
        name if name.ends_with("norm.weight") => values.fill(1.0),
        name if adds(name) => values.fill(0.0),
        _ => {}
    });
    [model, head]
}

/// Goal: a head whose first guess must be right always is, at any temperature: with a cold and a warm
/// cache, after evictions, and from a disk tier. So the hidden state that it reads is the one of its
/// position. The answers have the bits of plain decoding.
#[tokio::test]
async fn a_head_that_must_be_right_always_is() {
    let [model, head] = always_right();
    let with_head = |builder: EngineBuilder| {
        let sources = Some(DraftSources::new(Vec::new));
        let one = Speculation { max_tokens: 1, adaptive: false, sources };
        builder.draft_model(&*head.0).speculation(one).num_blocks(FEW_BLOCKS)
    };
    compare("eagle3-right", &model.0, with_head, |drafted, accepted| {
        assert!(drafted > 15 && drafted == accepted, "{accepted} of {drafted}");
    })
    .await;
}

/// Goal: heads with random weights, which are mostly wrong, change no bit of an answer either.
#[tokio::test]
async fn a_head_that_is_wrong_changes_no_answer() {
    for (name, head) in [
        ("qwen3", "eagle3/qwen3"),
        ("llama3", "eagle3/llama3"),
        ("gemma4", "gemma4_assistant/gemma4"),
        ("gemma4_dense", "gemma4_assistant/gemma4_dense"),
    ] {
        let [model, head] = [name, head].map(stolon_fixtures::path);
        let with_head = |builder: EngineBuilder| builder.draft_model(&*head).num_blocks(FEW_BLOCKS);
        compare(&format!("head-{name}"), &model, with_head, |drafted, accepted| {
            assert!(drafted > 30 && accepted < drafted / 2, "{accepted} of {drafted}");
        })
        .await;
    }
}

/// Goal: inspection tells what a head needs, and that it is no model by itself, as loading does. The
/// head is a part of the memory, and the model says that it is used.
#[tokio::test]
async fn inspection_knows_heads() {
    let of = |path: &Path| {
        let source = ModelSource::Directory(path.to_owned());
        inspect(&source, &InspectOptions::default()).expect("a description")
    };
    let described = of(&head());
    assert_eq!(described.outline.architecture.as_deref(), Some("eagle3"));
    let needed = described.draft_head.expect("a head");
    // Keys, values and the hidden state of a position, in f32.
    assert_eq!(needed.kv_per_token, 4 * (2 * 2 * 10 + 48));
    // The embedding and the output matrix are its own.
    assert!(needed.weights > 4 * 2 * 96 * 48, "{needed:?}");
    assert!(described.memory.is_none() && described.refusals.len() == 1, "{described:?}");
    let error = Engine::builder().model(&*head()).build().await.expect_err("no model").to_string();
    assert!(error.contains(&described.refusals[0]) && error.contains("draft model"), "{error}");
    assert!(of(&model()).draft_head.is_none());

    let with = |head: Option<PathBuf>| {
        let builder = builder(&model());
        head.into_iter().fold(builder, |builder, head| builder.draft_model(&*head))
    };
    let memory = |head| with(head).memory_needed().expect("a size");
    let info = async |head| {
        let engine = with(head).build().await.expect("an engine");
        let info = engine.model_info();
        let positions = (info.num_blocks * info.block_size) as u64;
        (info.drafting, info.kv_bytes as u64, positions)
    };
    let (drafting, kv_bytes, positions) = info(None).await;
    assert_eq!(drafting, Drafting::None);
    let added = positions * needed.kv_per_token;
    assert_eq!(info(Some(head())).await, (Drafting::Eagle3, kv_bytes + added, positions));
    assert_eq!(Drafting::Eagle3.name(), "eagle3");
    assert_eq!(memory(Some(head())), memory(None) + needed.weights + added);
}

/// Goal: an assistant of Gemma 4 takes memory for its weights and for the hidden states of the model,
/// and for nothing else.
#[tokio::test]
async fn assistants_keep_hidden_states_only() {
    let [model, head] = ["gemma4", "gemma4_assistant/gemma4"].map(stolon_fixtures::path);
    let source = ModelSource::Directory(head.clone());
    let described = inspect(&source, &InspectOptions::default()).expect("a description");
    assert_eq!(described.outline.architecture.as_deref(), Some("gemma4_assistant"));
    assert_eq!(described.refusals.len(), 1, "{:?}", described.refusals);
    let needed = described.draft_head.expect("a head");
    // The width of the model, in f32.
    assert_eq!(needed.kv_per_token, 4 * 40);
    assert!(needed.weights > 4 * 96 * 24, "{needed:?}");
    let memory = |builder: EngineBuilder| builder.memory_needed().expect("a size");
    let [plain, with] = [builder(&model), builder(&model).draft_model(&*head)].map(memory);
    let engine = builder(&model).draft_model(&*head).build().await.expect("an engine");
    let info = engine.model_info();
    assert_eq!(
        (info.drafting, info.drafting.name()),
        (Drafting::Gemma4Assistant, "gemma4_assistant")
    );
    let positions = (info.num_blocks * info.block_size) as u64;
    assert_eq!(with, plain + needed.weights + positions * needed.kv_per_token);
}

/// Goal: an assistant for another model, or for one that keeps the positions of windows only, is
/// refused with a message that says what is wrong.
#[tokio::test]
async fn assistants_for_other_models_are_refused() {
    let [own, other] =
        ["gemma4_assistant/gemma4", "gemma4_assistant/gemma4_dense"].map(stolon_fixtures::path);
    let [gemma4, dense, e4b, qwen3] =
        ["gemma4", "gemma4_dense", "gemma4_e4b", "qwen3"].map(stolon_fixtures::path);
    for (builder, head, parts) in [
        (builder(&dense), &own, ["sizes of the model's", "(2, 12)"]),
        (builder(&gemma4), &other, ["sizes of the model's", "(1, 12)"]),
        (builder(&e4b), &own, ["backbone_hidden_size", "36, as the model has"]),
        (builder(&qwen3), &own, ["Gemma 4", "Qwen3"]),
        (builder(&gemma4).window_kv(WindowKv::States), &own, ["`blocks`", "assistant"]),
    ] {
        let built = builder.draft_model(&**head).build().await;
        let error = built.expect_err("another model").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let built = builder(&own).build().await;
    let error = built.expect_err("no model").to_string();
    assert!(error.contains("draft model"), "{error}");
}

/// Goal: a head for another model, or one that is damaged, is refused with a message that says what is
/// wrong.
#[tokio::test]
async fn other_heads_are_refused() {
    let refused = async |model: &Path, head: &Path, parts: &[&str]| {
        let built = builder(model).draft_model(head).build().await;
        let error = built.expect_err("another head").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    // The embedding of Gemma has a factor.
    let gemma = stolon_fixtures::path("gemma3");
    refused(&gemma, &head(), &["factors", "Gemma3"]).await;
    let narrow = stolon_fixtures::path("gpt_oss");
    refused(&narrow, &head(), &["hidden_size", "32, as the model has"]).await;
    let llama = ["llama3", "eagle3/llama3"];
    let gemma = ["gemma4_dense", "gemma4_assistant/gemma4_dense"];
    // The first two tokens of the first cluster.
    let [token, no_token] = ["\x0f\0\0\0\0\0\0\0]", "\x7f\0\0\0\0\0\0\0]"];
    for (name, [model, head], changes, parts) in [
        (
            "d2t",
            llama,
            &[(r#""d2t":{"dtype":"I64""#, r#""d2t":{"dtype":"F64""#)][..],
            &["d2t", "I64"][..],
        ),
        ("name", llama, &[("\"d2t\"", "\"d3t\"")], &["d2t"]),
        ("fc", llama, &[("\"fc.weight\"", "\"xx.weight\"")], &["fc.weight"]),
        ("bias", llama, &[("\"lm_head.weight\"", "\"fc.more.weight\"")], &["without", "fc.more"]),
        ("order", gemma, &[("token_ordering", "token_orderinh")], &["without", "token_orderinh"]),
        ("input", gemma, &[("pre_projection", "pre_projectiox")], &["without", "pre_projectiox"]),
        ("type", gemma, &[(r#""dtype":"I64""#, r#""dtype":"U64""#)], &["token_ordering", "I64"]),
        ("token", gemma, &[(token, no_token)], &["token_ordering", "below 96", "127"]),
    ] {
        let copy = Directory::new(&format!("eagle3-damaged-{name}"));
        std::fs::create_dir_all(&copy.0).expect("a new directory");
        for entry in std::fs::read_dir(stolon_fixtures::path(head)).expect("a fixture") {
            let path = entry.expect("a file").path();
            let mut bytes = std::fs::read(&path).expect("a file");
            for (from, to) in changes {
                while let Some(at) =
                    bytes.windows(from.len()).position(|part| part == from.as_bytes())
                {
                    bytes[at..][..to.len()].copy_from_slice(to.as_bytes());
                }
            }
            std::fs::write(copy.0.join(path.file_name().expect("a name")), bytes)
                .expect("writable");
        }
        refused(&stolon_fixtures::path(model), &copy.0, parts).await;
    }
    let both = builder(&stolon_fixtures::path("mtp/qwen3_5")).mtp(true).draft_model(&*head());
    let error = both.build().await.expect_err("two of them").to_string();
    assert!(error.contains("`draft_model`"), "{error}");
}
