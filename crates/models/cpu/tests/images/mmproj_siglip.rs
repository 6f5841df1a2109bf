//! Gemma 3 and SmolVLM from GGUF files: the models and their encoders (`mmproj`), with the names and
//! keys of llama.cpp's converter.

use std::path::PathBuf;

use safetensors::SafeTensors;
use stolon_checkpoint::{LoadOptions, LoadedModel, ModelSource, ProjectorConfig, TensorType, load};
use stolon_vision::Tiling;

use super::fixture;
use super::mmproj::{describe, open_both, renamed};
use crate::gguf_model::gguf_of;
use crate::gguf_writer::{GgufWriter, Meta};

/// The parts of names in transformers, and in GGUF files.
const ENCODER: [(&str, &str); 15] = [
    ("vision_tower.", ""),
    ("vision_model.", ""),
    ("model.", ""),
    ("embeddings.patch_embedding", "v.patch_embd"),
    ("embeddings.position_embedding", "v.position_embd"),
    ("encoder.layers", "v.blk"),
    ("post_layernorm", "v.post_ln"),
    ("layer_norm", "ln"),
    ("self_attn.", "attn_"),
    ("_proj.", "."),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
    ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
    ("connector.modality_projection.proj", "mm.model.fc"),
];

/// The model and the encoder of the fixture `name` as GGUF files.
fn converted(name: &str) -> [GgufWriter; 2] {
    let model = fixture::model(name);
    let images = fixture::images(&model);
    let mut text = gguf_of(&model.config, &model.weights, TensorType::F32);
    let tokens = (0..64).map(|id| match id {
        60 => images.processor.image_token.clone(),
        id => format!("token {id}"),
    });
    text.set("tokenizer.ggml.model", Meta::Text("gpt2".to_owned()));
    text.set("tokenizer.ggml.tokens", Meta::Texts(tokens.collect()));

    let mut encoder = GgufWriter::default();
    let bytes = std::fs::read(fixture::directory(name).join("model.safetensors")).expect("a model");
    for (name, tensor) in SafeTensors::deserialize(&bytes).expect("a safetensors file").iter() {
        let is_of_encoder =
            ["vision_", "multi_modal", "connector"].iter().any(|p| name.contains(p));
        if !is_of_encoder {
            continue;
        }
        let own = renamed(name, &ENCODER);
        let mut data = tensor.data().to_vec();
        if own == "mm.soft_emb_norm.weight" {
            let more = fixture::floats(&data).into_iter().map(|value| value + 1.0);
            data = more.flat_map(f32::to_le_bytes).collect();
        }
        encoder.tensors.push((own, tensor.shape().to_vec(), 0, data));
    }
    describe(&mut encoder, &images.encoder, "projector.scale_factor");
    let kind = match &images.processor.tiling {
        Tiling::Idefics3(tiles) => {
            let edge = tiles.longest_edge.expect("pictures are resized");
            encoder.set("clip.vision.preproc_image_size", Meta::U32(edge as u32));
            "idefics3"
        }
        _ => name,
    };
    encoder.set("clip.projector_type", Meta::Text(kind.to_owned()));
    [text, encoder]
}

/// Gives the two matrices of the MLPs each other's names, as early converters did.
fn swap(encoder: &mut GgufWriter) {
    for (name, ..) in &mut encoder.tensors {
        *name = match name.contains("ffn_up") {
            true => name.replace("ffn_up", "ffn_down"),
            false => name.replace("ffn_down", "ffn_up"),
        };
    }
}

/// The largest difference of the embeddings of `model`, which is the fixture `name`, from those of
/// transformers, in standard deviations.
fn difference(name: &str, model: LoadedModel) -> f32 {
    let inputs = fixture::inputs(name, &model);
    let mut backend = fixture::backend(model, None, 1);
    let got: Vec<f32> =
        inputs.iter().flat_map(|image| fixture::encode(&mut backend, image)).collect();
    fixture::difference(&got, &fixture::expected(name).embeddings)
}

/// Goal: a model and an encoder from GGUF files prepare pictures as those from safetensors, and make
/// the embeddings of transformers of them.
#[test]
fn embeddings_match_transformers() {
    for name in ["gemma3", "smolvlm"] {
        let dir = tempfile::tempdir().expect("a directory");
        let [text, mut encoder] = converted(name);
        let expected = fixture::model(name);
        for is_swapped in [false, true] {
            if is_swapped {
                swap(&mut encoder);
            }
            let model = open_both(dir.path(), &text.bytes(), &encoder.bytes()).expect("valid");
            let mut own = fixture::images(&model).clone();
            if let ProjectorConfig::AveragePooling { norm_offset, .. } = &mut own.encoder.projector
            {
                assert_eq!(std::mem::replace(norm_offset, 1.0), 0.0);
            }
            assert_eq!(&own, fixture::images(&expected), "{name}");
            let largest = difference(name, model);
            assert!(largest < 1e-4, "{name}: {largest} standard deviations");
        }
    }
}

/// Goal: a wrong file of an encoder is an error with what was expected and what is there.
#[test]
fn wrong_encoders_are_refused() {
    for (name, key, value, expected) in [
        ("gemma3", "clip.projector_type", Meta::Text("idefics3".into()), "expected gemma3"),
        ("smolvlm", "clip.projector_type", Meta::Text("ldp".into()), "expected idefics3"),
        ("gemma3", "clip.vision.projector.scale_factor", Meta::U32(4), "a divisor of 6 patches"),
        ("smolvlm", "clip.vision.projector.scale_factor", Meta::U32(1), "modality_projection"),
        ("smolvlm", "clip.vision.preproc_image_size", Meta::U32(0), "preproc_image_size"),
        ("smolvlm", "clip.vision.projection_dim", Meta::U32(16), "expected 32 (embedding_length"),
        ("gemma3", "clip.vision.image_size", Meta::U32(35), "a divisor of 5 patches"),
    ] {
        let dir = tempfile::tempdir().expect("a directory");
        let [text, mut encoder] = converted(name);
        encoder.set(key, value);
        let error = open_both(dir.path(), &text.bytes(), &encoder.bytes()).expect_err(expected);
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let [mut text, encoder] = converted("smolvlm");
    text.set("tokenizer.ggml.tokens", Meta::Texts(vec!["a".into(); 64]));
    let error = open_both(dir.path(), &text.bytes(), &encoder.bytes()).expect_err("no token");
    assert!(error.to_string().contains("a tokenizer with the token <image>"), "{error}");
}

/// Goal: models and encoders that llama.cpp's own converter has written prepare pictures as the
/// fixtures do, and make the embeddings of transformers of them.
#[test]
#[ignore = "needs the folder STOLON_CONVERTED, which convert_fixtures.py fills"]
fn converted_encoders_match_transformers() {
    let folder = std::env::var_os("STOLON_CONVERTED").expect("STOLON_CONVERTED");
    let folder = PathBuf::from(folder).join("images");
    for name in ["gemma3", "qwen3_5", "qwen3_vl", "smolvlm"] {
        let mmproj = Some(folder.join(format!("{name}-mmproj.gguf")));
        let options = LoadOptions { mmproj, ..LoadOptions::default() };
        let source = ModelSource::Gguf(folder.join(format!("{name}.gguf")));
        let model = load(&source, &options).expect("a valid model");
        let expected = fixture::model(name);
        let (own, expected) = (fixture::images(&model), fixture::images(&expected));
        match name {
            // Its bounds for the number of pixels are not in the file.
            "qwen3_5" | "qwen3_vl" => {
                assert_eq!(own.processor.image_token_id, expected.processor.image_token_id)
            }
            _ => assert_eq!(own.processor, expected.processor),
        }
        let largest = difference(name, model);
        // The projection of Gemma 3 is f16.
        assert!(largest < 1e-3, "{name}: {largest} standard deviations");
    }
}
