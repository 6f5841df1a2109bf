//! Tests which models and batches a backend refuses, and that a refused batch has no effect.

use stolon_backend::{BackendError, StepBatch};
use stolon_checkpoint::FeedForwardConfig;
use stolon_kvcache::BlockId;

use super::{Open, Sizes, fixture, run};

/// The error for a tensor whose shape does not match the configuration names the tensor.
pub(crate) fn check_wrong_shape(open: &Open<'_>) {
    let mut model = fixture::model("llama");
    match &mut model.config.layers[0].mlp {
        Some(FeedForwardConfig::Dense(mlp)) => mlp.width += 1,
        _ => panic!("a dense MLP"),
    }
    let error = open(model, Sizes::default()).err().expect("gate_proj is smaller");
    assert!(error.contains("model.layers.0.mlp.gate_proj.weight"), "{error}");
}

/// An empty batch is not an error and has no output.
pub(crate) fn check_empty_batch(open: &Open<'_>) {
    let mut backend = open(fixture::model("llama"), Sizes::default()).expect("a valid model");
    let output = backend.step(&StepBatch::default()).expect("nothing to do");
    assert!(output.logits.is_empty() && output.hidden.is_empty());
}

/// Malformed batches are refused before anything is written to the KV store.
pub(crate) fn check_malformed_batches(open: &Open<'_>) {
    let mut backend = open(fixture::model("qwen3"), Sizes::default()).expect("a valid model");
    let tokens: Vec<u32> = (0..20).collect();
    let table = run::table(0, 20, 16);
    let expected = run::rows(&mut *backend, &tokens, 0, 20, &table);
    let overwriting = run::part(&[9; 20], 0, 20, &table);
    let good = run::part(&tokens, 0, 20, &run::table(10, 20, 16));
    let change = |change: fn(&mut run::Part)| {
        let mut part = good.clone();
        change(&mut part);
        part
    };
    let bad = [
        change(|part| part.tokens[19] = 96),
        change(|part| part.tokens[3] = u32::MAX),
        change(|part| part.slice.token_count = 0),
        change(|part| part.slice.token_count = usize::MAX),
        change(|part| part.slice.start = usize::MAX - 3),
        change(|part| part.slice.write_from = 21),
        change(|part| part.slice.block_table.truncate(1)),
        change(|part| part.slice.block_table[1] = BlockId(u32::MAX)),
        change(|part| part.slice.block_table[1] = part.slice.block_table[0]),
        change(|part| part.slice.block_table[1] = BlockId(1)),
    ];
    for part in bad {
        let batch = StepBatch {
            tokens: [overwriting.tokens.clone(), part.tokens].concat(),
            sequences: vec![overwriting.slice.clone(), part.slice.clone()],
        };
        let error = backend.step(&batch).expect_err("a malformed batch");
        assert!(matches!(&error, BackendError::MalformedBatch(_)), "{:?}: {error}", part.slice);
    }
    let again = run::rows(&mut *backend, &tokens, 19, 1, &table);
    assert_eq!(again, expected[19..]);
}
