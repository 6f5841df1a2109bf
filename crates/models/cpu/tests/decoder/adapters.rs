//! LoRA adapters: their results are those of PEFT, and bit-identical for all batchings, next to
//! other adapters and to the model without one.

use std::collections::HashMap;
use std::path::PathBuf;

use safetensors::SafeTensors;
use stolon_backend::{
    Adapter, AdapterLoadError, Backend, BackendError, BackendSpec, StepBatch, StepOutput,
};
use stolon_checkpoint::config::{FeedForwardWeights, TensorSpec};
use stolon_checkpoint::{
    AttentionConfig, DecoderConfig, KvType, LoadedModel, MixerConfig, Tensor, Weights,
};
use stolon_kernels::Path;
use stolon_kvcache::BlockId;

use super::converted;
use super::fixture::{self, Setup};
use super::invariance::wide_model;
use crate::adapter_writer::AdapterWriter;
use crate::gguf_writer::{GgufWriter, Meta};
use crate::model_adapter::whole_adapter;
use crate::suite::invariance::Subject;
use crate::suite::{Open, run};

/// Maximum size of the adapters of these tests in bytes.
pub(super) const BYTES_MAX: u64 = 64 << 20;

/// The directory of the adapter of the fixture `name`.
fn directory(name: &str) -> PathBuf {
    fixture::directory("lora").join(name)
}

/// The names of the models with an adapter.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(fixture::directory("lora")).expect("the fixtures");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> =
        entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    assert!(names.len() >= 10, "{names:?}");
    names
}

/// Loads the adapter at `path` for the model of `backend`.
pub(super) fn load(
    backend: &dyn Backend,
    path: &std::path::Path,
) -> Result<Adapter, AdapterLoadError> {
    backend.adapters().expect("the backend supports adapters").load(path, BYTES_MAX)
}

/// A backend that computes all slices with the same adapter.
struct Adapted {
    inner: Box<dyn Backend>,
    adapter: Adapter,
}

impl Adapted {
    fn open(inner: Box<dyn Backend>, path: &std::path::Path) -> Box<dyn Backend> {
        let adapter = load(&*inner, path).expect("a valid adapter");
        Box::new(Self { inner, adapter })
    }
}

impl Backend for Adapted {
    fn spec(&self) -> &BackendSpec {
        self.inner.spec()
    }

    fn step(&mut self, batch: &StepBatch) -> Result<StepOutput, BackendError> {
        let mut batch = batch.clone();
        batch.sequences.iter_mut().for_each(|slice| slice.adapter = Some(self.adapter.clone()));
        self.inner.step(&batch)
    }

    fn read_blocks(&mut self, blocks: &[BlockId], to: &mut [u8]) -> Result<(), BackendError> {
        self.inner.read_blocks(blocks, to)
    }

    fn write_blocks(&mut self, blocks: &[BlockId], from: &[&[u8]]) -> Result<(), BackendError> {
        self.inner.write_blocks(blocks, from)
    }
}

/// A way of opening backends that compute everything with the adapter at `path`.
fn open_adapted(setup: Setup, path: PathBuf) -> Open<'static> {
    let open = fixture::open(setup);
    Box::new(move |model, sizes| Ok(Adapted::open(open(model, sizes)?, &path)))
}

/// Goal: logits and greedy tokens of models with an adapter match those of PEFT, on every
/// instruction set of this machine. `make_lora.py` says what each adapter has.
#[test]
fn adapters_match_peft() {
    for name in names() {
        for path in Path::supported() {
            let setup = Setup { path: Some(path), ..Setup::default() };
            compare_with_peft(&name, fixture::model(&name), setup, &directory(&name));
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
        compare_with_peft(&name, model, Setup::default(), &adapter);
    }
    assert!(count >= 21, "{count} adapters");
}

/// Compares the logits of the fixture `name`, whose model is `model`, with the adapter at `path`
/// with those of PEFT.
fn compare_with_peft(name: &str, model: LoadedModel, setup: Setup, path: &std::path::Path) {
    let expected = fixture::expected(&format!("lora/{name}"));
    let mut backend = Adapted::open(Box::new(fixture::backend(model, setup)), path);
    let table = run::table(5, expected.prompt.len(), 16);
    let rows = run::rows(&mut *backend, &expected.prompt, 0, usize::MAX / 2, &table);
    for (&row, logits) in expected.rows.iter().zip(&expected.logits) {
        let difference = fixture::difference(&rows[row], logits);
        assert!(
            difference < 1e-3,
            "{name}, {setup:?}, row {row}: {difference} standard deviations"
        );
    }
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
        let open = open_adapted(setup, directory(&name));
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
        let open = open_adapted(setup, dir.path().to_owned());
        let label = format!("wide {model} with an adapter, {dtype}, {path:?}");
        let tokens = (0..140).map(|i| i * i % 499).collect();
        Subject::new(label, Box::new(open_model), open, &[1, 2], tokens).check();
    }
}

/// Goal: an adapter of routers and of the gates of shared experts, which PEFT's `all-linear` has,
/// gives the results of a model with the adapter in its weights.
#[test]
fn adapters_of_routers_equal_merged_weights() {
    for name in ["qwen2_moe", "glm4_moe", "mixtral"] {
        let plain = fixture::model(name);
        let mlps = plain.config.weights().layers.into_iter().filter_map(|layer| layer.mlp);
        let routers = mlps.filter_map(|mlp| match mlp {
            FeedForwardWeights::Experts(experts) => Some(experts),
            _ => None,
        });
        let routers: Vec<TensorSpec> = routers
            .flat_map(|experts| {
                let gate = experts.shared.and_then(|shared| shared.gate);
                [experts.router].into_iter().chain(gate).map(|router| router.weight)
            })
            .collect();
        let mut adapter = AdapterWriter::new(4, 9);
        let mut merged: HashMap<&str, Vec<f32>> = HashMap::new();
        for spec in &routers {
            let (rows, columns) = (spec.shape[0], spec.shape[1]);
            let module = spec.name.strip_suffix(".weight").expect("a matrix");
            adapter.add(module, [rows, columns], "F32");
            let [.., first, second] = &adapter.tensors[..] else { panic!("two matrices") };
            let floats = |bytes: &[u8]| -> Vec<f32> {
                bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
            };
            let (a, b) = (floats(&first.3), floats(&second.3));
            let mut values = plain.weights.floats(spec).expect("a matrix");
            for (index, value) in values.iter_mut().enumerate() {
                let (row, column) = (index / columns, index % columns);
                *value +=
                    (0..4).map(|r| 2.0 * b[row * 4 + r] * a[r * columns + column]).sum::<f32>();
            }
            merged.insert(&spec.name, values);
        }
        let dir = tempfile::tempdir().expect("a directory");
        adapter.write(dir.path());
        let tensors = plain.config.tensors().into_iter().map(|spec| {
            let values = match merged.get(spec.name.as_str()) {
                Some(values) => values.clone(),
                None => plain.weights.floats(&spec).expect("floats"),
            };
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let (dtype, bytes) = (stolon_checkpoint::TensorType::F32, bytes.into());
            Tensor { name: spec.name, dtype, shape: spec.shape, bytes }
        });
        let weights = Weights::from_tensors("merged", tensors).expect("valid tensors");
        let model = LoadedModel { weights, ..fixture::model(name) };
        let prompt: Vec<u32> = (0..40).map(|i| (7 * i + 3) % 80).collect();
        let logits = |mut backend: Box<dyn Backend>| {
            let table = run::table(5, prompt.len(), 16);
            run::rows(&mut *backend, &prompt, 0, usize::MAX / 2, &table)
        };
        let setup = Setup::default();
        let expected = logits(Box::new(fixture::backend(model, setup)));
        let base = logits(Box::new(fixture::backend(fixture::model(name), setup)));
        let own = Box::new(fixture::backend(plain, setup));
        let adapted = logits(Adapted::open(own, dir.path()));
        let difference = |a: &[Vec<f32>], b: &[Vec<f32>]| {
            let rows = a.iter().zip(b).map(|(a, b)| fixture::difference(a, b));
            rows.fold(0.0, f32::max)
        };
        assert!(difference(&adapted, &expected) < 1e-3, "{name}");
        assert!(difference(&base, &expected) > 1e-2, "{name}: the adapter changes nothing");
    }
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
        let backend = || fixture::backend(open_model(), setup);
        let mut mixed = backend();
        let dir = tempfile::tempdir().expect("a directory");
        let mut adapters = vec![None];
        for (seed, rank) in [(1, 4), (2, 16), (3, 33)] {
            let mut adapter = whole_adapter(&config, rank, "BF16", seed);
            let shape = [config.vocab_size, config.hidden_size];
            match seed {
                1 => adapter.add("lm_head", shape, "BF16"),
                2 => adapter.add("model.embed_tokens", shape, "BF16"),
                _ => {}
            }
            adapter.write(dir.path());
            adapters.push(Some(load(&mixed, dir.path()).expect("a valid adapter")));
        }
        let tokens: Vec<u32> = (0..60).map(|i| i * i % 499).collect();
        // For each sequence its adapter and the sizes of its chunks.
        let sequences = [(1, 20), (0, 7), (2, 1), (0, 60), (3, 13), (1, 60), (2, 30)];
        let step = |backend: &mut dyn Backend, slices: &[(usize, usize, usize)]| {
            let parts: Vec<_> = slices
                .iter()
                .map(|&(sequence, from, to)| {
                    let table = run::table(4 * sequence as u32, 60, 16);
                    let mut part = run::part(&tokens, from, to, &table);
                    part.slice.adapter = adapters[sequences[sequence].0].clone();
                    part
                })
                .collect();
            run::step(backend, &parts)
        };
        let mut alone = Vec::new();
        for (sequence, (adapter, _)) in sequences.iter().enumerate() {
            // A backend without adapters, for the model itself.
            let mut other = backend();
            let used = if *adapter == 0 { &mut other } else { &mut mixed };
            alone.push(step(used, &[(sequence, 0, 60)]).remove(0));
        }
        assert_ne!(alone[0], alone[1]);
        assert_ne!(alone[0], alone[2]);
        let mut at = [0; 7];
        while at.iter().any(|at| *at < 60) {
            let next = |sequence: usize| (at[sequence] + sequences[sequence].1).min(60);
            let slices: Vec<_> = (0..7)
                .filter(|sequence| at[*sequence] < 60)
                .map(|sequence| (sequence, at[sequence], next(sequence)))
                .collect();
            for ((sequence, from, to), rows) in slices.iter().zip(step(&mut mixed, &slices)) {
                assert_eq!(
                    rows,
                    alone[*sequence][*from..*to],
                    "{model}, {path:?}, sequence {sequence}"
                );
                at[*sequence] = *to;
            }
        }
    }
}

/// Goal: an adapter of another backend is refused, and so is one of another model.
#[test]
fn adapters_of_another_model_are_refused() {
    let open = || fixture::backend(fixture::model("llama"), Setup::default());
    let (mut backend, other) = (open(), open());
    let foreign = load(&other, &directory("llama")).expect("a valid adapter");
    for adapter in [foreign, Adapter::new([0; 32], 0, 1, ())] {
        let mut part = run::part(&[1, 2], 0, 2, &run::table(0, 2, 16));
        part.slice.adapter = Some(adapter);
        let batch = run::batch(&backend, &[part]);
        let error = backend.step(&batch).expect_err("another model").to_string();
        assert!(error.contains("is of another model"), "{error}");
    }
    // This one has other layers and shapes.
    let error = load(&backend, &directory("phi3")).expect_err("another model").to_string();
    assert!(error.contains("adapter_model.safetensors: tensor `"), "{error}");
}

/// Goal: an adapter has the same fingerprint whenever it is loaded, and another one if a weight or
/// the scale changes.
#[test]
fn fingerprints_depend_on_the_contents() {
    let backend = fixture::backend(fixture::model("llama"), Setup::default());
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = whole_adapter(backend.config(), 4, "F32", 1);
    let load = |writer: &crate::adapter_writer::AdapterWriter| {
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
