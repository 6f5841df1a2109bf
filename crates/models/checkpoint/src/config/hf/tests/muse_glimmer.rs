//! Configurations of Muse Glimmer.

use super::*;
use crate::config::TensorRole;

/// A configuration in the form of the published one, of 7 layers, with the keys of `extra` added.
fn small(extra: &Value) -> Value {
    let text = json!({
        "model_type": "muse_glimmer_text", "num_hidden_layers": 7,
        "rope_parameters": { "rope_theta": 500_000.0, "rope_type": "default" },
    });
    json!({
        "architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer",
        "eos_token_id": [200_001, 200_008], "vision_config": { "model_type": "muse_glimmer_vision" },
        "text_config": with(text, extra),
    })
}

/// Goal: missing keys have the defaults of transformers. Without a list, every fourth layer before
/// the last one has neither a window nor a rotary embedding.
#[test]
fn defaults_are_read() {
    let parsed = read(small(&json!({}))).unwrap();
    assert_eq!(parsed.eos_token_ids, [200_001, 200_008]);
    let config = parsed.decoder;
    assert_eq!(sliding(&config), [0, 1, 3, 4, 5]);
    let rotated = |layer: &LayerConfig| layer.rope().is_some();
    assert_eq!(config.layers.iter().map(rotated).collect::<Vec<_>>(), {
        [true, true, false, true, true, true, false]
    });
    assert_eq!(config.ropes, [plain(5e5)]);
    let AttentionConfig { scale, qk_norm, output_gate, sliding_window, .. } = attention(&config);
    assert_eq!(scale, (3.87 / 128_f64.sqrt()) as f32);
    assert_eq!(qk_norm, Some(QkNorm::HeadWithoutWeights));
    assert_eq!((output_gate, sliding_window), (true, Some(2048)));
    assert_eq!((config.logit_scale, config.logit_softcap), (Some(0.196_116_14), Some(20.0)));
    assert_eq!(dense(&config).activation, GateFunction::Silu.into());
}

/// Goal: norms of outputs have the epsilon of their own, and the last norm has no offset. Norms of
/// queries, keys and embeddings have no tensors.
#[test]
fn norms_differ() {
    let keys = json!({ "rms_norm_eps": 0.5, "post_norm_eps": 0.25 });
    let config = decoder(small(&keys));
    assert!(config.norms.embedding);
    let weights = config.weights();
    let layer = &weights.layers[0];
    let input = layer.mlp_input_norm.as_ref().unwrap();
    let output = layer.mlp_output_norm.as_ref().unwrap();
    assert_eq!((input.eps, input.offset, input.weight.role), (0.5, 1.0, TensorRole::Norm));
    assert_eq!((output.eps, output.offset, output.weight.role), (0.25, 1.0, TensorRole::Norm));
    let last = &weights.final_norm;
    assert_eq!((last.eps, last.offset, last.weight.role), (0.5, 0.0, TensorRole::PlainNorm));
    let names: Vec<_> = config.tensors().into_iter().map(|spec| spec.name).collect();
    assert!(names.iter().any(|name| name == "model.layers.0.self_attn.gate_proj.weight"));
    assert!(!names.iter().any(|name| name.contains("q_norm") || name.contains("embed_norm")));
}

/// Goal: the list of thetas may repeat what other keys say, and is refused otherwise. So are biases,
/// which the projection to gates does not have.
#[test]
fn other_layers_are_refused() {
    let thetas = |list: Value| json!({ "layer_rope_theta": list });
    decoder(small(&thetas(json!([5e5, 5e5, 0, 5e5, 5e5, 5e5, 0]))));
    for (extra, key) in [
        (thetas(json!([5e5, 5e5, 5e5, 5e5, 5e5, 5e5, 0])), "layer_rope_theta"),
        (thetas(json!([5e5, 5e5, 0, 1e4, 5e5, 5e5, 0])), "layer_rope_theta"),
        (thetas(json!([5e5, 5e5, 0])), "layer_rope_theta"),
        (json!({ "attention_bias": true }), "attention_bias"),
        (json!({ "post_norm_eps": 0 }), "post_norm_eps"),
        (json!({ "qk_scale_factor": -1 }), "qk_scale_factor"),
        (json!({ "hidden_activation": "gelu" }), "hidden_activation"),
    ] {
        let error = read(small(&extra)).unwrap_err().to_string();
        assert!(error.contains(&format!("`text_config.{key}`")), "{error}");
    }
}
