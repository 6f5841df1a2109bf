//! Tests which options and batches a backend refuses, and that a refused batch has no effect.

use stolon_backend::{Backend, BackendError, StepBatch};
use stolon_model::{CpuBackend, CpuOptions, KvBudget, ModelError};

use super::fixture::{self, Setup};
use super::run;

fn refused(options: CpuOptions, part: &str) -> ModelError {
    let model = fixture::model("llama");
    let error =
        CpuBackend::new(model.config, model.weights, options).expect_err("an invalid option");
    assert!(error.to_string().contains(part), "expected {part:?} in {error}");
    error
}

/// Goal: invalid options are refused with the accepted and the given value.
#[test]
fn invalid_options_are_refused() {
    let default = CpuOptions { kv_budget: KvBudget::Blocks(4), ..CpuOptions::default() };
    refused(CpuOptions { block_size: 24, ..default }, "power of two from 1 to 256, got 24");
    refused(CpuOptions { threads: Some(0), ..default }, "expected at least 1, got 0");
    refused(CpuOptions { kv_budget: KvBudget::Blocks(0), ..default }, "got 0");
    // 2 layers, 2 kv heads of 8, keys and values, 16 positions, f32.
    let block_bytes = 2 * 2 * 2 * 8 * 16 * 4;
    let error = refused(
        CpuOptions { kv_budget: KvBudget::Bytes(block_bytes - 1), ..default },
        &format!("expected at least {block_bytes} bytes (one block), got {}", block_bytes - 1),
    );
    assert!(matches!(error, ModelError::KvStore(_)));
    let model = fixture::model("llama");
    let options = CpuOptions { kv_budget: KvBudget::Bytes(3 * block_bytes + 1), ..default };
    let backend = CpuBackend::new(model.config, model.weights, options).expect("3 blocks");
    assert_eq!(backend.spec().block_count, 3);
    assert_eq!(backend.spec().block_bytes as u64, block_bytes);
}

/// Goal: the error for a tensor whose shape does not match the configuration names the tensor.
#[test]
fn a_tensor_of_the_wrong_shape_is_named() {
    let mut model = fixture::model("llama");
    model.config.intermediate_size += 1;
    let error = CpuBackend::new(model.config, model.weights, CpuOptions::default());
    let error = error.expect_err("gate_proj is smaller");
    assert!(error.to_string().contains("model.layers.0.mlp.gate_proj.weight"), "{error}");
}

/// Goal: a malformed batch is refused before anything is written to the KV store.
#[test]
fn a_malformed_batch_changes_nothing() {
    let mut backend = fixture::backend(fixture::model("qwen3"), Setup::default());
    let tokens: Vec<u32> = (0..20).collect();
    let table = run::table(0, 20, 16);
    let expected = run::rows(&mut backend, &tokens, 0, 20, &table);
    let overwriting = run::part(&[9; 20], 0, 20, &table);
    let mut beyond = run::part(&tokens, 0, 20, &run::table(10, 20, 16));
    beyond.tokens[19] = 96;
    let batch = StepBatch {
        tokens: [overwriting.tokens, beyond.tokens].concat(),
        sequences: vec![overwriting.slice, beyond.slice],
    };
    let error = backend.step(&batch).expect_err("token 96 of 96");
    assert!(matches!(&error, BackendError::MalformedBatch(what) if what.contains("below 96")));
    let again = run::rows(&mut backend, &tokens, 19, 1, &table);
    assert_eq!(again, expected[19..]);
}
