//! Configurations of models with recurrent layers.

use super::*;
use crate::config::{
    Activation, DeltaNetConfig, DeltaNetKind, FeedForwardConfig, GateConfig, LayerConfig,
    Mamba2Config,
};

/// The indices of the layers with Gated DeltaNet.
fn recurrent(config: &DecoderConfig) -> Vec<usize> {
    let layers = config.layers.iter().enumerate();
    let recurrent =
        layers.filter(|(_, layer)| matches!(layer.mixers[..], [MixerConfig::DeltaNet(_)]));
    recurrent.map(|(index, _)| index).collect()
}

/// Goal: the published configuration of Qwen3.5-0.8B, with its nested object and the sections of
/// its rotary embedding, is read.
#[test]
fn published_configurations_are_read() {
    let parsed = read(json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "tie_word_embeddings": true,
        "text_config": {
            "model_type": "qwen3_5_text", "attention_bias": false, "attn_output_gate": true,
            "dtype": "bfloat16", "eos_token_id": 248_044, "full_attention_interval": 4,
            "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
            "intermediate_size": 3584, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 16,
            "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262_144, "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1, "num_attention_heads": 8, "num_hidden_layers": 24,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 248_320,
            "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25, "rope_theta": 10_000_000, "rope_type": "default",
            },
        },
        "vision_config": { "model_type": "qwen3_5", "hidden_size": 768 },
    }));
    let config = parsed.expect("a published configuration").decoder;
    assert_eq!((config.architecture, config.dtype), (Architecture::Qwen35, TensorType::Bf16));
    let rope = Rope { sections: Some([11, 11, 10]), ..plain(1e7) };
    assert_eq!((attention(&config).rotary_dim, &config.ropes[..]), (64, &[rope][..]));
    assert_eq!((config.norms.offset, attention(&config).output_gate), (1.0, true));
    assert!(config.tie_word_embeddings);
    let others: Vec<usize> = (0..24).filter(|index| (index + 1) % 4 == 0).collect();
    assert!(others.iter().all(|index| config.layers[*index].rope() == Some(0)));
    assert_eq!(recurrent(&config).len() + others.len(), 24);
    let delta_net = config.delta_net().copied().expect("recurrent layers");
    // 16 heads of 128 x 128, and three inputs of 6,144 channels.
    assert_eq!(delta_net.shape().state_len(), 16 * 128 * 128 + 3 * 6144);
    assert_eq!(config, crate::random::preset("qwen3.5-0.8b").expect("a preset"));
}

/// Goal: missing keys have the defaults of transformers.
#[test]
fn missing_keys_have_defaults() {
    let default = DeltaNetConfig {
        kind: DeltaNetKind::Gated,
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        taps: 4,
        grouped: true,
        log_rates: true,
    };
    for (model_type, layers, hidden_size, experts) in [
        ("qwen3_5_text", 32, 4096, None),
        ("qwen3_5_moe_text", 40, 2048, Some((256, 8, 512, Some(512), true))),
        ("qwen3_next", 48, 2048, Some((512, 10, 512, Some(512), true))),
    ] {
        let config = decoder(json!({ "model_type": model_type }));
        assert_eq!(config.delta_net().copied(), Some(default), "{model_type}");
        assert_eq!((config.layers.len(), config.hidden_size), (layers, hidden_size));
        assert_eq!(
            (attention(&config).head_dim, attention(&config).rotary_dim),
            (256, 64),
            "{model_type}"
        );
        assert_eq!(recurrent(&config).len(), layers / 4 * 3, "{model_type}");
        let of_experts = |experts: ExpertsConfig| {
            let ExpertsConfig { count, per_token, width, shared_width, normalized, .. } = experts;
            (count, per_token, width, shared_width, normalized)
        };
        assert_eq!(config.experts().copied().map(of_experts), experts, "{model_type}");
    }
}

/// Goal: the recurrent layers are taken from the list, or are all but every n-th layer.
#[test]
fn layers_follow_the_configuration() {
    let layers = |extra: Value| {
        let base = json!({ "model_type": "qwen3_5_text", "num_hidden_layers": 4 });
        let config = decoder(with(base, &extra));
        (recurrent(&config), config.delta_net().copied().is_some())
    };
    assert_eq!(layers(json!({})), (vec![0, 1, 2], true));
    assert_eq!(layers(json!({ "full_attention_interval": 2 })), (vec![0, 2], true));
    assert_eq!(layers(json!({ "full_attention_interval": 1 })), (vec![], false));
    let (full, linear) = ("full_attention", "linear_attention");
    let listed = json!({ "layer_types": [full, linear, full, linear] });
    assert_eq!(layers(listed), (vec![1, 3], true));
}

/// Goal: options that are not implemented and sizes out of range are refused by their key.
#[test]
fn other_options_are_refused() {
    for (key, value, expected) in [
        ("attn_output_gate", json!(false), "true"),
        ("hidden_act", json!("gelu_pytorch_tanh"), "silu"),
        ("output_gate_type", json!("sigmoid"), "silu"),
        ("layer_types", json!(vec!["linear_attention"; 4]), "at least one layer"),
        ("layer_types", json!(["full_attention"]), "4 entries"),
        ("full_attention_interval", json!(0), "from 1"),
        ("linear_conv_kernel_dim", json!(1), "2 to 64"),
        ("linear_conv_kernel_dim", json!(65), "2 to 64"),
        ("linear_num_key_heads", json!(5), "a multiple of linear_num_key_heads"),
        ("linear_num_value_heads", json!(1 << 30), "at most 1073741824 elements"),
        ("linear_key_head_dim", json!(1 << 28), "at most 1073741824 elements"),
        ("linear_value_head_dim", json!(0), "from 1"),
    ] {
        let json = json!({ "model_type": "qwen3_5_text", "num_hidden_layers": 4, key: value });
        let error = read(json).expect_err(key).to_string();
        let named = key == "linear_key_head_dim" || key == "linear_num_key_heads";
        let key = if named { "linear_num_value_heads" } else { key };
        assert!(error.contains(&format!("`{key}`")) && error.contains(expected), "{key}: {error}");
    }
    let beyond = json!({ "model_type": "qwen3_5_text", "full_attention_interval": 4096 });
    let error = read(beyond).expect_err("no attention").to_string();
    assert!(error.contains("`layer_types`"), "{error}");
}

/// The published configuration of Kimi-Linear-48B-A3B-Instruct.
fn kimi_linear() -> Value {
    json!({
        "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163_584, "dtype": "bfloat16",
        "eos_token_id": 163_586, "first_k_dense_replace": 1, "head_dim": 72,
        "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216,
        "kv_lora_rank": 512, "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
            "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
            "num_heads": 32, "short_conv_kernel_size": 4,
        },
        "mla_use_nope": true, "model_max_length": 1_048_576, "model_type": "kimi_linear",
        "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
        "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8,
        "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
        "num_shared_experts": 1, "pad_token_id": 163_839, "q_lora_rank": null,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 10_000.0, "routed_scaling_factor": 2.446,
        "tie_word_embeddings": false, "topk_group": 1, "use_cache": true,
        "use_grouped_topk": true, "v_head_dim": 128, "vocab_size": 163_840,
    })
}

/// Goal: Kimi Linear's published configuration is read. A configuration with only a type differs
/// from it in the layers with attention, for which transformers has another default.
#[test]
fn kimi_linear_follows_its_configuration() {
    let config = decoder(kimi_linear());
    let others: Vec<usize> = (0..27).filter(|index| index % 4 == 3 || *index == 26).collect();
    let is_latent =
        |index: &usize| matches!(config.layers[*index].mixers[..], [MixerConfig::Latent(_)]);
    assert!(others.iter().all(is_latent));
    assert_eq!(recurrent(&config).len() + others.len(), 27);
    assert!(config.layers.iter().all(|layer| layer.rope().is_none()));
    assert_eq!(config.latent().map(|latent| latent.sizes.kept_dim()), Some(576));
    // There are 32 heads of 128 x 128, three inputs of 12,288 channels, and a decay for each of
    // 4,096 keys.
    let shape = config.recurrent_shape().expect("recurrent layers");
    assert_eq!(shape.state_len(), 32 * 128 * 128 + 3 * 12_288);
    assert_eq!((shape.decay_width(), shape.factor_width()), (4096, 4128));
    let billions = config.parameter_count() as f64 / 1e9;
    assert!((48.0..50.0).contains(&billions), "{billions}");
    assert!(!config.layers[0].has_experts());
    assert!(config.layers[1..].iter().all(LayerConfig::has_experts));
    let bare = decoder(json!({ "model_type": "kimi_linear" }));
    let dtype = config.dtype;
    assert_eq!(recurrent(&bare).len(), 21);
    assert_eq!(DecoderConfig { layers: config.layers.clone(), dtype, ..bare }, config);
}

/// Goal: other options of Kimi Linear, and inconsistent lists of layers, are refused, with their
/// key.
#[test]
fn other_options_of_kimi_linear_are_refused() {
    let lists = |attention: &[usize], kda: &[usize]| {
        let mut config = kimi_linear()["linear_attn_config"].clone();
        config["full_attn_layers"] = json!(attention);
        config["kda_layers"] = json!(kda);
        config
    };
    let beyond: Vec<usize> = (2..=28).collect();
    let heads = |key: &str, value: usize| {
        let mut config = kimi_linear()["linear_attn_config"].clone();
        config[key] = value.into();
        config
    };
    for (key, value, named, expected) in [
        ("mla_use_nope", json!(false), "mla_use_nope", "true"),
        ("moe_router_activation_func", json!("softmax"), "moe_router_activation_func", "sigmoid"),
        ("moe_layer_freq", json!(2), "moe_layer_freq", "1"),
        ("attn_output_gate", json!(true), "attn_output_gate", "false"),
        ("hidden_act", json!("gelu_pytorch_tanh"), "hidden_act", "silu"),
        ("linear_attn_config", lists(&[4], &[1, 2, 3]), "full_attn_layers", "from 1 to 27 once"),
        ("linear_attn_config", lists(&beyond, &[1]), "full_attn_layers", "from 1 to 27 once"),
        ("linear_attn_config", heads("num_heads", 1 << 29), "linear_num_heads", "at most"),
        ("linear_attn_config", heads("head_dim", 1 << 20), "linear_num_heads", "at most"),
        ("linear_attn_config", heads("short_conv_kernel_size", 1), "linear_conv", "2 to 64"),
    ] {
        let error = read(with(kimi_linear(), &json!({ key: value }))).expect_err(key).to_string();
        assert!(error.contains(named) && error.contains(expected), "{key}: {error}");
    }
}

/// Goal: the published configuration of Granite 4.0 H Micro is read. Inconsistent sizes and options
/// that are not implemented are refused, with their key.
#[test]
fn mamba_layers_follow_the_configuration() {
    let base = json!({
        "model_type": "granitemoehybrid", "num_hidden_layers": 4, "hidden_size": 2048,
        "num_local_experts": 0, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "shared_intermediate_size": 8192, "position_embedding_type": "nope",
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_n_heads": 64, "mamba_conv_bias": true,
        "mamba_proj_bias": false, "time_step_limit": [0.0, null],
    });
    let config = decoder(base.clone());
    let mamba2 = Mamba2Config {
        heads: 64,
        head_dim: 64,
        groups: 1,
        state_dim: 128,
        taps: 4,
        convolution_bias: true,
        norm: true,
        log_rates: true,
        input_factors: [1.0; 5],
        output_factor: 1.0,
    };
    assert_eq!((config.mamba2().copied(), config.recurrent_layers()), (Some(mamba2), 3));
    // 64 heads of 128 x 64, and three inputs of 4,096 + 2 * 128 channels.
    assert_eq!(mamba2.shape().state_len(), 64 * 128 * 64 + 3 * 4352);
    let auto = decoder(with(base.clone(), &json!({ "mamba_d_head": "auto" })));
    assert_eq!(auto.mamba2().copied(), Some(mamba2));
    for (key, value) in [
        ("mamba_d_head", json!(65)),
        ("mamba_n_groups", json!(3)),
        ("mamba_d_state", json!(1 << 30)),
        ("mamba_d_conv", json!(1)),
        ("mamba_proj_bias", json!(true)),
        ("time_step_limit", json!([0.0, 5.0])),
        ("time_step_limit", json!([0.1, null])),
        ("hidden_act", json!("gelu_pytorch_tanh")),
        ("layer_types", json!(vec!["mamba"; 4])),
    ] {
        let error = read(with(base.clone(), &json!({ key: value }))).expect_err(key).to_string();
        // If sizes are inconsistent, the error names the key of the heads.
        let named = matches!(key, "mamba_n_groups" | "mamba_d_state");
        let key = if named { "mamba_n_heads" } else { key };
        assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
    }
}

/// Goal: the published configuration of Nemotron Nano 9B v2 is read, and the kinds of layers can
/// also be a list of names.
#[test]
fn layers_of_nemotron_are_mixers_or_mlps() {
    let pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-";
    let base = json!({
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "attention_bias": false, "conv_kernel": 4, "expand": 2, "head_dim": 128,
        "hidden_size": 4480, "hybrid_override_pattern": pattern, "intermediate_size": 15_680,
        "layer_norm_epsilon": 1e-5, "mamba_head_dim": 80, "mamba_hidden_act": "silu",
        "mamba_num_heads": 128, "mamba_proj_bias": false, "max_position_embeddings": 131_072,
        "mlp_bias": false, "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 40,
        "num_hidden_layers": 56, "num_key_value_heads": 8, "ssm_state_size": 128,
        "time_step_limit": [0.0, "Infinity"], "use_bias": false, "use_conv_bias": true,
        "vocab_size": 131_072,
    });
    let config = decoder(base.clone());
    let mamba2 = config.mamba2().copied().expect("Mamba-2");
    assert_eq!((mamba2.heads, mamba2.head_dim, mamba2.groups), (128, 80, 8));
    assert_eq!((config.recurrent_layers(), config.layers.len()), (27, 56));
    assert_eq!(dense(&config).activation, Activation::Plain(PlainFunction::SquaredRelu));
    assert!(config.layers.iter().all(|layer| layer.rope().is_none()));
    assert!(config.layers.iter().all(|layer| layer.mixers.is_empty() == layer.mlp.is_some()));
    assert!(config.experts().is_none());
    let billions = config.parameter_count() as f64 / 1e9;
    assert!((8.8..8.9).contains(&billions), "{billions}");

    let names = json!({
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4, "n_routed_experts": 16, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    });
    let config = decoder(with(base.clone(), &names));
    assert!(matches!(
        [0, 1, 2, 3].map(|layer| config.layers[layer].mlp),
        [None, Some(FeedForwardConfig::Experts(_)), None, Some(FeedForwardConfig::Dense(_))]
    ));
    let experts = config.experts().copied().expect("experts");
    assert_eq!((experts.count, experts.width, experts.shared_width), (16, 32, Some(48)));

    for (key, value, expected) in [
        ("hybrid_override_pattern", json!("M-*-"), "56 layers, got 4"),
        ("hybrid_override_pattern", json!(pattern.replace('*', "X")), "* (attention)"),
        ("hybrid_override_pattern", json!(null), "a string"),
        ("layers_block_type", json!(["mamba", "conv"]), "moe"),
        ("mlp_hidden_act", json!("silu"), "relu2"),
        ("mamba_hidden_act", json!("gelu"), "silu"),
        ("use_bias", json!(true), "false"),
        ("mamba_proj_bias", json!(true), "false"),
        ("time_step_limit", json!([0.0, 5.0]), "infinity"),
        ("time_step_limit", json!([0.0, "NaN"]), "infinity"),
        ("moe_latent_size", json!(64), "null"),
        ("n_group", json!(2), "1"),
    ] {
        let changed = with(base.clone(), &json!({ key: value }));
        let experts = json!({ "hybrid_override_pattern": pattern.replace("*-", "*E") });
        let needs_experts = matches!(key, "moe_latent_size" | "n_group");
        let changed = if needs_experts { with(changed, &experts) } else { changed };
        let error = read(changed).expect_err(key).to_string();
        assert!(error.contains(&format!("`{key}`")) && error.contains(expected), "{key}: {error}");
    }
    // Without attention, blocks would be empty.
    for pattern in ["MM", "--"] {
        let alone = json!({ "hybrid_override_pattern": pattern, "num_hidden_layers": 2 });
        let error = read(with(base.clone(), &alone)).expect_err("no attention").to_string();
        assert!(error.contains("`layer_types`"), "{error}");
    }
}

/// Goal: the published configuration of Falcon-H1 0.5B is read, with all of its factors.
#[test]
fn layers_of_falcon_have_both_mixers_and_factors() {
    let base = json!({
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1",
        "attention_bias": false, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656_854_249_492_381,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048,
        "key_multiplier": 0.390_625, "lm_head_multiplier": 0.039_062_5, "mamba_conv_bias": true,
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24,
        "mamba_norm_before_gate": false, "mamba_proj_bias": false, "mamba_rms_norm": false,
        "max_position_embeddings": 16_384, "mlp_bias": false,
        "mlp_multipliers": [0.883_883_476_483_184_4, 0.585_937_5], "num_attention_heads": 8,
        "num_hidden_layers": 36, "num_key_value_heads": 2, "projectors_bias": false,
        "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 100_000_000_000.0,
        "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.5, 0.25, 0.75, 1.0, 2.0],
        "ssm_out_multiplier": 0.236, "tie_word_embeddings": false, "vocab_size": 32_784,
    });
    let config = decoder(base.clone());
    let mamba2 = config.mamba2().copied().expect("Mamba-2");
    assert_eq!((mamba2.heads, mamba2.head_dim, mamba2.norm), (24, 64, false));
    assert_eq!((config.recurrent_layers(), config.layers.len()), (36, 36));
    assert!(config.layers.iter().all(|layer| layer.has_attention() && layer.rope() == Some(0)));
    assert_eq!(attention(&config).scale, 0.125 * 0.390_625);
    assert_eq!((config.logit_scale, config.embedding_scale), (Some(0.039_062_5), Some(5.656_854)));
    assert_eq!(attention(&config).output_factor, 0.9375);
    assert_eq!(mamba2.output_factor, 0.236);
    assert_eq!(mamba2.input_factors, [0.625, 0.3125, 0.9375, 1.25, 2.5]);
    let gate = GateConfig { function: GateFunction::Silu, factor: 0.883_883_5 };
    assert_eq!(dense(&config).activation, Activation::Gated(gate));
    assert_eq!(dense(&config).output_factor, 0.585_937_5);
    let millions = config.parameter_count() as f64 / 1e6;
    assert!((521.0..522.0).contains(&millions), "{millions}");

    // Queries, keys and values are multiplied by the factor of the inputs.
    let scaled = decoder(with(base.clone(), &json!({ "attention_in_multiplier": 2.0 })));
    assert_eq!(attention(&scaled).scale, 4.0 * attention(&config).scale);
    assert_eq!(attention(&scaled).output_factor, 1.875);
    let plain = decoder(json!({ "model_type": "falcon_h1", "mamba_n_heads": 16 }));
    assert_eq!((attention(&plain).output_factor, plain.logit_scale), (1.0, None));
    assert_eq!(dense(&plain).activation, GateFunction::Silu.into());
    assert_eq!(plain.mamba2().map(|mamba2| (mamba2.head_dim, mamba2.norm)), Some((64, false)));

    for (key, value, expected) in [
        ("mlp_multipliers", json!([1.0]), "2 numbers above 0"),
        ("mlp_multipliers", json!([1.0, 0.0]), "2 numbers above 0"),
        ("ssm_multipliers", json!([1, 1, 1, 1, "1"]), "numbers"),
        ("key_multiplier", json!(-1.0), "above 0"),
        ("lm_head_multiplier", json!(0), "above 0"),
        ("projectors_bias", json!(true), "false"),
        ("mamba_proj_bias", json!(true), "false"),
        ("mamba_d_head", json!(32), "1536 elements"),
        ("time_step_limit", json!([0.0, 0.1]), "infinity"),
        ("hidden_act", json!("gelu_pytorch_tanh"), "silu"),
    ] {
        let error = read(with(base.clone(), &json!({ key: value }))).expect_err(key).to_string();
        assert!(error.contains(&format!("`{key}`")) && error.contains(expected), "{key}: {error}");
    }
    for (key, extra) in [
        (
            "mamba_norm_before_gate",
            json!({ "mamba_rms_norm": true, "mamba_norm_before_gate": true }),
        ),
        ("attention_bias", json!({ "attention_bias": true, "attention_in_multiplier": 1.5 })),
    ] {
        let error = read(with(base.clone(), &extra)).expect_err(key).to_string();
        assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
    }
}
