//! The `config.json` of Moondream.

use serde_json::json;

use super::*;
use crate::config::LayerConfig;

/// Goal: empty configurations are the same as the published models, and keys change them.
#[test]
fn published_models_have_the_defaults() {
    let of = |name: &str, text: Value| {
        decoder(json!({ "model_type": name, "config": { "text": text } }))
    };
    let first_with_experts =
        |config: &DecoderConfig| config.layers.iter().position(LayerConfig::has_experts);
    let two = of("moondream1", json!({}));
    assert_eq!(
        (attention(&two).selective, two.experts().copied(), two.max_positions),
        (false, None, 2048)
    );
    assert_eq!(two.ropes, [plain(1e4)]);
    let three = of("moondream3", json!({}));
    assert!(attention(&three).selective);
    assert_eq!((three.layers.len(), three.max_positions), (24, 32_768));
    assert_eq!((three.ropes.clone(), first_with_experts(&three)), (vec![plain(1.5e6)], Some(4)));
    let experts = three.experts().copied().expect("experts");
    assert_eq!((experts.count, experts.per_token, experts.width), (64, 8, 1024));
    assert!(experts.shifted && experts.router_bias && experts.normalized);
    let none = of("moondream3", json!({ "moe": null, "tau_attn": false }));
    assert_eq!((none.experts().copied(), attention(&none).selective), (None, false));
    let late = of("moondream3", json!({ "moe": { "start_layer": 24 } }));
    assert_eq!((late.experts().copied(), first_with_experts(&late)), (None, None));
    let fewer_keys =
        json!({ "model_type": "moondream3", "config": { "text": { "n_kv_heads": 8 } } });
    let error = read(fewer_keys).unwrap_err().to_string();
    assert!(error.contains("tau_attn") && error.contains("as many key heads"), "{error}");
}
