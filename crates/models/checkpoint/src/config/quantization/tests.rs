use serde_json::json;

use super::*;

fn read(quantization: Value) -> Result<Option<Quantization>, ModelError> {
    let config = json!({ "quantization_config": quantization });
    parse(&Keys::root("config.json", &config)?)
}

/// A configuration of compressed-tensors with some keys of `weights` replaced.
fn compressed_with(format: &str, weights: Value) -> Value {
    let mut all = json!({ "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true });
    for (key, value) in weights.as_object().unwrap() {
        all[key] = value.clone();
    }
    json!({
        "quant_method": "compressed-tensors", "format": format,
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": all,
            "input_activations": { "num_bits": 8, "dynamic": true } } },
        "kv_cache_scheme": { "num_bits": 8 },
    })
}

/// Goal: the configurations of popular models on the hub are parsed.
#[test]
fn usual_configurations_are_read() {
    let qwen_fp8 = json!({ "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"] });
    assert_eq!(read(qwen_fp8).unwrap(), Some(Quantization::Fp8 { block: Some([128, 128]) }));
    let qwen_awq = json!({ "backend": "autoawq", "bits": 4, "do_fuse": false, "group_size": 128,
        "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm",
        "zero_point": true });
    assert_eq!(read(qwen_awq).unwrap(), Some(Quantization::Awq { group: Some(128) }));
    let qwen_gptq = json!({ "bits": 4, "damp_percent": 0.01, "desc_act": false, "group_size": 128,
        "quant_method": "gptq", "static_groups": false, "sym": true, "true_sequential": true });
    let gptq = |bits, group, act_order, zero_offset| Quantization::Gptq {
        bits,
        group,
        act_order,
        zero_offset,
        modules: Vec::new(),
    };
    let expected = gptq(4, Some(128), false, 1);
    assert_eq!(read(qwen_gptq).unwrap(), Some(expected));
    let v2 = json!({ "bits": 8, "desc_act": true, "group_size": -1, "quant_method": "gptq",
        "checkpoint_format": "gptq_v2", "dynamic": null, "pack_dtype": "int32" });
    let expected = gptq(8, None, true, 0);
    assert_eq!(read(v2).unwrap(), Some(expected));
    let integers = |bits, packed, symmetric, group, act_order| {
        Some(Quantization::Integers { bits, packed, symmetric, group, act_order })
    };
    let w8a8 = compressed_with("int-quantized", json!({}));
    assert_eq!(read(w8a8).unwrap(), integers(8, false, true, None, false));
    let w4a16 =
        json!({ "num_bits": 4, "strategy": "group", "group_size": 128, "actorder": "weight" });
    let w4a16 = compressed_with("pack-quantized", w4a16);
    assert_eq!(read(w4a16).unwrap(), integers(4, true, true, Some(128), false));
    let asymmetric = json!({ "num_bits": 4, "strategy": "group", "group_size": 64,
        "actorder": "group", "symmetric": false });
    let asymmetric = compressed_with("pack-quantized", asymmetric);
    assert_eq!(read(asymmetric).unwrap(), integers(4, true, false, Some(64), true));
    let fp8 = compressed_with("float-quantized", json!({ "type": "float" }));
    assert_eq!(read(fp8).unwrap(), Some(Quantization::Fp8 { block: None }));
    let older = json!({ "compression_config": compressed_with("int-quantized", json!({})) });
    let parsed = parse(&Keys::root("config.json", &older).unwrap()).unwrap();
    assert_eq!(parsed, integers(8, false, true, None, false));
    assert_eq!(read(json!(null)).unwrap(), None);
}

/// Goal: formats that are not supported are refused, with their name.
#[test]
fn other_formats_are_refused_by_name() {
    let gptq = |key: &str, value: Value| {
        let mut gptq = json!({ "quant_method": "gptq", "bits": 4, "group_size": 128 });
        gptq[key] = value;
        gptq
    };
    let awq = |key: &str, value: Value| {
        let mut awq = json!({ "quant_method": "awq", "bits": 4, "group_size": 128 });
        awq[key] = value;
        awq
    };
    let mut two = compressed_with("int-quantized", json!({}));
    two["config_groups"]["group_1"] =
        json!({ "weights": { "num_bits": 8, "type": "int", "symmetric": false } });
    let mut activations = compressed_with("int-quantized", json!({}));
    activations["config_groups"]["group_0"]["weights"] = Value::Null;
    let mut sparse = compressed_with("int-quantized", json!({}));
    sparse["sparsity_config"] = json!({ "format": "sparse-24-bitmask" });
    for (value, parts) in [
        (json!({ "quant_method": "bitsandbytes", "load_in_4bit": true }), ["bitsandbytes", "GGUF"]),
        (json!({ "quant_method": "hqq" }), ["hqq", "fp8, awq, gptq"]),
        (json!({ "bits": 4 }), ["`quantization_config.quant_method`", "nothing"]),
        (json!([1]), ["`quantization_config`", "an object"]),
        (json!({ "quant_method": "fp8", "fmt": "e5m2" }), ["e5m2", "e4m3"]),
        (
            json!({ "quant_method": "fp8", "weight_block_size": [0, 128] }),
            ["[0,128]", "two numbers"],
        ),
        (json!({ "quant_method": "fp8", "weight_block_size": 128 }), ["128", "two numbers"]),
        (awq("bits", json!(3)), ["`quantization_config.bits`: 3", "expected 4"]),
        (awq("version", json!("gemv")), ["gemv", "gemm"]),
        (awq("zero_point", json!(false)), ["`quantization_config.zero_point`", "true"]),
        (awq("group_size", json!(0)), ["`quantization_config.group_size`", "got 0"]),
        (gptq("bits", json!(2)), ["`quantization_config.bits`: 2", "4 or 8"]),
        (gptq("checkpoint_format", json!("marlin")), ["marlin", "gptq_v2"]),
        (gptq("dynamic", json!({ "a(?=b)": {} })), ["dynamic.a(?=b)`", "regular expression"]),
        (gptq("dynamic", json!({ "a": { "bits": 3 } })), ["dynamic.a.bits`: 3", "4 or 8"]),
        (gptq("dynamic", json!({ "a": 1 })), ["dynamic.a`", "an object"]),
        (gptq("dynamic", json!(vec![1])), ["`quantization_config.dynamic`", "an object"]),
        (gptq("group_size", json!(-2)), ["`quantization_config.group_size`", "got -2"]),
        (
            compressed_with("nvfp4-pack-quantized", json!({})),
            ["nvfp4-pack-quantized", "int-quantized"],
        ),
        (compressed_with("marlin-24", json!({})), ["marlin-24", "int-quantized"]),
        (
            compressed_with("float-quantized", json!({ "num_bits": 4, "type": "float" })),
            ["num_bits`: 4", "8"],
        ),
        (compressed_with("int-quantized", json!({ "strategy": "token" })), ["token", "channel"]),
        (two, ["config_groups", "the same format for all layers"]),
        (activations, ["weights", "quantized weights"]),
        (sparse, ["sparse-24-bitmask", "dense"]),
        (json!({ "quant_method": "compressed-tensors" }), ["config_groups", "an object"]),
    ] {
        let error = read(value.clone()).expect_err(&value.to_string()).to_string();
        for part in parts {
            assert!(error.contains(part), "{value}: `{error}` lacks `{part}`");
        }
    }
}

/// Goal: as in GPTQModel, the first pattern of `dynamic` that matches the beginning of a module's
/// name determines the differences of this module.
#[test]
fn modules_may_be_quantized_in_another_way() {
    let value = json!({ "quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {
        r"-:.*\.k_proj": {}, r"+:.*layers\.[01]\..*": { "bits": 8, "desc_act": true },
        ".*down_proj": { "group_size": -1 }, "layers": { "bits": 8 },
    } });
    let quantization = read(value).unwrap().unwrap();
    for (module, expected) in [
        ("model.layers.0.self_attn.k_proj", (4, Some(128), false)),
        ("model.layers.1.mlp.down_proj", (8, Some(128), true)),
        ("model.layers.2.mlp.down_proj", (4, None, false)),
        ("model.layers.2.mlp.up_proj", (4, Some(128), false)),
    ] {
        let (bits, group, act_order) = expected;
        let zero_offset = 1;
        let modules = Vec::new();
        let expected = Quantization::Gptq { bits, group, act_order, zero_offset, modules };
        assert_eq!(quantization.of_module(module), expected, "{module}");
    }
}
