//! Writes small random models in the format of Hugging Face.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use stolon_checkpoint::random::random_model;
use stolon_checkpoint::{Architecture, DecoderConfig, TensorType, Weights};

/// The `model_type` of each architecture.
pub(crate) fn architectures() -> impl Iterator<Item = &'static str> {
    Architecture::all().map(Architecture::name)
}

/// The architectures whose files have rows in another order: adjacent rows of q and k form the pairs
/// that are rotated, or the rows of queries and gates are in one matrix.
pub(crate) const OTHER_ROWS: [&str; 12] = [
    "glm4",
    "ernie4_5",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "mistral4",
    "youtu",
    "kimi_linear",
    "cohere2",
];

/// The architectures with latent attention.
pub(crate) const LATENT: [&str; 6] =
    ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu", "kimi_linear"];

/// A small `config.json`. Rows are long enough for every quantized type.
pub(crate) fn config_json(architecture: &str) -> Value {
    let mut config = json!({
        "model_type": architecture, "vocab_size": 40, "hidden_size": 256,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 50_000.0, "tie_word_embeddings": false,
        "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    });
    if architecture == "granitemoehybrid" {
        config["layer_types"] = json!(["mamba", "attention"]);
        config["num_local_experts"] = 4.into();
        config["shared_intermediate_size"] = 512.into();
        config["position_embedding_type"] = "rope".into();
        config["mamba_n_heads"] = 4.into();
        config["mamba_n_groups"] = 2.into();
        config["mamba_d_state"] = 64.into();
    }
    if let "moondream1" | "moondream3" = architecture {
        let experts = json!({
            "num_experts": 4, "start_layer": 1, "experts_per_token": 2, "expert_inner_dim": 256,
        });
        config["config"] = json!({ "text": {
            "dim": 256, "ff_dim": 256, "n_layers": 2, "vocab_size": 40, "max_context": 128,
            "n_heads": 8, "n_kv_heads": 8,
            "moe": if architecture == "moondream3" { experts } else { Value::Null },
        } });
    }
    if architecture == "nemotron_h" {
        config["num_hidden_layers"] = 4.into();
        config["hybrid_override_pattern"] = "ME*E".into();
        config["head_dim"] = 64.into();
        config["layer_norm_epsilon"] = 1e-5.into();
        config["mamba_num_heads"] = 4.into();
        config["n_groups"] = 2.into();
        config["ssm_state_size"] = 64.into();
        config["n_routed_experts"] = 4.into();
        config["moe_intermediate_size"] = 256.into();
        config["moe_shared_expert_intermediate_size"] = 512.into();
        config["routed_scaling_factor"] = 1.5.into();
    }
    if architecture == "falcon_h1" {
        config["mamba_d_ssm"] = 256.into();
        config["mamba_n_heads"] = 4.into();
        config["mamba_n_groups"] = 2.into();
        config["mamba_d_state"] = 64.into();
        config["mamba_rms_norm"] = true.into();
        config["mamba_norm_before_gate"] = false.into();
        config["embedding_multiplier"] = 3.0.into();
        config["lm_head_multiplier"] = 0.5.into();
        config["key_multiplier"] = 0.7.into();
        config["attention_in_multiplier"] = 1.2.into();
        config["attention_out_multiplier"] = 0.8.into();
        config["ssm_in_multiplier"] = 1.3.into();
        config["ssm_out_multiplier"] = 0.6.into();
        config["ssm_multipliers"] = json!([0.9, 0.6, 0.6, 0.6, 0.7]);
        config["mlp_multipliers"] = json!([0.8, 1.3]);
    }
    if architecture.starts_with("granite") {
        config["attention_multiplier"] = 0.1.into();
        config["embedding_multiplier"] = 12.0.into();
        config["residual_multiplier"] = 0.22.into();
        config["logits_scaling"] = 8.0.into();
    }
    if architecture == "ministral3" {
        config["rope_parameters"] = json!({
            "rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
        });
    }
    if architecture == "smollm3" {
        config["num_hidden_layers"] = 5.into();
    }
    if architecture == "exaone4" {
        config["sliding_window"] = 16.into();
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
    }
    if architecture == "olmo3" {
        config["num_hidden_layers"] = 4.into();
        config["sliding_window"] = 16.into();
    }
    if let "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next" = architecture {
        config["layer_types"] = json!(["linear_attention", "full_attention"]);
        config["linear_num_key_heads"] = 2.into();
        config["linear_num_value_heads"] = 4.into();
        config["linear_key_head_dim"] = 32.into();
        config["linear_value_head_dim"] = 64.into();
    }
    if architecture.starts_with("lfm2") {
        config["layer_types"] = json!(["conv", "full_attention"]);
        config["block_auto_adjust_ff_dim"] = false.into();
        config["norm_eps"] = 1e-5.into();
    }
    if architecture == "ernie4_5" {
        config["use_bias"] = true.into();
    }
    if architecture == "gemma2" {
        config["attn_logit_softcapping"] = 3.0.into();
        config["final_logit_softcapping"] = 1.5.into();
    }
    if architecture == "muse_glimmer_text" {
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        // GGUF files do not have this epsilon.
        config["rms_norm_eps"] = 1e-2.into();
        config["qk_scale_factor"] = 2.5.into();
        config["output_multiplier"] = 0.5.into();
        config["final_logit_softcapping"] = 4.0.into();
    }
    if architecture.starts_with("gemma") {
        config["query_pre_attn_scalar"] = 32.into();
        config["sliding_window"] = 16.into();
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        config["tie_word_embeddings"] = true.into();
    }
    if architecture == "gemma4_text" {
        config["num_hidden_layers"] = 4.into();
        let types = ["sliding_attention", "full_attention"];
        config["layer_types"] = json!([types, types].concat());
        config["global_head_dim"] = 64.into();
        config["num_kv_shared_layers"] = 2.into();
        config["use_double_wide_mlp"] = true.into();
        config["hidden_size_per_layer_input"] = 256.into();
        config["vocab_size_per_layer_input"] = 40.into();
        config["final_logit_softcapping"] = 1.5.into();
    }
    if let "mixtral" | "qwen2_moe" | "qwen3_moe" | "gpt_oss" | "lfm2_moe" | "olmoe"
    | "qwen3_5_moe_text" | "qwen3_next" | "granitemoe" | "glm4_moe" = architecture
    {
        let local = ["mixtral", "gpt_oss", "granitemoe"].contains(&architecture);
        let count = if local { "num_local_experts" } else { "num_experts" };
        config[count] = 4.into();
        config["num_experts_per_tok"] = 2.into();
    }
    if architecture == "glm4_moe" {
        config["moe_intermediate_size"] = 256.into();
        config["n_shared_experts"] = 2.into();
        config["routed_scaling_factor"] = 1.5.into();
        config["use_qk_norm"] = true.into();
    }
    if LATENT.contains(&architecture) {
        config["kv_lora_rank"] = 256.into();
        config["q_lora_rank"] =
            if let "deepseek_v2" | "kimi_linear" = architecture { Value::Null } else { 256.into() };
        config["qk_rope_head_dim"] = 16.into();
        config["qk_nope_head_dim"] = 32.into();
        config["v_head_dim"] = 32.into();
        config["n_routed_experts"] = 8.into();
        config["num_experts_per_tok"] = 2.into();
        config["moe_intermediate_size"] = 256.into();
        config["first_k_dense_replace"] = 1.into();
    }
    if architecture == "kimi_linear" {
        config["linear_attn_config"] = json!({
            "kda_layers": [1], "full_attn_layers": [2], "num_heads": 8, "head_dim": 256,
            "short_conv_kernel_size": 4,
        });
    }
    if architecture == "mistral4" {
        config["rope_parameters"] = json!({
            "type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 1.0 / 3.0,
        });
    }
    if architecture == "deepseek_v3" {
        config["n_group"] = 4.into();
        config["topk_group"] = 2.into();
        config["rope_scaling"] = json!({
            "type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 32,
        });
    }
    if architecture == "starcoder2" {
        config["norm_epsilon"] = 1e-5.into();
        config["sliding_window"] = 16.into();
    }
    if architecture == "cohere2" {
        config["layer_norm_eps"] = 1e-5.into();
        config["num_hidden_layers"] = 4.into();
        config["sliding_window"] = 16.into();
    }
    if architecture == "lfm2_moe" {
        config["moe_intermediate_size"] = 256.into();
        config["num_dense_layers"] = 1.into();
    }
    if let "qwen2_moe" | "qwen3_moe" | "qwen3_vl_moe_text" = architecture {
        config["moe_intermediate_size"] = 256.into();
        config["norm_topk_prob"] = (architecture != "qwen2_moe").into();
        config["mlp_only_layers"] = json!([0]);
    }
    if architecture == "gpt_oss" {
        config["sliding_window"] = 16.into();
        config["rope_scaling"] = json!({
            "rope_type": "yarn", "factor": 4.0, "truncate": false,
            "original_max_position_embeddings": 32,
        });
    }
    if let "qwen3_5_moe_text" | "qwen3_next" = architecture {
        config["moe_intermediate_size"] = 256.into();
    }
    if let "qwen2_moe" | "qwen3_5_moe_text" | "qwen3_next" = architecture {
        config["shared_expert_intermediate_size"] = 512.into();
    }
    if let "qwen3_vl_text" | "qwen3_vl_moe_text" = architecture {
        config["rope_scaling"] = json!({ "rope_type": "default", "mrope_section": [6, 5, 5] });
    }
    if architecture == "phi3" {
        let divisors: Vec<f64> = (0..12).map(|i| 1.0 + 0.1 * f64::from(i)).collect();
        config["partial_rotary_factor"] = 0.75.into();
        config["original_max_position_embeddings"] = 32.into();
        config["sliding_window"] = 16.into();
        config["rope_scaling"] =
            json!({ "type": "longrope", "short_factor": divisors, "long_factor": divisors });
    }
    config
}

/// The configuration and random weights of a `config.json`.
pub(crate) fn model(config: &Value, seed: u64) -> (DecoderConfig, Weights) {
    let decoder = DecoderConfig::from_json("config.json", config).unwrap();
    let weights = random_model(&decoder, seed).unwrap();
    (decoder, weights)
}

pub(crate) fn write_json(dir: &Path, name: &str, value: &Value) {
    std::fs::write(dir.join(name), value.to_string()).unwrap();
}

/// The model's tensors as a safetensors file, with the names that `rename` returns. Tensors for
/// which it returns `None` are omitted.
pub(crate) fn safetensors_of(
    weights: &Weights,
    rename: impl Fn(&str) -> Option<String>,
) -> Vec<u8> {
    let tensors: Vec<_> = weights
        .names()
        .filter_map(|name| {
            let tensor = weights.tensor(name, weights.shape(name).unwrap()).unwrap();
            Some((rename(name)?, tensor))
        })
        .collect();
    let views = tensors.iter().map(|(name, tensor)| {
        let dtype = match tensor.dtype {
            TensorType::F32 => Dtype::F32,
            TensorType::F16 => Dtype::F16,
            TensorType::Bf16 => Dtype::BF16,
            other => panic!("safetensors does not support {other:?}"),
        };
        (name, TensorView::new(dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// Writes `config.json` and `model.safetensors`.
pub(crate) fn write_model(dir: &Path, config: &Value, seed: u64) -> (DecoderConfig, Weights) {
    let (decoder, weights) = model(config, seed);
    write_json(dir, "config.json", config);
    let file = safetensors_of(&weights, |name| Some(name.to_owned()));
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    (decoder, weights)
}

/// Asserts that both have the same tensors, byte for byte.
pub(crate) fn assert_same(left: &Weights, right: &Weights, config: &DecoderConfig) {
    for spec in config.tensors() {
        let (l, r) = (left.tensor(&spec.name, &spec.shape), right.tensor(&spec.name, &spec.shape));
        let (l, r) = (l.unwrap(), r.unwrap());
        assert!(l.dtype == r.dtype && l.bytes == r.bytes, "{} differs", spec.name);
    }
}
