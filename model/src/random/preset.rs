//! Presets: the shapes of models with random weights.

use serde_json::{Value, json};

use crate::config::DecoderConfig;
use crate::error::ModelError;

/// The names of all presets of [`ModelSource::Random`](crate::ModelSource::Random), smallest first:
/// `tiny` (about 0.1 M parameters, f32), `20m`, `100m` (Llama shapes, bf16), `474m` (Qwen3 0.6B
/// with a vocabulary of 32,768), `moe-1b` (a mixture of experts in the shape of Qwen3-MoE: 1.3 B
/// parameters, of which a token uses 0.26 B), and the shapes of published models (bf16).
pub const PRESETS: [&str; 13] = [
    "tiny",
    "20m",
    "100m",
    "474m",
    "moe-1b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "gemma3-1b",
    "llama3.2-1b",
    "gemma2-2b",
    "smollm3-3b",
    "phi4-mini",
    "mistral-7b",
];

/// The configuration of the preset `name`.
///
/// # Errors
/// [`ModelError::InvalidOption`] if there is no preset with this name.
pub fn preset(name: &str) -> Result<DecoderConfig, ModelError> {
    let value = preset_json(name).ok_or_else(|| ModelError::InvalidOption {
        name: "random model".into(),
        expected: format!("one of {}", PRESETS.join(", ")),
        got: format!("`{name}`"),
    })?;
    DecoderConfig::from_json(&format!("random:{name}"), &value)
}

/// The preset in the format of a `config.json`.
fn preset_json(name: &str) -> Option<Value> {
    let llama =
        |vocab: usize, hidden: usize, mlp: usize, layers: usize, heads: usize, kv: usize| {
            json!({
                "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
                "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
                "num_key_value_heads": kv, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
                "tie_word_embeddings": true, "dtype": "bfloat16",
            })
        };
    let value = match name {
        "tiny" => {
            let mut tiny = llama(320, 64, 128, 2, 4, 2);
            tiny["dtype"] = "float32".into();
            tiny
        }
        "20m" => llama(8192, 384, 1024, 8, 6, 2),
        "100m" => llama(32_000, 768, 2048, 12, 12, 4),
        "qwen2.5-0.5b" => json!({
            "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896,
            "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "max_position_embeddings": 32_768,
            "rope_theta": 1_000_000.0, "tie_word_embeddings": true, "dtype": "bfloat16",
        }),
        "474m" | "qwen3-0.6b" => json!({
            "model_type": "qwen3", "hidden_size": 1024,
            "vocab_size": if name == "474m" { 32_768 } else { 151_936 },
            "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000.0, "tie_word_embeddings": true, "dtype": "bfloat16",
        }),
        "moe-1b" => json!({
            "model_type": "qwen3_moe", "vocab_size": 32_768, "hidden_size": 1024,
            "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
            "head_dim": 64, "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0,
            "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 384,
            "norm_topk_prob": true, "tie_word_embeddings": true, "dtype": "bfloat16",
        }),
        "gemma3-1b" => json!({
            "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 1152,
            "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32_768,
            "sliding_window": 512, "dtype": "bfloat16",
        }),
        "llama3.2-1b" => json!({
            "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": true,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
            "dtype": "bfloat16",
        }),
        "gemma2-2b" => json!({ "model_type": "gemma2", "dtype": "bfloat16" }),
        "smollm3-3b" => json!({
            "model_type": "smollm3", "rope_theta": 5_000_000.0, "max_position_embeddings": 65_536,
            "dtype": "bfloat16",
        }),
        "phi4-mini" => json!({
            "model_type": "phi3", "vocab_size": 200_064, "num_attention_heads": 24,
            "num_key_value_heads": 8, "max_position_embeddings": 131_072,
            "sliding_window": 262_144, "partial_rotary_factor": 0.75, "tie_word_embeddings": true,
            "rope_scaling": {
                "type": "longrope", "short_factor": vec![1.0; 48], "long_factor": vec![4.0; 48],
            },
            "dtype": "bfloat16",
        }),
        "mistral-7b" => json!({
            "model_type": "mistral", "vocab_size": 32_000, "hidden_size": 4096,
            "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "max_position_embeddings": 32_768,
            "sliding_window": 4096, "dtype": "bfloat16",
        }),
        _ => return None,
    };
    Some(value)
}
