//! Tables that stay in their file: the same logits, and less memory.

use stolon_checkpoint::{LoadedModel, WeightType};
use stolon_cpu::{CpuBackend, CpuOptions};

use super::super::suite::{fixture, run};

fn open(model: LoadedModel, map_tables: bool) -> CpuBackend {
    let options = CpuOptions { map_tables, threads: Some(1), ..CpuOptions::default() };
    CpuBackend::new(model.config, model.weights, options).expect("a valid model")
}

/// Goal: a model whose embeddings are read from the file computes the logits of one that has loaded
/// them, bit for bit, and needs less memory by their size.
#[test]
fn tables_can_stay_in_their_file() {
    let mut mapped = Vec::new();
    for name in fixture::names() {
        let model = fixture::model(&name);
        let tensors = model.config.tensors();
        let stays = |spec: &_| model.weights.can_stay_in_file(spec, WeightType::Stored);
        if !tensors.iter().any(stays) {
            continue;
        }
        let prompt = fixture::expected(&name).prompt;
        let logits = |backend: &mut CpuBackend| {
            let table = run::table(0, prompt.len(), 16);
            run::rows(backend, &prompt, 0, prompt.len(), &table)
        };
        let (mut loaded, mut other) = (open(fixture::model(&name), false), open(model, true));
        assert!(other.weight_bytes() < loaded.weight_bytes(), "{name}");
        let bits = |rows: Vec<Vec<f32>>| -> Vec<u32> {
            rows.into_iter().flatten().map(f32::to_bits).collect()
        };
        assert!(bits(logits(&mut other)) == bits(logits(&mut loaded)), "{name}: other logits");
        mapped.push(name);
    }
    // An untied embedding, and the per-layer embeddings of a model whose embedding is tied.
    assert!(mapped.iter().any(|name| name == "llama"), "{mapped:?}");
    assert!(mapped.iter().any(|name| name.starts_with("gemma4")), "{mapped:?}");
}
