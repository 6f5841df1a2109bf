//! Compares logits and greedy tokens with Hugging Face transformers.

use stolon_kernels::Path;

use super::fixture::{self, Setup};
use super::run;

fn deviation(values: &[f32]) -> f32 {
    let count = values.len() as f32;
    let mean = values.iter().sum::<f32>() / count;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count).sqrt()
}

/// Checks one fixture on every instruction set of this machine.
fn check(name: &str) {
    let expected = fixture::expected(name);
    for path in Path::supported() {
        let setup = Setup { path: Some(path), ..Setup::default() };
        let mut backend = fixture::backend(fixture::model(name), setup);
        let table = run::table(5, expected.prompt.len(), 16);
        let rows = run::rows(&mut backend, &expected.prompt, 0, usize::MAX / 2, &table);
        assert_eq!(rows.len(), expected.prompt.len());
        for (&row, logits) in expected.rows.iter().zip(&expected.logits) {
            let difference =
                rows[row].iter().zip(logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let share = difference / deviation(logits);
            assert!(share < 1e-3, "{name}, {path:?}, row {row}: {share} standard deviations");
        }
        let greedy = run::greedy(&mut backend, &expected.prompt, expected.greedy.len());
        assert_eq!(greedy, expected.greedy, "{name}, {path:?}");
    }
}

/// Goal: the results match with biases on all projections, grouped heads and an untied output
/// matrix.
#[test]
fn llama_matches_transformers() {
    check("llama");
}

/// Goal: the results match with Llama 3's rope scaling, one KV head and a tied output matrix.
#[test]
fn llama3_matches_transformers() {
    check("llama3");
}

/// Goal: the results match with a sliding window that is shorter than the prompt.
#[test]
fn mistral_matches_transformers() {
    check("mistral");
}

/// Goal: the results match with biases on q, k and v only, and with linear rope scaling.
#[test]
fn qwen2_matches_transformers() {
    check("qwen2");
}

/// Goal: the results match with norms of q and k, and heads wider than `hidden_size / num_heads`.
#[test]
fn qwen3_matches_transformers() {
    check("qwen3");
}

/// Goal: the results match with YaRN beyond the context of the original training.
#[test]
fn yarn_matches_transformers() {
    check("yarn");
}

/// Goal: the results match with factors of embeddings, scores, residuals and logits.
#[test]
fn granite_matches_transformers() {
    check("granite");
}

/// Goal: the results match with norms of the outputs only, and of all heads of q and k together.
#[test]
fn olmo2_matches_transformers() {
    check("olmo2");
}

/// Goal: the results match with a layer without a rotary embedding.
#[test]
fn smollm3_matches_transformers() {
    check("smollm3");
}

/// Goal: the results match with fused projections, rotated parts of heads, LongRoPE and a sliding
/// window.
#[test]
fn phi3_matches_transformers() {
    check("phi3");
}

/// Goal: the results match with soft-capped scores and logits, and alternating windows.
#[test]
fn gemma2_matches_transformers() {
    check("gemma2");
}

/// Goal: the results match with four norms per layer, local and global layers with different rotary
/// embeddings, and scaled embeddings and attention.
#[test]
fn gemma3_matches_transformers() {
    check("gemma3");
}

/// Goal: the results match with experts in all layers and a sliding window.
#[test]
fn mixtral_matches_transformers() {
    check("mixtral");
}

/// Goal: the results match with a shared expert, weights that do not add up to 1, and experts in
/// some layers only.
#[test]
fn qwen2_moe_matches_transformers() {
    check("qwen2_moe");
}

/// Goal: the results match with many narrow experts, and norms of q and k.
#[test]
fn qwen3_moe_matches_transformers() {
    check("qwen3_moe");
}
