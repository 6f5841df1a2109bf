//! Tests which options, models and batches a backend refuses.

use stolon_backend::Backend;
use stolon_checkpoint::{KvBudget, ModelError, WindowKv};
use stolon_cpu::{CpuBackend, CpuOptions};

use super::fixture::{self, Setup};
use crate::suite::{refusals, run};

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

/// Goal: without recurrent layers, the number of slots is not used; with them, it is at least 1, and
/// the states of all slots must fit in memory.
#[test]
fn slots_of_states_are_checked() {
    let open = |name: &str, state_slots| {
        let model = fixture::model(name);
        let kv_budget = KvBudget::Blocks(4);
        let options = CpuOptions { kv_budget, state_slots, ..CpuOptions::default() };
        CpuBackend::new(model.config, model.weights, options)
    };
    assert_eq!(open("llama", 0).expect("no states").spec().state, None);
    let error = open("qwen3_5", 0).expect_err("no slots").to_string();
    assert!(error.contains("state slots") && error.contains("got 0"), "{error}");
    let error = open("qwen3_5", 1 << 31).expect_err("too many slots").to_string();
    assert!(error.contains("the states of all slots"), "{error}");
    let backend = open("qwen3_5", 3).expect("3 slots");
    let state = backend.spec().state.expect("states");
    // Three layers with 6 heads of 12 x 16 values (10 are used) and 3 inputs of 108 channels, and
    // what is missing to whole groups of 64 positions.
    let bytes = 3 * 4 * (6 * 12 * 16 + 3 * 108_usize);
    let bytes = bytes.next_multiple_of(4 * backend.spec().block_bytes);
    assert_eq!((state.bytes, state.slots), (bytes, 3));
}

/// Goal: with windows in states, a slot has the window of the layers that have one; a slice that is
/// longer than its room is refused. Without layers in blocks, windows stay in blocks.
#[test]
fn windows_in_states_have_room_for_a_slice() {
    let open = |name: &str, window_kv| {
        let model = fixture::model(name);
        let kv_budget = KvBudget::Blocks(64);
        let step_tokens = 20;
        let options = CpuOptions { kv_budget, window_kv, step_tokens, ..CpuOptions::default() };
        CpuBackend::new(model.config, model.weights, options).expect("a valid model")
    };
    let mut backend = open("gpt_oss", WindowKv::States);
    let blocks = open("gpt_oss", WindowKv::Blocks);
    let (spec, whole) = (backend.spec().clone(), blocks.spec());
    // Half of the layers have windows of 13 positions, which are in at most two blocks of 16.
    assert_eq!(2 * spec.block_bytes, whole.block_bytes);
    assert_eq!(spec.state.map(|state| state.bytes), Some(4 * spec.block_bytes), "whole records");
    let tokens = [1; 21];
    for (count, fits) in [(20, true), (21, false)] {
        let part = run::part(&tokens, 0, count, &run::table(0, count, 16));
        let result = backend.step(&run::batch(&backend, &[part]));
        assert_eq!(result.is_ok(), fits, "{count}");
        let Err(error) = result else { continue };
        let error = error.to_string();
        assert!(error.contains("slices of at most 20 tokens, got 21"), "{error}");
    }
    assert_eq!(open("mistral", WindowKv::States).spec().state, None, "all layers have a window");
    assert_eq!(open("llama", WindowKv::States).spec().state, None, "none has");
}

/// Goal: models and batches that are malformed are refused, and an empty batch is not.
#[test]
fn malformed_models_and_batches_are_refused() {
    let open = fixture::open(Setup::default());
    refusals::check_wrong_shape(&open);
    refusals::check_malformed_batches(&open);
    refusals::check_empty_batch(&open);
}
