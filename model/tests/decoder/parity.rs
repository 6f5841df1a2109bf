//! The same numbers as Hugging Face transformers.

use stolon_kernels::Path;

use super::fixture::{self, Setup};
use super::run;

fn deviation(values: &[f32]) -> f32 {
    let count = values.len() as f32;
    let mean = values.iter().sum::<f32>() / count;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count).sqrt()
}

/// Checks one architecture on every path that this machine has.
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
            assert!(share < 1e-3, "{name}, {path:?}, row {row}: {share} of the deviation");
        }
        let greedy = run::greedy(&mut backend, &expected.prompt, expected.greedy.len());
        assert_eq!(greedy, expected.greedy, "{name}, {path:?}");
    }
}

/// Goal: biases on all products, grouped heads, an untied head.
#[test]
fn llama() {
    check("llama");
}

/// Goal: llama3 rope scaling, one kv head, a tied head.
#[test]
fn llama3() {
    check("llama3");
}

/// Goal: a sliding window shorter than the prompt.
#[test]
fn mistral() {
    check("mistral");
}

/// Goal: biases on q, k and v alone; linear rope scaling.
#[test]
fn qwen2() {
    check("qwen2");
}

/// Goal: norms on q and k; heads wider than the hidden size's share.
#[test]
fn qwen3() {
    check("qwen3");
}

/// Goal: four norms a layer, local and global layers with two ropes, both scales.
#[test]
fn gemma3() {
    check("gemma3");
}
