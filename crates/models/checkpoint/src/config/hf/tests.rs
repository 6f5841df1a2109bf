mod gemma4;
mod latent;
mod moondream;
mod muse_glimmer;
mod recurrent;

use serde_json::{Value, json};
use stolon_kernels::KvLayout;

use super::*;
use crate::config::{
    Activation, ExpertScores, ExpertsConfig, GateFunction, MixerConfig, MlpConfig, NormKind,
    NormPlacement, PlainFunction, QkNorm, Rope, RopeScaling, ShortContext,
};
use crate::kv::{KvShape, KvType};

fn read(value: Value) -> Result<ParsedConfig, ModelError> {
    parse("config.json", &value)
}

fn decoder(value: Value) -> DecoderConfig {
    read(value).unwrap().decoder
}

/// The object `value` with the keys of `extra` added or replaced.
fn with(mut value: Value, extra: &Value) -> Value {
    for (key, entry) in extra.as_object().unwrap() {
        value[key] = entry.clone();
    }
    value
}

fn plain(theta: f64) -> Rope {
    Rope { theta, scaling: RopeScaling::None, sections: None }
}

/// The attention of the first layer that has any.
fn attention(config: &DecoderConfig) -> AttentionConfig {
    *config.attention().expect("attention")
}

/// The first MLP for all tokens.
fn dense(config: &DecoderConfig) -> MlpConfig {
    let mut mlps = config.layers.iter().filter_map(|layer| layer.mlp.as_ref()?.dense());
    *mlps.next().expect("an MLP")
}

/// The indices of the layers with a sliding window.
fn sliding(config: &DecoderConfig) -> Vec<usize> {
    let layers = config.layers.iter().enumerate();
    layers.filter(|(_, layer)| layer.sliding_window().is_some()).map(|(i, _)| i).collect()
}

/// Goal: a configuration with only a `model_type` has the defaults of transformers 5.
#[test]
fn defaults_are_those_of_transformers() {
    let sizes = |config: &DecoderConfig| {
        [
            config.vocab_size,
            config.hidden_size,
            // If all layers have experts, the width is the width of experts.
            config.experts().map_or_else(|| dense(config).width, |experts| experts.width),
            config.layers.len(),
            attention(config).heads,
            attention(config).kv_heads,
            attention(config).head_dim,
            config.max_positions,
        ]
    };
    let cases = [
        ("llama", [32_000, 4096, 11_008, 32, 32, 32, 128, 2048]),
        ("mistral", [32_000, 4096, 14_336, 32, 32, 8, 128, 131_072]),
        ("qwen2", [151_936, 4096, 22_016, 32, 32, 32, 128, 32_768]),
        ("qwen3", [151_936, 4096, 22_016, 32, 32, 32, 128, 32_768]),
        ("granite", [32_000, 4096, 11_008, 32, 32, 32, 128, 2048]),
        ("olmo2", [50_304, 4096, 11_008, 32, 32, 32, 128, 2048]),
        ("smollm3", [128_256, 2048, 11_008, 36, 16, 4, 128, 32_768]),
        ("phi3", [32_064, 3072, 8192, 32, 32, 32, 96, 4096]),
        ("gemma2", [256_000, 2304, 9216, 26, 8, 4, 256, 8192]),
        ("gemma3_text", [262_208, 2304, 9216, 26, 8, 4, 256, 131_072]),
        ("mixtral", [32_000, 4096, 14_336, 32, 32, 8, 128, 131_072]),
        ("qwen2_moe", [151_936, 2048, 1408, 24, 16, 16, 128, 32_768]),
        ("qwen3_moe", [151_936, 2048, 768, 24, 32, 4, 64, 32_768]),
        ("gpt_oss", [201_088, 2880, 2880, 36, 64, 8, 64, 131_072]),
    ];
    for (name, expected) in cases {
        let config = decoder(json!({ "model_type": name }));
        assert_eq!(sizes(&config), expected, "{name}");
        let eps =
            if matches!(name, "phi3" | "olmo2" | "mixtral" | "gpt_oss") { 1e-5 } else { 1e-6 };
        assert_eq!(config.norms.eps, eps, "{name}");
        let tied = name.starts_with("gemma") || name == "smollm3";
        assert_eq!(config.tie_word_embeddings, tied, "{name}");
        assert_eq!(config.architecture.name(), name);
    }
    let ids = |name: &str| {
        let parsed = read(json!({ "model_type": name })).unwrap();
        (parsed.bos_token_id, parsed.eos_token_ids)
    };
    assert_eq!(ids("llama"), (Some(1), vec![2]));
    assert_eq!(ids("qwen3"), (None, vec![]));
    assert_eq!(ids("gemma3_text"), (Some(2), vec![1]));
}

/// Goal: biases, norms of q and k, and the attention scale follow from the architecture.
#[test]
fn biases_norms_and_scales_follow_the_architecture() {
    let biases = |value: Value| {
        let config = decoder(value);
        (
            attention(&config).qkv_bias,
            attention(&config).output_bias,
            dense(&config).bias,
            attention(&config).qk_norm.is_some(),
        )
    };
    let model =
        |name: &str| json!({ "model_type": name, "attention_bias": true, "mlp_bias": true });
    assert_eq!(biases(model("llama")), (true, true, true, false));
    assert_eq!(biases(model("mistral")), (false, false, false, false));
    assert_eq!(biases(model("qwen2")), (true, false, false, false));
    assert_eq!(biases(model("qwen3")), (true, true, false, true));
    assert_eq!(biases(model("gemma3_text")), (true, true, false, true));
    let gemma = decoder(json!({ "model_type": "gemma3_text", "query_pre_attn_scalar": 64 }));
    assert_eq!((gemma.norms.offset, gemma.norms.placement), (1.0, NormPlacement::InputAndOutput));
    assert_eq!(dense(&gemma).activation, GateFunction::GeluTanh.into());
    assert_eq!(attention(&gemma).scale, 0.125);
    assert_eq!(gemma.embedding_scale, Some(48.0));
    let llama = decoder(json!({ "model_type": "llama", "head_dim": 16 }));
    assert_eq!((attention(&llama).scale, llama.embedding_scale), (0.25, None));
    assert_eq!(
        decoder(json!({ "architectures": ["Qwen3ForCausalLM"] })).attention().map(|a| a.head_dim),
        Some(128)
    );
}

/// Goal: a key with the value null means none, while a missing key means the default.
#[test]
fn null_is_not_missing() {
    let window = |extra: Value| {
        decoder(with(json!({ "model_type": "mistral" }), &extra)).layers[0].sliding_window()
    };
    assert_eq!(window(json!({})), Some(4096));
    assert_eq!(window(json!({ "sliding_window": null })), None);
    assert_eq!(window(json!({ "sliding_window": 5 })), Some(5));
    let heads = json!({ "model_type": "mistral", "num_key_value_heads": null });
    assert_eq!(attention(&decoder(heads)).kv_heads, 32);
    let parsed = read(json!({ "model_type": "llama", "eos_token_id": null, "bos_token_id": null }));
    let parsed = parsed.unwrap();
    assert_eq!((parsed.eos_token_ids, parsed.bos_token_id), (vec![], None));
}

/// Goal: experts have the defaults of transformers 5, keys change them, and impossible numbers are
/// refused.
#[test]
fn experts_follow_the_configuration() {
    let experts = |name: &str, extra: Value| {
        let config = decoder(with(json!({ "model_type": name, "num_hidden_layers": 6 }), &extra));
        let layers = config.layers.iter().enumerate().filter(|(_, layer)| layer.has_experts());
        (config.experts().copied(), layers.map(|(index, _)| index).collect::<Vec<_>>())
    };
    let all = vec![0, 1, 2, 3, 4, 5];
    let of = |count, per_token, width, normalized, shared_width| {
        let router_bias = false;
        let scores = ExpertScores::Softmax;
        Some(ExpertsConfig {
            count,
            per_token,
            width,
            activation: GateFunction::Silu.into(),
            bias: false,
            scores,
            normalized,
            router_bias,
            groups: None,
            scale: 1.0,
            shared_width,
            shared_gate: shared_width.is_some(),
            scaled_router: false,
            shifted: false,
        })
    };
    assert_eq!(experts("mixtral", json!({})), (of(8, 2, 14_336, true, None), all.clone()));
    let qwen2 = of(60, 4, 1408, false, Some(5632));
    assert_eq!(experts("qwen2_moe", json!({})), (qwen2, all.clone()));
    assert_eq!(experts("qwen3_moe", json!({})), (of(128, 8, 768, false, None), all));
    let changed = json!({
        "num_experts": 16, "num_experts_per_tok": 16, "moe_intermediate_size": 96,
        "norm_topk_prob": true, "decoder_sparse_step": 2, "mlp_only_layers": [3, 77],
    });
    assert_eq!(experts("qwen3_moe", changed), (of(16, 16, 96, true, None), vec![1, 5]));
    assert_eq!(experts("qwen3_moe", json!({ "num_experts": 0 })), (None, Vec::new()));
    assert_eq!(experts("llama", json!({ "num_experts": 8 })), (None, Vec::new()));
    let (glm, layers) = experts("glm4_moe", json!({ "routed_scaling_factor": 2.5 }));
    let scores = ExpertScores::Sigmoid { bias: true };
    let of_glm = of(128, 8, 1408, true, Some(1408)).map(|experts| ExpertsConfig {
        scores,
        scale: 2.5,
        shared_gate: false,
        ..experts
    });
    assert_eq!((glm, layers), (of_glm, vec![1, 2, 3, 4, 5]));
    let keys = json!({ "first_k_dense_replace": 4, "n_shared_experts": 2, "n_routed_experts": 9 });
    let (glm, layers) = experts("glm4_moe", keys);
    let glm = glm.expect("experts");
    assert_eq!((glm.count, glm.shared_width, layers), (9, Some(2816), vec![4, 5]));
    let (glm, _) = experts("glm4_moe", json!({ "n_shared_experts": 0 }));
    assert_eq!(glm.and_then(|experts| experts.shared_width), None);
    let refused = |extra: Value, parts: [&str; 2]| {
        let error = read(with(json!({ "model_type": "qwen3_moe" }), &extra)).unwrap_err();
        for part in parts {
            assert!(error.to_string().contains(part), "`{error}` lacks `{part}`");
        }
    };
    refused(json!({ "num_experts": 1025 }), ["`num_experts`", "1 to 1024"]);
    let layers = json!({ "num_experts": 1024, "num_hidden_layers": 64 });
    refused(layers, ["`num_experts`", "1 to 512"]);
    refused(json!({ "num_experts_per_tok": 129 }), ["`num_experts_per_tok`", "1 to 128"]);
    refused(json!({ "num_experts_per_tok": 0 }), ["`num_experts_per_tok`", "got 0"]);
    refused(json!({ "mlp_only_layers": [-1] }), ["`mlp_only_layers`", "[-1]"]);
    refused(json!({ "n_group": 8 }), ["`n_group`", "8"]);
    let scale = json!({ "model_type": "glm4_moe", "routed_scaling_factor": -1.0 });
    assert!(read(scale).unwrap_err().to_string().contains("`routed_scaling_factor`"));
}

/// Goal: Ministral 3 is recognized in the wrapper that it shares with Mistral Small, and its
/// queries have the factor in the keys or the default.
#[test]
fn ministral_3_follows_the_configuration() {
    let scaling = |extra: Value| {
        attention(&decoder(with(json!({ "model_type": "ministral3" }), &extra))).query_scaling
    };
    assert_eq!(scaling(json!({})), Some(QueryScaling { beta: 0.1, step: 16_384 }));
    let rope = |beta: Value| {
        json!({ "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": beta,
        } })
    };
    let of_file = scaling(rope(json!(0.5))).expect("a factor");
    assert_eq!(of_file, QueryScaling { beta: 0.5, step: 8 });
    assert_eq!([0, 7].map(|position| of_file.factor(position)), [1.0; 2]);
    assert!((of_file.factor(16) - (1.0 + 0.5 * 3_f32.ln())).abs() < 1e-6);
    assert_eq!(scaling(rope(Value::Null)), None);
    for (text, expected) in
        [("ministral3", Architecture::Ministral3), ("mistral", Architecture::Mistral)]
    {
        let text = json!({ "model_type": text, "hidden_size": 64 });
        let wrapper = decoder(json!({ "model_type": "mistral3", "text_config": text }));
        assert_eq!((wrapper.architecture, wrapper.hidden_size), (expected, 64));
    }
    for value in [json!({ "model_type": "llama" }), json!({}), Value::Null] {
        let error = read(json!({ "model_type": "mistral3", "text_config": value })).unwrap_err();
        assert!(error.to_string().contains("`mistral3`"), "{error}");
    }
}

/// Goal: Granite 4 is read with and without experts, and unknown options are refused, with their
/// key.
#[test]
fn granite_4_follows_the_configuration() {
    let base = json!({
        "model_type": "granitemoehybrid", "num_hidden_layers": 2, "num_local_experts": 0,
        "layer_types": ["attention", "full_attention"], "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
    });
    let config = decoder(base.clone());
    assert_eq!((dense(&config).width, config.layers[1].rope()), (96, Some(0)));
    for unrotated in [json!("nope"), Value::Null] {
        let config = decoder(with(base.clone(), &json!({ "position_embedding_type": unrotated })));
        assert!(config.layers.iter().all(|layer| layer.rope().is_none()));
    }
    let with_experts = json!({ "num_local_experts": 8, "intermediate_size": 40 });
    let config = decoder(with(base.clone(), &with_experts));
    let experts = config.experts().copied().expect("experts");
    assert_eq!((experts.count, experts.per_token, experts.width), (8, 2, 40));
    assert_eq!((experts.shared_width, experts.shared_gate), (Some(96), false));
    for (key, value) in [
        ("layer_types", json!(["attention", "conv"])),
        ("layer_types", json!(["attention"])),
        ("layer_types", Value::Null),
        ("position_embedding_type", json!("alibi")),
    ] {
        let error = read(with(base.clone(), &json!({ key: value }))).unwrap_err();
        assert!(error.to_string().contains(&format!("`{key}`")), "{error}");
    }
}

/// Goal: StarCoder 2 and Cohere 2 have layer norms, the keys that only they have, and the defaults
/// of transformers.
#[test]
fn models_with_layer_norms_follow_the_configuration() {
    let starcoder = decoder(json!({ "model_type": "starcoder2" }));
    assert_eq!(
        (starcoder.norms.kind, dense(&starcoder).activation),
        (NormKind::Layer, Activation::Plain(PlainFunction::GeluTanh))
    );
    assert!(
        attention(&starcoder).qkv_bias
            && attention(&starcoder).output_bias
            && dense(&starcoder).bias
    );
    let changed = json!({
        "model_type": "starcoder2", "use_bias": false, "norm_epsilon": 0.5, "sliding_window": 8,
    });
    let changed = decoder(changed);
    assert_eq!((attention(&changed).qkv_bias, changed.norms.eps), (false, 0.5));
    assert_eq!(sliding(&changed).len(), 30);
    let cohere = decoder(json!({ "model_type": "cohere2", "num_hidden_layers": 8 }));
    assert_eq!(
        (cohere.norms.kind, dense(&cohere).activation),
        (NormKind::LayerWithoutBias, GateFunction::Silu.into())
    );
    assert_eq!((cohere.logit_scale, attention(&cohere).kv_heads), (Some(0.0625), 64));
    assert_eq!(sliding(&cohere), [0, 1, 2, 4, 5, 6]);
    let rotated = cohere.layers.iter().map(|layer| layer.rope().is_some()).collect::<Vec<_>>();
    assert_eq!(rotated, [true, true, true, false, true, true, true, false]);
}

/// Goal: in EXAONE 4, only the layers with a window have a rotary embedding, if there are any.
/// Without windows, all layers have one. OLMoE's clipping is refused.
#[test]
fn exaone_4_and_olmoe_follow_the_configuration() {
    let ropes = |extra: Value| {
        let base = json!({ "model_type": "exaone4", "num_hidden_layers": 4 });
        let layers = decoder(with(base, &extra)).layers;
        layers.iter().map(|layer| layer.rope().is_some()).collect::<Vec<_>>()
    };
    assert_eq!(ropes(json!({})), [true, true, true, false]);
    assert_eq!(ropes(json!({ "sliding_window_pattern": 2 })), [true, false, true, false]);
    let full = ["full_attention"; 4];
    assert_eq!(ropes(json!({ "sliding_window": null, "layer_types": full })), [true; 4]);
    let olmoe = decoder(json!({ "model_type": "olmoe" }));
    assert_eq!(attention(&olmoe).qk_norm, Some(QkNorm::Position));
    let experts = olmoe.experts().copied().expect("experts");
    assert_eq!((experts.count, experts.width, experts.normalized), (64, 2048, false));
    let error = read(json!({ "model_type": "olmoe", "clip_qkv": 8.0 })).unwrap_err();
    assert!(error.to_string().contains("`clip_qkv`"), "{error}");
}

/// Goal: the layers with a convolution, the number of taps, the width of the MLP and the other keys
/// that only LFM2 has have the same meaning as in transformers. Options that are not implemented
/// are refused.
#[test]
fn convolutions_follow_the_configuration() {
    let lfm2 = |extra: Value| {
        let config = decoder(with(json!({ "model_type": "lfm2", "num_hidden_layers": 4 }), &extra));
        let layers = config
            .layers
            .iter()
            .enumerate()
            .filter(|(_, layer)| matches!(layer.mixers[..], [MixerConfig::Convolution(_)]));
        let layers: Vec<_> = layers.map(|(index, _)| index).collect();
        (layers, config.convolution().map(|convolution| convolution.taps), dense(&config).width)
    };
    // 12,288 * 2 / 3 is a multiple of 256.
    assert_eq!(lfm2(json!({})), (vec![], None, 8192));
    let of_350m = json!({ "full_attn_idxs": [2], "block_ff_dim": 6656, "conv_L_cache": 4 });
    assert_eq!(lfm2(of_350m), (vec![0, 1, 3], Some(4), 4608));
    let listed = json!({
        "layer_types": ["full_attention", "conv", "conv", "full_attention"],
        "full_attn_idxs": [2], "intermediate_size": 100, "block_ffn_dim_multiplier": 1.5,
        "block_multiple_of": 8,
    });
    assert_eq!(lfm2(listed), (vec![1, 2], Some(3), 104));
    let plain = json!({ "intermediate_size": 100, "block_auto_adjust_ff_dim": false });
    assert_eq!(lfm2(plain).2, 100);
    let unrounded = json!({ "intermediate_size": 100, "block_ffn_dim_multiplier": null });
    assert_eq!(lfm2(unrounded).2, 66);
    let huge = json!({ "block_ffn_dim_multiplier": 1e30, "block_multiple_of": 1 << 30 });
    assert_eq!(lfm2(huge).2, 1 << 30);
    let tied = |key: &str, value: bool| {
        decoder(json!({ "model_type": "lfm2", key: value })).tie_word_embeddings
    };
    assert_eq!(["tie_embedding", "tie_word_embeddings"].map(|key| tied(key, false)), [false; 2]);
    assert!(tied("tie_embedding", true));
    let moe = decoder(json!({ "model_type": "lfm2_moe", "num_dense_layers": 30 }));
    assert_eq!(
        (dense(&moe).width, moe.layers[29].has_experts(), moe.layers[30].has_experts()),
        (7168, false, true)
    );
    let experts = |extra: Value| {
        let config = decoder(with(json!({ "model_type": "lfm2_moe" }), &extra));
        let experts = config.experts().copied().expect("experts");
        (experts.scores, experts.scale)
    };
    assert_eq!(experts(json!({})), (ExpertScores::Sigmoid { bias: true }, 1.0));
    let other = json!({ "use_expert_bias": false, "routed_scaling_factor": 2.5 });
    assert_eq!(experts(other), (ExpertScores::Sigmoid { bias: false }, 2.5));
    for (model_type, key, value) in
        [("lfm2", "conv_bias", json!(true)), ("lfm2", "layer_types", json!(["conv"]))]
    {
        let error = read(json!({ "model_type": model_type, key: value })).unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
    }
    let one_tap = json!({ "model_type": "lfm2", "full_attn_idxs": [], "conv_L_cache": 1 });
    assert!(read(one_tap).unwrap_err().to_string().contains("2 to 64"));
}

/// Goal: `use_sliding_window`, `max_window_layers`, `layer_types` and Gemma's pattern determine
/// which layers have a sliding window.
#[test]
fn sliding_window_layers_follow_the_configuration() {
    let qwen = |extra: Value| {
        let base = json!({ "model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 8 });
        sliding(&decoder(with(base, &extra)))
    };
    let none: [usize; 0] = [];
    assert_eq!(qwen(json!({})), none);
    assert_eq!(qwen(json!({ "use_sliding_window": true })), none);
    assert_eq!(qwen(json!({ "use_sliding_window": true, "max_window_layers": 1 })), [1, 2, 3]);
    assert_eq!(qwen(json!({ "use_sliding_window": true, "max_window_layers": 0 })), [0, 1, 2, 3]);
    let types =
        json!(["sliding_attention", "full_attention", "full_attention", "sliding_attention"]);
    assert_eq!(qwen(json!({ "layer_types": types })), none);
    assert_eq!(qwen(json!({ "layer_types": types, "use_sliding_window": true })), [0, 3]);

    let gemma = |extra: Value| {
        let base = json!({ "model_type": "gemma3_text", "num_hidden_layers": 8 });
        decoder(with(base, &extra))
    };
    let config = gemma(json!({}));
    assert_eq!(sliding(&config), [0, 1, 2, 3, 4, 6, 7]);
    assert_eq!((config.layers[0].rope(), config.layers[5].rope()), (Some(1), Some(0)));
    assert_eq!(sliding(&gemma(json!({ "sliding_window_pattern": 2 }))), [0, 2, 4, 6]);
    assert_eq!(sliding(&gemma(json!({ "sliding_window": null }))), none);
}

/// Goal: with windows in states, 32,768 positions of Gemma 3 4B, a ring and a checkpoint take a
/// quarter of the memory that they take with windows in blocks.
#[test]
fn windows_in_states_save_memory() {
    let config = decoder(json!({
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 1024,
    }));
    let shape = KvShape::of(&config, 16, KvType::Bf16, |_| KvLayout::Rows);
    let windowed = shape.clone().with_windows(&config);
    let blocks = |shape: &KvShape| 2048 * shape.block_bytes();
    // A layer takes 4 kB per position; 29 have windows, of at most 65 blocks in a checkpoint, and
    // 97 in the ring.
    assert_eq!((blocks(&shape), blocks(&windowed)), (32_768 * 34 * 4096, 32_768 * 5 * 4096));
    assert_eq!((shape.window_bytes(), shape.ring_bytes(512)), (0, 0));
    assert_eq!(windowed.window_bytes(), 65 * 16 * 29 * 4096);
    assert_eq!(windowed.ring_bytes(512), 97 * 16 * 29 * 4096);
    let needed = blocks(&windowed) + windowed.window_bytes() + windowed.ring_bytes(512);
    assert!(4 * needed < blocks(&shape));
}

/// Goal: the older and the newer keys of the rotary embedding lead to the same configuration.
#[test]
fn older_and_newer_rope_keys_are_equivalent() {
    let ropes =
        |name: &str, extra: Value| decoder(with(json!({ "model_type": name }), &extra)).ropes;
    assert_eq!(ropes("llama", json!({})), [plain(10_000.0)]);
    assert_eq!(ropes("llama", json!({ "rope_theta": 5e5, "rope_scaling": null })), [plain(5e5)]);
    assert_eq!(ropes("qwen3", json!({ "rope_parameters": { "rope_theta": 5e5 } })), [plain(5e5)]);
    let linear =
        |theta| Rope { theta, scaling: RopeScaling::Linear { factor: 8.0 }, sections: None };
    let scaling = json!({ "type": "linear", "factor": 8.0 });
    assert_eq!(
        ropes("llama", json!({ "rope_theta": 3.0, "rope_scaling": scaling })),
        [linear(3.0)]
    );

    let mut llama3 = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let old = ropes("llama", json!({ "rope_theta": 5e5, "rope_scaling": llama3 }));
    llama3["rope_theta"] = json!(5e5);
    assert_eq!(ropes("llama", json!({ "rope_parameters": llama3 })), old);
    assert!(matches!(old[0].scaling, RopeScaling::Llama3 { factor: 32.0, .. }));

    assert_eq!(ropes("gemma3_text", json!({})), [plain(1e6), plain(1e4)]);
    let old = json!({ "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling });
    assert_eq!(ropes("gemma3_text", old), [linear(5e5), plain(2e4)]);
    let new = json!({ "rope_parameters": {
        "full_attention": { "rope_type": "linear", "factor": 8.0 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 777.0 },
    }});
    assert_eq!(ropes("gemma3_text", new), [linear(1e6), plain(777.0)]);
}

/// Goal: the published configurations of Phi-3 and Phi-4 are read: the window of all layers, the
/// rotated part of each head, and the divisors for the context length. LongRoPE's attention factor
/// is the same as in transformers.
#[test]
fn phi_configurations_are_read() {
    let phi = |extra: Value| {
        let base = json!({
            "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072,
            "num_attention_heads": 32, "num_key_value_heads": 32, "attention_bias": false,
            "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "resid_pdrop": 0.0,
        });
        decoder(with(base, &extra))
    };
    let mini = phi(json!({ "max_position_embeddings": 4096, "sliding_window": 2047 }));
    assert_eq!(mini.ropes, [plain(1e4)]);
    assert!(mini.layers.iter().all(|layer| layer.sliding_window() == Some(2047)));
    assert_eq!((attention(&mini).rotary_dim, attention(&mini).qkv_bias), (96, false));

    let long_rope = |name: &str, context: usize| {
        json!({ "max_position_embeddings": context, "rope_scaling": {
            "type": name, "short_factor": vec![1.5; 48], "long_factor": vec![2.5; 48],
        }})
    };
    let scaling = |value: Value| phi(value).ropes[0].scaling.clone();
    let divisors = |divisor, attention_factor, short: Option<f32>| RopeScaling::Divisors {
        divisors: vec![divisor; 48],
        attention_factor,
        short: short.map(|short| ShortContext { length: 4096, divisors: vec![short; 48] }),
    };
    for name in ["longrope", "su", "yarn"] {
        let long = divisors(2.5, 1.190_238_1, Some(1.5));
        assert_eq!(scaling(long_rope(name, 131_072)), long);
        // A limit of the context selects the other divisors, and changes nothing else.
        for (limit, part) in [(None, "more than 4096"), (Some(4097), "more than 4096")] {
            let mut config = phi(long_rope(name, 131_072));
            let notes = config.limit_context(limit);
            assert!(notes.len() == 1 && notes[0].contains(part), "{notes:?}");
            assert_eq!(config.ropes[0].scaling, long);
        }
        let mut config = phi(long_rope(name, 131_072));
        let notes = config.limit_context(Some(4096));
        assert!(notes.len() == 1 && notes[0].contains("at most 4096"), "{notes:?}");
        assert_eq!(config.ropes[0].scaling, divisors(1.5, 1.190_238_1, None));
    }
    assert_eq!(scaling(long_rope("longrope", 4096)), divisors(1.5, 1.0, None));
    assert!(phi(long_rope("longrope", 4096)).limit_context(Some(100)).is_empty());
    let error = read(with(
        json!({ "model_type": "phi3" }),
        &json!({
            "rope_scaling": { "type": "longrope", "short_factor": [1.0], "long_factor": [] },
        }),
    ));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("48 divisors") && error.contains("got 1"), "{error}");

    let phi4_mini = with(
        long_rope("longrope", 131_072),
        &json!({
            "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
            "sliding_window": 262_144, "tie_word_embeddings": true, "vocab_size": 200_064,
        }),
    );
    let phi4_mini = phi(phi4_mini);
    assert_eq!((attention(&phi4_mini).head_dim, attention(&phi4_mini).rotary_dim), (128, 96));
    assert!(phi4_mini.tie_word_embeddings);
}

/// Goal: Gemma 2's soft caps, scale of scores and alternating windows are read, from the keys and
/// from their defaults, and null switches soft-capping off.
#[test]
fn gemma2_configurations_are_read() {
    let gemma = |extra: Value| decoder(with(json!({ "model_type": "gemma2" }), &extra));
    let small = gemma(json!({ "num_hidden_layers": 4, "hidden_act": "gelu_pytorch_tanh" }));
    assert_eq!((attention(&small).softcap, small.logit_softcap), (Some(50.0), Some(30.0)));
    assert_eq!((attention(&small).scale, attention(&small).qk_norm), (0.0625, None));
    assert_eq!((sliding(&small), small.layers[0].sliding_window()), (vec![0, 2], Some(4096)));
    assert_eq!((&small.ropes[..], small.layers[0].rope()), (&[plain(1e4)][..], Some(0)));
    assert_eq!((small.norms.offset, small.embedding_scale), (1.0, Some(48.0)));
    let large = gemma(json!({
        "hidden_size": 4608, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144, "attn_logit_softcapping": null,
        "final_logit_softcapping": 20.0,
    }));
    assert_eq!(attention(&large).scale, (1.0_f64 / 12.0) as f32);
    assert_eq!((attention(&large).softcap, large.logit_softcap), (None, Some(20.0)));
}

/// Goal: the published configuration of SmolLM3 is read, and layers without a rotary embedding
/// follow the list or the interval.
#[test]
fn smollm3_configurations_are_read() {
    let smol = |extra: Value| {
        let base = json!({
            "model_type": "smollm3", "rope_theta": 5e6, "max_position_embeddings": 65_536,
            "num_hidden_layers": 8, "use_sliding_window": false, "sliding_window": null,
            "rope_scaling": null, "attention_bias": false, "mlp_bias": false,
            "layer_types": vec!["full_attention"; 8],
        });
        with(base, &extra)
    };
    let without = |value: Value| {
        let config = decoder(value);
        assert_eq!(config.ropes, [plain(5e6)]);
        let layers = config.layers.iter().enumerate();
        layers.filter(|(_, layer)| layer.rope().is_none()).map(|(i, _)| i).collect::<Vec<_>>()
    };
    assert_eq!(without(smol(json!({ "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0] }))), [3, 7]);
    assert_eq!(without(smol(json!({ "no_rope_layer_interval": 3 }))), [2, 5]);
    assert_eq!(without(smol(json!({}))), [3, 7]);
    let windows = smol(json!({
        "layer_types": null, "use_sliding_window": true, "sliding_window": 9,
    }));
    assert_eq!(sliding(&decoder(windows)), [3, 7]);
    let error = read(smol(json!({ "no_rope_layers": [1] }))).unwrap_err().to_string();
    assert!(error.contains("`no_rope_layers`") && error.contains("at least 8"), "{error}");
}

/// Goal: the published configuration of Granite 3.3 2B is read, with its four factors; factors of 1
/// are left out, and other architectures refuse them.
#[test]
fn granite_configurations_are_read() {
    let granite = decoder(json!({
        "model_type": "granite", "vocab_size": 49_159, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 1e7,
        "rope_scaling": null, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        "attention_bias": false, "mlp_bias": false, "attention_multiplier": 0.015_625,
        "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
    }));
    assert_eq!((attention(&granite).scale, granite.embedding_scale), (0.015_625, Some(12.0)));
    assert_eq!((granite.residual_scale, granite.logit_scale), (Some(0.22), Some(0.125)));
    assert_eq!((&granite.ropes[..], attention(&granite).kv_heads), (&[plain(1e7)][..], 8));
    let plain = decoder(json!({ "model_type": "granite", "residual_multiplier": 1.0 }));
    assert_eq!((attention(&plain).scale, plain.embedding_scale), (1.0, None));
    assert_eq!((plain.residual_scale, plain.logit_scale), (None, None));
    let error = read(json!({ "model_type": "llama", "logits_scaling": 8.0 })).unwrap_err();
    assert!(error.to_string().contains("`logits_scaling`"), "{error}");
}

/// Goal: the published configuration of OLMo 2 7B is read, with norms of outputs and of all heads.
#[test]
fn olmo2_configurations_are_read() {
    let parsed = read(json!({
        "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "vocab_size": 100_352,
        "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        "rope_theta": 500_000, "rope_scaling": null, "rms_norm_eps": 1e-6,
        "attention_bias": false, "eos_token_id": 100_257, "pad_token_id": 100_277,
    }));
    let parsed = parsed.unwrap();
    let config = parsed.decoder;
    assert_eq!((parsed.bos_token_id, &parsed.eos_token_ids[..]), (None, &[100_257][..]));
    assert_eq!(
        (config.norms.placement, attention(&config).qk_norm),
        (NormPlacement::Output, Some(QkNorm::Position))
    );
    let names: Vec<_> = config.tensors().into_iter().map(|spec| (spec.name, spec.shape)).collect();
    let has = |name: &str, shape: &[usize]| {
        names.iter().any(|(n, s)| n == &format!("model.layers.1.{name}.weight") && s == shape)
    };
    assert!(has("self_attn.q_norm", &[4096]) && has("self_attn.k_norm", &[4096]));
    assert!(has("post_attention_layernorm", &[4096]));
    assert!(has("post_feedforward_layernorm", &[4096]));
    assert!(!names.iter().any(|(name, _)| name.contains("input_layernorm")));
}

/// Goal: in Gemma's multimodal configuration, the decoder is read from the nested object and the
/// token ids from the outer one.
#[test]
fn multimodal_gemma_configurations_are_read() {
    let parsed = read(json!({
        "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": { "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2 },
        "vision_config": { "hidden_size": 1152 },
        "torch_dtype": "bfloat16",
    }));
    let parsed = parsed.unwrap();
    assert_eq!(parsed.decoder.hidden_size, 64);
    assert_eq!(parsed.decoder.dtype, TensorType::Bf16);
    assert_eq!(parsed.eos_token_ids, [1, 106]);
    assert!(parsed.decoder.tie_word_embeddings);
}

/// Goal: unsupported options and invalid values are refused with the key, the accepted values and
/// the actual value.
#[test]
fn errors_name_the_key() {
    let llama = |extra: Value| with(json!({ "model_type": "llama" }), &extra);
    let gemma = |extra: Value| with(json!({ "model_type": "gemma3_text" }), &extra);
    let cases: &[(Value, &[&str])] = &[
        (json!([]), &["config.json", "JSON object", "[]"]),
        (json!({}), &["unknown architecture", "nothing", "qwen3"]),
        (json!({ "model_type": "mamba" }), &["unknown architecture", "`mamba`", "llama"]),
        (json!({ "architectures": ["GPT2LMHeadModel"] }), &["`GPT2LMHeadModel`"]),
        (json!({ "model_type": "gemma4-assistant" }), &["`model_type`", "assistants of Gemma 4"]),
        (
            json!({ "model_type": "qwen3", "architectures": ["DFlashDraftModel"] }),
            &["`architectures`", "DFlash", "not supported"],
        ),
        (llama(json!({ "architectures": ["EagleLlamaForCausalLM"] })), &["EAGLE-1"]),
        (json!({ "model_type": "gemma3" }), &["`text_config`", "nothing"]),
        (llama(json!({ "hidden_size": 0 })), &["`hidden_size`", "from 1", "got 0"]),
        (llama(json!({ "hidden_size": -4 })), &["`hidden_size`", "got -4"]),
        (llama(json!({ "hidden_size": 1.5 })), &["`hidden_size`", "got 1.5"]),
        (llama(json!({ "vocab_size": "many" })), &["`vocab_size`", "\"many\""]),
        (llama(json!({ "vocab_size": 1u64 << 40 })), &["`vocab_size`", "1099511627776"]),
        (llama(json!({ "num_hidden_layers": 1_000_000 })), &["`num_hidden_layers`", "4096"]),
        (llama(json!({ "num_key_value_heads": 5 })), &["`num_key_value_heads`", "divisor", "5"]),
        (llama(json!({ "head_dim": 7 })), &["`head_dim`", "even", "7"]),
        (llama(json!({ "num_attention_heads": 8192 })), &["`head_dim`", "got 0"]),
        (llama(json!({ "rms_norm_eps": -1.0 })), &["`rms_norm_eps`", "above 0"]),
        (llama(json!({ "rms_norm_eps": "1e-5" })), &["`rms_norm_eps`", "finite number"]),
        (llama(json!({ "hidden_act": "relu" })), &["`hidden_act`", "relu", "silu"]),
        (llama(json!({ "dtype": "float8_e4m3fn" })), &["`dtype`", "float8", "bfloat16"]),
        (llama(json!({ "rope_theta": 0 })), &["`rope_theta`", "above 0"]),
        (
            llama(json!({ "rope_scaling": { "rope_type": "mrope", "factor": 4.0 } })),
            &["`rope_scaling.rope_type`", "mrope", "yarn or longrope"],
        ),
        (
            llama(json!({ "rope_scaling": { "type": "yarn", "factor": 4.0, "beta_fast": -1 } })),
            &["`rope_scaling.beta_fast`", "above 0", "-1"],
        ),
        (
            llama(json!({ "rope_scaling": { "type": "dynamic", "factor": 1.0, "alpha": 1000.0 } })),
            &["`rope_scaling.type`", "dynamic"],
        ),
        (
            llama(json!({ "rope_scaling": { "type": "linear" } })),
            &["`rope_scaling.factor`", "nothing"],
        ),
        (
            llama(json!({ "rope_scaling": { "type": "linear", "factor": -0.5 } })),
            &["`rope_scaling.factor`", "above 0", "-0.5"],
        ),
        (
            llama(json!({ "rope_scaling": { "rope_type": null, "factor": 2.0 } })),
            &["`rope_scaling.rope_type`", "null"],
        ),
        (
            llama(json!({ "rope_parameters": { "rope_type": "llama3", "factor": 4.0,
                "low_freq_factor": 4.0, "high_freq_factor": 4.0 } })),
            &["`rope_parameters.high_freq_factor`", "above low_freq_factor"],
        ),
        (llama(json!({ "partial_rotary_factor": 0.5 })), &["`partial_rotary_factor`", "0.5"]),
        (
            llama(json!({ "quantization_config": { "quant_method": "gptq" } })),
            &["`quantization_config.bits`", "4 or 8", "nothing"],
        ),
        (llama(json!({ "attn_logit_softcapping": 50.0 })), &["`attn_logit_softcapping`", "50"]),
        (gemma(json!({ "final_logit_softcapping": -30.0 })), &["`final_logit_softcapping`", "-30"]),
        (gemma(json!({ "use_bidirectional_attention": true })), &["bidirectional"]),
        (gemma(json!({ "is_causal": false })), &["is_causal", "true"]),
        (gemma(json!({ "layer_types": ["full_attention"] })), &["`layer_types`", "26 entries"]),
        (
            gemma(json!({ "num_hidden_layers": 1, "layer_types": ["chunked_attention"] })),
            &["`layer_types`", "chunked_attention", "sliding_attention"],
        ),
        (
            gemma(json!({ "rope_parameters": { "rope_theta": 5.0 } })),
            &["`rope_parameters.rope_theta`", "full_attention"],
        ),
    ];
    for (value, parts) in cases {
        let error = read(value.clone()).expect_err(&value.to_string()).to_string();
        for part in *parts {
            assert!(error.contains(part), "{value}: `{error}` lacks `{part}`");
        }
    }
}

/// Goal: the frequencies are the same as in transformers' `LlamaRotaryEmbedding`.
#[test]
fn frequencies_match_transformers() {
    let check = |value: Value, expected: &[f32]| {
        let config = decoder(value);
        let got = config.ropes[0].inverse_frequencies(attention(&config).head_dim);
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got / expected - 1.0).abs() < 1e-6, "{got} {expected}");
        }
    };
    check(
        json!({ "model_type": "llama", "head_dim": 16, "rope_theta": 5e5, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        }}),
        &[
            1.0,
            0.193_922_76,
            0.037_606_03,
            0.007_292_665,
            0.000_524_846,
            3.428_102_4e-5,
            6.647_869_7e-6,
            1.289_173_2e-6,
        ],
    );
    check(
        json!({ "model_type": "llama", "head_dim": 6,
                "rope_scaling": { "type": "linear", "factor": 3.0 } }),
        &[0.333_333_34, 0.015_471_961, 0.000_718_144_76],
    );
}

/// Goal: YaRN's frequencies and attention factors are the same as in transformers, and the context
/// length is the one for which the scaling is designed.
#[test]
fn yarn_matches_transformers() {
    let check = |value: Value, frequencies: &[f32], factor: f32, context: usize| {
        let config = decoder(value);
        let rope = &config.ropes[0];
        assert!((rope.attention_factor() / factor - 1.0).abs() < 1e-6, "{rope:?}");
        assert_eq!(config.max_positions, context);
        let got = rope.inverse_frequencies(attention(&config).head_dim);
        assert_eq!(got.len(), frequencies.len());
        for (got, expected) in got.iter().zip(frequencies) {
            assert!((got / expected - 1.0).abs() < 2e-6, "{got} {expected}");
        }
    };
    // The model cards of Qwen2.5 and Qwen3 advise this. The context length does not change.
    check(
        json!({ "model_type": "qwen2", "head_dim": 16, "rope_theta": 1e6,
            "max_position_embeddings": 32_768, "rope_scaling": {
                "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768,
            },
        }),
        &[
            1.0,
            0.177_827_94,
            0.031_622_78,
            0.004_217_56,
            0.000_5,
            4.445_698_5e-5,
            7.905_694e-6,
            1.405_853_4e-6,
        ],
        1.138_629_4,
        131_072,
    );
    check(
        json!({ "model_type": "llama", "head_dim": 16, "max_position_embeddings": 131_072,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096,
            },
        }),
        &[
            1.0,
            0.225_418,
            0.050_813_273,
            0.006_794_959_3,
            0.000_456_483_92,
            1.818_833_7e-5,
            4.099_978_5e-6,
            9.242_09e-7,
        ],
        1.346_573_6,
        131_072,
    );
    check(
        json!({ "model_type": "llama", "head_dim": 12, "max_position_embeddings": 163_840,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                "mscale_all_dim": 0.8, "original_max_position_embeddings": 4096,
            },
        }),
        &[1.0, 0.215_443_45, 0.035_102_013, 0.005_125, 0.000_579_004_23, 1.160_397_4e-5],
        1.056_966_3,
        163_840,
    );
    let dynamic = json!({ "type": "dynamic", "factor": 4.0 });
    let dynamic = decoder(json!({ "model_type": "llama", "rope_scaling": dynamic }));
    assert_eq!((&dynamic.ropes[..], dynamic.max_positions), (&[plain(1e4)][..], 2048));
}

/// An arbitrary value, valid or not.
fn any_value() -> impl proptest::strategy::Strategy<Value = Value> {
    use proptest::prelude::*;
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0_u64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_0-9]{0,12}".prop_map(Value::from),
        Just(json!([])),
        Just(json!(["full_attention", 3])),
        Just(json!({ "rope_type": "llama3", "factor": 1e300 })),
        Just(json!({ "rope_type": "yarn", "factor": 1e300, "mscale": -1, "mscale_all_dim": 1 })),
        Just(json!({ "rope_type": "longrope", "short_factor": [1, 2], "long_factor": [-1] })),
        Just(json!({ "full_attention": { "type": "linear" }, "sliding_attention": null })),
    ]
}

proptest::proptest! {
    /// Goal: with arbitrary values, parsing never panics and returns either an error or a
    /// consistent configuration with a bounded number of layers.
    #[test]
    fn arbitrary_values_never_panic(
        architecture in proptest::sample::select(vec!["llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "smollm3", "phi3", "gemma2", "gemma3_text", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe", "qwen3_next", "gpt_oss"]),
        changes in proptest::collection::vec((proptest::sample::select(KEYS.to_vec()), any_value()), 1..4),
    ) {
        let mut value = json!({ "model_type": architecture });
        for (key, entry) in changes {
            value[key] = entry;
        }
        if let Ok(parsed) = read(value) {
            parsed.decoder.check("again").unwrap();
            assert!(parsed.decoder.layers.len() <= crate::config::LAYERS_MAX);
        }
    }
}

const KEYS: [&str; 57] = [
    "attn_output_gate",
    "full_attention_interval",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "output_gate_type",
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "no_rope_layer_interval",
    "no_rope_layers",
    "original_max_position_embeddings",
    "residual_multiplier",
    "architectures",
    "attention_bias",
    "attn_logit_softcapping",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "final_logit_softcapping",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "sliding_window_pattern",
    "text_config",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
];
