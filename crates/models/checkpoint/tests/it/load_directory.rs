//! Tests loading of Hugging Face model directories: all supported forms, and the errors for others.
use std::path::Path;

use model_dir::{
    OTHER_ROWS, architectures, assert_same, config_json, model, safetensors_of, write_json,
    write_model,
};
use serde_json::{Value, json};
use stolon_checkpoint::inspect::{InspectOptions, inspect};
use stolon_checkpoint::{
    LoadOptions, LoadedModel, ModelError, ModelSource, RopeScaling, Tensor, Weights, load,
};
use stolon_text::TokenizerSource;

use crate::support::model_dir;

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

/// Goal: where `config.json` says that the embedding is the output matrix, an output matrix in the
/// file is used if it differs, under any of its names, and users are told. An equal one changes
/// nothing.
#[test]
fn an_output_matrix_that_differs_from_the_embedding_is_used() {
    let mut json = config_json("llama");
    let (config, weights) = model(&json, 5);
    json["tie_word_embeddings"] = true.into();
    let dir = tempfile::tempdir().unwrap();
    write_json(dir.path(), "config.json", &json);
    let write = |name: &str, is_equal: bool| {
        let tensors = config.tensors().into_iter().map(|spec| {
            let is_head = spec.name == "lm_head.weight";
            let source = if is_head && is_equal { "model.embed_tokens.weight" } else { &spec.name };
            let tensor = weights.tensor(source, &spec.shape).unwrap();
            let name = if is_head { name.to_owned() } else { spec.name };
            let bytes = tensor.bytes.to_vec().into();
            Tensor { name, shape: spec.shape, bytes, dtype: tensor.dtype }
        });
        let weights = Weights::from_tensors("memory", tensors).unwrap();
        let file = safetensors_of(&weights, |name| Some(name.to_owned()));
        std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    };
    let source = ModelSource::Directory(dir.path().to_owned());
    let notes = || inspect(&source, &InspectOptions::default()).unwrap().notes;
    for name in ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"] {
        write(name, false);
        let loaded = open(dir.path()).unwrap();
        assert_eq!(loaded.config, config, "{name}");
        assert_same(&loaded.weights, &weights, &config);
        let notes = notes();
        assert!(notes.len() == 1 && notes[0].contains("differs from the embedding"), "{notes:?}");
    }
    write("lm_head.weight", true);
    assert!(open(dir.path()).unwrap().config.tie_word_embeddings);
    assert!(notes().is_empty());
    // The only matrix may have the name of the output matrix.
    let only_head = |name: &str| (name != "model.embed_tokens.weight").then(|| name.to_owned());
    std::fs::write(dir.path().join("model.safetensors"), safetensors_of(&weights, only_head))
        .unwrap();
    let loaded = open(dir.path()).unwrap();
    let shape = [config.vocab_size, config.hidden_size];
    let [used, head] =
        [(&loaded.weights, "model.embed_tokens.weight"), (&weights, "lm_head.weight")]
            .map(|(weights, name)| weights.tensor(name, &shape).unwrap().bytes.into_owned());
    assert!(loaded.config.tie_word_embeddings && used == head);
}

/// Goal: in a multimodal model without an output matrix, either object of the configuration may say
/// that the embedding is used, and some do it by default.
#[test]
fn a_multimodal_model_may_lack_its_output_matrix() {
    let text = config_json("ministral3");
    let (_, weights) = model(&text, 5);
    let dir = tempfile::tempdir().unwrap();
    let is_kept = |name: &str| (name != "lm_head.weight").then(|| name.to_owned());
    std::fs::write(dir.path().join("model.safetensors"), safetensors_of(&weights, is_kept))
        .unwrap();
    let load = |outer: Option<bool>, inner: Option<bool>| {
        let mut json = json!({ "model_type": "mistral3", "text_config": text });
        json["tie_word_embeddings"] = json!(outer);
        json["text_config"]["tie_word_embeddings"] = json!(inner);
        write_json(dir.path(), "config.json", &json);
        open(dir.path()).map(|model| model.config.tie_word_embeddings && model.generates)
    };
    for (outer, inner) in
        [(None, None), (Some(true), None), (None, Some(true)), (Some(false), Some(true))]
    {
        assert!(load(outer, inner).unwrap(), "{outer:?} {inner:?}");
    }
    for (outer, inner) in [(Some(false), None), (None, Some(false)), (Some(false), Some(false))] {
        let error = load(outer, inner).unwrap_err().to_string();
        assert!(error.contains("missing tensor `lm_head.weight`"), "{error}");
    }
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
    // Users change the end-of-sequence tokens in one of the files only.
    assert_eq!(got.eos_token_ids, [2, 3, 7]);
    assert_eq!((got.do_sample, got.top_k, got.min_p), (Some(true), Some(20), None));
    assert_eq!((got.temperature, got.top_p), (Some(0.6), Some(0.95)));
    // The default of the architecture is used only if no file names one.
    let mut config = config_json("llama");
    config.as_object_mut().unwrap().remove("eos_token_id");
    write_json(dir.path(), "config.json", &config);
    assert_eq!(open(dir.path()).unwrap().generation.eos_token_ids, [3, 7]);
    write_json(dir.path(), "generation_config.json", &json!({ "top_p": 2.0 }));
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("`top_p`") && error.contains("got 2.0"), "{error}");
}

/// Goal: further chat templates are files of a directory; others are not read.
#[test]
fn named_templates_are_files() {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config_json("llama"), 7);
    assert!(open(dir.path()).unwrap().text.named_templates.is_empty());
    let templates = dir.path().join("additional_chat_templates");
    std::fs::create_dir(&templates).unwrap();
    for name in ["tool_use.jinja", "rag.jinja", "notes.txt"] {
        std::fs::write(templates.join(name), name).unwrap();
    }
    let expected = ["rag", "tool_use"].map(|name| (name.to_owned(), format!("{name}.jinja")));
    assert_eq!(open(dir.path()).unwrap().text.named_templates, expected);
    std::fs::write(templates.join("wrong.jinja"), [255]).unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("wrong.jinja"), "{error}");
}

/// Goal: quantized weights without a description are refused with the names of what may have it,
/// and the files of older tools are read.
#[test]
fn quantized_weights_need_a_description() {
    use safetensors::tensor::{Dtype, TensorView};
    let dir = tempfile::tempdir().unwrap();
    write_json(dir.path(), "config.json", &config_json("llama"));
    let name = "model.layers.0.self_attn.q_proj.qweight";
    let view = TensorView::new(Dtype::I32, vec![1], &[0; 4]).unwrap();
    let file = safetensors::serialize([(name, view)], None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let error = || open(dir.path()).unwrap_err().to_string();
    for part in ["`quantization_config`", "quantize_config.json", name] {
        assert!(error().contains(part), "{}", error());
    }
    write_json(dir.path(), "quant_config.json", &json!({ "w_bit": 3, "q_group_size": 128 }));
    assert!(error().contains("`quantization_config.bits`: 3"), "{}", error());
    write_json(dir.path(), "quantize_config.json", &json!({ "bits": 2, "group_size": 128 }));
    assert!(error().contains("`quantization_config.bits`: 2"), "{}", error());
}

/// Goal: tokens that must not be generated are read from `generation_config.json`, or else from
/// `config.json`, and keys that are not applied are named.
#[test]
fn suppressed_tokens_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config_json("llama");
    write_model(dir.path(), &config, 7);
    config["bad_words_ids"] = json!([[5], [6, 7], [2]]);
    write_json(dir.path(), "config.json", &config);
    let suppressed = || open(dir.path()).unwrap().generation.suppressed;
    let of_config = suppressed();
    assert_eq!((of_config.always, of_config.sequences), (vec![5], vec![vec![6, 7]]));
    let generation = json!({ "suppress_tokens": [4, 1000], "num_beams": 4 });
    write_json(dir.path(), "generation_config.json", &generation);
    let own = suppressed();
    assert_eq!((own.always, own.sequences.len()), (vec![4], 0));
    let source = ModelSource::Directory(dir.path().to_owned());
    let notes = inspect(&source, &InspectOptions::default()).unwrap().notes;
    assert!(notes.len() == 1 && notes[0].contains("`num_beams` is not applied"), "{notes:?}");
}

/// Goal: classifiers, rerankers and reward models with tied embeddings are refused, and `inspect`
/// says why.
#[test]
fn models_of_scores_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config_json("llama");
    config["tie_word_embeddings"] = true.into();
    write_model(dir.path(), &config, 7);
    assert!(open(dir.path()).is_ok());
    config["architectures"] = json!(["LlamaForSequenceClassification"]);
    write_json(dir.path(), "config.json", &config);
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("`architectures`") && error.contains("rerankers"), "{error}");
    let source = ModelSource::Directory(dir.path().to_owned());
    let refusals = inspect(&source, &InspectOptions::default()).unwrap().refusals;
    assert_eq!(refusals, [error]);
}

/// Goal: LongRoPE's factors for short contexts are used if the context is limited to one.
#[test]
fn a_limited_context_selects_the_short_factors() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config_json("phi3");
    config["rope_scaling"]["short_factor"] = json!(vec![1.0; 12]);
    write_model(dir.path(), &config, 7);
    let source = ModelSource::Directory(dir.path().to_owned());
    for (max_positions, is_short) in [(None, false), (Some(33), false), (Some(32), true)] {
        let options = LoadOptions { max_positions, ..LoadOptions::default() };
        let RopeScaling::Divisors { divisors, .. } =
            load(&source, &options).unwrap().config.ropes.remove(0).scaling
        else {
            panic!("expected divisors");
        };
        assert_eq!(divisors == [1.0; 12], is_short, "{max_positions:?}");
    }
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
