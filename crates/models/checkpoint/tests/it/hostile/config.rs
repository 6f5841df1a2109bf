//! Hostile values in `config.json` and `generation_config.json`.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::{MEMORY_MAX, refused, run_within};
use crate::support::model_dir::{config_json, write_json, write_model};

/// Values that are too large, too small, or of the wrong type.
fn hostile() -> Vec<Value> {
    let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
    let numbers = [0.0, -0.0, -1.0, 0.5, 1e-300, 1e-40, 1e300, 3e38, 1e9];
    let integers = [1, 2, 3, 1 << 30, (1 << 30) + 1, 1 << 40, 1 << 60, 1 << 63, u64::MAX];
    let others = [
        Value::Null,
        json!(-1),
        json!(i64::MIN),
        json!(true),
        json!(false),
        json!(""),
        json!("x".repeat(100_000)),
        json!([]),
        json!({}),
        json!([1_u64 << 40, -1]),
        json!(vec!["full_attention"; 100_000]),
        deep,
    ];
    let numbers = numbers.into_iter().map(|number| json!(number));
    numbers.chain(integers.into_iter().map(|n| json!(n))).chain(others).collect()
}

/// Goal: no value of any key leads to a panic, a hang, or an allocation in proportion to it. A key
/// that earlier architectures have, too, gets a third of the values, in turn.
#[test]
fn no_value_of_a_key_is_dangerous() {
    let dir = tempfile::tempdir().unwrap();
    let mut known = HashSet::new();
    let names = ["llama", "gemma3_text", "qwen2_moe", "qwen3_5_text", "nemotron_h", "falcon_h1"];
    for (number, architecture) in names.into_iter().enumerate() {
        let mut config = config_json(architecture);
        for key in [
            "head_dim",
            "sliding_window",
            "layer_types",
            "rope_scaling",
            "rope_parameters",
            "attention_bias",
            "hidden_act",
            "quantization_config",
            "query_pre_attn_scalar",
            "sliding_window_pattern",
            "rope_local_base_freq",
            "architectures",
            "text_config",
            "num_local_experts",
            "decoder_sparse_step",
            "layers_block_type",
            "time_step_limit",
        ] {
            let value = config.get(key).cloned().unwrap_or(Value::Null);
            config[key] = value;
        }
        write_model(dir.path(), &config_json(architecture), 1);
        let keys: Vec<_> = config.as_object().unwrap().keys().cloned().collect();
        for key in keys {
            let step = if known.insert(key.clone()) { 1 } else { 3 };
            for value in hostile().into_iter().skip(number % step).step_by(step) {
                let mut changed = config_json(architecture);
                changed[&key] = value;
                write_json(dir.path(), "config.json", &changed);
                let _ = run_within(dir.path(), MEMORY_MAX);
            }
        }
    }
}

/// Goal: no value in `generation_config.json` is dangerous.
#[test]
fn no_value_of_a_generation_key_is_dangerous() {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config_json("llama"), 1);
    for key in [
        "eos_token_id",
        "bos_token_id",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
    ] {
        for value in hostile() {
            write_json(dir.path(), "generation_config.json", &json!({ key: value }));
            let _ = run_within(dir.path(), MEMORY_MAX);
        }
    }
    for (key, value) in [("repetition_penalty", 1e-40), ("temperature", 1e-300), ("top_p", 1.1)] {
        write_json(dir.path(), "generation_config.json", &json!({ key: value }));
        refused(dir.path(), key, "expected");
    }
}

/// Goal: sizes and numbers that no model has are refused by their key.
#[test]
fn impossible_values_are_refused_by_their_key() {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path(), &config_json("llama"), 1);
    for (key, value) in [
        ("num_hidden_layers", json!(1_000_000_000)),
        ("num_hidden_layers", json!(0)),
        ("head_dim", json!(0)),
        ("head_dim", json!(31)),
        ("head_dim", json!(1 << 30)),
        ("num_attention_heads", json!(1 << 29)),
        ("vocab_size", json!(1_u64 << 40)),
        ("max_position_embeddings", json!(1_u64 << 60)),
        ("rope_theta", json!(0)),
        ("rope_theta", json!(-1)),
        ("rope_theta", json!(1e-300)),
        ("rope_theta", json!("NaN")),
        ("rms_norm_eps", json!(1e-300)),
        ("rms_norm_eps", json!("NaN")),
    ] {
        let mut config = config_json("llama");
        config[key] = value.clone();
        write_json(dir.path(), "config.json", &config);
        refused(dir.path(), &format!("{key}: {value}"), &format!("key `{key}`"));
    }
    // Python writes numbers that JSON does not have.
    for (key, number) in [("rope_theta", "NaN"), ("rms_norm_eps", "Infinity")] {
        let mut config = config_json("llama");
        config[key] = "a number".into();
        let text = config.to_string().replace("\"a number\"", number);
        std::fs::write(dir.path().join("config.json"), text).unwrap();
        refused(dir.path(), number, &format!("key `{key}`"));
    }
    std::fs::write(dir.path().join("config.json"), r#"{"rope_theta": nan}"#).unwrap();
    refused(dir.path(), "nan", "malformed");
}
