//! Tests loading of Hugging Face model directories: all supported forms, and the errors for others.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail by panicking")]

#[path = "support/model_dir.rs"]
mod model_dir;

use std::path::Path;

use model_dir::{
    OTHER_ROWS, architectures, assert_same, config_json, model, safetensors_of, write_json,
    write_model,
};
use serde_json::{Value, json};
use stolon_model::{LoadOptions, LoadedModel, ModelError, ModelSource, Tensor, Weights, load};
use stolon_text::TokenizerSource;

fn open(dir: &Path) -> Result<LoadedModel, ModelError> {
    load(&ModelSource::Directory(dir.to_owned()), &LoadOptions::default())
}

/// Goal: configuration and tensors of every architecture are loaded as they were saved.
#[test]
fn every_architecture_is_loaded_as_saved() {
    // The parity tests of the decoder have files with other orders of rows.
    for architecture in architectures().filter(|name| !OTHER_ROWS.contains(name)) {
        let dir = tempfile::tempdir().unwrap();
        let (config, weights) = write_model(dir.path(), &config_json(architecture), 3);
        let loaded = open(dir.path()).unwrap();
        assert_eq!(loaded.config, config);
        assert_same(&loaded.weights, &weights, &config);
        assert_eq!(loaded.id, dir.path().file_name().unwrap().to_str().unwrap());
    }
}

/// Goal: projections that are stored as one tensor (Phi-3) equal separate ones, and the error for a
/// wrong number of rows names the tensor in the file.
#[test]
fn fused_projections_are_divided() {
    let json = config_json("phi3");
    let (config, weights) = model(&json, 5);
    let write = |dir: &Path, with_queries: bool| {
        let mut tensors: Vec<Tensor<'static>> = Vec::new();
        for spec in config.tensors() {
            let tensor = weights.tensor(&spec.name, &spec.shape).unwrap();
            let module = spec.name.trim_end_matches(".weight");
            let (module, part) = module.rsplit_once('.').unwrap_or(("", module));
            let name = match part {
                "q_proj" if !with_queries => continue,
                "q_proj" | "k_proj" | "v_proj" => format!("{module}.qkv_proj.weight"),
                "gate_proj" | "up_proj" => format!("{module}.gate_up_proj.weight"),
                _ => spec.name.clone(),
            };
            match tensors.iter_mut().find(|tensor| tensor.name == name) {
                Some(fused) => {
                    fused.shape[0] += spec.shape[0];
                    fused.bytes.to_mut().extend_from_slice(&tensor.bytes);
                }
                None => {
                    let bytes = tensor.bytes.to_vec().into();
                    tensors.push(Tensor { name, shape: spec.shape, bytes, dtype: tensor.dtype });
                }
            }
        }
        let fused = Weights::from_tensors("memory", tensors).unwrap();
        let file = safetensors_of(&fused, |name| Some(name.to_owned()));
        write_json(dir, "config.json", &json);
        std::fs::write(dir.join("model.safetensors"), file).unwrap();
    };
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), true);
    assert_same(&open(dir.path()).unwrap().weights, &weights, &config);
    write(dir.path(), false);
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("self_attn.qkv_proj.weight") && error.contains("[128, 256]"), "{error}");
}

/// Writes the model to two files and an index.
fn write_sharded(dir: &Path, config: &Value) -> Value {
    let (_, weights) = model(config, 4);
    let second = |name: &str| name.contains("layers.1.");
    let mut map = json!({});
    for (shard, inside) in [("model-1-of-2.safetensors", false), ("model-2-of-2.safetensors", true)]
    {
        let pick = |name: &str| (second(name) == inside).then(|| name.to_owned());
        std::fs::write(dir.join(shard), safetensors_of(&weights, pick)).unwrap();
        for name in weights.names().filter(|name| second(name) == inside) {
            map[name] = shard.into();
        }
    }
    let index = json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    write_json(dir, "config.json", config);
    write_json(dir, "model.safetensors.index.json", &index);
    index
}

/// Goal: a model in several files equals the model in one file. The error for a file that is
/// missing, lacks a tensor or is truncated names the file.
#[test]
fn sharded_models_are_loaded_and_broken_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_json("qwen3");
    let mut index = write_sharded(dir.path(), &config);
    let loaded = open(dir.path()).unwrap();
    assert_same(&loaded.weights, &model(&config, 4).1, &loaded.config);

    index["weight_map"]["model.extra.weight"] = "model-1-of-2.safetensors".into();
    write_json(dir.path(), "model.safetensors.index.json", &index);
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("model-1-of-2.safetensors") && error.contains("`model.extra.weight`"));

    let shard = dir.path().join("model-2-of-2.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(error, ModelError::Truncated { .. }), "{error}");
    assert!(error.to_string().contains("model-2-of-2.safetensors"), "{error}");

    std::fs::remove_file(&shard).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(error, ModelError::Io { .. }), "{error}");
    assert!(error.to_string().contains("model-2-of-2.safetensors"), "{error}");
}

/// Goal: weights are found if they were saved without the prefix `model.`, or as part of a
/// multimodal model.
#[test]
fn weights_with_other_prefixes_are_found() {
    let plain = |name: &str| Some(name.strip_prefix("model.").unwrap_or(name).to_owned());
    let older = |name: &str| Some(format!("language_model.{name}"));
    let newer = |name: &str| Some(name.replacen("model.", "model.language_model.", 1));
    let renames: [fn(&str) -> Option<String>; 3] = [plain, older, newer];
    for rename in renames {
        let dir = tempfile::tempdir().unwrap();
        let config = config_json("gemma3_text");
        let (decoder, weights) = model(&config, 5);
        write_json(dir.path(), "config.json", &config);
        std::fs::write(dir.path().join("model.safetensors"), safetensors_of(&weights, rename))
            .unwrap();
        assert_same(&open(dir.path()).unwrap().weights, &weights, &decoder);
    }
}

/// Goal: loading fails if a tensor is missing or has the wrong shape, and the error names the
/// tensor. The output matrix may be missing only if it is tied to the embedding.
#[test]
fn tensors_are_checked_at_loading() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config_json("llama");
    let (_, weights) = model(&config, 6);
    let file = |without: &str| {
        let rename = |name: &str| (name != without).then(|| name.to_owned());
        std::fs::write(dir.path().join("model.safetensors"), safetensors_of(&weights, rename))
            .unwrap();
    };
    write_json(dir.path(), "config.json", &config);
    file("lm_head.weight");
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("missing tensor `lm_head.weight`") && error.contains("[40, 256]"));
    config["tie_word_embeddings"] = true.into();
    write_json(dir.path(), "config.json", &config);
    assert!(open(dir.path()).is_ok());

    file("model.layers.1.mlp.up_proj.weight");
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("missing tensor `model.layers.1.mlp.up_proj.weight`"), "{error}");

    file("");
    config["intermediate_size"] = 255.into();
    write_json(dir.path(), "config.json", &config);
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("expected shape [255, 256], got [256, 256]"), "{error}");
    assert!(error.contains("model.safetensors"), "{error}");
}

/// Goal: the errors for missing or malformed files name the file.
#[test]
fn missing_and_malformed_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = open(&dir.path().join("nothing")).unwrap_err();
    assert!(matches!(error, ModelError::Io { .. }) && error.to_string().contains("nothing"));
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("expected config.json"), "{error}");
    std::fs::write(dir.path().join("m.gguf"), "").unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("m.gguf"), "{error}");
    // Weights in a GGUF file have their configuration in the same file.
    std::fs::remove_file(dir.path().join("m.gguf")).unwrap();
    std::fs::write(dir.path().join("config.json"), "{ \"model_type\": ").unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json: malformed") && error.contains("line 1"), "{error}");
    write_json(dir.path(), "config.json", &config_json("llama"));
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors or model.safetensors.index.json"), "{error}");
    std::fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("pytorch_model.bin is not supported: save the model as safetensors"),
        "{error}"
    );
    std::fs::write(dir.path().join("model.safetensors"), "").unwrap();
    assert!(matches!(open(dir.path()), Err(ModelError::Truncated { got: 0, .. })));
    let file = dir.path().join("config.json");
    assert!(open(&file).unwrap_err().to_string().contains("expected a directory"));
}

/// Goal: the tokenizer, the chat template from each of its three files, and the generation defaults
/// are loaded.
#[test]
fn text_and_generation_files_are_loaded() {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config_json("llama"), 7);
    let loaded = open(dir.path()).unwrap();
    assert!(matches!(loaded.text.tokenizer, TokenizerSource::Missing { .. }));
    assert_eq!(loaded.text.chat_template, None);
    assert_eq!(loaded.generation.eos_token_ids, [2]);
    assert_eq!(loaded.generation.bos_token_id, Some(1));

    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let named = json!([
        { "name": "tool_use", "template": "tools" },
        { "name": "default", "template": "from the list" },
    ]);
    write_json(dir.path(), "tokenizer_config.json", &json!({ "chat_template": named }));
    let loaded = open(dir.path()).unwrap();
    assert!(
        matches!(&loaded.text.tokenizer, TokenizerSource::Json { bytes, .. } if **bytes == *b"{}")
    );
    assert_eq!(loaded.text.chat_template.as_deref(), Some("from the list"));
    write_json(dir.path(), "tokenizer_config.json", &json!({ "chat_template": "one" }));
    assert_eq!(open(dir.path()).unwrap().text.chat_template.as_deref(), Some("one"));
    write_json(dir.path(), "chat_template.json", &json!({ "chat_template": "of the processor" }));
    let loaded = open(dir.path()).unwrap();
    assert_eq!(loaded.text.chat_template.as_deref(), Some("of the processor"));
    std::fs::write(dir.path().join("chat_template.jinja"), "jinja").unwrap();
    let loaded = open(dir.path()).unwrap();
    assert_eq!(loaded.text.chat_template.as_deref(), Some("jinja"));

    let generation = json!({
        "eos_token_id": [7, 3, 7, 1000, -1], "do_sample": true, "temperature": 0.6, "top_k": 20,
        "top_p": 0.95, "repetition_penalty": 1.05,
    });
    write_json(dir.path(), "generation_config.json", &generation);
    let got = open(dir.path()).unwrap().generation;
    assert_eq!(got.eos_token_ids, [3, 7]);
    assert_eq!((got.do_sample, got.top_k, got.min_p), (Some(true), Some(20), None));
    assert_eq!((got.temperature, got.top_p), (Some(0.6), Some(0.95)));
    write_json(dir.path(), "generation_config.json", &json!({ "top_p": 2.0 }));
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("`top_p`") && error.contains("got 2.0"), "{error}");
}

/// Goal: the error for a tensor type that the kernels do not support names the type.
#[test]
fn unsupported_types_are_refused_by_name() {
    use safetensors::tensor::{Dtype, TensorView};
    let dir = tempfile::tempdir().unwrap();
    let (config, _) = write_model(dir.path(), &config_json("llama"), 8);
    let specs = config.tensors();
    let data: Vec<Vec<u8>> =
        specs.iter().map(|s| vec![0; s.shape.iter().product::<usize>()]).collect();
    let views = specs.iter().zip(&data).map(|(spec, data)| {
        (&spec.name, TensorView::new(Dtype::F8_E4M3, spec.shape.clone(), data).unwrap())
    });
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(&error, ModelError::WrongType { got, .. } if got.contains("F8")), "{error}");
}

/// Goal: a preset is loaded with random weights and a tokenizer of bytes.
#[test]
fn random_models_are_loaded_by_preset() {
    let open = |text: &str| load(&text.parse().unwrap(), &LoadOptions::default());
    let loaded = open("random:tiny@5").unwrap();
    assert_eq!(loaded.id, "random:tiny");
    loaded.weights.check(&loaded.config).unwrap();
    let vocab_size = loaded.config.vocab_size;
    assert!(
        matches!(loaded.text.tokenizer, TokenizerSource::Bytes { vocab_size: n } if n == vocab_size)
    );
    assert!(loaded.generation.eos_token_ids.is_empty());
    let error = open("random:huge").unwrap_err().to_string();
    assert!(error.contains("`huge`") && error.contains("100m"), "{error}");
}
