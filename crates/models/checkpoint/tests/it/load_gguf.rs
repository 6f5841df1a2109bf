//! Tests loading of GGUF files: a model loaded from GGUF equals the same model from safetensors.
//!
//! The tests write the files from random models in the same way as llama.cpp's converter.
use std::path::Path;

use gguf_model::{floats, gguf_of, quantized, stored_type};
use gguf_writer::{GgufWriter, Meta};
use model_dir::{architectures, assert_same, config_json, model, write_json};
use serde_json::{Value, json};
use stolon_backend::{Backend, LogitRows, Pooling, SequenceSlice, SliceState, StepBatch};
use stolon_checkpoint::config::{QkNorm, TensorRole};
use stolon_checkpoint::kv::{KvBudget, KvType};
use stolon_checkpoint::{
    Activation, Architecture, DecoderConfig, FeedForwardConfig, LayerConfig, LoadOptions,
    LoadedModel, MixerConfig, ModelError, ModelSource, PairForm, RopeScaling, TensorType, Weights,
    load,
};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_kvcache::BlockId;
use stolon_text::TokenizerSource;

use crate::support::{gguf_model, gguf_writer, model_dir};

/// As `config_json("gemma4_text")`, with experts and without per-layer embeddings; no layers share
/// keys and values, and those of global layers have the same projection.
fn gemma4_with_experts() -> Value {
    let mut config = config_json("gemma4_text");
    config["num_kv_shared_layers"] = 0.into();
    config["use_double_wide_mlp"] = false.into();
    config["hidden_size_per_layer_input"] = 0.into();
    config["attention_k_eq_v"] = true.into();
    config["num_global_key_value_heads"] = 1.into();
    config["enable_moe_block"] = true.into();
    config["num_experts"] = 4.into();
    config["top_k_experts"] = 2.into();
    config["moe_intermediate_size"] = 256.into();
    config
}

fn open(path: &Path) -> Result<LoadedModel, ModelError> {
    load(&ModelSource::Gguf(path.to_owned()), &LoadOptions::default())
}

fn write(dir: &Path, file: &GgufWriter) -> std::path::PathBuf {
    let path = dir.join("m.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

/// All types that GGUF files have.
fn gguf_types() -> impl Iterator<Item = TensorType> {
    TensorType::ALL.into_iter().filter(|dtype| dtype.gguf_id().is_some())
}

/// Goal: for each architecture and type, the configuration equals the one of config.json, and each
/// tensor is byte for byte the quantized form of the one in safetensors. The first architecture has
/// all types, and each other one a third of them, in turn.
#[test]
fn every_type_is_loaded_byte_for_byte() {
    let mut biased = config_json("llama");
    biased["attention_bias"] = true.into();
    biased["mlp_bias"] = true.into();
    let cases = [
        config_json("llama"),
        biased,
        config_json("ministral3"),
        config_json("qwen2"),
        config_json("qwen3"),
        config_json("granite"),
        config_json("olmo2"),
        config_json("exaone4"),
        config_json("smollm3"),
        config_json("olmoe"),
        config_json("phi3"),
        config_json("glm4"),
        config_json("ernie4_5"),
        config_json("lfm2"),
        config_json("lfm2_moe"),
        config_json("gemma2"),
        config_json("gemma3_text"),
        config_json("gemma4_text"),
        gemma4_with_experts(),
        config_json("qwen2_moe"),
        config_json("qwen3_moe"),
        config_json("granitemoe"),
        config_json("glm4_moe"),
        config_json("deepseek_v2"),
        config_json("deepseek_v3"),
        config_json("glm4_moe_lite"),
        config_json("mistral4"),
        config_json("youtu"),
        config_json("gpt_oss"),
        config_json("starcoder2"),
        config_json("cohere2"),
        config_json("qwen3_vl_text"),
        config_json("qwen3_vl_moe_text"),
    ];
    for (number, json) in cases.into_iter().enumerate() {
        let (config, weights) = model(&json, 11);
        let step = if number == 0 { 1 } else { 3 };
        for dtype in gguf_types().skip(number % step).step_by(step) {
            let dir = tempfile::tempdir().unwrap();
            let loaded = open(&write(dir.path(), &gguf_of(&config, &weights, dtype))).unwrap();
            let mut expected = config.clone();
            expected.norms.offset = 0.0;
            expected.dtype = dtype;
            if config.latent().is_some() {
                if config.architecture != Architecture::Mistral4 {
                    // Files of all other such architectures have the same name.
                    expected.architecture = Architecture::DeepseekV3;
                }
                let got = loaded.config.mixers().collect::<Vec<_>>();
                let all = expected.layers.iter_mut().flat_map(|layer| &mut layer.mixers);
                for (expected, got) in all.zip(got) {
                    if let (MixerConfig::Latent(expected), MixerConfig::Latent(got)) =
                        (expected, got)
                    {
                        let scale = got.scale / expected.scale;
                        assert!((scale - 1.0).abs() < 1e-6, "{scale}");
                        expected.scale = got.scale;
                    }
                }
                // The matrices of heads, which are always F32 here, may be larger than all others.
                expected.dtype = loaded.config.dtype;
            }
            assert_eq!(loaded.config, expected);
            for spec in config.tensors() {
                let mut values = floats(&weights, &spec.name, &spec.shape);
                let norm = spec.role == TensorRole::Norm;
                if norm {
                    values.iter_mut().for_each(|value| *value += config.norms.offset);
                }
                let dtype = stored_type(&spec, dtype);
                let got = loaded.weights.tensor(&spec.name, &spec.shape).unwrap();
                assert_eq!(got.dtype, dtype, "{}", spec.name);
                let same = *got.bytes == quantized(&values, &spec.shape, dtype);
                assert!(same, "{} {dtype:?} {}", json["model_type"], spec.name);
            }
        }
    }
}

/// The logits of all rows of a prompt of 24 tokens.
fn logits(config: &DecoderConfig, weights: Weights) -> Vec<f32> {
    let options = CpuOptions {
        kv_budget: KvBudget::Blocks(2),
        kv_type: Some(KvType::F32),
        threads: Some(1),
        ..CpuOptions::default()
    };
    let mut backend = CpuBackend::new(config.clone(), weights, options).unwrap();
    let tokens: Vec<u32> = (0..24).map(|i| (i * 7) % 40).collect();
    let slice = SequenceSlice {
        token_count: tokens.len(),
        start: 0,
        write_from: 0,
        block_table: vec![BlockId(0), BlockId(1)],
        logit_rows: LogitRows::All,
        state: backend.spec().state.map(|_| SliceState::in_slot(0)),
        ..SequenceSlice::default()
    };
    backend.step(&StepBatch { tokens, sequences: vec![slice] }).unwrap().logits
}

/// The relative error of logits with weights that were rounded to a type. `None` for types that
/// are too coarse, and for those that candle cannot quantize to.
fn tolerance(dtype: TensorType) -> Option<f64> {
    Some(match dtype {
        TensorType::F32 => 0.0,
        TensorType::F16 => 2e-3,
        TensorType::Bf16 | TensorType::Q8_0 => 0.035,
        TensorType::Q6K => 0.1,
        TensorType::Q5_0 | TensorType::Q5_1 | TensorType::Q5K => 0.2,
        TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q4K => 0.4,
        _ => return None,
    })
}

/// The layers without what a converter changes together with the weights: factors, the scale of
/// attention, norms without weights, the form of decay rates, and the order of value heads.
fn unconverted(config: &DecoderConfig) -> Vec<LayerConfig> {
    let mut layers = config.layers.clone();
    for layer in &mut layers {
        for mixer in &mut layer.mixers {
            match mixer {
                MixerConfig::Attention(attention) => {
                    (attention.scale, attention.output_factor) = (1.0, 1.0);
                    // The converter writes the factor of queries as the weights of a norm.
                    if attention.qk_norm == Some(QkNorm::HeadWithoutWeights) {
                        attention.qk_norm = Some(QkNorm::Head);
                    }
                }
                MixerConfig::Latent(latent) => latent.scale = 1.0,
                MixerConfig::Convolution(_) => {}
                MixerConfig::DeltaNet(delta_net) => {
                    (delta_net.log_rates, delta_net.grouped) = (false, false);
                }
                MixerConfig::Mamba2(mamba2) => {
                    mamba2.log_rates = false;
                    (mamba2.input_factors, mamba2.output_factor) = ([1.0; 5], 1.0);
                }
            }
        }
        if let Some(FeedForwardConfig::Dense(mlp)) = &mut layer.mlp {
            mlp.output_factor = 1.0;
            if let Activation::Gated(gate) = &mut mlp.activation {
                gate.factor = 1.0;
            }
        }
    }
    layers
}

/// Goal: the logits from GGUF and from safetensors are bit-identical if the weights are equal, and
/// close if the weights were rounded. A wrong order of rows, rotary embedding or norm would be far
/// off.
#[test]
fn logits_match_those_from_safetensors() {
    // GGUF files of Moondream are not read.
    let unread = ["moondream1", "moondream3"];
    let names = architectures().filter(|name| !unread.contains(name));
    let mut dense = config_json("nemotron_h");
    dense["hybrid_override_pattern"] = "M-*-".into();
    for mut json in names.map(config_json).chain([dense, gemma4_with_experts()]) {
        let name = json["model_type"].to_string();
        let architecture = name.trim_matches('"');
        let windowless = matches!(architecture, "mistral" | "mixtral");
        json["sliding_window"] = if windowless { Value::Null } else { 16.into() };
        let (config, weights) = model(&json, 16);
        // With coarse types, rounding changes which positions Gemma 4 attends to, and with any type
        // which experts it uses. OLMo 3 has more layers, over which the error grows.
        let coarsest = match (architecture, config.experts()) {
            ("gemma4_text", Some(_)) => 0.0,
            ("gemma4_text", None) => 0.035,
            ("olmo3", _) => 0.2,
            _ => 1.0,
        };
        let types = gguf_types().filter_map(|dtype| Some((dtype, tolerance(dtype)?)));
        let types = types.filter(|(_, allowed)| *allowed <= coarsest);
        let files =
            types.map(|(dtype, allowed)| (dtype, allowed, gguf_of(&config, &weights, dtype)));
        let files: Vec<_> = files.collect();
        let expected = logits(&config, weights);
        let mean_square =
            |list: &[f32]| list.iter().map(|x| f64::from(x * x)).sum::<f64>() / list.len() as f64;
        for (dtype, allowed, file) in files {
            let dir = tempfile::tempdir().unwrap();
            let loaded = open(&write(dir.path(), &file)).unwrap();
            assert_eq!(unconverted(&loaded.config), unconverted(&config), "{architecture}");
            let got = logits(&loaded.config, loaded.weights);
            let difference: Vec<f32> = got.iter().zip(&expected).map(|(g, e)| g - e).collect();
            let error = (mean_square(&difference) / mean_square(&expected)).sqrt();
            // Norms are rounded when the converter adds their offset, matrices when it multiplies
            // them, and the factor of the scores of latent attention when it is written.
            let is_changed = config.norms.offset != 0.0
                || config.architecture == Architecture::FalconH1
                || config.latent().is_some() && config.ropes[0].scaling != RopeScaling::None;
            let allowed = if is_changed { allowed.max(1e-5) } else { allowed };
            // Rounding also changes which experts a row uses.
            let allowed = if config.experts().is_some() { 2.0 * allowed } else { allowed };
            // The relative error of a square is twice that of the number.
            let squared = config.architecture == Architecture::NemotronH;
            let allowed = if squared { 2.0 * allowed } else { allowed };
            // Gemma 4 does not scale the scores of attention, so that rounding changes more.
            let allowed = if architecture == "gemma4_text" { 3.0 * allowed } else { allowed };
            // OLMo 2 and 3 and EXAONE 4 do not normalize the inputs of their matrices.
            let outputs_only = matches!(architecture, "olmo2" | "olmo3" | "exaone4");
            let allowed = if outputs_only { 1.25 * allowed } else { allowed };
            // Muse Glimmer multiplies normalized queries by a factor.
            let is_sharp = architecture == "muse_glimmer_text";
            let allowed = if is_sharp { 1.5 * allowed } else { allowed };
            assert!(error <= allowed, "{architecture} {dtype:?}: {error}");
        }
    }
}

/// Goal: a file with one tensor per expert, as older converters wrote it, equals one with stacked
/// tensors.
#[test]
fn experts_may_be_separate_tensors() {
    let (config, weights) = model(&config_json("mixtral"), 19);
    let mut file = gguf_of(&config, &weights, TensorType::Q8_0);
    let dir = tempfile::tempdir().unwrap();
    let stacked = open(&write(dir.path(), &file)).unwrap();
    let tensors = std::mem::take(&mut file.tensors);
    for (name, shape, type_id, bytes) in tensors {
        match name.split_once("_exps") {
            Some((start, end)) => {
                let experts = bytes.chunks(bytes.len() / shape[0]).enumerate();
                file.tensors.extend(experts.map(|(index, bytes)| {
                    let name = format!("{start}.{index}{end}");
                    (name, shape[1..].to_vec(), type_id, bytes.to_vec())
                }));
            }
            None => file.tensors.push((name, shape, type_id, bytes)),
        }
    }
    assert!(file.tensors.iter().any(|tensor| tensor.0 == "blk.1.ffn_down.3.weight"));
    let dir = tempfile::tempdir().unwrap();
    let separate = open(&write(dir.path(), &file)).unwrap();
    assert_eq!(separate.config, stacked.config);
    assert_same(&separate.weights, &stacked.weights, &config);
}

/// Goal: linear rope scaling and YaRN from the metadata and Llama 3's scaling from its tensor lead
/// to the same frequencies as in config.json.
#[test]
fn rope_scaling_matches_config_json() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let linear = json!({ "rope_type": "linear", "factor": 4.0 });
    let yarn = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    });
    for scaling in [llama3, linear, yarn] {
        for architecture in ["granite", "llama", "gemma3_text"] {
            let mut json = config_json(architecture);
            json["rope_scaling"] = scaling.clone();
            let (config, weights) = model(&json, 12);
            let dir = tempfile::tempdir().unwrap();
            let file = gguf_of(&config, &weights, TensorType::F32);
            let loaded = open(&write(dir.path(), &file)).unwrap().config;
            assert_eq!(loaded.ropes.len(), config.ropes.len());
            assert_eq!(loaded.max_positions, config.max_positions);
            let head_dim = config.attention().expect("attention").head_dim;
            for (got, expected) in loaded.ropes.iter().zip(&config.ropes) {
                assert_eq!(got.attention_factor(), expected.attention_factor());
                let got = got.inverse_frequencies(head_dim);
                let expected = expected.inverse_frequencies(head_dim);
                let near = |(g, e): (&f32, &f32)| (g / e - 1.0).abs() < 1e-6;
                assert!(got.iter().zip(&expected).all(near), "{got:?} {expected:?}");
            }
        }
    }
}

/// Goal: vocabulary, chat template and end-of-sequence tokens are loaded from the GGUF file, and
/// files in the same directory take precedence.
#[test]
fn text_files_in_the_directory_take_precedence() {
    let (config, weights) = model(&config_json("llama"), 13);
    let mut file = gguf_of(&config, &weights, TensorType::F32);
    let tokens: Vec<String> = (0..config.vocab_size).map(|i| format!("t{i}")).collect();
    file.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
    file.set("tokenizer.ggml.pre", Meta::Text("llama-bpe".into()));
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens.clone()));
    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; tokens.len()]));
    file.set("tokenizer.ggml.scores", Meta::Floats(vec![0.0; tokens.len()]));
    file.set("tokenizer.ggml.merges", Meta::Texts(vec!["t 1".into()]));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(1));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(9));
    file.set("tokenizer.ggml.eot_token_id", Meta::U32(5));
    file.set("tokenizer.ggml.add_bos_token", Meta::Bool(true));
    file.set("tokenizer.chat_template", Meta::Text("template".into()));
    file.set("tokenizer.chat_template.tool_use", Meta::Text("with tools".into()));
    file.set("tokenizer.ggml.suppress_tokens", Meta::I32s(vec![7, 1000, -1]));
    // Converters write 2^32 - 1 for a token that there is not.
    file.set("tokenizer.ggml.unknown_token_id", Meta::U32(u32::MAX));
    file.set("tokenizer.ggml.eom_token_id", Meta::U32(u32::MAX));
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &file);
    let loaded = open(&path).unwrap();
    assert_eq!(loaded.id, "m.gguf");
    let TokenizerSource::Gguf(tokenizer) = loaded.text.tokenizer else {
        panic!("not from the GGUF file")
    };
    assert_eq!((tokenizer.model.as_str(), tokenizer.pre.as_deref()), ("gpt2", Some("llama-bpe")));
    assert_eq!(tokenizer.tokens, tokens);
    assert_eq!(tokenizer.merges.as_deref(), Some(&["t 1".to_owned()][..]));
    assert_eq!((tokenizer.bos_token_id, tokenizer.eos_token_id), (Some(1), Some(9)));
    assert_eq!((tokenizer.add_bos_token, tokenizer.add_eos_token), (Some(true), None));
    assert_eq!(tokenizer.unknown_token_id, None);
    assert_eq!(loaded.text.chat_template.as_deref(), Some("template"));
    let named = [("tool_use".to_owned(), "with tools".to_owned())];
    assert_eq!(loaded.text.named_templates, named);
    assert_eq!(loaded.generation.eos_token_ids, [5, 9]);
    assert_eq!(loaded.generation.suppressed.always, [7]);
    assert_eq!(loaded.generation.bos_token_id, Some(1));

    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    write_json(dir.path(), "generation_config.json", &json!({ "eos_token_id": 3 }));
    let loaded = open(&path).unwrap();
    assert!(matches!(loaded.text.tokenizer, TokenizerSource::Json { .. }));
    assert_eq!(loaded.generation.eos_token_ids, [3, 5, 9]);

    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; 3]));
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let error = open(&write(dir.path(), &file)).unwrap_err().to_string();
    assert!(error.contains("`tokenizer.ggml.token_type`") && error.contains("40 numbers"));
}

/// Goal: sizes that the file has for each layer, where all are the same, and factors of 0 that mean
/// none are read.
#[test]
fn equal_sizes_of_layers_and_factors_of_0_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let (config, weights) = model(&config_json("llama"), 13);
    let mut file = gguf_of(&config, &weights, TensorType::F32);
    for (key, size) in [("attention.head_count", 8), ("feed_forward_length", 256)] {
        file.set(&format!("llama.{key}"), Meta::I32s(vec![size; 2]));
    }
    file.set("llama.rope.scaling.type", Meta::Text("linear".into()));
    file.set("llama.rope.scaling.factor", Meta::F32(0.0));
    assert_eq!(open(&write(dir.path(), &file)).unwrap().config, config);
    file.set("llama.attention.head_count", Meta::I32s(vec![8, 4]));
    let error = open(&write(dir.path(), &file)).unwrap_err().to_string();
    assert!(error.contains("`llama.attention.head_count`"), "{error}");
}

/// Goal: classifiers and rerankers are refused by their matrix.
#[test]
fn models_of_scores_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (config, weights) = model(&config_json("llama"), 13);
    let mut file = gguf_of(&config, &weights, TensorType::F32);
    file.tensors.push(("cls.output.weight".into(), vec![1], 0, vec![0; 4]));
    let error = open(&write(dir.path(), &file)).unwrap_err().to_string();
    assert!(error.contains("`cls.output.weight`") && error.contains("rerankers"), "{error}");
}

/// Goal: a reranker of llama.cpp scores with the difference of its two rows, which may be quantized,
/// and keeps its output matrix; another shape is refused.
#[test]
fn rerankers_have_a_matrix_of_two_rows() {
    let dir = tempfile::tempdir().unwrap();
    let (config, weights) = model(&config_json("qwen3"), 13);
    let width = config.hidden_size;
    let values = |shift: usize| (0..width).map(move |i| ((i * 7 + shift) % 11) as f32 - 5.0);
    let rows: Vec<f32> = values(0).chain(values(3)).collect();
    let bytes = |rows: &[f32]| rows.iter().flat_map(|value| value.to_le_bytes()).collect();
    let with = |shape: Vec<usize>, rows: &[f32]| {
        let mut file = gguf_of(&config, &weights, TensorType::F32);
        file.set("qwen3.pooling_type", Meta::U32(4));
        file.tensors.push(("cls.output.weight".into(), shape, 0, bytes(rows)));
        open(&write(dir.path(), &file))
    };
    let loaded = with(vec![2, width], &rows).unwrap();
    let scores = loaded.scores.expect("scores");
    assert_eq!((scores.pairs, scores.config.labels.len()), (PairForm::Template, 1));
    let row = loaded.weights.floats(&scores.head.tensors()[0]).unwrap();
    assert_eq!(row, values(0).zip(values(3)).map(|(a, b)| a - b).collect::<Vec<_>>());
    assert!(loaded.generates && loaded.embedding.is_none());
    for shape in [vec![1, width], vec![3, width], vec![2, width - 32]] {
        let count = shape.iter().product();
        let mut rows = rows.clone();
        rows.resize(count, 0.0);
        let error = with(shape, &rows).unwrap_err().to_string();
        assert!(error.contains("cls.output.weight"), "{error}");
    }
}

/// Goal: what the file recommends for sampling is used, unless a generation_config.json next to it
/// says something else.
#[test]
fn sampling_is_recommended_by_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let (config, weights) = model(&config_json("llama"), 13);
    let mut file = gguf_of(&config, &weights, TensorType::F32);
    assert_eq!(open(&write(dir.path(), &file)).unwrap().generation.do_sample, None);
    for (name, value) in [
        ("temp", Meta::F32(0.5)),
        ("top_k", Meta::I32(-1)),
        ("min_p", Meta::F32(0.25)),
        ("penalty_repeat", Meta::F32(1.5)),
        ("mirostat", Meta::I32(0)),
    ] {
        file.set(&format!("general.sampling.{name}"), value);
    }
    let path = write(dir.path(), &file);
    let sampling = open(&path).unwrap().generation.recommended_sampling();
    assert_eq!((sampling.temperature, sampling.top_k, sampling.min_p), (0.5, None, 0.25));
    assert_eq!((sampling.top_p, sampling.repetition_penalty), (1.0, 1.5));
    write_json(dir.path(), "generation_config.json", &json!({ "temperature": 0.75 }));
    let sampling = open(&path).unwrap().generation.recommended_sampling();
    assert_eq!((sampling.temperature, sampling.min_p), (0.75, 0.25));

    file.set("general.sampling.min_p", Meta::F32(2.0));
    let error = open(&write(dir.path(), &file)).unwrap_err().to_string();
    for part in ["m.gguf", "general.sampling", "min_p", "from 0 to 1"] {
        assert!(error.contains(part), "`{error}` lacks `{part}`");
    }
    assert!(!error.contains("generation_config.json"), "{error}");
}

/// Goal: errors name the key or tensor that is missing, invalid or not implemented.
#[test]
fn errors_name_the_key_or_tensor() {
    let check = |architecture: &str, change: &dyn Fn(&mut GgufWriter), parts: &[&str]| {
        let (config, weights) = model(&config_json(architecture), 14);
        let mut file = gguf_of(&config, &weights, TensorType::F32);
        change(&mut file);
        let dir = tempfile::tempdir().unwrap();
        let error = open(&write(dir.path(), &file)).expect_err(parts[0]).to_string();
        for part in parts.iter().chain(&["m.gguf"]) {
            assert!(error.contains(part), "`{error}` lacks `{part}`");
        }
    };
    let set = |key: &'static str, value: Meta| move |f: &mut GgufWriter| f.set(key, value.clone());
    let text = |text: &str| Meta::Text(text.into());
    let drop_key =
        |key: &'static str| move |f: &mut GgufWriter| f.metadata.retain(|(k, _)| k != key);
    let drop_tensor =
        |name: &'static str| move |f: &mut GgufWriter| f.tensors.retain(|t| t.0 != name);

    check("llama", &set("general.architecture", text("mamba")), &["`mamba`", "gemma3"]);
    check("llama", &set("general.architecture", text("eagle3")), &["EAGLE-3", "safetensors files"]);
    check("llama", &set("general.architecture", text("gemma4-assistant")), &["Gemma 4"]);
    check(
        "llama",
        &set("split.count", Meta::U32(3)),
        &["`split.count`", "NAME-00001-of-00003.gguf", "got 3"],
    );
    check("llama", &drop_key("general.architecture"), &["nothing", "qwen2"]);
    check("llama", &drop_key("llama.block_count"), &["`llama.block_count`", "got nothing"]);
    check("llama", &set("llama.block_count", Meta::U32(3)), &["missing tensor `model.layers.2."]);
    check("llama", &set("llama.block_count", Meta::U32(1 << 29)), &["at most 4096"]);
    check("llama", &set("llama.block_count", text("two")), &["`llama.block_count`", "`two`"]);
    check("llama", &set("llama.expert_count", Meta::U32(8)), &["`llama.expert_count`", "8"]);
    check("llama", &set("llama.rope.scaling.type", text("longrope")), &["longrope", "yarn"]);
    check("llama", &set("llama.rope.scaling.type", text("yarn")), &["scaling.factor`", "nothing"]);
    check("llama", &set("llama.rope.dimension_count", Meta::U32(16)), &["dimension_count", "32"]);
    check("llama", &set("llama.attention.value_length", Meta::U32(16)), &["value_length"]);
    let small_heads = |f: &mut GgufWriter| {
        f.metadata.retain(|(key, _)| !key.ends_with("value_length") && !key.ends_with("_count"));
        f.set("llama.block_count", Meta::U32(2));
        f.set("llama.attention.head_count", Meta::U32(8));
        f.set("llama.attention.key_length", Meta::U32(16));
    };
    check("llama", &small_heads, &["k_proj", "expected shape [32, 256], got [64, 256]"]);
    check("llama", &set("llama.attention.head_count_kv", Meta::U32(3)), &["divisor", "got 3"]);
    for counts in [&[0][..], &[0, 0], &[0, -2], &[4, 2], &[0, 2, 2]] {
        let key = "lfm2.attention.head_count_kv";
        check(
            "lfm2",
            &set(key, Meta::I32s(counts.to_vec())),
            &[key, "2 numbers, all 0 or the same"],
        );
    }
    for (key, value, expected) in [
        ("nemotron_h_moe.feed_forward_length", Meta::U32(256), "4 numbers, got 256"),
        ("nemotron_h_moe.feed_forward_length", Meta::I32s(vec![0, 256]), "4 numbers, all 0 or the"),
        ("nemotron_h_moe.feed_forward_length", Meta::I32s(vec![0, 7, 0, 256]), "all 0 or the same"),
        ("nemotron_h_moe.attention.head_count_kv", Meta::I32s(vec![0; 4]), "all 0 or the same"),
        ("nemotron_h_moe.moe_latent_size", Meta::U32(64), "64 is not supported"),
        ("nemotron_h_moe.ssm.group_count", Meta::U32(3), "a multiple of mamba_n_groups, 3"),
    ] {
        check("nemotron_h", &set(key, value), &[expected]);
    }
    check("lfm2", &set("lfm2.shortconv.l_cache", Meta::U32(1)), &["2 to 64", "got 1"]);
    let softmax = set("lfm2moe.expert_gating_func", Meta::U32(1));
    check("lfm2_moe", &softmax, &["lfm2moe.expert_gating_func", "1 is not", "2 (sigmoid)"]);
    for (key, value, expected) in [
        ("qwen35.ssm.inner_size", Meta::U32(0), "from 1"),
        ("qwen35.ssm.inner_size", Meta::U32(257), "a multiple of ssm.time_step_rank, 4"),
        ("qwen35.ssm.time_step_rank", Meta::U32(1 << 30), "a multiple of ssm.time_step_rank"),
        ("qwen35.ssm.state_size", Meta::U32(1 << 30), "at most 1073741824 elements"),
        ("qwen35.ssm.conv_kernel", Meta::U32(1), "2 to 64"),
        ("qwen35.nextn_predict_layers", Meta::U32(2), "more than nextn_predict_layers"),
        ("qwen35.nextn_predict_layers", text("one"), "an integer"),
        ("qwen35.full_attention_interval", Meta::U32(1 << 29), "at least one layer"),
        ("qwen35.attention.recurrent_layers", Meta::Bools(vec![true]), "2 booleans"),
    ] {
        check("qwen3_5_text", &set(key, value), &[expected]);
    }
    let drop_rates = drop_tensor("blk.0.ssm_a");
    check("qwen3_5_text", &drop_rates, &["missing tensor `model.layers.0.linear_attn.A_log"]);
    check("qwen2", &set("qwen2.attention.sliding_window", Meta::U32(8)), &["sliding_window"]);
    check("qwen3", &set("qwen3.final_logit_softcapping", Meta::F32(30.0)), &["softcapping", "30"]);
    check("llama", &drop_tensor("token_embd.weight"), &["missing tensor `token_embd.weight`"]);
    check(
        "qwen3",
        &drop_tensor("blk.1.attn_k_norm.weight"),
        &["`model.layers.1.self_attn.k_norm.weight`"],
    );
    let shape = |f: &mut GgufWriter| {
        f.tensors.iter_mut().for_each(|t| {
            if t.0 == "blk.0.ffn_up.weight" {
                t.1 = vec![128, 512];
            }
        })
    };
    check("llama", &shape, &["mlp.up_proj", "expected shape [256, 256], got [128, 512]"]);
    let wrong_type = |f: &mut GgufWriter| {
        f.tensors.iter_mut().for_each(|t| {
            if t.0 == "blk.0.ffn_up.weight" {
                t.2 = 9;
            }
        })
    };
    check("qwen3_moe", &set("qwen3moe.expert_used_count", Meta::U32(5)), &["per_tok", "1 to 4"]);
    check("qwen3_moe", &set("qwen3moe.expert_count", Meta::U32(5000)), &["num_experts", "1024"]);
    check("qwen3_moe", &drop_key("qwen3moe.expert_count"), &["`qwen3moe.expert_count`"]);
    let other_count = set("qwen3moe.expert_count", Meta::U32(8));
    check("qwen3_moe", &other_count, &["experts.*.", "expected shape [8, 256, 256], got [4,"]);
    let shared = set("qwen3moe.expert_shared_feed_forward_length", Meta::U32(8));
    check("qwen3_moe", &shared, &["`qwen3moe.expert_shared_feed_forward_length`"]);
    check(
        "qwen2_moe",
        &drop_tensor("blk.1.ffn_up_exps.weight"),
        &["missing tensor `model.layers.1.mlp.experts.0.up_proj.weight`"],
    );
    check("llama", &wrong_type, &["`model.layers.0.mlp.up_proj.weight`", "Q6_K", "got Q8_1"]);
}

/// Goal: a truncated file is an error with the expected and the actual length.
#[test]
fn truncated_files_are_refused() {
    let (config, weights) = model(&config_json("llama"), 15);
    let bytes = gguf_of(&config, &weights, TensorType::Q8_0).bytes();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for length in [0, 3, 20, 100, 1000, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = open(&path).unwrap_err();
        assert!(matches!(error, ModelError::Truncated { .. }), "{length}: {error}");
    }
    let missing = open(&dir.path().join("no.gguf")).unwrap_err();
    assert!(matches!(missing, ModelError::Io { .. }), "{missing}");
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(300))]

    /// Goal: changing bytes of the header leads to an error or to a model whose tensors can all be
    /// read, but never to a panic.
    #[test]
    fn changed_headers_never_panic(changes in proptest::collection::vec((0_usize..1 << 20, 0_u8..), 1..4)) {
        let mut bytes = SMALL_FILE.with(Clone::clone);
        // About the length of the header.
        let header = bytes.len().min(2500);
        for (at, to) in changes {
            bytes[at % header] = to;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, bytes).unwrap();
        if let Ok(loaded) = open(&path) {
            for spec in loaded.config.tensors() {
                loaded.weights.tensor(&spec.name, &spec.shape).unwrap();
            }
        }
    }
}

thread_local! {
    static SMALL_FILE: Vec<u8> = {
        let mut json = config_json("llama");
        json["hidden_size"] = 64.into();
        json["intermediate_size"] = 64.into();
        json["num_attention_heads"] = 4.into();
        json["head_dim"] = 16.into();
        let (config, weights) = model(&json, 17);
        let mut file = gguf_of(&config, &weights, TensorType::Q8_0);
        file.set("tokenizer.ggml.model", Meta::Text("gpt2".into()));
        file.set("tokenizer.ggml.tokens", Meta::Texts(vec!["a".into(); config.vocab_size]));
        file.bytes()
    };
}

/// Goal: a file says how embeddings are made, and what cannot be computed is refused by its key.
#[test]
fn pooling_is_read_or_refused() {
    let (config, weights) = model(&config_json("qwen3"), 3);
    let with = |key: &str, value: Meta| {
        let mut file = gguf_of(&config, &weights, TensorType::F32);
        file.set(&format!("qwen3.{key}"), value);
        let dir = tempfile::tempdir().unwrap();
        open(&write(dir.path(), &file)).map(|loaded| loaded.embedding.map(|made| made.pooling))
    };
    for (number, pooling) in [(0, None), (1, Some(Pooling::Mean)), (3, Some(Pooling::Last))] {
        assert_eq!(with("pooling_type", Meta::U32(number)).unwrap(), pooling);
    }
    assert_eq!(with("attention.causal", Meta::Bool(true)).unwrap(), None);
    for (key, value) in [
        ("pooling_type", Meta::U32(2)),
        ("pooling_type", Meta::U32(4)),
        ("pooling_type", Meta::Text("last".into())),
        ("attention.causal", Meta::Bool(false)),
    ] {
        let error = with(key, value).unwrap_err().to_string();
        assert!(error.contains(&format!("qwen3.{key}")), "{error}");
    }
}
