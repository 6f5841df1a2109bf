//! Qwen3-VL from GGUF files: the model and its encoder (`mmproj`), with the names and keys of
//! llama.cpp's converter.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use stolon_model::inspect::{InspectOptions, Inspection, inspect};
use stolon_model::{LoadOptions, LoadedModel, ModelError, ModelSource, load};

use super::fixture;
use super::qwen3_vl::Two;
use crate::gguf_writer::{GgufWriter, Meta};

const NAME: &str = "qwen3_vl";

/// The parts of names in transformers, and in GGUF files.
const TEXT: [(&str, &str); 15] = [
    ("model.language_model.embed_tokens", "token_embd"),
    ("model.language_model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.language_model.layers", "blk"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];
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

/// The model and the encoder of the fixture as GGUF files.
fn converted() -> [GgufWriter; 2] {
    let bytes = std::fs::read(fixture::directory(NAME).join("model.safetensors")).expect("a model");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let [mut text, mut encoder] = [GgufWriter::default(), GgufWriter::default()];
    for (name, tensor) in file.iter() {
        let (shape, data) = (tensor.shape().to_vec(), tensor.data().to_vec());
        let Some(own) = name.strip_prefix("model.visual.") else {
            text.tensors.push((renamed(name, &TEXT), shape, 0, data));
            continue;
        };
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
    for (key, number) in [
        ("context_length", 256),
        ("embedding_length", 32),
        ("block_count", 4),
        ("feed_forward_length", 48),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("rope.dimension_count", 16),
        ("n_deepstack_layers", 3),
    ] {
        text.set(&format!("qwen3vl.{key}"), Meta::U32(number));
    }
    text.set("general.architecture", Meta::Text("qwen3vl".to_owned()));
    text.set("qwen3vl.attention.layer_norm_rms_epsilon", Meta::F32(1e-6));
    text.set("qwen3vl.rope.freq_base", Meta::F32(10_000.0));
    text.set("qwen3vl.rope.dimension_sections", Meta::I32s(vec![4, 2, 2, 0]));
    let token = |id| if id == 60 { "<|image_pad|>".to_owned() } else { format!("token {id}") };
    text.set("tokenizer.ggml.model", Meta::Text("gpt2".to_owned()));
    text.set("tokenizer.ggml.tokens", Meta::Texts((0..64).map(token).collect()));
    for (key, number) in [
        ("projection_dim", 32),
        ("embedding_length", 24),
        ("feed_forward_length", 40),
        ("block_count", 5),
        ("attention.head_count", 2),
        ("patch_size", 8),
        ("image_size", 40),
        ("spatial_merge_size", 2),
    ] {
        encoder.set(&format!("clip.vision.{key}"), Meta::U32(number));
    }
    encoder.set("general.architecture", Meta::Text("clip".to_owned()));
    encoder.set("clip.projector_type", Meta::Text("qwen3vl_merger".to_owned()));
    encoder.set("clip.vision.attention.layer_norm_epsilon", Meta::F32(1e-6));
    encoder.set("clip.vision.image_mean", Meta::Floats(vec![0.5, 0.4, 0.3]));
    encoder.set("clip.vision.image_std", Meta::Floats(vec![0.5, 0.6, 0.7]));
    let deepstack = Meta::Bools(vec![true, false, true, true, false]);
    encoder.set("clip.vision.is_deepstack_layers", deepstack);
    [text, encoder]
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
    let dir = tempfile::tempdir().expect("a directory");
    let [text, encoder] = converted();
    let model = open_both(dir.path(), &text.bytes(), &encoder.bytes()).expect("both are valid");
    let expected = fixture::model(NAME);
    assert_eq!(model.config, expected.config);
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
    let mut two = Two::of(model, None);
    let (shape, expected) = fixture::tensor(NAME, "two.logits");
    let got = two.step(0..two.tokens.len());
    for (row, expected) in fixture::floats(&expected).chunks(shape[1]).enumerate() {
        let difference = fixture::difference(&got[row * shape[1]..][..shape[1]], expected);
        assert!(difference < 1e-3, "row {row}: {difference}");
    }
}

/// Goal: a wrong file of an encoder is an error with what was expected and what is there.
#[test]
fn wrong_encoders_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let [text, encoder] = converted();
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
