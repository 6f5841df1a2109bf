//! The decoder's configuration: one description that all supported architectures fit into.
//!
//! Built once by the loader (from `config.json`, from a GGUF's metadata or from a preset),
//! checked there, and constant afterwards. The forward pass reads these fields and never asks
//! for the architecture by name.

pub(crate) mod gguf;
mod hf;
mod keys;
mod rope;
mod tensors;

pub(crate) use hf::{ParsedConfig, parse as parse_json};
pub(crate) use keys::Keys;
pub use rope::{Rope, RopeScaling};
pub use tensors::{TensorRole, TensorSpec};

use crate::error::ModelError;
use crate::weights::TensorType;

/// Most layers a configuration may state: far above any model, far below what hurts to allocate.
pub(crate) const LAYERS_MAX: usize = 4096;

/// The architectures the decoder can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 1 to 3.3 and models that reuse it.
    Llama,
    /// Mistral, with or without a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: norms on each head's q and k.
    Qwen3,
    /// Gemma 3, text part: four norms a layer, local and global layers.
    Gemma3,
}

impl Architecture {
    /// Hugging Face's `model_type`, the name used in messages and statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3_text",
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

/// What one layer does differently from the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Index into [`DecoderConfig::ropes`].
    pub rope: usize,
    /// Positions a query sees, its own included: a query at `p` reads keys at
    /// `p + 1 - window ..= p`. `None` sees everything before it. At least 1.
    pub sliding_window: Option<usize>,
}

/// Everything the forward pass needs to know besides the weights. All sizes are at least 1.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Where the configuration came from; for messages, not for branches.
    pub architecture: Architecture,
    /// Rows of the embedding and of the output matrix.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a head, even; `num_heads * head_dim` needs not be `hidden_size`.
    pub head_dim: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Norms scale by `norm_offset + weight`: 1 for Gemma's safetensors, else 0.
    pub norm_offset: f32,
    /// Positions the model was made for: prompt and generated tokens together.
    pub max_positions: usize,
    /// The output matrix is the embedding; no `lm_head.weight` is read.
    pub tie_word_embeddings: bool,
    /// `q_proj`, `k_proj` and `v_proj` have biases.
    pub qkv_bias: bool,
    /// `o_proj` has a bias.
    pub output_bias: bool,
    /// `gate_proj`, `up_proj` and `down_proj` have biases.
    pub mlp_bias: bool,
    /// `q_norm` and `k_norm`, `[head_dim]` each, are applied to every head before rope.
    pub qk_norm: bool,
    /// Gemma's layer: `post_attention_layernorm` is applied to the attention's output before it
    /// is added, and the MLP stands between `pre_feedforward_layernorm` and
    /// `post_feedforward_layernorm`. Otherwise `post_attention_layernorm` is the MLP's input norm.
    pub sandwich_norms: bool,
    /// The MLP's gate function.
    pub activation: Activation,
    /// Embeddings are multiplied by it (Gemma: the square root of `hidden_size`).
    pub embedding_scale: Option<f32>,
    /// Attention scores are multiplied by it before the softmax.
    pub attention_scale: f32,
    /// The rotary embeddings in use: one, or a global and a local one.
    pub ropes: Vec<Rope>,
    /// One entry a layer.
    pub layers: Vec<LayerConfig>,
    /// Type most weights are stored in, as far as the configuration says; F32 when it does not.
    pub dtype: TensorType,
}

impl DecoderConfig {
    /// Reads a Hugging Face `config.json`; `file` is its name for messages.
    ///
    /// # Errors
    /// [`ModelError::UnknownArchitecture`], [`ModelError::InvalidKey`], or
    /// [`ModelError::Unsupported`] for an option that is valid and not implemented.
    pub fn from_json(file: &str, value: &serde_json::Value) -> Result<Self, ModelError> {
        parse_json(file, value).map(|parsed| parsed.decoder)
    }

    /// Checks what the fields promise each other. `file` is named in the error.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`] for the first field that breaks its documentation.
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
        if !self.head_dim.is_multiple_of(2) {
            return Err(ModelError::key(file, "head_dim", "an even number", self.head_dim));
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
        for rope in &self.ropes {
            rope.check(file, self.head_dim)?;
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
}
