use serde_json::{Value, json};

use super::{AssistantConfig, ClusterConfig, fit, is_assistant, parse};
use crate::config::{DecoderConfig, KeysAndValues};

/// The layers of a model with as many as there are, or of an assistant.
fn layers(count: usize, shared: usize) -> Value {
    let kind = |index| if index % 5 == 4 { "full_attention" } else { "sliding_attention" };
    let mut kinds: Vec<&str> = (0..count).map(kind).collect();
    *kinds.last_mut().expect("a layer") = "full_attention";
    json!({
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144,
        "num_hidden_layers": count, "num_kv_shared_layers": shared, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
        "vocab_size": 262_144, "layer_types": kinds, "max_position_embeddings": 131_072,
    })
}

/// The assistant of a small model, as it is published.
fn assistant() -> Value {
    let mut text = layers(4, 4);
    text["hidden_size"] = 256.into();
    text["hidden_size_per_layer_input"] = 0.into();
    text["vocab_size_per_layer_input"] = 0.into();
    json!({
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
        "backbone_hidden_size": 1536, "use_ordered_embeddings": true, "num_centroids": 2048,
        "centroid_intermediate_top_k": 32, "text_config": text,
    })
}

/// Goal: an assistant reads the keys and values of the last layers of its model that have some, of
/// those with and of those without a window, and has the embedding's factor of the model.
#[test]
fn assistants_fit_their_models() {
    assert!(is_assistant(&assistant()));
    let (decoder, config) = parse("config.json", &assistant()).expect("an assistant");
    let clusters = Some(ClusterConfig { count: 2048, chosen: 32 });
    assert_eq!(config, AssistantConfig { model_width: 1536, clusters });
    let model = DecoderConfig::from_json("config.json", &layers(35, 20)).expect("a model");
    let head = fit("config.json", decoder, &config, &model).expect("its assistant");
    let source = |index: usize| head.layers[index].attention().map(|own| own.keys_and_values);
    // Of the first 15 layers, the last one has no window.
    assert_eq!(source(0), Some(KeysAndValues::OfModel(13)));
    assert_eq!(source(3), Some(KeysAndValues::OfModel(14)));
    assert_eq!((head.max_positions, head.hidden_size), (131_072, 256));
    assert_eq!(head.embedding_scale, model.embedding_scale);
    let weights = config.own_weights(&head);
    assert_eq!(weights.input.weight.shape, [256, 3072]);
    assert_eq!(weights.output.weight.shape, [1536, 256]);
    assert_eq!(weights.clusters.map(|scores| scores.weight.shape), Some(vec![2048, 256]));
}

/// Goal: what an assistant does not have, and sizes that are impossible, are refused by their key.
#[test]
fn other_assistants_are_refused() {
    for (key, value) in [
        ("text_config", Value::Null),
        ("num_centroids", 1000.into()),
        ("num_centroids", (1u64 << 40).into()),
        ("centroid_intermediate_top_k", 2049.into()),
        ("centroid_intermediate_top_k", 0.into()),
        ("backbone_hidden_size", Value::Null),
        ("backbone_hidden_size", (1u64 << 32).into()),
        ("text_config.enable_moe_block", true.into()),
        ("text_config.use_double_wide_mlp", true.into()),
        ("text_config.attention_k_eq_v", true.into()),
        ("text_config.num_kv_shared_layers", 2.into()),
        ("text_config.model_type", "gemma3_text".into()),
    ] {
        let mut head = assistant();
        match key.split_once('.') {
            Some((outer, inner)) => head[outer][inner] = value.clone(),
            None => head[key] = value.clone(),
        }
        let error = parse("config.json", &head).expect_err("another head").to_string();
        let name = key.rsplit('.').next().expect("a name");
        assert!(error.contains(name), "{key} {value}: {error}");
    }
}
