//! Compares logits and greedy tokens with Hugging Face transformers.

use serde_json::{Value, json};
use stolon_checkpoint::{LoadOptions, LoadedModel, ModelSource, load};
use stolon_kernels::Path;

use super::fixture::{self, Setup};
use crate::suite::{parity, run};

/// Goal: logits and greedy tokens of every architecture match those of transformers, on every
/// instruction set of this machine. `make_fixtures.py` says what each model has.
#[test]
fn every_architecture_matches_transformers() {
    for path in Path::supported() {
        let setup = Setup { path: Some(path), ..Setup::default() };
        let coverage = parity::check(path.name(), &fixture::open(setup));
        assert!(coverage.refused.is_empty(), "{:?}", coverage.refused);
    }
}

/// The model of the fixture `gpt_oss` with experts in MXFP4, as in the published checkpoints.
fn gpt_oss_in_mxfp4() -> LoadedModel {
    let fixture = fixture::directory("gpt_oss");
    let dir = tempfile::tempdir().expect("a directory");
    for file in ["rest.safetensors", "mxfp4.safetensors"] {
        std::fs::copy(fixture.join(file), dir.path().join(file)).expect("a copy");
    }
    let read = |name: &str| -> Value {
        let text = std::fs::read(fixture.join(name)).expect("a file of the fixture");
        serde_json::from_slice(&text).expect("JSON")
    };
    let mut config = read("config.json");
    config["quantization_config"] = json!({ "quant_method": "mxfp4" });
    let mut index = read("model.safetensors.index.json");
    let files = index["weight_map"].as_object_mut().expect("an object");
    for name in files.keys().cloned().collect::<Vec<_>>() {
        if files[&name] == "experts.safetensors" {
            files.remove(&name);
            for part in ["blocks", "scales"] {
                files.insert(format!("{name}_{part}"), "mxfp4.safetensors".into());
            }
        }
    }
    for (name, value) in [("config.json", config), ("model.safetensors.index.json", index)] {
        std::fs::write(dir.path().join(name), value.to_string()).expect("a file");
    }
    let source = ModelSource::Directory(dir.path().to_owned());
    load(&source, &LoadOptions::default()).expect("a valid model")
}

/// Goal: experts in MXFP4 have the same values as the experts in floats, which MXFP4 can represent,
/// and the model can be computed.
#[test]
fn mxfp4_experts_equal_experts_in_floats() {
    let (floats, packed) = (fixture::model("gpt_oss"), gpt_oss_in_mxfp4());
    assert_eq!(floats.config, packed.config);
    for spec in floats.config.tensors() {
        let [floats, packed] = [&floats, &packed].map(|model| {
            let tensor = model.weights.tensor(&spec.name, &spec.shape).expect("a tensor");
            let mut values = vec![0.0; spec.shape.iter().product()];
            stolon_kernels::widen(tensor.dtype, &tensor.bytes, &mut values);
            values
        });
        assert_eq!(floats, packed, "{}", spec.name);
    }
    let name = "model.layers.1.mlp.experts.3.up_proj.weight";
    let dtype = packed.weights.tensor(name, &[32, 32]).expect("a tensor").dtype;
    assert_eq!(dtype.name(), "MXFP4");
    let mut backend = fixture::backend(packed, Setup::default());
    let rows = run::rows(&mut backend, &[5, 6, 7], 0, 3, &run::table(0, 3, 16));
    assert!(rows.iter().flatten().all(|logit| logit.is_finite()));
}
