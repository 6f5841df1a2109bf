use serde_json::{Value, json};

use super::{FeatureNorm, fit, is_eagle3, parse};
use crate::config::{DecoderConfig, RopeScaling};

/// The head of the authors for Llama 3.1 8B.
fn of_authors() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "vocab_size": 128_256, "draft_vocab_size": 32_000,
        "torch_dtype": "float16", "tie_word_embeddings": false,
    })
}

/// A head as SpecForge writes it.
fn of_spec_forge() -> Value {
    let mut head = of_authors();
    head["architectures"] = json!(["LlamaForCausalLMEagle3"]);
    head["eagle_config"] = json!({
        "eagle_aux_hidden_state_layer_ids": [1, 14, 27], "use_aux_hidden_state": true,
    });
    head
}

/// A head as speculators writes it.
fn of_speculators() -> Value {
    let mut layer = of_authors();
    let object = layer.as_object_mut().expect("an object");
    ["architectures", "draft_vocab_size"].iter().for_each(|key| _ = object.remove(*key));
    json!({
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "draft_vocab_size": 32_000, "eagle_aux_hidden_state_layer_ids": [2, 16, 32],
        "norm_before_residual": true, "norm_before_fc": true, "norm_output": true,
        "torch_dtype": "bfloat16", "transformer_layer_config": layer,
    })
}

fn model(layers: usize) -> DecoderConfig {
    let mut json = of_authors();
    json["num_hidden_layers"] = layers.into();
    json["max_position_embeddings"] = 131_072.into();
    DecoderConfig::from_json("config.json", &json).expect("a model")
}

/// Goal: heads of all publishers are recognized and parsed, with the layers whose states vLLM and
/// SGLang read, and fit their models.
#[test]
fn published_heads_are_parsed() {
    for (head, layers, norm, is_new) in [
        (of_authors(), [2, 16, 29], FeatureNorm::None, false),
        // SGLang reads the outputs of these layers.
        (of_spec_forge(), [2, 15, 28], FeatureNorm::None, false),
        (of_speculators(), [2, 16, 32], FeatureNorm::Joined, true),
    ] {
        assert!(is_eagle3(&head));
        let (decoder, config) = parse("config.json", &head, 32).expect("a head");
        assert_eq!((&config.layers[..], config.feature_norm), (&layers[..], norm));
        assert_eq!([config.norm_before_residual, config.norm_output], [is_new; 2]);
        assert_eq!((config.vocab_size, decoder.layers.len()), (32_000, 1));
        let decoder = fit("config.json", decoder, &config, &model(32)).expect("its model");
        assert_eq!((decoder.max_positions, decoder.vocab_size), (131_072, 128_256));
        let weights = config.decoder_weights(&decoder);
        assert_eq!(weights.head.map(|head| head.shape), Some(vec![32_000, 4096]));
        let shape = |name: &str| {
            let specs = config.decoder_weights(&decoder).tensors().into_iter();
            let specs = specs.chain(config.input_weights(&decoder).tensors());
            let spec = specs.into_iter().find(|spec| spec.name == name);
            spec.unwrap_or_else(|| panic!("a tensor {name}")).shape
        };
        assert_eq!(shape("model.layers.0.self_attn.k_proj.weight"), [1024, 8192]);
        assert_eq!(shape("model.layers.0.self_attn.o_proj.weight"), [4096, 4096]);
        assert_eq!(shape("model.layers.0.hidden_norm.weight"), [4096]);
        assert_eq!(shape("fc.weight"), [4096, 3 * 4096]);
    }
    assert!(!is_eagle3(&json!({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1})));
    assert!([json!(null), json!([1]), json!("x")].iter().all(|value| !is_eagle3(value)));
}

/// Goal: a list with the number of layers can only mean the state after all layers, so all its numbers
/// count layers before a state.
#[test]
fn lists_of_states_are_recognized() {
    let mut head = of_spec_forge();
    for (ids, expected) in [([24, 30, 36], [24, 30, 36]), ([1, 17, 35], [2, 18, 36])] {
        head["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!(ids);
        let (_, config) = parse("config.json", &head, 36).expect("a head");
        assert_eq!(config.layers, expected);
    }
}

/// Goal: the rotary embedding of a head is its own.
#[test]
fn the_rotary_embedding_is_that_of_the_head() {
    let mut head = of_spec_forge();
    head["rope_theta"] = json!(5e5);
    head["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let (decoder, _) = parse("config.json", &head, 32).expect("a head");
    assert_eq!(decoder.ropes[0].theta, 5e5);
    assert!(matches!(decoder.ropes[0].scaling, RopeScaling::Llama3 { .. }));
}

/// Goal: what would be computed otherwise, or was made for another model, is refused with what was
/// expected and what came.
#[test]
fn other_heads_are_refused() {
    let changed = |key: &str, value: Value| {
        let mut head = of_spec_forge();
        *key.split('.').fold(&mut head, |object, key| &mut object[key]) = value;
        head
    };
    let inner = "eagle_config.eagle_aux_hidden_state_layer_ids";
    let divisors = vec![1.0; 64];
    let longrope = json!({
        "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors,
        "original_max_position_embeddings": 1024,
    });
    for (key, value, part) in [
        ("architectures", json!(["Eagle3DeepseekV2ForCausalLM"]), "LlamaForCausalLMEagle3"),
        ("num_hidden_layers", json!(2), "expected 1"),
        ("model_type", json!("llama4_text"), "expected llama"),
        ("layer_types", json!(["sliding_attention"]), "full_attention"),
        ("quantization_config", json!({"quant_method": "fp8"}), "not quantized"),
        ("draft_vocab_size", json!(200_000), "at most vocab_size, 128256"),
        ("target_hidden_size", json!(5120), "hidden_size, 4096"),
        ("eagle_config.use_aux_hidden_state", json!(false), "expected true"),
        ("eagle_config.use_mtp_layernorm", json!(true), "expected false"),
        ("rope_scaling", longrope, "default, linear, llama3 or yarn"),
        (inner, json!([-1, 1]), "a list of integers"),
        (inner, json!(vec![1; 17]), "at most 16"),
        (inner, json!([1, 2, 33]), "which has 32"),
        (inner, json!([1_u64 << 30]), "which has 32"),
        ("hidden_size", json!(2048), "4096, as the model has"),
        ("vocab_size", json!(128_000), "128256, as the model has"),
    ] {
        let head = changed(key, value);
        assert!(is_eagle3(&head));
        let fitted = parse("config.json", &head, 32)
            .and_then(|(decoder, config)| fit("config.json", decoder, &config, &model(32)));
        let error = fitted.expect_err(part).to_string();
        let last = key.rsplit('.').next().expect("a key");
        assert!(error.contains(part) && error.contains(last), "{key}: {error}");
    }
    let mut both = of_speculators();
    both["fc_norm"] = true.into();
    assert!(parse("config.json", &both, 32).expect_err("both").to_string().contains("fc_norm"));
    let mut qwen = of_speculators();
    qwen["transformer_layer_config"]["model_type"] = "qwen3".into();
    let error = parse("config.json", &qwen, 32).expect_err("another layer").to_string();
    assert!(error.contains("transformer_layer_config.model_type"), "{error}");
    // Without a list, the layers would not be different ones.
    let error = parse("config.json", &of_authors(), 6).expect_err("few layers").to_string();
    assert!(error.contains("has only 6"), "{error}");
    // Embeddings of Gemma have a factor.
    let scaled = DecoderConfig { embedding_scale: Some(64.0), ..model(32) };
    let (decoder, config) = parse("config.json", &of_authors(), 32).expect("a head");
    let error = fit("config.json", decoder, &config, &scaled).expect_err("a factor").to_string();
    assert!(error.contains("without factors"), "{error}");
}
