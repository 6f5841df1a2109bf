//! Qwen3-VL and Qwen3.5 from GGUF files: the models and their encoder (`mmproj`), with the names
//! and keys of llama.cpp's converter.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use stolon_checkpoint::inspect::{InspectOptions, Inspection, inspect};
use stolon_checkpoint::{
    LoadOptions, LoadedModel, ModelError, ModelSource, ProjectorConfig, TensorType, VisionConfig,
    load,
};

use super::fixture;
use super::qwen3_vl::{Prompt, TWO};
use crate::gguf_model::gguf_of;
use crate::gguf_writer::{GgufWriter, Meta};

const NAME: &str = "qwen3_vl";

/// The parts of names in transformers, and in GGUF files.
const ENCODER: [(&str, &str); 15] = [
    ("deepstack_merger_list.0", "v.deepstack.0"),
    ("deepstack_merger_list.1", "v.deepstack.2"),
    ("deepstack_merger_list.2", "v.deepstack.3"),
    ("merger.norm", "v.post_ln"),
    ("merger.linear_fc1", "mm.0"),
    ("merger.linear_fc2", "mm.2"),
    ("mlp.linear_fc1", "ffn_up"),
    ("mlp.linear_fc2", "ffn_down"),
    ("linear_fc", "fc"),
    ("patch_embed.proj", "v.patch_embd"),
    ("pos_embed", "v.position_embd"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("norm1", "ln1"),
    ("norm2", "ln2"),
];

pub(super) fn renamed(name: &str, parts: &[(&str, &str)]) -> String {
    parts.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// The model and the encoder of the fixture `name` as GGUF files.
fn converted(name: &str) -> [GgufWriter; 2] {
    let model = fixture::model(name);
    let images = fixture::images(&model);
    let mut text = gguf_of(&model.config, &model.weights, TensorType::F32);
    let interval = "full_attention_interval";
    if text.metadata.iter().any(|(key, _)| key.ends_with(interval)) {
        let prefix = if model.config.experts().is_some() { "qwen35moe" } else { "qwen35" };
        text.set(&format!("{prefix}.{interval}"), Meta::U32(3));
    }
    let token = |id| if id == 60 { "<|image_pad|>".to_owned() } else { format!("token {id}") };
    text.set("tokenizer.ggml.model", Meta::Text("gpt2".to_owned()));
    text.set("tokenizer.ggml.tokens", Meta::Texts((0..64).map(token).collect()));

    let mut encoder = GgufWriter::default();
    let bytes = std::fs::read(fixture::directory(name).join("model.safetensors")).expect("a model");
    for (name, tensor) in SafeTensors::deserialize(&bytes).expect("a safetensors file").iter() {
        let (shape, data) = (tensor.shape().to_vec(), tensor.data().to_vec());
        let Some(own) = name.strip_prefix("model.visual.") else { continue };
        let own = renamed(own, &ENCODER).replace("blocks.", "v.blk.");
        if let [rows, 3, 2, edge, _] = shape[..] {
            for frame in 0..2 {
                let kernels = data.chunks_exact(4 * edge * edge).skip(frame).step_by(2);
                let name = if frame == 0 { own.clone() } else { format!("{own}.1") };
                let data = kernels.flatten().copied().collect();
                encoder.tensors.push((name, vec![rows, 3, edge, edge], 0, data));
            }
        } else {
            encoder.tensors.push((own, shape, 0, data));
        }
    }
    describe(&mut encoder, &images.encoder, "spatial_merge_size");
    encoder.set("general.architecture", Meta::Text("clip".to_owned()));
    encoder.set("clip.projector_type", Meta::Text("qwen3vl_merger".to_owned()));
    let ProjectorConfig::Merger { deepstack, .. } = &images.encoder.projector else {
        panic!("Qwen3-VL has a merger")
    };
    let layers = images.encoder.tower.layers;
    let deepstack = (0..layers).map(|layer| deepstack.contains(&layer)).collect();
    encoder.set("clip.vision.is_deepstack_layers", Meta::Bools(deepstack));
    [text, encoder]
}

/// Writes the keys that the files of all encoders have. `factor` is the name of the projector's.
pub(super) fn describe(to: &mut GgufWriter, encoder: &VisionConfig, factor: &str) {
    let tower = &encoder.tower;
    for (key, number) in [
        ("projection_dim", encoder.output_size),
        ("embedding_length", tower.hidden_size),
        ("feed_forward_length", tower.intermediate_size),
        ("block_count", tower.layers),
        ("attention.head_count", tower.heads),
        ("patch_size", tower.patch_size),
        ("image_size", tower.image_size),
        (factor, encoder.projector.factor()),
    ] {
        to.set(&format!("clip.vision.{key}"), Meta::U32(number as u32));
    }
    to.set("clip.vision.attention.layer_norm_epsilon", Meta::F32(tower.norm_eps));
    to.set("clip.vision.image_mean", Meta::Floats(encoder.mean.to_vec()));
    to.set("clip.vision.image_std", Meta::Floats(encoder.deviation.to_vec()));
}

/// Loads a model with an encoder, and checks that its inspection finds an error exactly if loading
/// does.
fn open(source: ModelSource, mmproj: PathBuf) -> Result<LoadedModel, ModelError> {
    let options = LoadOptions { mmproj: Some(mmproj), ..LoadOptions::default() };
    let loaded = load(&source, &options);
    let whole = inspected(&source, options);
    assert_eq!(whole.refusals.is_empty(), loaded.is_ok(), "{:?}", whole.refusals);
    if let Err(error) = &loaded {
        assert!(whole.refusals.iter().any(|refusal| *refusal == error.to_string()), "{error}");
    }
    loaded
}

fn inspected(source: &ModelSource, load: LoadOptions) -> Inspection {
    let options = InspectOptions { load, ..InspectOptions::default() };
    inspect(source, &options).expect("files that can be read")
}

/// Writes both files to `directory` and loads them.
pub(super) fn open_both(
    directory: &Path,
    text: &[u8],
    encoder: &[u8],
) -> Result<LoadedModel, ModelError> {
    let [model, mmproj] = ["model.gguf", "mmproj.gguf"].map(|name| directory.join(name));
    std::fs::write(&model, text).expect("room");
    std::fs::write(&mmproj, encoder).expect("room");
    open(ModelSource::Gguf(model), mmproj)
}

/// Goal: a model and an encoder from GGUF files have the configuration of the ones in safetensors,
/// apart from the kernels of the frames, and the logits of transformers.
#[test]
fn logits_match_transformers() {
    for name in [NAME, "qwen3_5", "qwen3_5_moe"] {
        let dir = tempfile::tempdir().expect("a directory");
        let [text, encoder] = converted(name);
        let model = open_both(dir.path(), &text.bytes(), &encoder.bytes()).expect("both are valid");
        let expected = fixture::model(name);
        // The converter has changed what some tensors of recurrent layers contain.
        match model.config.delta_net() {
            None => assert_eq!(model.config, expected.config),
            Some(_) => assert_eq!(model.config.ropes, expected.config.ropes),
        }
        let source = ModelSource::Gguf(dir.path().join("model.gguf"));
        let mmproj = Some(dir.path().join("mmproj.gguf"));
        let needed = |mmproj| {
            let load = LoadOptions { mmproj, ..LoadOptions::default() };
            inspected(&source, load).memory.expect("a supported model").weights
        };
        assert!(needed(mmproj) > needed(None), "the encoder takes memory");
        let (mut own, images) = (fixture::images(&model).clone(), fixture::images(&expected));
        assert_eq!(own.encoder.tower.frames, 1);
        own.encoder.tower.frames = 2;
        assert_eq!(own.encoder, images.encoder);
        assert_eq!(own.processor.image_token_id, images.processor.image_token_id);
        let mut two = Prompt::of(fixture::backend(model, None, 1), images, TWO);
        let (shape, expected) = fixture::tensor(name, "two.logits");
        let got = two.step(0..two.tokens.len());
        for (row, expected) in fixture::floats(&expected).chunks(shape[1]).enumerate() {
            let difference = fixture::difference(&got[row * shape[1]..][..shape[1]], expected);
            assert!(difference < 1e-3, "{name}, row {row}: {difference}");
        }
    }
}

/// Goal: what Qwen3.5's decoder cannot read is refused: an encoder with DeepStack, and images for a
/// model whose sections are unknown, which is a model for text otherwise.
#[test]
fn encoders_that_do_not_fit_to_qwen3_5_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let [mut text, mut encoder] = converted("qwen3_5");
    let deepstack = "clip.vision.is_deepstack_layers";
    encoder.set(deepstack, Meta::Bools(vec![true, false, false, false, false]));
    let error = open_both(dir.path(), &text.bytes(), &encoder.bytes()).expect_err("DeepStack");
    assert!(error.to_string().contains("expected no layers for qwen3_5_text, got 1"), "{error}");
    encoder.set(deepstack, Meta::Bools(vec![false; 5]));
    text.metadata.retain(|(key, _)| key != "qwen35.rope.dimension_sections");
    let error = open_both(dir.path(), &text.bytes(), &encoder.bytes()).expect_err("no sections");
    assert!(error.to_string().contains("mrope_section"), "{error}");
    assert!(error.to_string().contains("whose sum is 8, got nothing"), "{error}");
    let source = ModelSource::Gguf(dir.path().join("model.gguf"));
    let model = load(&source, &LoadOptions::default()).expect("a model for text");
    assert_eq!(model.config.ropes[0].sections, None);
}

/// Goal: a wrong file of an encoder is an error with what was expected and what is there.
#[test]
fn wrong_encoders_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let [text, encoder] = converted(NAME);
    let with = |key: &str, value: Meta| {
        let mut changed = encoder.clone();
        changed.set(key, value);
        changed
    };
    let without = |name: &str| {
        let mut changed = encoder.clone();
        changed.tensors.retain(|(own, ..)| own != name);
        changed
    };
    let mut reshaped = encoder.clone();
    let up = reshaped.tensors.iter_mut().find(|(name, ..)| name == "v.blk.0.ffn_up.weight");
    up.expect("a tensor").1.reverse();
    for (encoder, expected) in [
        (with("clip.projector_type", Meta::Text("gemma3".into())), "expected qwen3vl_merger"),
        (with("clip.vision.projection_dim", Meta::U32(16)), "expected 32 (embedding_length"),
        (with("clip.vision.block_count", Meta::U32(0)), "clip.vision.block_count"),
        (with("clip.vision.attention.head_count", Meta::U32(5)), "a divisor of hidden_size, 24"),
        (with("clip.vision.image_mean", Meta::Floats(vec![0.5])), "3 numbers"),
        (with("clip.vision.is_deepstack_layers", Meta::Bools(vec![true])), "5 booleans"),
        (with("clip.vision.spatial_merge_size", Meta::U32(99)), "expected 1 to 16"),
        (with("clip.vision.image_size", Meta::U32(48)), "position_embedding.weight"),
        (without("v.blk.0.ln1.weight"), "encoder.layers.0.layer_norm1.weight"),
        (without("v.patch_embd.weight.1"), "patch_embedding.weight.1"),
        (without("v.deepstack.2.fc1.bias"), "deepstack_merger_list.1.linear_fc1.bias"),
        (reshaped, "encoder.layers.0.mlp.fc1.weight"),
    ] {
        let error = open_both(dir.path(), &text.bytes(), &encoder.bytes()).expect_err(expected);
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
    let mut nameless = text.clone();
    nameless.set("tokenizer.ggml.tokens", Meta::Texts(vec!["a".into(); 64]));
    let error = open_both(dir.path(), &nameless.bytes(), &encoder.bytes()).expect_err("no token");
    assert!(error.to_string().contains("a tokenizer with the token <|image_pad|>"), "{error}");
    let cut = &encoder.bytes()[..1000];
    assert!(open_both(dir.path(), &text.bytes(), cut).is_err());
    let mut sections = text.clone();
    sections.set("qwen3vl.rope.dimension_sections", Meta::I32s(vec![4, 2, 2, 1]));
    let error = open_both(dir.path(), &sections.bytes(), &encoder.bytes()).expect_err("four");
    assert!(error.to_string().contains("3 numbers of pairs, and 0"), "{error}");
    let mmproj = dir.path().join("mmproj.gguf");
    std::fs::write(&mmproj, encoder.bytes()).expect("room");
    for (name, expected) in [
        (NAME, "expected a GGUF model"),
        ("smolvlm", "expected a GGUF model"),
        ("moondream2", "architecture gemma3, llama, qwen3_vl"),
    ] {
        let source = ModelSource::Directory(fixture::directory(name));
        let error = open(source, mmproj.clone()).expect_err("no place for an encoder");
        assert!(error.to_string().contains(expected), "{error}");
    }
}
