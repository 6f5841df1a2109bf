//! LoRA adapters: the tests of all backends, and what is special on a device.

use stolon_backend::{Backend, Draw, LogitRows};
use stolon_cuda::{CandleOptions, ComputeType};

use super::fixture;
use crate::model_adapter::whole_adapter;
use crate::suite::adapters::{self, directory, load, names};
use crate::suite::invariance::Subject;
use crate::suite::run;

/// Goal: logits of models with an adapter match those of PEFT, for every fixture, with and without
/// batch invariance.
#[test]
fn adapters_match_peft() {
    for name in names() {
        for batch_invariant in [true, false] {
            let options = CandleOptions { batch_invariant, ..fixture::options(16) };
            let backend = Box::new(fixture::backend(fixture::model(&name), options));
            let label = format!("batch invariance: {batch_invariant}");
            adapters::check_peft(&name, &label, backend, &directory(&name));
        }
    }
}

/// Goal: an adapter of routers and of the gates of shared experts gives the results of a model with
/// the adapter in its weights.
#[test]
fn adapters_of_routers_equal_merged_weights() {
    adapters::check_routers(&fixture::open(CandleOptions::default()));
}

/// Goal: rows with an adapter are batch invariant for every kind of model.
#[test]
fn adapters_are_batch_invariant() {
    for name in names() {
        let open = adapters::open(fixture::open(CandleOptions::default()), directory(&name));
        Subject::fixture(&name, "candle, with an adapter", open, &[1]).check();
    }
}

/// Goal: in a batch of the model itself and several adapters, each row has the bits that it has
/// alone, for models of all kinds, in single and half precision.
#[test]
fn requests_with_different_adapters_share_a_batch() {
    let names =
        ["qwen3", "gpt_oss", "qwen2_moe", "deepseek_v3", "falcon_h1", "kimi_linear", "lfm2"];
    let all = names.map(|name| (name, ComputeType::F32));
    for (name, compute_type) in all.into_iter().chain([("llama", ComputeType::F16)]) {
        let options = CandleOptions { compute_type: Some(compute_type), ..fixture::options(16) };
        let open = || Box::new(fixture::backend(fixture::model(name), options)) as Box<dyn Backend>;
        let config = fixture::model(name).config;
        adapters::check_mixed_batch(&format!("{name}, {compute_type:?}"), &config, &open);
    }
}

/// Goal: an adapter of another backend is refused, and so is one of another model.
#[test]
fn adapters_of_another_model_are_refused() {
    adapters::check_foreign(&fixture::open(CandleOptions::default()));
}

/// Goal: steps with an adapter are not captured, and draw the tokens of their logits.
#[test]
fn steps_with_adapters_are_not_captured() {
    let options =
        CandleOptions { batch_invariant: false, cuda_graphs: true, ..fixture::options(16) };
    let mut backend = fixture::backend(fixture::model("llama"), options);
    let adapter = load(&backend, &directory("llama")).expect("a valid adapter");
    let tokens = [3, 1, 4, 1, 5];
    let table = run::table(2, tokens.len(), 16);
    for (adapter, captured) in [(Some(adapter), 0), (None, 1)] {
        let mut step = |from, rows| {
            let mut part = run::part(&tokens, from, tokens.len(), &table);
            (part.slice.adapter, part.slice.logit_rows) = (adapter.clone(), rows);
            let batch = run::batch(&backend, &[part]);
            backend.step(&batch).expect("a good batch")
        };
        let logits = step(0, LogitRows::Last).logits;
        let drawn = step(4, LogitRows::Drawn(Draw::GREEDY)).drawn;
        assert_eq!(drawn, [Draw::GREEDY.of(&logits)]);
        assert_eq!(backend.captured_graphs(), captured);
    }
}

/// Goal: the memory of an adapter is that of its matrices in the compute type, and an adapter that
/// needs more than the maximum is refused, also if its file is smaller.
#[test]
fn the_memory_of_adapters_is_counted() {
    let bytes = [ComputeType::F32, ComputeType::F16].map(|compute_type| {
        let options = CandleOptions { compute_type: Some(compute_type), ..fixture::options(16) };
        let backend = fixture::backend(fixture::model("llama"), options);
        let dir = tempfile::tempdir().expect("a directory");
        whole_adapter(backend.config(), 4, "BF16", 1).write(dir.path());
        let adapter = load(&backend, dir.path()).expect("a valid adapter");
        let loader = backend.adapters().expect("it supports adapters");
        let loaded = loader.load(dir.path(), adapter.bytes());
        assert_eq!(loaded.expect("it fits").bytes(), adapter.bytes());
        let error = loader.load(dir.path(), adapter.bytes() - 1).expect_err("it is larger");
        assert!(error.to_string().contains(&(adapter.bytes() - 1).to_string()), "{error}");
        adapter.bytes()
    });
    assert_eq!(bytes[0], 2 * bytes[1]);
}
