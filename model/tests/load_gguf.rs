//! GGUF files: the same model as safetensors and as GGUF is the same model.
//!
//! The files are written here, from random models, in the way llama.cpp's converter writes them.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail by panicking")]

#[path = "support/gguf_writer.rs"]
mod gguf_writer;
#[path = "support/model_dir.rs"]
#[allow(dead_code, reason = "shared between tests")]
mod model_dir;

use std::path::Path;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor as CandleTensor};
use gguf_writer::{GgufWriter, Meta};
use model_dir::{config_json, model, write_json};
use serde_json::json;
use stolon_model::config::TensorRole;
use stolon_model::{
    Architecture, DecoderConfig, LoadOptions, LoadedModel, ModelError, ModelSource, RopeScaling,
    TensorType, TokenizerSource, Weights, load,
};

fn open(path: &Path) -> Result<LoadedModel, ModelError> {
    load(&ModelSource::Gguf(path.to_owned()), &LoadOptions::default())
}

fn candle_type(dtype: TensorType) -> (GgmlDType, u32) {
    match dtype {
        TensorType::F32 => (GgmlDType::F32, 0),
        TensorType::F16 => (GgmlDType::F16, 1),
        TensorType::Bf16 => (GgmlDType::BF16, 30),
        TensorType::Q8_0 => (GgmlDType::Q8_0, 8),
        TensorType::Q4K => (GgmlDType::Q4K, 12),
        TensorType::Q5K => (GgmlDType::Q5K, 13),
        TensorType::Q6K => (GgmlDType::Q6K, 14),
    }
}

/// The bytes of `values` in the type.
fn quantised(values: &[f32], shape: &[usize], dtype: TensorType) -> Vec<u8> {
    let tensor = CandleTensor::from_slice(values, shape, &Device::Cpu).unwrap();
    let quantised = QTensor::quantize(&tensor, candle_type(dtype).0).unwrap();
    quantised.data().unwrap().into_owned()
}

fn floats(weights: &Weights, name: &str, shape: &[usize]) -> Vec<f32> {
    let tensor = weights.tensor(name, shape).unwrap();
    assert_eq!(tensor.dtype, TensorType::F32);
    tensor.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The converter's order of llama's q and k rows: within each head, row `i` of the first half
/// and row `i` of the second stand side by side.
fn interleaved(values: &[f32], rows: usize, heads: usize) -> Vec<f32> {
    let width = values.len() / rows;
    let (head_rows, half) = (rows / heads, rows / heads / 2);
    let mut out = Vec::new();
    for head in 0..heads {
        for i in 0..half {
            for second in [0, half] {
                let row = head * head_rows + second + i;
                out.extend_from_slice(&values[row * width..(row + 1) * width]);
            }
        }
    }
    out
}

/// The GGUF name of a tensor.
fn gguf_name(name: &str, gemma: bool) -> String {
    let top = [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ];
    if let Some((_, gguf)) = top.iter().find(|(hf, _)| *hf == name) {
        return (*gguf).to_owned();
    }
    let (layer, rest) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let (module, kind) = rest.rsplit_once('.').unwrap();
    let gguf = match module {
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "post_attention_layernorm" if gemma => "post_attention_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{gguf}.{kind}")
}

/// The metadata of a decoder.
fn metadata(config: &DecoderConfig, file: &mut GgufWriter) {
    let prefix = match config.architecture {
        Architecture::Gemma3 => "gemma3",
        Architecture::Mistral => "llama",
        other => other.name(),
    };
    file.set("general.architecture", Meta::Text(prefix.into()));
    let numbers = [
        ("context_length", config.max_positions),
        ("embedding_length", config.hidden_size),
        ("block_count", config.layers.len()),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.num_heads),
        ("attention.head_count_kv", config.num_kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
    ];
    for (key, number) in numbers {
        file.set(&format!("{prefix}.{key}"), Meta::U32(number as u32));
    }
    file.set(&format!("{prefix}.rope.freq_base"), Meta::F32(config.ropes[0].theta as f32));
    let epsilon = format!("{prefix}.attention.layer_norm_rms_epsilon");
    file.set(&epsilon, Meta::F32(config.rms_norm_eps));
    if let Some(window) = config.layers[0].sliding_window {
        file.set(&format!("{prefix}.attention.sliding_window"), Meta::U32(window as u32));
        let pattern = config.layers.iter().map(|l| l.sliding_window.is_some()).collect();
        file.set(&format!("{prefix}.attention.sliding_window_pattern"), Meta::Bools(pattern));
    }
    match config.ropes[0].scaling {
        RopeScaling::Linear { factor } => {
            file.set(&format!("{prefix}.rope.scaling.type"), Meta::Text("linear".into()));
            file.set(&format!("{prefix}.rope.scaling.factor"), Meta::F32(factor as f32));
        }
        RopeScaling::Llama3 { .. } => {
            let plain =
                stolon_model::Rope { scaling: RopeScaling::None, ..config.ropes[0].clone() };
            let plain = plain.inverse_frequencies(config.head_dim);
            let scaled = config.ropes[0].inverse_frequencies(config.head_dim);
            let divisors = plain.iter().zip(&scaled).flat_map(|(p, s)| (p / s).to_le_bytes());
            let shape = vec![config.head_dim / 2];
            file.tensors.push(("rope_freqs.weight".into(), shape, 0, divisors.collect()));
        }
        _ => {}
    }
}

/// The model as a GGUF file, matrices in `dtype`.
fn gguf_of(config: &DecoderConfig, weights: &Weights, dtype: TensorType) -> GgufWriter {
    let mut file = GgufWriter::default();
    metadata(config, &mut file);
    let llama = matches!(config.architecture, Architecture::Llama | Architecture::Mistral);
    for spec in config.tensors() {
        let mut values = floats(weights, &spec.name, &spec.shape);
        if llama && spec.name.contains("q_proj") {
            values = interleaved(&values, spec.shape[0], config.num_heads);
        }
        if llama && spec.name.contains("k_proj") {
            values = interleaved(&values, spec.shape[0], config.num_kv_heads);
        }
        if spec.role == TensorRole::Norm {
            values.iter_mut().for_each(|value| *value += config.norm_offset);
        }
        let dtype = if spec.role == TensorRole::Matrix { dtype } else { TensorType::F32 };
        let bytes = quantised(&values, &spec.shape, dtype);
        let name = gguf_name(&spec.name, config.architecture == Architecture::Gemma3);
        file.tensors.push((name, spec.shape, candle_type(dtype).1, bytes));
    }
    file
}

fn write(dir: &Path, file: &GgufWriter) -> std::path::PathBuf {
    let path = dir.join("m.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

/// Each architecture in each type: the configuration is that of config.json, and every tensor
/// is, byte for byte, the quantised form of the safetensors one.
#[test]
fn same_model_in_every_type() {
    let mut biased = config_json("llama");
    biased["attention_bias"] = true.into();
    biased["mlp_bias"] = true.into();
    let cases = [
        config_json("llama"),
        biased,
        config_json("qwen2"),
        config_json("qwen3"),
        config_json("gemma3_text"),
    ];
    for json in cases {
        let (config, weights) = model(&json, 11);
        for dtype in TensorType::ALL {
            let dir = tempfile::tempdir().unwrap();
            let loaded = open(&write(dir.path(), &gguf_of(&config, &weights, dtype))).unwrap();
            let mut expected = config.clone();
            expected.norm_offset = 0.0;
            expected.dtype = dtype;
            assert_eq!(loaded.config, expected);
            for spec in config.tensors() {
                let mut values = floats(&weights, &spec.name, &spec.shape);
                let norm = spec.role == TensorRole::Norm;
                if norm {
                    values.iter_mut().for_each(|value| *value += config.norm_offset);
                }
                let dtype = if spec.role == TensorRole::Matrix { dtype } else { TensorType::F32 };
                let got = loaded.weights.tensor(&spec.name, &spec.shape).unwrap();
                assert_eq!(got.dtype, dtype, "{}", spec.name);
                let same = *got.bytes == quantised(&values, &spec.shape, dtype);
                assert!(same, "{} {dtype:?} {}", json["model_type"], spec.name);
            }
        }
    }
}

/// Linear scaling comes from the metadata, Llama 3's from its tensor: the frequencies are those
/// of config.json.
#[test]
fn rope_scaling() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    for scaling in [llama3, json!({ "rope_type": "linear", "factor": 4.0 })] {
        for architecture in ["llama", "gemma3_text"] {
            let mut json = config_json(architecture);
            json["rope_scaling"] = scaling.clone();
            let (config, weights) = model(&json, 12);
            let dir = tempfile::tempdir().unwrap();
            let file = gguf_of(&config, &weights, TensorType::F32);
            let loaded = open(&write(dir.path(), &file)).unwrap().config;
            assert_eq!(loaded.ropes.len(), config.ropes.len());
            for (got, expected) in loaded.ropes.iter().zip(&config.ropes) {
                let got = got.inverse_frequencies(config.head_dim);
                let expected = expected.inverse_frequencies(config.head_dim);
                let near = |(g, e): (&f32, &f32)| (g / e - 1.0).abs() < 1e-6;
                assert!(got.iter().zip(&expected).all(near), "{got:?} {expected:?}");
            }
        }
    }
}

/// The vocabulary, the chat template and the end tokens in the file; files beside it win.
#[test]
fn text_in_the_file_and_beside_it() {
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
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &file);
    let loaded = open(&path).unwrap();
    assert_eq!(loaded.id, "m.gguf");
    let TokenizerSource::Gguf(tokenizer) = loaded.text.tokenizer else { panic!("not its own") };
    assert_eq!((tokenizer.model.as_str(), tokenizer.pre.as_deref()), ("gpt2", Some("llama-bpe")));
    assert_eq!(tokenizer.tokens, tokens);
    assert_eq!(tokenizer.merges.as_deref(), Some(&["t 1".to_owned()][..]));
    assert_eq!((tokenizer.bos_token_id, tokenizer.eos_token_id), (Some(1), Some(9)));
    assert_eq!((tokenizer.add_bos_token, tokenizer.add_eos_token), (Some(true), None));
    assert_eq!(loaded.text.chat_template.as_deref(), Some("template"));
    assert_eq!(loaded.generation.eos_token_ids, [5, 9]);
    assert_eq!(loaded.generation.bos_token_id, Some(1));

    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    write_json(dir.path(), "generation_config.json", &json!({ "eos_token_id": 3 }));
    let loaded = open(&path).unwrap();
    assert!(matches!(loaded.text.tokenizer, TokenizerSource::Json { .. }));
    assert_eq!(loaded.generation.eos_token_ids, [3]);

    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; 3]));
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let error = open(&write(dir.path(), &file)).unwrap_err().to_string();
    assert!(error.contains("`tokenizer.ggml.token_type`") && error.contains("40 numbers"));
}

/// What is missing, wrong or not implemented is named.
#[test]
fn refusals() {
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
    check("llama", &drop_key("general.architecture"), &["nothing", "qwen2"]);
    check("llama", &drop_key("llama.block_count"), &["`llama.block_count`", "got nothing"]);
    check("llama", &set("llama.block_count", Meta::U32(3)), &["missing tensor `model.layers.2."]);
    check("llama", &set("llama.block_count", Meta::U32(1 << 29)), &["at most 4096"]);
    check("llama", &set("llama.block_count", text("two")), &["`llama.block_count`", "`two`"]);
    check("llama", &set("llama.expert_count", Meta::U32(8)), &["`llama.expert_count`", "8"]);
    check("llama", &set("llama.rope.scaling.type", text("yarn")), &["yarn", "not supported"]);
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
    check("qwen2", &set("qwen2.attention.sliding_window", Meta::U32(8)), &["sliding_window"]);
    check("gemma3_text", &set("gemma3.final_logit_softcapping", Meta::F32(30.0)), &["softcapping"]);
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
    let old_type = |f: &mut GgufWriter| {
        f.tensors.iter_mut().for_each(|t| {
            if t.0 == "blk.0.ffn_up.weight" {
                t.2 = 6;
            }
        })
    };
    check("llama", &old_type, &["`model.layers.0.mlp.up_proj.weight`", "Q6_K, got Q5_0"]);
}

/// A cut file is an error that says how much is missing.
#[test]
fn truncated() {
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
