//! For every architecture, a prompt gets the same greedy tokens with a warm and with a cold cache,
//! and however it is cut into chunks. The models are the small random ones that the parity tests of
//! `stolon-cpu` compare with transformers.

use std::path::PathBuf;

use stolon::{Engine, Error, Request};

/// Number of tokens that each request generates.
const ANSWER_LEN: usize = 12;

/// Vocabulary size of the fixtures. The preset's is larger.
const VOCAB_SIZE: u32 = 96;

/// A prompt of `len` tokens that differs for each seed.
fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|n| (n * n * 31 + n * seed + seed) % VOCAB_SIZE).collect()
}

/// The greedy tokens after a prompt, and the number of cached prompt tokens.
async fn run(engine: &Engine, tokens: &[u32]) -> (Vec<u32>, usize) {
    let request = Request::tokens(tokens.to_vec()).max_tokens(ANSWER_LEN).ignore_eos(true);
    let answer = engine.complete(request).await.expect("it ends");
    (answer.token_ids, answer.finish.usage.cached_tokens)
}

/// Compares the answers of one engine with `expected`: cold, warm, fully cached, and after
/// eviction.
async fn check(model: &str, block_size: usize, chunk: usize, caching: bool, expected: &Answers) {
    let engine = start(model, block_size, chunk, caching).await;
    let case = format!("{model}, block size {block_size}, chunk {chunk}, caching {caching}");
    let hit = |len: usize| if caching { len / block_size * block_size } else { 0 };

    let (cold, cached) = run(&engine, &expected.prompt).await;
    assert_eq!(cold.len(), ANSWER_LEN, "{case}");
    assert_eq!((&cold, cached), (&expected.answer, 0), "cold: {case}");
    let (warm, cached) = run(&engine, &expected.longer).await;
    assert_eq!((&warm, cached), (&expected.longer_answer, hit(64)), "warm: {case}");
    let (full, cached) = run(&engine, &expected.prompt).await;
    assert_eq!((&full, cached), (&expected.answer, hit(64)), "full hit: {case}");

    // Other prompts evict this one. Then it is computed again, in a batch with further prompts.
    for seed in 10..18 {
        run(&engine, &prompt(seed, 100)).await;
    }
    assert_eq!(engine.stats().evictions > 0, caching, "{case}");
    let others = (20..24).map(|seed| {
        let engine = engine.clone();
        async move { run(&engine, &prompt(seed, 50)).await }
    });
    let (again, others) =
        tokio::join!(run(&engine, &expected.longer), futures::future::join_all(others));
    assert_eq!(again.0, expected.longer_answer, "after eviction, in a batch: {case}");
    assert_eq!(others.len(), 4, "{case}");

    engine.audit().await.expect("consistent accounting");
    engine.shutdown().await;
}

/// The answers of an engine without a cache that runs one request at a time, each prompt in one
/// chunk.
struct Answers {
    prompt: Vec<u32>,
    answer: Vec<u32>,
    longer: Vec<u32>,
    longer_answer: Vec<u32>,
}

/// An engine whose KV cache has 512 positions. `model` is a preset or the name of a fixture.
async fn start(model: &str, block_size: usize, chunk: usize, caching: bool) -> Engine {
    let builder = match model.starts_with("random:") {
        true => Engine::builder().model(model).threads(1),
        false => {
            // The fixtures have no tokenizer, and the tests use token ids.
            Engine::builder().model(fixture(model))
        }
    };
    // Cover both kinds of a full hit: with cached logits, and with the last position computed.
    let logit_bytes = if chunk == 7 { 0 } else { 1 << 20 };
    let builder = builder.num_blocks(512 / block_size).block_size(block_size);
    let builder = builder.max_batched_tokens(chunk).prefix_caching(caching);
    let builder = builder.logit_cache_bytes(logit_bytes);
    builder.build().await.expect("the engine starts")
}

fn fixture(model: &str) -> PathBuf {
    stolon_fixtures::path(model)
}

async fn warm_equals_cold(model: &str) {
    let tokens = prompt(3, 64);
    let longer: Vec<u32> = tokens.iter().copied().chain(prompt(5, 30)).collect();
    let reference = start(model, 16, 512, false).await;
    let expected = Answers {
        answer: run(&reference, &tokens).await.0,
        longer_answer: run(&reference, &longer).await.0,
        prompt: tokens,
        longer,
    };
    assert_ne!(
        expected.answer, expected.longer_answer,
        "the test must be able to distinguish the two answers"
    );
    for block_size in [1, 4, 16, 32] {
        for chunk in [7, 64, 512] {
            check(model, block_size, chunk, true, &expected).await;
        }
    }
    check(model, 16, 7, false, &expected).await;
    reference.shutdown().await;
}

/// Defines a test for each model, so that they run at the same time.
macro_rules! warm_equals_cold {
    ($($(#[$goal:meta])+ $name:ident: $model:literal,)+) => {$(
        $(#[$goal])+
        #[tokio::test]
        async fn $name() {
            warm_equals_cold($model).await;
        }
    )+};
}

warm_equals_cold! {
    /// For Llama with biases in all layers.
    llama: "llama",
    /// With Llama 3's rope scaling.
    llama3: "llama3",
    /// With a sliding window shorter than the prompt.
    mistral: "mistral",
    /// With biases on queries, keys and values.
    qwen2: "qwen2",
    /// With norms on queries and keys.
    qwen3: "qwen3",
    /// With local and global layers and two rope bases.
    gemma3: "gemma3",
    /// With per-layer embeddings, layers that share keys and values, and heads of different
    /// lengths.
    gemma4: "gemma4",
    /// With experts next to MLPs, and values that are projected with the matrix of the keys.
    gemma4_moe: "gemma4_moe",
    /// With YaRN and a prompt longer than the original context.
    yarn: "yarn",
    /// With LongRoPE, where a prompt grows beyond the original context.
    phi3: "phi3",
    /// With soft-capped scores and logits.
    gemma2: "gemma2",
    /// With factors of embeddings, residuals and logits.
    granite: "granite",
    /// With a norm over the keys of all heads together.
    olmo2: "olmo2",
    /// With a layer without a rotary embedding.
    smollm3: "smollm3",
    /// For a preset that the builder loads.
    preset: "random:tiny",
    /// With a mixture of experts and a sliding window.
    mixtral: "mixtral",
    /// With a shared expert.
    qwen2_moe: "qwen2_moe",
    /// With many narrow experts.
    qwen3_moe: "qwen3_moe",
    /// With attention sinks and a window in every other layer.
    gpt_oss: "gpt_oss",
}

/// Goal: a model directory without a tokenizer answers prompts of token ids, and stops at its
/// end-of-sequence token. Prompts of text are refused.
#[tokio::test]
async fn a_model_without_a_tokenizer_answers_token_ids() {
    let path = fixture("llama");
    let engine =
        Engine::builder().model(path.as_path()).num_blocks(16).build().await.expect("it starts");
    let refused = engine.generate(Request::text("hello")).await;
    assert!(matches!(refused, Err(Error::NoTokenizer)), "{refused:?}");
    let (answer, _) = run(&engine, &prompt(3, 20)).await;
    assert_eq!(answer.len(), ANSWER_LEN);
    assert_eq!(engine.model_info().eos_token_ids, [2]);
    engine.shutdown().await;
}
