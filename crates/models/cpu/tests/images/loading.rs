//! The configurations of encoders and processors.

use std::path::Path;

use serde_json::Value;
use stolon_checkpoint::{LoadOptions, LoadedModel, ModelError, ModelSource, load};
use stolon_vision::Tiling;

use super::fixture;

/// A copy of the fixture `name` in `to`, without the files `omitted`.
fn copy(name: &str, to: &Path, omitted: &[&str]) {
    for entry in std::fs::read_dir(fixture::directory(name)).expect("the fixture") {
        let path = entry.expect("an entry").path();
        let file = path.file_name().expect("a name");
        if !omitted.iter().any(|omitted| file == *omitted) {
            std::fs::copy(&path, to.join(file)).expect("a copy");
        }
    }
}

fn open(directory: &Path) -> Result<LoadedModel, ModelError> {
    load(&ModelSource::Directory(directory.to_owned()), &LoadOptions::default())
}

fn change(directory: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = directory.join(file);
    let mut value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    change(&mut value);
    std::fs::write(&path, value.to_string()).expect("a file");
}

const PREPROCESSOR: &str = "preprocessor_config.json";

/// Goal: a model without the files of a processor, or with an encoder that is not supported, is used
/// for text only.
#[test]
fn unsupported_encoders_leave_text() {
    let dir = tempfile::tempdir().unwrap();
    copy("gemma3", dir.path(), &[PREPROCESSOR]);
    assert_eq!(open(dir.path()).unwrap().images, None);
    for (file, object, key, value) in [
        ("config.json", "vision_config", "hidden_act", Value::from("relu")),
        (PREPROCESSOR, "", "do_normalize", Value::from(false)),
        (PREPROCESSOR, "", "resample", Value::from(0)),
    ] {
        copy("gemma3", dir.path(), &[]);
        change(dir.path(), file, |json| match object {
            "" => json[key] = value,
            object => json[object][key] = value,
        });
        assert_eq!(open(dir.path()).unwrap().images, None, "{key}");
    }
}

/// Goal: a wrong value is an error with the file, the key, what was expected and what is there.
#[test]
fn wrong_values_are_refused() {
    for (name, file, object, key, value, expected) in [
        ("smolvlm", "config.json", "vision_config", "num_attention_heads", 5, "a divisor of"),
        ("smolvlm", "config.json", "", "scale_factor", 3, "a divisor of 4 patches"),
        ("smolvlm", "config.json", "", "image_token_id", 64, "an id below vocab_size, 64"),
        ("smolvlm", PREPROCESSOR, "max_image_size", "longest_edge", 48, "up to 32"),
        ("gemma3", "config.json", "", "mm_tokens_per_image", 8, "the square of a divisor of 6"),
        ("gemma3", "config.json", "vision_config", "patch_size", 0, "an integer from 1"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        copy(name, dir.path(), &[]);
        change(dir.path(), file, |json| match object {
            "" => json[key] = value.into(),
            object => json[object][key] = value.into(),
        });
        let error = open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{key}: {error}");
    }
}

/// Goal: a wrong value of Moondream's own keys is an error with the key and what was expected.
#[test]
fn wrong_values_of_moondream_are_refused() {
    for (object, key, value, expected) in [
        ("text", "dim", Value::from(50), "config.text.dim`: expected a multiple of 12"),
        ("text", "n_layers", 5000.into(), "config.text.n_layers`: expected at most 4096"),
        ("text", "moe", 5.into(), "config.text.moe`: expected an object"),
        ("text", "moe", serde_json::json!({"start_layer": 1, "num_experts": 2000}), "1 to 1024"),
        ("text", "tau_attn", 5.into(), "config.text.tau_attn"),
        ("text", "tau_attn", true.into(), "model.layers.0.self_attn.tau.wq"),
        ("text", "group_size", 128.into(), "config.text.group_size"),
        ("text", "prefix_attn", 25.into(), "config.text.prefix_attn"),
        ("vision", "overlap_margin", 3.into(), "vision.overlap_margin`: expected less than half"),
        ("vision", "max_crops", 65.into(), "vision.max_crops`: expected 1 to 64"),
        ("vision", "crop_size", 36.into(), "config.vision.crop_size"),
        ("vision", "enc_n_heads", 5.into(), "a divisor of"),
        ("vision", "in_channels", 4.into(), "config.vision.in_channels"),
        ("vision", "proj_out_dim", 47.into(), "expected 48 (text.dim)"),
        ("tokenizer", "bos_id", 96.into(), "96"),
        ("region", "dim", 47.into(), "expected 48 (text.dim)"),
        ("region", "decoder_arch", "linear".into(), "model.region.ln.weight"),
        ("region", "decoder_arch", "conv".into(), "config.region.decoder_arch"),
        ("region", "use_ln", true.into(), "config.region.use_ln"),
        ("region", "coord_feat_dim", 11.into(), "even numbers of features"),
        ("region", "size_out_dim", 40_000.into(), "region.size_out_dim`: expected 2 to 16384"),
        ("region", "inner_dim", 41.into(), "model.region.coord_decoder.fc1.weight"),
        ("", "text", 5.into(), "config.text`: expected an object"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        copy("moondream2", dir.path(), &[]);
        change(dir.path(), "config.json", |json| match object {
            "" => json["config"][key] = value,
            object => json["config"][object][key] = value,
        });
        let error = open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{key}: {error}");
    }
}

/// Goal: a wrong value of Qwen3-VL's own keys is an error with the key and what was expected.
#[test]
fn wrong_values_of_qwen3_vl_are_refused() {
    use serde_json::json;
    for (object, key, value, expected) in [
        ("vision_config", "out_hidden_size", json!(31), "expected 32 (text_config.hidden_size)"),
        ("vision_config", "num_position_embeddings", json!(26), "the square of an integer"),
        ("vision_config", "num_heads", json!(5), "a divisor of hidden_size, 24"),
        ("vision_config", "num_heads", json!(4), "heads of a multiple of 4"),
        ("vision_config", "depth", json!(0), "an integer from 1"),
        ("vision_config", "spatial_merge_size", json!(1 << 20), "expected 1 to 16"),
        ("vision_config", "temporal_patch_size", json!(9), "expected 1 to 8"),
        ("vision_config", "deepstack_visual_indexes", json!([2, 1]), "in ascending order"),
        ("vision_config", "deepstack_visual_indexes", json!([0, 5]), "layers below 5"),
        ("vision_config", "deepstack_visual_indexes", json!([0, 1, 2, 3]), "fewer than the 4"),
        ("text_config", "rope_parameters", json!({"mrope_section": [4, 2, 1]}), "whose sum is 8"),
        ("text_config", "rope_parameters", json!({"mrope_section": [4, 4]}), "3 numbers of pairs"),
        ("text_config", "rope_parameters", json!({"mrope_interleaved": false}), "expected true"),
        ("", "image_token_id", json!(64), "an id below vocab_size, 64"),
        (PREPROCESSOR, "image_mean", json!(null), "3 numbers"),
        (PREPROCESSOR, "size", json!({"shortest_edge": 9, "longest_edge": 255}), "at least 256"),
        (PREPROCESSOR, "size", json!({"shortest_edge": 4096, "longest_edge": 1024}), "4096"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        copy("qwen3_vl", dir.path(), &[]);
        let file = if object == PREPROCESSOR { object } else { "config.json" };
        change(dir.path(), file, |json| match object {
            "" | PREPROCESSOR => json[key] = value,
            object => json[object][key] = value,
        });
        let error = open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{key}: {error}");
    }
    for (file, object, key, value) in [
        ("config.json", "vision_config", "in_channels", json!(4)),
        (PREPROCESSOR, "", "patch_size", json!(16)),
        (PREPROCESSOR, "", "do_resize", json!(false)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        copy("qwen3_vl", dir.path(), &[]);
        change(dir.path(), file, |json| match object {
            "" => json[key] = value,
            object => json[object][key] = value,
        });
        assert_eq!(open(dir.path()).unwrap().images, None, "{key}");
    }
}

/// Goal: so is a wrong value of what Qwen3.5 does not share with Qwen3-VL, whose text model is read
/// without sections, too.
#[test]
fn wrong_values_of_qwen3_5_are_refused() {
    use serde_json::json;
    let rope = |key: &str, value: Value| {
        let mut rope = json!({ "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2] });
        rope[key] = value;
        rope
    };
    for (object, key, value, expected) in [
        ("vision_config", "deepstack_visual_indexes", json!([0]), "expected no layers for qwen3_5"),
        ("vision_config", "out_hidden_size", json!(31), "expected 32 (text_config.hidden_size)"),
        ("vision_config", "num_heads", json!(5), "a divisor of hidden_size, 24"),
        ("text_config", "rope_parameters", rope("mrope_section", json!([4, 4, 8])), "sum is 8"),
        ("text_config", "rope_parameters", rope("mrope_section", json!([8])), "3 numbers of pairs"),
        (
            "text_config",
            "rope_parameters",
            rope("mrope_interleaved", json!(false)),
            "expected true",
        ),
        ("text_config", "rope_parameters", rope("partial_rotary_factor", json!(0.25)), "sum is 4"),
        ("text_config", "rope_parameters", rope("mrope_section", json!(null)), "got nothing"),
        ("", "image_token_id", json!(64), "an id below vocab_size, 64"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        copy("qwen3_5", dir.path(), &[]);
        change(dir.path(), "config.json", |json| match object {
            "" => json[key] = value,
            object => json[object][key] = value,
        });
        let error = open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{key}: {error}");
    }
    for (indexes, omitted) in [(json!([]), ""), (json!(null), PREPROCESSOR)] {
        let dir = tempfile::tempdir().unwrap();
        copy("qwen3_5", dir.path(), &[omitted]);
        change(dir.path(), "config.json", |json| {
            json["vision_config"]["deepstack_visual_indexes"] = indexes;
            if !omitted.is_empty() {
                json["text_config"]["rope_parameters"] = rope("mrope_section", json!(null));
            }
        });
        assert_eq!(open(dir.path()).unwrap().images.is_some(), omitted.is_empty());
    }
}

/// Goal: the numbers of pixels are read from all keys that files have, and bounded.
#[test]
fn pictures_of_qwen3_vl_are_bounded() {
    use serde_json::json;
    for (size, older, expected) in [
        (json!({"shortest_edge": 1024, "longest_edge": 4096}), None, [1024, 4096]),
        (json!({"min_pixels": 512, "max_pixels": 2048}), None, [512, 2048]),
        (json!({"shortest_edge": 1024, "longest_edge": 4096}), Some([512, 2048]), [512, 2048]),
        (json!(null), None, [3136, 1_003_520]),
        (json!({"shortest_edge": 65_536, "longest_edge": 1 << 24}), None, [65_536, 4096 * 256]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        copy("qwen3_vl", dir.path(), &[]);
        change(dir.path(), PREPROCESSOR, |json| {
            json["size"] = size;
            if let Some([min, max]) = older {
                (json["min_pixels"], json["max_pixels"]) = (min.into(), max.into());
            }
        });
        let model = open(dir.path()).unwrap();
        let Tiling::Qwen3Vl(tiles) = fixture::images(&model).processor.tiling else {
            panic!("Qwen3-VL has its own tiles")
        };
        assert_eq!([tiles.pixels_min, tiles.pixels_max], expected);
    }
}

/// Goal: the configuration of a processor is also found where newer versions of transformers write
/// it.
#[test]
fn processors_may_share_a_file() {
    let dir = tempfile::tempdir().unwrap();
    copy("smolvlm", dir.path(), &[PREPROCESSOR]);
    let file = std::fs::read(fixture::directory("smolvlm").join(PREPROCESSOR)).unwrap();
    let processor: Value = serde_json::from_slice(&file).unwrap();
    let shared = serde_json::json!({ "image_processor": processor, "image_seq_len": 4 });
    std::fs::write(dir.path().join("processor_config.json"), shared.to_string()).unwrap();
    let model = open(dir.path()).unwrap();
    assert_eq!(model.images, fixture::model("smolvlm").images);
    let Tiling::Idefics3(tiles) = fixture::images(&model).processor.tiling else {
        panic!("SmolVLM has the tiles of Idefics 3")
    };
    assert_eq!((tiles.longest_edge, tiles.tile_edge, tiles.tile_rows), (Some(64), 32, 4));
}
