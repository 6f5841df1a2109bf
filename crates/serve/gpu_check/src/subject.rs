//! The models on which backends are compared: one small model with random weights per architecture,
//! made from its configuration in `architectures.json`, or a model that the user names.

use std::borrow::Cow;

use serde_json::{Value, json};
use stolon_checkpoint::config::TensorRole;
use stolon_checkpoint::{
    Architecture, DecoderConfig, KvBudget, KvType, LoadOptions, ModelError, ModelSource, Tensor,
    TensorType, Weights, load, random_model,
};
use stolon_cuda::{CandleBackend, CandleOptions, ComputeType, DeviceChoice, OpenError};
use stolon_loadgen::rng::SeededRng;

use super::formats::{FORMATS, Format};

/// Factor by which the random weights are larger than those of `random_model`, whose attention
/// would be almost the same for all positions. A power of two, so that half precision represents
/// the weights as well as before.
const GAIN: f32 = 4.0;

/// Opens backends of the kind that is checked. The tests open backends that compute something
/// wrong.
pub(super) trait Target: Clone + Send + Sync + 'static {
    type Backend: stolon::Backend + 'static;

    fn open(
        &self,
        config: DecoderConfig,
        weights: Weights,
        options: CandleOptions,
    ) -> Result<Self::Backend, OpenError>;

    /// Number of CUDA graphs of a backend.
    fn captured_graphs(backend: &Self::Backend) -> usize;
}

/// The backend of `stolon-cuda`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candle;

impl Target for Candle {
    type Backend = CandleBackend;

    fn open(
        &self,
        config: DecoderConfig,
        weights: Weights,
        options: CandleOptions,
    ) -> Result<CandleBackend, OpenError> {
        CandleBackend::open(config, weights, options)
    }

    fn captured_graphs(backend: &CandleBackend) -> usize {
        backend.captured_graphs()
    }
}

/// How a backend is opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setup {
    pub(super) device: DeviceChoice,
    /// `None` for the default of the model.
    pub(super) compute_type: Option<ComputeType>,
    /// Type of keys and values; `None` for that of `compute_type`.
    pub(super) kv_type: Option<KvType>,
    pub(super) batch_invariant: bool,
    pub(super) cuda_graphs: bool,
}

impl Setup {
    /// With batch invariance and without graphs.
    pub(super) fn new(device: DeviceChoice, compute_type: Option<ComputeType>) -> Self {
        Self { device, compute_type, kv_type: None, batch_invariant: true, cuda_graphs: false }
    }

    /// Options with a KV store of `blocks` blocks of 32 positions, and as many slots for recurrent
    /// states, but not more than 256. With 0 blocks, the caller sets the size of the store.
    pub(super) fn options(&self, blocks: usize) -> CandleOptions {
        CandleOptions {
            device: self.device,
            block_size: BLOCK_SIZE,
            kv_budget: KvBudget::Blocks(blocks),
            state_slots: if blocks == 0 { SLOTS_MAX } else { blocks.min(SLOTS_MAX) },
            compute_type: self.compute_type,
            kv_type: self.kv_type,
            batch_invariant: self.batch_invariant,
            cuda_graphs: self.cuda_graphs,
            ..CandleOptions::default()
        }
    }
}

/// Maximum number of slots for recurrent states: the most sequences of a measurement.
const SLOTS_MAX: usize = 256;

/// Positions per KV block: the fewest with which flash attention works.
pub(super) const BLOCK_SIZE: usize = 32;

/// A model that can be loaded several times.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub(super) name: String,
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    /// Random weights in f32, whose values are exact in bf16. Matrices are in random blocks of the
    /// format, if there is one.
    Config(Box<DecoderConfig>, Option<&'static Format>),
    Model(ModelSource),
}

impl Subject {
    /// A model that the user names.
    pub(super) fn model(source: &ModelSource) -> Self {
        Self { name: source.to_string(), source: Source::Model(source.clone()) }
    }

    pub(super) fn load(&self) -> Result<(DecoderConfig, Weights), ModelError> {
        match &self.source {
            Source::Config(config, format) => Ok(((**config).clone(), weights(config, *format)?)),
            Source::Model(source) => {
                let model = load(source, &LoadOptions::default())?;
                Ok((model.config, model.weights))
            }
        }
    }
}

/// One model for each architecture that the backend computes, in the order of
/// [`Architecture::all`]. The file has, for each architecture, the fields other than the common
/// sizes. Windows are shorter than the prompts of the checks.
pub(super) fn architectures() -> Result<Vec<Subject>, ModelError> {
    const FILE: &str = "architectures.json";
    let malformed = |reason: String| ModelError::Malformed { file: FILE.to_owned(), reason };
    let list: Value = serde_json::from_str(include_str!("architectures.json"))
        .map_err(|error| malformed(error.to_string()))?;
    let subject = |architecture: Architecture| {
        let name = architecture.name();
        if !list[name].is_object() {
            return Err(malformed(format!("expected an object `{name}`")));
        }
        let config = config(name, &list[name])?;
        Ok(Subject { name: name.to_owned(), source: Source::Config(Box::new(config), None) })
    };
    Architecture::all()
        .filter(|architecture| list.get(architecture.name()).is_some())
        .map(subject)
        .collect()
}

/// A Llama model for each format of quantized blocks that stays as it is on a device.
pub(super) fn quantized() -> Result<Vec<Subject>, ModelError> {
    // Rows of whole blocks of all formats.
    let config = config("llama", &json!({ "hidden_size": 256, "intermediate_size": 512 }))?;
    let subject = |format: &'static Format| Subject {
        name: format!("llama, {}", format.dtype.name()),
        source: Source::Config(Box::new(config.clone()), Some(format)),
    };
    Ok(FORMATS.iter().map(subject).collect())
}

/// The configuration of a small model with the common fields and those of the object `own`.
fn config(name: &str, own: &Value) -> Result<DecoderConfig, ModelError> {
    let mut value = json!({
        "model_type": name, "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 1024, "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "dtype": "float32",
    });
    if let (Some(value), Some(own)) = (value.as_object_mut(), own.as_object()) {
        value.extend(own.clone());
    }
    DecoderConfig::from_json(name, &value)
}

/// Random weights for `config`, with matrices in `format`. They do not depend on the machine.
fn weights(config: &DecoderConfig, format: Option<&Format>) -> Result<Weights, ModelError> {
    let mut blocks = SeededRng::new(7);
    let narrow = DecoderConfig { dtype: TensorType::Bf16, ..config.clone() };
    let random = random_model(&narrow, 1)?;
    let mut tensors = Vec::new();
    for spec in config.tensors() {
        if let Some(format) = format
            && spec.role.is_matrix()
        {
            let (name, shape) = (spec.name, spec.shape);
            let bytes = Cow::Owned(format.random(shape.iter().product(), &mut blocks));
            tensors.push(Tensor { name, dtype: format.dtype, shape, bytes });
            continue;
        }
        let is_norm = matches!(spec.role, TensorRole::Norm | TensorRole::PlainNorm);
        let gain = if is_norm { 1.0 } else { GAIN };
        let tensor = random.tensor(&spec.name, &spec.shape)?;
        let halves = tensor.bytes.as_chunks().0.iter();
        let bytes = halves.flat_map(|half: &[u8; 2]| {
            let value = f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16);
            (gain * value).to_le_bytes()
        });
        let bytes = Cow::Owned(bytes.collect());
        let (name, shape, dtype) = (spec.name, spec.shape, TensorType::F32);
        tensors.push(Tensor { name, dtype, shape, bytes });
    }
    Weights::from_tensors("random model", tensors)
}
