//! LoRA adapters: their results are those of PEFT, and bit-identical for all batchings, next to
//! other adapters and to the model without one.

use safetensors::SafeTensors;
use stolon_backend::Backend;
use stolon_checkpoint::{AttentionConfig, DecoderConfig, KvType, MixerConfig};
use stolon_kernels::Path;

use super::converted;
use super::fixture::{self, Setup};
use super::invariance::{wide_model, wide_tokens};
use crate::adapter_writer::AdapterWriter;
use crate::gguf_writer::{GgufWriter, Meta};
use crate::model_adapter::whole_adapter;
use crate::suite::adapters::{self, Adapted, directory, load, names};
use crate::suite::invariance::Subject;
use crate::suite::run;

/// Goal: logits and greedy tokens of models with an adapter match those of PEFT, on every
/// instruction set of this machine. `make_lora.py` says what each adapter has.
#[test]
fn adapters_match_peft() {
    for name in names() {
        for path in Path::supported() {
            let setup = Setup { path: Some(path), ..Setup::default() };
            let backend = Box::new(fixture::backend(fixture::model(&name), setup));
            adapters::check_peft(&name, &format!("{setup:?}"), backend, &directory(&name));
        }
    }
}

/// Goal: models and their adapters that llama.cpp's own converters have written have the results of
/// PEFT.
#[test]
#[ignore = "needs the folder STOLON_CONVERTED, which convert_fixtures.py fills"]
fn converted_adapters_match_peft() {
    let folder = converted::folder().join("lora");
    let mut count = 0;
    for name in names() {
        // The converter cannot write all.
        let adapter = folder.join(format!("{name}.gguf"));
        if !adapter.exists() {
            continue;
        }
        count += 1;
        let model = converted::model(&name).expect("a valid model");
        let backend = Box::new(fixture::backend(model, Setup::default()));
        adapters::check_peft(&name, "converted", backend, &adapter);
    }
    assert!(count >= 21, "{count} adapters");
}

/// Goal: rows with an adapter are batch invariant for every kind of model. An adapter changes no
/// access to the KV store, so each element type is checked with a part of the models.
#[test]
fn adapters_are_batch_invariant() {
    let paths = Path::supported();
    let path = paths[paths.len() - 1];
    for (name, kv_type) in names().into_iter().zip(KvType::ALL.into_iter().cycle()) {
        let setup = Setup { kv_type, path: Some(path), ..Setup::default() };
        let label = format!("with an adapter, {kv_type}, {path:?}");
        let open = adapters::open(fixture::open(setup), directory(&name));
        Subject::fixture(&name, &label, open, &[1, 2]).check();
    }
}

/// Goal: the same with matrices that are large enough for all work to run on several threads, on
/// every instruction set, whose types alternate.
#[test]
fn wide_adapters_are_batch_invariant() {
    let paths = Path::supported();
    let last = paths[paths.len() - 1];
    let types = ["F32", "BF16"].into_iter().cycle();
    let mut cases: Vec<_> =
        paths.into_iter().zip(types).map(|(path, dtype)| ("qwen3", dtype, path)).collect();
    cases.extend([
        ("moondream2", "BF16", last),
        ("deepseek_v3", "BF16", last),
        ("qwen3_5", "BF16", last),
        ("falcon_h1", "F32", last),
        ("qwen2_moe", "BF16", last),
    ]);
    for (model, dtype, path) in cases {
        let (config, open_model) = wide_model(model, stolon_checkpoint::TensorType::Bf16);
        let dir = tempfile::tempdir().expect("a directory");
        let mut adapter = whole_adapter(&config, 24, dtype, 3);
        let shape = [config.vocab_size, config.hidden_size];
        adapter.add("lm_head", shape, dtype);
        if model == "qwen3" {
            adapter.add("model.embed_tokens", shape, dtype);
        }
        adapter.write(dir.path());
        let setup = Setup { kv_type: KvType::Bf16, path: Some(path), ..Setup::default() };
        let open = adapters::open(fixture::open(setup), dir.path().to_owned());
        let label = format!("wide {model} with an adapter, {dtype}, {path:?}");
        Subject::new(label, Box::new(open_model), open, &[1, 2], wide_tokens(path)).check();
    }
}

/// Goal: an adapter of routers and of the gates of shared experts, which PEFT's `all-linear` has,
/// gives the results of a model with the adapter in its weights.
#[test]
fn adapters_of_routers_equal_merged_weights() {
    adapters::check_routers(&fixture::open(Setup::default()));
}

/// Goal: in a batch of the model itself and several adapters, of different ranks and with prompts
/// and decodes, each row has the bits that it has alone; those of the model itself are the bits of
/// a backend that has never had an adapter.
#[test]
fn requests_with_different_adapters_share_a_batch() {
    let all = Path::supported();
    let last = all[all.len() - 1];
    let models = [("qwen2_moe", last), ("deepseek_v3", last), ("falcon_h1", last)];
    for (model, path) in all.into_iter().map(|path| ("qwen3", path)).chain(models) {
        let (config, open_model) = wide_model(model, stolon_checkpoint::TensorType::Bf16);
        let setup = Setup { path: Some(path), threads: 2, ..Setup::default() };
        let backend = || Box::new(fixture::backend(open_model(), setup)) as Box<dyn Backend>;
        adapters::check_mixed_batch(&format!("{model}, {path:?}"), &config, &backend);
    }
}

/// Goal: an adapter of another backend is refused, and so is one of another model.
#[test]
fn adapters_of_another_model_are_refused() {
    adapters::check_foreign(&fixture::open(Setup::default()));
}

/// Goal: an adapter has the same fingerprint whenever it is loaded, and another one if a weight or
/// the scale changes.
#[test]
fn fingerprints_depend_on_the_contents() {
    let backend = fixture::backend(fixture::model("llama"), Setup::default());
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = whole_adapter(backend.config(), 4, "F32", 1);
    let load = |writer: &AdapterWriter| {
        writer.write(dir.path());
        load(&backend, dir.path()).expect("a valid adapter")
    };
    let first = load(&writer);
    assert_eq!(first.fingerprint(), load(&writer).fingerprint());
    assert_eq!(first.rank(), 4);
    assert!(first.bytes() > 0);
    writer.tensors[3].3[5] ^= 1;
    let second = load(&writer);
    assert_ne!(first.fingerprint(), second.fingerprint());
    writer.settings["lora_alpha"] = 9.into();
    assert_ne!(second.fingerprint(), load(&writer).fingerprint());
}

/// The adapter of the fixture `name` in GGUF, as llama.cpp's converter writes it.
fn in_gguf(name: &str, config: &DecoderConfig) -> Vec<u8> {
    let attention = config.attention().expect("attention");
    let file = fixture::file(&format!("lora/{name}"), "adapter_model.safetensors");
    let tensors = SafeTensors::deserialize(&file).expect("a safetensors file");
    let settings = fixture::file(&format!("lora/{name}"), "adapter_config.json");
    let settings: serde_json::Value = serde_json::from_slice(&settings).expect("JSON");
    let text = |key: &str, value: &str| (key.to_owned(), Meta::Text(value.to_owned()));
    let alpha = settings["lora_alpha"].as_f64().expect("a number") as f32;
    let metadata = vec![
        text("general.architecture", name),
        text("general.type", "adapter"),
        text("adapter.type", "lora"),
        ("adapter.lora.alpha".to_owned(), Meta::F32(alpha)),
    ];
    let mut writer = GgufWriter { metadata, tensors: Vec::new() };
    for (tensor, view) in tensors.tensors() {
        let rest = tensor.strip_prefix("base_model.model.").expect("a module");
        let outer = [
            ("lm_head.lora_A.weight", "output.weight.lora_a"),
            ("lm_head.lora_B.weight", "output.weight.lora_b"),
            ("model.embed_tokens.lora_embedding_A", "token_embd.weight.lora_a"),
            ("model.embed_tokens.lora_embedding_B", "token_embd.weight.lora_b"),
        ];
        if let Some((_, name)) = outer.iter().find(|(peft, _)| *peft == rest) {
            let (mut shape, mut bytes) = (view.shape().to_vec(), view.data().to_vec());
            if *name == "token_embd.weight.lora_a" {
                // It is stored by token.
                let rows = bytes.chunks_exact(4 * shape[1]);
                let column = |at: usize| rows.clone().map(move |row| &row[4 * at..][..4]);
                bytes = (0..shape[1]).flat_map(column).flatten().copied().collect();
                shape.reverse();
            }
            writer.tensors.push(((*name).to_owned(), shape, 0, bytes));
            continue;
        }
        let rest = rest.strip_prefix("model.layers.").expect("a layer");
        let (layer, rest) = rest.split_once('.').expect("a module");
        let (module, rest) = rest.split_once('.').and_then(|(_, m)| m.split_once('.')).expect("it");
        let (gguf, heads) = match module {
            "q_proj" => ("attn_q", attention.heads),
            "k_proj" => ("attn_k", attention.kv_heads),
            "v_proj" => ("attn_v", 0),
            "o_proj" => ("attn_output", 0),
            "gate_proj" => ("ffn_gate", 0),
            "up_proj" | "gate_up_proj" => ("ffn_up", 0),
            _ => ("ffn_down", 0),
        };
        let second = rest.starts_with("lora_B");
        let mut bytes = view.data().to_vec();
        if second && heads > 0 {
            bytes = adjacent_pairs(&bytes, heads, attention);
        }
        let end = if second { "lora_b" } else { "lora_a" };
        let name = format!("blk.{layer}.{gguf}.weight.{end}");
        writer.tensors.push((name, view.shape().to_vec(), 0, bytes));
    }
    writer.bytes()
}

/// Brings rows whose values `i` and `i + rotary_dim / 2` of a head are rotated together into the
/// order in which these are adjacent.
fn adjacent_pairs(bytes: &[u8], heads: usize, config: &AttentionConfig) -> Vec<u8> {
    let (dim, half) = (config.head_dim, config.rotary_dim / 2);
    let width = bytes.len() / (heads * dim);
    let order = (0..heads).flat_map(|head| {
        let pairs = (0..half).flat_map(move |i| [i, half + i]).chain(2 * half..dim);
        pairs.map(move |row| head * dim + row)
    });
    order.flat_map(|row| bytes[row * width..][..width].to_vec()).collect()
}

/// Goal: an adapter in GGUF, whose rows of queries and keys are in another order, gives the same
/// bits as in the format of PEFT. (The safetensors files of GLM-4 have that order, too.)
#[test]
fn adapters_in_gguf_equal_those_of_peft() {
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["llama", "glm4", "qwen2"] {
        let path = dir.path().join(format!("{name}.gguf"));
        let config = fixture::model(name).config;
        // The fixture of GLM-4 is in the order of GGUF files already, and Qwen2 has only one.
        let mut as_stored = config.clone();
        for mixer in as_stored.layers.iter_mut().flat_map(|layer| &mut layer.mixers) {
            if let MixerConfig::Attention(attention) = mixer {
                attention.rotary_dim = 0;
            }
        }
        let order = if name == "llama" { &config } else { &as_stored };
        std::fs::write(&path, in_gguf(name, order)).expect("a file");
        let prompt = fixture::expected(name).prompt;
        let rows = [directory(name), path].map(|path| {
            let backend = fixture::backend(fixture::model(name), Setup::default());
            let mut backend = Adapted::open(Box::new(backend), &path);
            let table = run::table(0, prompt.len(), 16);
            run::rows(&mut *backend, &prompt, 0, usize::MAX / 2, &table)
        });
        assert_eq!(rows[0], rows[1], "{name}");
    }
}
