//! The models on which backends are compared: one small model with random weights per architecture,
//! made from a configuration in this file, or a model that the user names.

use std::borrow::Cow;

use serde_json::{Value, json};
use stolon_cuda::{CandleBackend, CandleOptions, ComputeType, DeviceChoice, OpenError};
use stolon_model::config::TensorRole;
use stolon_model::{
    DecoderConfig, KvBudget, LoadOptions, ModelError, ModelSource, Tensor, TensorType, Weights,
    load, random_model,
};

/// By how much the random weights are larger than those of `random_model`, whose attention would be
/// almost the same for all positions. A power of two, so that half precision represents the weights
/// as well as before.
const GAIN: f32 = 4.0;

/// Opens backends of the kind that is checked. Tests have wrong ones.
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
    pub(super) batch_invariant: bool,
    pub(super) cuda_graphs: bool,
}

impl Setup {
    /// With batch invariance and without graphs.
    pub(super) fn new(device: DeviceChoice, compute_type: Option<ComputeType>) -> Self {
        Self { device, compute_type, batch_invariant: true, cuda_graphs: false }
    }

    /// Options with a KV store of `blocks` blocks of 32 positions.
    pub(super) fn options(&self, blocks: usize) -> CandleOptions {
        CandleOptions {
            device: self.device,
            block_size: BLOCK_SIZE,
            kv_budget: KvBudget::Blocks(blocks),
            compute_type: self.compute_type,
            batch_invariant: self.batch_invariant,
            cuda_graphs: self.cuda_graphs,
            ..CandleOptions::default()
        }
    }
}

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
    /// Random weights in f32, whose values are exact in bf16.
    Config(Box<DecoderConfig>),
    Model(ModelSource),
}

impl Subject {
    /// A model that the user names.
    pub(super) fn model(source: &ModelSource) -> Self {
        Self { name: source.to_string(), source: Source::Model(source.clone()) }
    }

    pub(super) fn load(&self) -> Result<(DecoderConfig, Weights), ModelError> {
        match &self.source {
            Source::Config(config) => Ok(((**config).clone(), weights(config)?)),
            Source::Model(source) => {
                let model = load(source, &LoadOptions::default())?;
                Ok((model.config, model.weights))
            }
        }
    }
}

/// One model per architecture.
pub(super) fn architectures() -> Result<Vec<Subject>, ModelError> {
    let subject = |(name, own): (&str, Value)| {
        let mut value = json!({
            "model_type": name, "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "max_position_embeddings": 1024, "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "dtype": "float32",
        });
        if let (Some(value), Value::Object(own)) = (value.as_object_mut(), own) {
            value.extend(own);
        }
        let config = DecoderConfig::from_json(name, &value)?;
        Ok(Subject { name: name.to_owned(), source: Source::Config(Box::new(config)) })
    };
    configurations().into_iter().map(subject).collect()
}

/// What the architectures have besides the common sizes. Windows are shorter than the prompts of
/// the checks.
fn configurations() -> [(&'static str, Value); 14] {
    let alternating = json!(["sliding_attention", "full_attention"]);
    let yarn = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
    });
    [
        (
            "llama",
            json!({
                "attention_bias": true, "mlp_bias": true,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                },
            }),
        ),
        ("mistral", json!({ "sliding_window": 40 })),
        ("qwen2", json!({ "rope_scaling": yarn.clone(), "tie_word_embeddings": true })),
        ("qwen3", json!({ "head_dim": 128 })),
        (
            "granite",
            json!({
                "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 4.0,
                "residual_multiplier": 0.7,
            }),
        ),
        ("olmo2", json!({ "head_dim": 32 })),
        ("smollm3", json!({ "no_rope_layers": [1, 0] })),
        (
            "phi3",
            json!({
                "partial_rotary_factor": 0.75, "sliding_window": 60,
                "original_max_position_embeddings": 64,
                "rope_scaling": {
                    "type": "longrope", "short_factor": vec![1.1; 24], "long_factor": vec![3.0; 24],
                },
            }),
        ),
        (
            "gemma2",
            json!({
                "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 0.3, "layer_types": alternating.clone(),
                "sliding_window": 40, "tie_word_embeddings": true,
                "hidden_activation": "gelu_pytorch_tanh",
            }),
        ),
        (
            "gemma3_text",
            json!({
                "head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": alternating.clone(),
                "sliding_window": 40, "tie_word_embeddings": true, "rope_local_base_freq": 1000.0,
                "hidden_activation": "gelu_pytorch_tanh",
            }),
        ),
        ("mixtral", json!({ "num_local_experts": 5, "num_experts_per_tok": 2 })),
        (
            "qwen2_moe",
            json!({
                "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 96, "decoder_sparse_step": 1, "head_dim": null,
            }),
        ),
        (
            "qwen3_moe",
            json!({
                "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
                "norm_topk_prob": true,
            }),
        ),
        (
            "gpt_oss",
            json!({
                "attention_bias": true, "num_local_experts": 4, "num_experts_per_tok": 2,
                "layer_types": alternating, "sliding_window": 40, "rope_scaling": yarn,
                "swiglu_limit": 7.0,
            }),
        ),
    ]
}

/// Random weights for `config`. They do not depend on the machine.
fn weights(config: &DecoderConfig) -> Result<Weights, ModelError> {
    let narrow = DecoderConfig { dtype: TensorType::Bf16, ..config.clone() };
    let random = random_model(&narrow, 1)?;
    let mut tensors = Vec::new();
    for spec in config.tensors() {
        let gain = if spec.role == TensorRole::Norm { 1.0 } else { GAIN };
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
