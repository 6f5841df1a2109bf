//! Tests which options and batches a backend refuses, and that a refused batch has no effect.

use stolon_backend::{Backend, BackendError, StepBatch};
use stolon_cuda::{CandleBackend, CandleOptions, ComputeType, DeviceChoice, OpenError};
use stolon_kvcache::BlockId;
use stolon_model::{KvBudget, KvType};

use super::fixture;
use crate::run;

fn refused(options: CandleOptions, part: &str) -> OpenError {
    let model = fixture::model("llama");
    let error = CandleBackend::open(model.config, model.weights, options)
        .expect_err("an option that is not valid");
    assert!(error.to_string().contains(part), "expected {part:?} in {error}");
    error
}

/// Goal: invalid options are refused with the accepted and the given value.
#[test]
fn invalid_options_are_refused() {
    let valid = fixture::options(16);
    let cases = [
        (CandleOptions { block_size: 24, ..valid }, "power of two from 1 to 256, got 24"),
        (CandleOptions { memory_utilization: 0.0, ..valid }, "above 0 and up to 1, got 0"),
        (CandleOptions { memory_utilization: f64::NAN, ..valid }, "up to 1, got NaN"),
        (CandleOptions { kv_type: Some(KvType::Int8), ..valid }, "got `int8`"),
        (CandleOptions { compute_type: Some(ComputeType::Bf16), ..valid }, "got `bf16`"),
        (CandleOptions { kv_budget: KvBudget::Blocks(0), ..valid }, "got 0"),
        (CandleOptions { kv_copies: true, batch_invariant: false, ..valid }, "batch invariance"),
    ];
    for (options, part) in cases {
        refused(options, part);
    }
    // 2 layers, 2 kv heads of 8, keys and values, 16 positions, f32.
    let block_bytes = 2 * 2 * 2 * 8 * 16 * 4;
    let budget = KvBudget::Bytes(block_bytes - 1);
    refused(CandleOptions { kv_budget: budget, ..valid }, &format!("{block_bytes} bytes"));
}

/// Goal: a KV store that does not fit in memory is refused with the numbers, before anything is
/// allocated, however large it is.
#[test]
fn a_kv_store_that_does_not_fit_is_refused() {
    for blocks in [1 << 30, usize::MAX / 2, usize::MAX] {
        let options =
            CandleOptions { kv_budget: KvBudget::Blocks(blocks), ..fixture::options(256) };
        refused(options, "bytes of memory are needed");
    }
}

/// Goal: a device that this build does not have is refused by its name.
#[test]
fn devices_of_other_builds_are_refused() {
    for (device, name) in [(DeviceChoice::Cuda(3), "cuda:3"), (DeviceChoice::Metal(0), "metal:0")] {
        let error = refused(CandleOptions { device, ..fixture::options(16) }, name);
        assert!(matches!(error, OpenError::Device { .. }));
    }
    for name in ["cpu", "cuda:0", "cuda:7", "metal:1"] {
        let device: DeviceChoice = name.parse().expect("a device");
        assert_eq!(device.to_string(), name);
    }
    for name in ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "CUDA", "metal:0:1"] {
        let error = name.parse::<DeviceChoice>().expect_err("not a device").to_string();
        assert!(error.contains(&format!("got `{name}`")), "{error}");
    }
}

/// Goal: the error for a tensor whose shape does not match the configuration names the tensor.
#[test]
fn a_tensor_of_the_wrong_shape_is_named() {
    let mut model = fixture::model("llama");
    model.config.intermediate_size += 1;
    let error = CandleBackend::open(model.config, model.weights, fixture::options(16));
    let error = error.expect_err("gate_proj is smaller").to_string();
    assert!(error.contains("model.layers.0.mlp.gate_proj.weight"), "{error}");
}

/// Goal: malformed batches are refused before anything is written to the KV store.
#[test]
fn a_malformed_batch_changes_nothing() {
    let mut backend = fixture::backend(fixture::model("qwen3"), fixture::options(16));
    let tokens: Vec<u32> = (0..20).collect();
    let table = run::table(0, 20, 16);
    let expected = run::rows(&mut backend, &tokens, 0, 20, &table);
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
    let again = run::rows(&mut backend, &tokens, 19, 1, &table);
    assert_eq!(again, expected[19..]);
}
