//! Configurations of Gemma 4.

use stolon_kernels::KvLayout;

use super::*;
use crate::config::{FeedForwardConfig, PerLayerInput};

/// The sizes of the heads of layer `layer`.
fn heads(config: &DecoderConfig, layer: usize) -> HeadShape {
    let AttentionConfig { kv_heads, head_dim, .. } =
        *config.layers[layer].attention().expect("attention");
    HeadShape { kv_heads, head_dim }
}

use crate::kv::{KvShape, KvType};

/// The published text configuration of Gemma 4 E2B, with the keys of `extra` added.
fn e2b(extra: &Value) -> Value {
    let types = ["sliding_attention"; 4].into_iter().chain(["full_attention"]);
    let types: Vec<&str> = types.cycle().take(35).collect();
    let text = json!({
        "attention_bias": false, "attention_k_eq_v": false, "dtype": "bfloat16",
        "enable_moe_block": false, "expert_intermediate_size": null,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
        "hidden_size_per_layer_input": 256, "intermediate_size": 6144, "layer_types": types,
        "max_position_embeddings": 131_072, "model_type": "gemma4_text",
        "num_attention_heads": 8, "num_experts": null, "num_global_key_value_heads": null,
        "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-6, "sliding_window": 512, "tie_word_embeddings": true,
        "top_k_experts": null, "use_bidirectional_attention": null,
        "use_double_wide_mlp": true, "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": { "rope_theta": 10_000.0, "rope_type": "default" },
        },
    });
    json!({
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "eos_token_id": [1, 106], "audio_config": { "model_type": "gemma4_audio" },
        "vision_config": { "model_type": "gemma4_vision" }, "text_config": with(text, extra),
    })
}

/// Goal: the published configuration of E2B is read. The last 20 layers share the keys and values
/// of the last layer of their kind before them, have wider MLPs, and need no memory for each token.
#[test]
fn layers_share_keys_and_values() {
    let parsed = read(e2b(&json!({}))).unwrap();
    assert_eq!(parsed.eos_token_ids, [1, 106]);
    let config = parsed.decoder;
    assert_eq!((config.norms.offset, attention(&config).scale), (0.0, 1.0));
    let per_layer = PerLayerInput { width: 256, gate: GateFunction::GeluTanh };
    assert_eq!((config.per_layer_input, config.layer_scales), (Some(per_layer), true));
    assert_eq!((config.logit_softcap, attention(&config).value_norm), (Some(30.0), true));
    assert_eq!((config.rope_dim(0), config.rope_dim(1)), (Some(512), Some(256)));
    let scaling = RopeScaling::FirstPairs { pairs: 64, factor: 1.0 };
    assert_eq!(config.ropes, [Rope { scaling, ..plain(1e6) }, plain(1e4)]);
    assert_eq!(heads(&config, 0), HeadShape { kv_heads: 1, head_dim: 256 });
    assert_eq!(heads(&config, 4), HeadShape { kv_heads: 1, head_dim: 512 });
    for (index, layer) in config.layers.iter().enumerate() {
        let is_local = index % 5 != 4;
        assert_eq!(layer.sliding_window(), is_local.then_some(512));
        let source = (index >= 15).then_some(if is_local { 13 } else { 14 });
        let expected = source.map_or(KeysAndValues::Own, KeysAndValues::OfLayer);
        let attention = layer.attention().expect("attention");
        assert_eq!(attention.keys_and_values, expected, "{index}");
        let width = layer.mlp.as_ref().and_then(|mlp| mlp.dense()).map(|mlp| mlp.width);
        assert_eq!(width, Some(if source.is_some() { 12_288 } else { 6144 }));
    }
    assert_eq!(config.last_keeping_layer(), 14);
    let shape = KvShape::of(&config, 1, KvType::Bf16, |_| KvLayout::Rows);
    assert_eq!(shape.attention_layers.len(), 15);
    assert_eq!(shape.block_bytes(), 2 * 2 * (12 * 256 + 3 * 512));
}

/// Goal: the keys of 26B-A4B are read: experts next to each MLP, and global layers with fewer and
/// longer heads, whose values are projected with the matrix of keys. Files that transformers has
/// written have the sizes of heads by layer.
#[test]
fn experts_and_shared_projections_are_read() {
    let types = [["sliding_attention"; 5].as_slice(), &["full_attention"]].concat();
    let mut text = json!({
        "attention_k_eq_v": true, "enable_moe_block": true, "hidden_size_per_layer_input": 0,
        "moe_intermediate_size": 704, "num_experts": 128, "num_attention_heads": 16,
        "num_global_key_value_heads": 2, "num_hidden_layers": 6, "num_key_value_heads": 8,
        "num_kv_shared_layers": 0, "top_k_experts": 8, "use_bidirectional_attention": "vision",
        "layer_types": types, "use_double_wide_mlp": false,
    });
    let config = decoder(e2b(&text));
    assert_eq!(heads(&config, 0), HeadShape { kv_heads: 8, head_dim: 256 });
    assert_eq!(heads(&config, 5), HeadShape { kv_heads: 2, head_dim: 512 });
    let values_from_keys = config
        .layers
        .iter()
        .filter_map(|layer| layer.attention())
        .map(|attention| attention.keys_and_values == KeysAndValues::OneMatrix);
    assert_eq!(values_from_keys.collect::<Vec<_>>(), [false, false, false, false, false, true]);
    assert!(
        config
            .layers
            .iter()
            .all(|layer| { matches!(layer.mlp, Some(FeedForwardConfig::DenseAndExperts(..))) })
    );
    let experts = config.experts().copied().unwrap();
    assert_eq!((experts.count, experts.per_token, experts.width), (128, 8, 704));
    assert!(experts.normalized && experts.scaled_router);
    assert_eq!(config.per_layer_input, None);

    text["per_layer_config"] = json!({ "5": { "head_dim": 512, "num_key_value_heads": 2 } });
    text["global_head_dim"] = Value::Null;
    assert_eq!(decoder(e2b(&text)), config);
    // The keys of a model with more layers are padded with zeros.
    text["per_layer_config"] = json!({ "05": { "head_dim": 512, "num_key_value_heads": 2 } });
    assert_eq!(decoder(e2b(&text)), config);
}

/// Goal: keys with values that are not compatible, or not implemented, are refused, with the key.
#[test]
fn other_values_are_refused() {
    for (extra, part) in [
        (json!({ "num_kv_shared_layers": 35 }), "`text_config.num_kv_shared_layers`"),
        (json!({ "num_kv_shared_layers": 32 }), "fewer than all layers"),
        (json!({ "use_bidirectional_attention": "all" }), "use_bidirectional_attention"),
        (json!({ "vocab_size_per_layer_input": 1000 }), "262144 (vocab_size)"),
        (json!({ "global_head_dim": 511 }), "an even number"),
        (json!({ "global_head_dim": 1 << 20 }), "`global_head_dim`"),
        (json!({ "hidden_size_per_layer_input": 1 << 29 }), "hidden_size_per_layer_input"),
        (json!({ "enable_moe_block": true }), "`text_config.num_experts`"),
        (json!({ "per_layer_config": { "4": { "rope_theta": 1 } } }), "only the keys head_dim"),
        (json!({ "per_layer_config": { "35": {} } }), "only the indices of layers"),
        (json!({ "per_layer_config": { "+4": {} } }), "only the indices of layers"),
        (json!({ "per_layer_config": { "4": {}, "04": {} } }), "each once"),
        (json!({ "per_layer_config": { "34": { "head_dim": 128 } } }), "as in other layers"),
        (json!({ "per_layer_config": { "4": { "head_dim": 512 } } }), "as in other layers"),
        (
            json!({ "attention_k_eq_v": true, "num_global_key_value_heads": 3 }),
            "a divisor of num_attention_heads",
        ),
        (
            json!({ "rope_parameters": { "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 1.5,
            } } }),
            "a number from 0 to 1",
        ),
    ] {
        let error = read(e2b(&extra)).unwrap_err().to_string();
        assert!(error.contains(part), "expected {part} in {error}");
    }
    let other = json!({ "model_type": "gemma3_text", "per_layer_config": {} });
    assert!(read(other).unwrap_err().to_string().contains("per_layer_config"));
}
