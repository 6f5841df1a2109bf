//! The decoder's configuration: one description that all supported architectures fit into.
//!
//! The loader builds and checks it once, from `config.json`, from the metadata of a GGUF file or
//! from a preset. It is constant afterwards. The forward pass reads these fields and never branches
//! on the architecture.

mod experts;
pub(crate) mod gguf;
mod hf;
mod keys;
mod rope;
mod tensors;

pub use experts::ExpertsConfig;
pub(crate) use hf::{ParsedConfig, parse as parse_json};
pub(crate) use keys::Keys;
pub use rope::{Rope, RopeScaling};
pub use tensors::{TensorRole, TensorSpec};

use crate::error::ModelError;
use crate::weights::TensorType;

/// Maximum number of layers of a configuration. It bounds what is allocated for a malformed file.
pub(crate) const LAYERS_MAX: usize = 4096;

/// Maximum number of elements of a head. Known models have up to 576.
pub(crate) const HEAD_DIM_MAX: usize = 1 << 16;

/// The architectures that the decoder supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 1 to 3.3 and models with the same architecture.
    Llama,
    /// Mistral, with or without a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: the projections of q, k and v have biases.
    Qwen2,
    /// Qwen3: q and k of each head are normalized.
    Qwen3,
    /// The text part of Gemma 3: four norms per layer, local and global layers.
    Gemma3,
    /// Mixtral: Mistral with a mixture of experts in each layer.
    Mixtral,
    /// Qwen1.5-MoE and Qwen2-MoE: a mixture of experts with a shared expert.
    Qwen2Moe,
    /// Qwen3-MoE: a mixture of experts.
    Qwen3Moe,
}

impl Architecture {
    /// Hugging Face's `model_type`, which is used in messages and statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3_text",
            Self::Mixtral => "mixtral",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
        }
    }
}

/// The MLP's gate function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation (`gelu_pytorch_tanh`).
    GeluTanh,
}

/// The properties in which layers may differ from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Index into [`DecoderConfig::ropes`].
    pub rope: usize,
    /// Number of positions that a query attends to, including its own: a query at position `p`
    /// reads the keys at `p + 1 - window ..= p`. At least 1. With `None`, it reads all keys up to
    /// its own.
    pub sliding_window: Option<usize>,
    /// Whether the MLP is the mixture of experts that [`DecoderConfig::experts`] describes.
    pub experts: bool,
}

/// Everything that the forward pass needs besides the weights. All sizes are at least 1.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The architecture. Used in messages only; the forward pass does not branch on it.
    pub architecture: Architecture,
    /// Number of rows of the embedding and of the output matrix.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP in layers without experts.
    pub intermediate_size: usize,
    /// The mixture of experts, if at least one layer has one.
    pub experts: Option<ExpertsConfig>,
    /// Number of query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Number of key heads and of value heads.
    pub num_kv_heads: usize,
    /// Number of elements of a head, which is even. `num_heads * head_dim` may differ from
    /// `hidden_size`.
    pub head_dim: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Every RMS norm multiplies by `norm_offset + weight`. 1 for Gemma's safetensors, else 0.
    pub norm_offset: f32,
    /// Context length: the maximum number of positions, prompt and generated tokens together.
    pub max_positions: usize,
    /// Whether the embedding is also the output matrix, so that there is no `lm_head.weight`.
    pub tie_word_embeddings: bool,
    /// Whether `q_proj`, `k_proj` and `v_proj` have biases.
    pub qkv_bias: bool,
    /// Whether `o_proj` has a bias.
    pub output_bias: bool,
    /// Whether `gate_proj`, `up_proj` and `down_proj` have biases, also those of experts.
    pub mlp_bias: bool,
    /// Whether the norms `q_norm` and `k_norm`, `[head_dim]` each, are applied to every head before
    /// the rotary embedding.
    pub qk_norm: bool,
    /// Whether the layers have Gemma's four norms: `post_attention_layernorm` is applied to the
    /// attention's output before the residual is added, and `pre_feedforward_layernorm` and
    /// `post_feedforward_layernorm` are applied before and after the MLP. Otherwise
    /// `post_attention_layernorm` is the MLP's input norm.
    pub sandwich_norms: bool,
    /// The MLP's gate function.
    pub activation: Activation,
    /// Factor of the embeddings (Gemma: the square root of `hidden_size`); `None` for 1.
    pub embedding_scale: Option<f32>,
    /// Factor of the attention scores before the softmax, above 0.
    pub attention_scale: f32,
    /// The rotary embeddings in use: either one, or a global and a local one.
    pub ropes: Vec<Rope>,
    /// One entry per layer.
    pub layers: Vec<LayerConfig>,
    /// The element type of most weights according to the configuration, or F32 if it has none.
    pub dtype: TensorType,
}

impl DecoderConfig {
    /// Parses a Hugging Face `config.json`. `file` is its name in error messages.
    ///
    /// # Errors
    /// [`ModelError::UnknownArchitecture`], [`ModelError::InvalidKey`], or
    /// [`ModelError::Unsupported`] for an option that is valid but not implemented.
    pub fn from_json(file: &str, value: &serde_json::Value) -> Result<Self, ModelError> {
        parse_json(file, value).map(|parsed| parsed.decoder)
    }

    /// Checks the documented ranges of the fields and the relations between them. `file` is the
    /// file's name in error messages.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`] for the first field that is out of range.
    pub fn check(&self, file: &str) -> Result<(), ModelError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_positions),
            ("num_hidden_layers", self.layers.len()),
        ];
        for (key, size) in sizes {
            if size == 0 || size as u64 > keys::SIZE_MAX {
                return Err(ModelError::key(file, key, format!("1 to {}", keys::SIZE_MAX), size));
            }
        }
        if self.layers.len() > LAYERS_MAX {
            let expected = format!("at most {LAYERS_MAX}");
            return Err(ModelError::key(file, "num_hidden_layers", expected, self.layers.len()));
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {}", self.num_heads);
            return Err(ModelError::key(file, "num_key_value_heads", expected, self.num_kv_heads));
        }
        if !self.head_dim.is_multiple_of(2) || self.head_dim > HEAD_DIM_MAX {
            let expected = format!("an even number of at most {HEAD_DIM_MAX}");
            return Err(ModelError::key(file, "head_dim", expected, self.head_dim));
        }
        if (self.num_heads * self.head_dim) as u64 > keys::SIZE_MAX {
            let expected = format!("at most {} with this head_dim", keys::SIZE_MAX);
            return Err(ModelError::key(file, "num_attention_heads", expected, self.num_heads));
        }
        let floats = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("attention_scale", self.attention_scale),
            ("embedding_scale", self.embedding_scale.unwrap_or(1.0)),
        ];
        for (key, number) in floats {
            if !number.is_finite() || number <= 0.0 {
                return Err(ModelError::key(file, key, "a finite number above 0", number));
            }
        }
        self.check_experts(file)?;
        for rope in &self.ropes {
            rope.check(file, self.head_dim, self.max_positions)?;
        }
        for layer in &self.layers {
            if layer.rope >= self.ropes.len() {
                let expected = format!("an index below {}", self.ropes.len());
                return Err(ModelError::key(file, "rope", expected, layer.rope));
            }
            if layer.sliding_window == Some(0) {
                return Err(ModelError::key(file, "sliding_window", "at least 1", 0));
            }
        }
        Ok(())
    }
    fn check_experts(&self, file: &str) -> Result<(), ModelError> {
        let layers = self.layers.iter().filter(|layer| layer.experts).count();
        let Some(experts) = &self.experts else {
            let missing = || ModelError::key(file, "num_experts", "1 or more", "nothing");
            return if layers > 0 { Err(missing()) } else { Ok(()) };
        };
        if self.sandwich_norms {
            return Err(ModelError::unsupported(
                file,
                "num_experts",
                "no norm after experts",
                layers,
            ));
        }
        experts.check(file, layers)
    }
}
