//! Tests LoRA adapters: their results are those of PEFT, and bit-identical for all batchings, next
//! to other adapters and to the model without one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use stolon_backend::{
    Adapter, AdapterLoadError, Backend, BackendError, BackendSpec, LogitRows, StepBatch, StepOutput,
};
use stolon_checkpoint::config::{FeedForwardWeights, TensorSpec};
use stolon_checkpoint::{DecoderConfig, LoadedModel, Tensor, TensorType, Weights};
use stolon_kvcache::BlockId;

use super::{Open, Sizes, fixture, run};
use crate::adapter_writer::AdapterWriter;
use crate::model_adapter::whole_adapter;

/// Maximum size of the adapters of these tests in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The directory of the adapter of the fixture `name`.
pub(crate) fn directory(name: &str) -> PathBuf {
    fixture::directory("lora").join(name)
}

/// The names of the models with an adapter. `make_lora.py` says what each adapter has.
pub(crate) fn names() -> Vec<String> {
    let entries = std::fs::read_dir(fixture::directory("lora")).expect("the fixtures");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
    let mut names: Vec<_> =
        entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    assert!(names.len() >= 10, "{names:?}");
    names
}

/// Loads the adapter at `path` for the model of `backend`.
pub(crate) fn load(backend: &dyn Backend, path: &Path) -> Result<Adapter, AdapterLoadError> {
    backend.adapters().expect("the backend supports adapters").load(path, BYTES_MAX)
}

/// A backend that computes all slices with the same adapter.
pub(crate) struct Adapted {
    inner: Box<dyn Backend>,
    adapter: Adapter,
}

impl Adapted {
    /// Computes everything with the adapter at `path`.
    pub(crate) fn open(inner: Box<dyn Backend>, path: &Path) -> Box<dyn Backend> {
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
pub(crate) fn open(open: Open<'_>, path: PathBuf) -> Open<'_> {
    Box::new(move |model, sizes| Ok(Adapted::open(open(model, sizes)?, &path)))
}

/// The logits of the fixture `name`, which `backend` computes, with the adapter at `path` are those
/// of PEFT. `label` describes the backend.
pub(crate) fn check_peft(name: &str, label: &str, backend: Box<dyn Backend>, path: &Path) {
    let expected = fixture::expected(&format!("lora/{name}"));
    let mut backend = Adapted::open(backend, path);
    let table = run::table(5, expected.prompt.len(), 16);
    let rows = run::rows(&mut *backend, &expected.prompt, 0, usize::MAX / 2, &table);
    for (&row, logits) in expected.rows.iter().zip(&expected.logits) {
        let difference = fixture::difference(&rows[row], logits);
        assert!(difference < 1e-3, "{name}, {label}, row {row}: {difference} standard deviations");
    }
}

/// The projections of a model that choose experts and weigh the shared expert.
fn routers(config: &DecoderConfig) -> Vec<TensorSpec> {
    let mlps = config.weights().layers.into_iter().filter_map(|layer| layer.mlp);
    let experts = mlps.filter_map(|mlp| match mlp {
        FeedForwardWeights::Experts(experts) => Some(experts),
        _ => None,
    });
    let routers = experts.flat_map(|experts| {
        let gate = experts.shared.and_then(|shared| shared.gate);
        [experts.router].into_iter().chain(gate)
    });
    routers.map(|router| router.weight).collect()
}

/// An adapter of routers and of the gates of shared experts gives the results of a model with the
/// adapter in its weights.
pub(crate) fn check_routers(open: &Open<'_>) {
    for name in ["qwen2_moe", "glm4_moe", "mixtral"] {
        let plain = fixture::model(name);
        let routers = routers(&plain.config);
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
            Tensor {
                name: spec.name,
                dtype: TensorType::F32,
                shape: spec.shape,
                bytes: bytes.into(),
            }
        });
        let weights = Weights::from_tensors("merged", tensors).expect("valid tensors");
        let model = LoadedModel { weights, ..fixture::model(name) };
        let prompt: Vec<u32> = (0..40).map(|i| (7 * i + 3) % 80).collect();
        let logits = |mut backend: Box<dyn Backend>| {
            let table = run::table(5, prompt.len(), 16);
            run::rows(&mut *backend, &prompt, 0, usize::MAX / 2, &table)
        };
        let backend = |model| open(model, Sizes::default()).expect("a valid model");
        let expected = logits(backend(model));
        let base = logits(backend(fixture::model(name)));
        let adapted = logits(Adapted::open(backend(plain), dir.path()));
        let difference = |a: &[Vec<f32>], b: &[Vec<f32>]| {
            let rows = a.iter().zip(b).map(|(a, b)| fixture::difference(a, b));
            rows.fold(0.0, f32::max)
        };
        assert!(difference(&adapted, &expected) < 1e-3, "{name}");
        assert!(difference(&base, &expected) > 1e-2, "{name}: the adapter changes nothing");
    }
}

/// In a batch of the model itself and several adapters, of different ranks and with prompts and
/// decodes, each row has the bits that it has alone; those of the model itself are the bits of a
/// backend that has never had an adapter. `open` opens backends of the model with the configuration
/// `config`.
pub(crate) fn check_mixed_batch(
    label: &str,
    config: &DecoderConfig,
    open: &dyn Fn() -> Box<dyn Backend>,
) {
    let mut mixed = open();
    let dir = tempfile::tempdir().expect("a directory");
    let mut adapters = vec![None];
    for (seed, rank) in [(1, 4), (2, 16), (3, 33)] {
        let mut adapter = whole_adapter(config, rank, "BF16", seed);
        let shape = [config.vocab_size, config.hidden_size];
        match seed {
            1 => adapter.add("lm_head", shape, "BF16"),
            2 => adapter.add("model.embed_tokens", shape, "BF16"),
            _ => {}
        }
        adapter.write(dir.path());
        adapters.push(Some(load(&*mixed, dir.path()).expect("a valid adapter")));
    }
    let tokens: Vec<u32> = (0..60).map(|i| i * i % (config.vocab_size as u32 - 1)).collect();
    // For each sequence its adapter and the sizes of its chunks.
    let sequences = [(1, 20), (0, 7), (2, 1), (0, 60), (3, 13), (1, 60), (2, 30)];
    let step = |backend: &mut dyn Backend, slices: &[(usize, usize, usize)], rows: LogitRows| {
        let parts: Vec<_> = slices
            .iter()
            .map(|&(sequence, from, to)| {
                let table = run::table(4 * sequence as u32, 60, 16);
                let mut part = run::part(&tokens, from, to, &table);
                part.slice.adapter = adapters[sequences[sequence].0].clone();
                part.slice.logit_rows = rows;
                part
            })
            .collect();
        run::step(backend, &parts)
    };
    let mut alone = Vec::new();
    for (sequence, (adapter, _)) in sequences.iter().enumerate() {
        // A backend without adapters, for the model itself.
        let mut other = open();
        let used = if *adapter == 0 { &mut other } else { &mut mixed };
        alone.push(step(&mut **used, &[(sequence, 0, 60)], LogitRows::All).remove(0));
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
        let rows = step(&mut *mixed, &slices, LogitRows::All);
        for ((sequence, from, to), rows) in slices.iter().zip(rows) {
            assert_eq!(rows, alone[*sequence][*from..*to], "{label}, sequence {sequence}");
            at[*sequence] = *to;
        }
    }
    // The rows of the last layer are those of the last tokens only.
    let whole = [0, 1, 2, 3, 4, 5, 6].map(|sequence| (sequence, 0, 60));
    let last = step(&mut *mixed, &whole, LogitRows::Last);
    for (sequence, (rows, alone)) in last.iter().zip(&alone).enumerate() {
        assert_eq!(rows[..], alone[59..], "{label}, last row of sequence {sequence}");
    }
}

/// An adapter of another backend is refused, and so is one of another model.
pub(crate) fn check_foreign(open: &Open<'_>) {
    let open = || open(fixture::model("llama"), Sizes::default()).expect("a valid model");
    let (mut backend, other) = (open(), open());
    let foreign = load(&*other, &directory("llama")).expect("a valid adapter");
    for adapter in [foreign, Adapter::new([0; 32], 0, 1, ())] {
        let mut part = run::part(&[1, 2], 0, 2, &run::table(0, 2, 16));
        part.slice.adapter = Some(adapter);
        let batch = run::batch(&*backend, &[part]);
        let error = backend.step(&batch).expect_err("another model").to_string();
        assert!(error.contains("is of another model"), "{error}");
    }
    // This one has other layers and shapes.
    let error = load(&*backend, &directory("phi3")).expect_err("another model").to_string();
    assert!(error.contains("adapter_model.safetensors: tensor `"), "{error}");
}
