//! Embeddings: of a model for embeddings, compared with sentence-transformers, and of a fake
//! backend that also runs requests that generate.

use std::path::PathBuf;

use futures::future::join_all;
use serde_json::Value;
use stolon::{
    Embedding, EmbeddingConfig, EmbeddingSizes, Engine, EngineBuilder, Error, ModelSource, Pooling,
    Request,
};
use stolon_backend::Pooler;
use stolon_backend::fake::{expected_hidden, expected_next};

use crate::support::fake;

/// The hidden size of the fake backend.
const HIDDEN_SIZE: usize = 16;

/// The directory of a model of sentence-transformers, with the embeddings that the model computes.
fn directory() -> PathBuf {
    stolon_fixtures::path("embedding")
}

fn model() -> EngineBuilder {
    let source = ModelSource::Directory(directory());
    Engine::builder().model(source).num_blocks(128).block_size(4).threads(1)
}

/// The entries of the fixture: texts with their tokens and embeddings.
fn expected() -> Vec<Value> {
    let text = std::fs::read_to_string(directory().join("expected.json")).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

fn numbers(value: &Value) -> Vec<f32> {
    let numbers = value.as_array().expect("a list").iter();
    numbers.map(|number| number.as_f64().expect("a number") as f32).collect()
}

#[track_caller]
fn assert_close(values: &[f32], expected: &Value) {
    let expected = numbers(expected);
    assert_eq!(values.len(), expected.len());
    let difference = values.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference < 2e-6, "{difference}: {values:?}, expected {expected:?}");
}

fn bits(embedding: &Embedding) -> Vec<u32> {
    embedding.values.iter().map(|value| value.to_bits()).collect()
}

async fn embed(engine: &Engine, request: Request) -> Embedding {
    engine.embed(request, None).await.expect("an embedding")
}

/// Goal: tokens and embeddings equal those of sentence-transformers, with last-token and mean
/// pooling, whole and shortened.
#[tokio::test]
async fn embeddings_match_sentence_transformers() {
    let last = model().embedding_sizes(EmbeddingSizes::Any).build().await.expect("an engine");
    let info = last.model_info().embedding.clone().expect("a model for embeddings");
    assert_eq!((info.size, info.config.pooling, info.config.normalize), (32, Pooling::Last, true));
    let config = EmbeddingConfig { pooling: Pooling::Mean, ..info.config };
    let mean = model().embedding(config).build().await.expect("an engine");
    for case in expected() {
        let text = || Request::text(case["text"].as_str().expect("a text"));
        let tokens = last.prompt_tokens(&text()).await.expect("tokens");
        assert_eq!(serde_json::json!(tokens), case["tokens"]);
        assert_close(&embed(&last, text()).await.values, &case["last"]);
        assert_close(&embed(&mean, Request::tokens(tokens)).await.values, &case["mean"]);
        let short = last.embed(text(), Some(12)).await.expect("an embedding");
        assert_close(&short.values, &case["short"]);
    }
}

/// Goal: an embedding is the same, bit for bit, whether its prompt is computed or cached, alone or
/// in a batch, in one step or in chunks, and the number of cached tokens is reported.
#[tokio::test]
async fn embeddings_do_not_depend_on_the_cache_and_the_batch() {
    let texts: Vec<String> =
        expected().iter().map(|case| case["text"].as_str().expect("a text").to_owned()).collect();
    for pooling in [Pooling::Last, Pooling::Mean, Pooling::First, Pooling::Max] {
        let config = EmbeddingConfig { pooling, normalize: true, sizes: EmbeddingSizes::Full };
        let builder = || model().embedding(config.clone());
        let alone = builder().prefix_caching(false).build().await.expect("an engine");
        let mut cold = Vec::new();
        for text in &texts {
            cold.push(embed(&alone, Request::text(text)).await);
        }
        let engine = builder().max_batched_tokens(7).build().await.expect("an engine");
        for round in 0..3 {
            let all = texts.iter().map(|text| embed(&engine, Request::text(text)));
            for (warm, cold) in join_all(all).await.iter().zip(&cold) {
                assert_eq!(bits(warm), bits(cold), "{pooling}, round {round}");
                assert_eq!((cold.cached_tokens, warm.prompt_tokens), (0, cold.prompt_tokens));
                let cached = match pooling {
                    Pooling::Last if round > 0 => cold.prompt_tokens / 4 * 4,
                    Pooling::Last => warm.cached_tokens,
                    // The others need every position.
                    _ => 0,
                };
                assert_eq!(warm.cached_tokens, cached, "{pooling}, round {round}");
            }
        }
        engine.audit().await.expect("a consistent accounting");
    }
}

/// Goal: a model without an output matrix refuses to generate, but its cache can be warmed.
#[tokio::test]
async fn a_model_without_an_output_matrix_only_embeds() {
    let engine = model().build().await.expect("an engine");
    assert!(!engine.model_info().generates);
    let refused = engine.generate(Request::tokens([1, 2]).max_tokens(1)).await;
    assert!(matches!(refused, Err(Error::EmbeddingsOnly { .. })), "{refused:?}");
    let refused = engine.generate_choices(Request::tokens([1, 2]), 2).await;
    assert!(matches!(refused, Err(Error::EmbeddingsOnly { .. })), "{refused:?}");
    let text = "A stolon is a stem";
    assert_eq!(engine.cache().warm(Request::text(text)).await.expect("computed"), text.len() + 1);
    let cached = engine.cache().query_match_len(&Request::text(text)).expect("a query");
    assert_eq!(cached, (text.len() + 1) / 4 * 4);
}

/// Goal: the whole context may be one input, and one token more is refused.
#[tokio::test]
async fn an_input_may_fill_the_context() {
    let engine = model().build().await.expect("an engine");
    let context = engine.model_info().max_positions;
    let embedding = embed(&engine, Request::tokens(vec![5; context])).await;
    assert_eq!(embedding.prompt_tokens, context);
    let refused = engine.embed(Request::tokens(vec![5; context + 1]), None).await;
    let message = refused.expect_err("too long").to_string();
    assert!(message.contains("256") && message.contains("257"), "{message}");
}

/// Goal: impossible settings and requests are refused with an error that says what was expected.
#[tokio::test]
async fn impossible_embeddings_are_refused() {
    let (builder, _) = fake::builder(64);
    let engine = builder.build().await.expect("an engine");
    let refused = engine.embed(Request::text("a"), None).await.expect_err("it generates");
    assert!(matches!(refused, Error::NotForEmbeddings { .. }));
    assert!(refused.to_string().contains("`1_Pooling/config.json`"), "{refused}");
    let (builder, _) = fake::builder(64);
    let refused = builder.embedding_sizes(EmbeddingSizes::Any).build().await.expect_err("refused");
    assert!(matches!(refused, Error::NotForEmbeddings { .. }), "{refused}");
    for (sizes, size, part) in [
        (EmbeddingSizes::Full, 8, "is_matryoshka"),
        (EmbeddingSizes::Any, 17, "from 1 to 16"),
        (EmbeddingSizes::Any, 0, "from 1 to 16"),
        (EmbeddingSizes::Listed(vec![4, 8]), 5, "[4, 8]"),
    ] {
        let (builder, _) = fake::builder(64);
        let config = EmbeddingConfig { pooling: Pooling::Last, normalize: true, sizes };
        let engine = builder.embedding(config).build().await.expect("an engine");
        let refused = engine.embed(Request::text("a"), Some(size)).await.expect_err("refused");
        let message = refused.to_string();
        assert!(message.contains("dimensions") && message.contains(part), "{message}");
        assert!(engine.embed(Request::text("a"), Some(HIDDEN_SIZE)).await.is_ok());
        assert!(engine.embed(Request::text(""), None).await.is_err(), "an empty prompt");
    }
}

/// Goal: embeddings and generated tokens of one engine are right in the same batches, share cached
/// prefixes, and an embedding whose future is dropped leaves nothing behind.
#[tokio::test]
async fn embeddings_and_answers_share_an_engine() {
    let (builder, handle) = fake::builder(64);
    let config =
        EmbeddingConfig { pooling: Pooling::Last, normalize: false, sizes: EmbeddingSizes::Full };
    let engine = builder.embedding(config).build().await.expect("an engine");
    // The prompts share their first 32 tokens.
    let prompt = |n: u32| (0..40 + n).map(|i| (i * i + if i < 32 { 0 } else { n }) % 250).collect();
    let prompts: Vec<Vec<u32>> = (0..6).map(prompt).collect();
    let embeddings = join_all(prompts.iter().map(|p| embed(&engine, Request::tokens(p.clone()))));
    let answers = prompts.iter().map(|prompt| {
        engine.complete(Request::tokens(prompt.clone()).ignore_eos(true).max_tokens(3))
    });
    let (embeddings, answers) = futures::join!(embeddings, join_all(answers));
    for ((prompt, embedding), answer) in prompts.iter().zip(&embeddings).zip(answers) {
        let mut pooler = Pooler::new(Pooling::Last);
        pooler.push(&expected_hidden(prompt, HIDDEN_SIZE), HIDDEN_SIZE);
        assert_eq!(embedding.values, pooler.finish());
        let first = answer.expect("an answer").token_ids[0];
        assert_eq!(first, expected_next(prompt, 256));
    }
    assert!(embeddings.iter().any(|embedding| embedding.cached_tokens == 32), "a shared prefix");
    let hold = handle.hold();
    let mut dropped = Box::pin(engine.embed(Request::tokens(vec![9; 50]), None));
    assert!(futures::poll!(&mut dropped).is_pending());
    drop(dropped);
    drop(hold);
    while engine.stats().running + engine.stats().waiting > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert_eq!(engine.stats().canceled, 1);
    engine.audit().await.expect("a consistent accounting");
}
