//! Compares logits with Hugging Face transformers and with the CPU backend.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value};
use stolon_backend::Backend;
use stolon_checkpoint::KvType;
use stolon_cuda::{CandleOptions, ComputeType};

use super::fixture;
use crate::suite::parity::Coverage;
use crate::suite::{parity, run};

/// The architectures of the models that `stolon gpu-check` compares on a device. The book's table of
/// models says of these that they run on GPUs.
fn checked_on_gpus() -> BTreeSet<String> {
    let list = "../../serve/gpu_check/src/architectures.json";
    let list = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(list));
    let list: Map<String, Value> =
        serde_json::from_str(&list.expect("the list of models")).expect("an object");
    list.into_iter().map(|(name, _)| name).collect()
}

/// Goal: logits and greedy tokens of every architecture match those of transformers. The test
/// prints which fixtures are refused, and why; the list has no others, and `gpu-check` and the book
/// have exactly the architectures that are computed.
#[test]
fn every_architecture_matches_transformers() {
    let Coverage { computed, refused } =
        parity::check("candle", &fixture::open(fixture::options(16)));
    println!("the GPU backend refuses {} fixtures", refused.len());
    for (name, reason) in &refused {
        println!("{name}: {reason}");
    }
    let listed: BTreeMap<_, _> = fixture::REFUSED.into_iter().collect();
    assert!(refused.keys().eq(listed.keys()), "refused: {refused:?}");
    for (name, reason) in &refused {
        assert!(reason.contains(listed[name.as_str()]), "{name}: {reason}");
    }
    let computed: BTreeSet<String> = computed.into_iter().map(str::to_owned).collect();
    assert_eq!(computed, checked_on_gpus(), "architectures that run on GPUs");
}

/// Goal: logits and hidden states of every architecture match those of the CPU backend, at all
/// positions, beyond the length of the sliding windows.
#[test]
fn every_architecture_matches_the_cpu_backend() {
    for name in fixture::names() {
        let name = name.as_str();
        let expected = fixture::expected(name);
        let tokens = [expected.prompt, expected.greedy].concat();
        let mut cpu = fixture::cpu_backend(fixture::model(name));
        let mut candle = fixture::backend(fixture::model(name), fixture::options(16));
        let table = run::table(3, tokens.len(), 16);
        let rows = |backend: &mut dyn Backend| run::rows(backend, &tokens, 0, 1000, &table);
        for (row, (got, expected)) in rows(&mut candle).iter().zip(&rows(&mut cpu)).enumerate() {
            let difference = fixture::difference(got, expected);
            assert!(difference < 1e-3, "{name}, row {row}: {difference} standard deviations");
        }
        let hidden = |backend: &mut dyn Backend| {
            let mut part = run::part(&tokens, 0, tokens.len(), &table);
            part.slice.logit_rows = stolon_backend::LogitRows::AllHidden;
            run::hidden(backend, &[part]).remove(0)
        };
        let (got, expected) = (hidden(&mut candle), hidden(&mut cpu));
        assert_eq!(got.len(), tokens.len());
        for (got, expected) in got.iter().zip(&expected) {
            assert!(fixture::difference(got, expected) < 1e-3, "{name}: hidden states");
        }
    }
}

/// Goal: with keys, values and products in half precision, the logits of most rows are near those
/// in f32, and not equal to them. The models have only 64 features, so that rounding weighs more
/// than in real ones; rows in which it changes the choice of an expert differ more.
#[test]
fn half_precision_is_near() {
    let f32 = CandleOptions { block_size: 16, ..fixture::options(16) };
    for name in ["llama", "gemma2", "qwen3_moe", "gpt_oss"] {
        let expected = fixture::expected(name);
        let rows = |options| {
            let mut backend = fixture::backend(fixture::model(name), options);
            let table = run::table(0, expected.prompt.len(), 16);
            run::rows(&mut backend, &expected.prompt, 0, 1000, &table)
        };
        let exact = rows(f32);
        for (options, most) in [
            (CandleOptions { kv_type: Some(KvType::F16), ..f32 }, 0.02),
            (CandleOptions { kv_type: Some(KvType::Bf16), ..f32 }, 0.1),
            (CandleOptions { compute_type: Some(ComputeType::F16), ..f32 }, 0.02),
        ] {
            let got = rows(options);
            let pairs = got.iter().zip(&exact);
            let mut differences: Vec<_> = pairs.map(|(a, b)| fixture::difference(a, b)).collect();
            differences.sort_by(f32::total_cmp);
            let median = differences[differences.len() / 2];
            assert!(median > 0.0 && median < most, "{name}, {options:?}: {median}");
        }
    }
}
