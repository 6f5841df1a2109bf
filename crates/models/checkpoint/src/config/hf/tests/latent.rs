//! Configurations of models with latent attention.

use super::*;
use crate::config::{ExpertGroups, LatentSizes};
use crate::kv::{KvShape, KvType};

/// Goal: the published configuration of DeepSeek-V2-Lite is read: queries without a low-rank
/// vector, no groups, and the squared factor of scores. A position takes 576 numbers in a layer.
#[test]
fn deepseek_v2_lite_is_read() {
    let config = decoder(json!({
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10_944, "kv_lora_rank": 512, "max_position_embeddings": 163_840,
        "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10_000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
        "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102_400,
    }));
    let sizes =
        LatentSizes { width: 512, rotary_dim: 64, key_dim: 128, value_dim: 128, query_rank: None };
    let latent = *config.latent().expect("latent attention");
    assert_eq!((latent.heads, latent.sizes, latent.sizes.kept_dim()), (16, sizes, 576));
    assert!(config.mixers().all(|mixer| *mixer == MixerConfig::Latent(latent)));
    let magnitude = 0.0707 * 40_f64.ln() + 1.0;
    let scale = f64::from(latent.scale) * 192_f64.sqrt();
    assert!((scale - magnitude * magnitude).abs() < 1e-6, "{scale}");
    assert!((config.ropes[0].attention_factor() - 1.0).abs() < 1e-6);
    assert_eq!(config.max_positions, 163_840);
    let experts = config.experts().copied().expect("experts");
    assert_eq!((experts.count, experts.per_token, experts.shared_width), (64, 6, Some(2816)));
    assert_eq!((experts.groups, experts.scale, experts.normalized), (None, 1.0, false));
    let shape = KvShape::of(&config, 16, KvType::Bf16, |_| stolon_kernels::KvLayout::Rows);
    assert_eq!(shape.block_bytes(), 27 * 576 * 2 * 16);
    let parameters = config.parameter_count() as f64 / 1e9;
    assert!((parameters - 15.7).abs() < 0.05, "{parameters}");
}

/// Goal: DeepSeek-V3 and GLM-4.7-Flash have the defaults of transformers, and the layers with
/// experts of GLM-4.7-Flash may be listed.
#[test]
fn missing_keys_have_the_defaults_of_transformers() {
    let experts = |config: &DecoderConfig| config.experts().copied().expect("experts");
    let dense =
        |config: &DecoderConfig| config.layers.iter().filter(|layer| !layer.has_experts()).count();
    let v3 = decoder(json!({ "model_type": "deepseek_v3" }));
    assert_eq!(v3.latent().and_then(|latent| latent.sizes.query_rank), Some(1536));
    assert_eq!(experts(&v3).groups, Some(ExpertGroups { count: 8, used: 4, best: 2 }));
    assert_eq!((experts(&v3).scale, dense(&v3)), (2.5, 3));
    assert_eq!((v3.parameter_count() as f64 / 1e9).round(), 671.0);
    let flash = decoder(json!({ "model_type": "glm4_moe_lite" }));
    assert_eq!((experts(&flash).groups, experts(&flash).scale), (None, 1.8));
    assert_eq!(
        (dense(&flash), flash.latent().map(|latent| latent.sizes.query_dim())),
        (1, Some(256))
    );
    let types = json!({
        "model_type": "glm4_moe_lite", "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    });
    let listed = decoder(types).layers.iter().map(|layer| layer.has_experts()).collect::<Vec<_>>();
    assert_eq!(listed, [true, false, true]);
    let youtu = decoder(json!({ "model_type": "youtu" }));
    assert_eq!((youtu.experts(), youtu.tie_word_embeddings), (None, true));
    assert_eq!((youtu.parameter_count() as f64 / 1e8).round(), 20.0);
    let small4 = decoder(json!({ "model_type": "mistral4" }));
    let latent = small4.latent().expect("latent attention");
    assert_eq!(latent.query_scaling, Some(QueryScaling { beta: 0.1, step: 8192 }));
    let magnitude = 0.1 * 128_f64.ln() + 1.0;
    let scale = f64::from(latent.scale) * 128_f64.sqrt();
    assert!((scale - magnitude * magnitude).abs() < 1e-6, "{scale}");
    assert_eq!((small4.parameter_count() as f64 / 1e9).round(), 119.0);
    let v2 = json!({ "model_type": "deepseek_v2" });
    let groups = json!({ "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3 });
    let expected = ExpertGroups { count: 8, used: 3, best: 1 };
    assert_eq!(experts(&decoder(with(v2, &groups))).groups, Some(expected));
}

/// Goal: options and sizes that are not implemented are refused, with their names.
#[test]
fn other_options_are_refused() {
    for (key, value) in [
        ("rope_interleave", json!(false)),
        ("attention_bias", json!(true)),
        ("num_attention_heads", json!(2048)),
        ("kv_lora_rank", json!(0)),
        ("qk_rope_head_dim", json!(33)),
        ("v_head_dim", json!(1_u64 << 30)),
        ("n_group", json!(7)),
        ("topk_group", json!(9)),
        ("mlp_layer_types", json!(["sparse"])),
        ("topk_method", json!("noaux_tc")),
        ("partial_rotary_factor", json!(0.5)),
        ("rope_parameters", json!({ "partial_rotary_factor": 0.4 })),
    ] {
        let model_type = match key {
            "mlp_layer_types" => "glm4_moe_lite",
            "topk_method" => "deepseek_v2",
            "rope_parameters" => "mistral4",
            _ => "deepseek_v3",
        };
        let mut config = json!({ "model_type": model_type });
        config[key] = value;
        let error = read(config).unwrap_err().to_string();
        let shown = if key == "rope_parameters" { "partial_rotary_factor`" } else { key };
        assert!(error.contains(shown), "{key}: {error}");
    }
}
