//! The decoder's configuration: one description that all supported architectures fit into.
//!
//! Built once by the loader (from `config.json`, from a GGUF's metadata or from a preset),
//! checked there, and constant afterwards. The forward pass reads these fields and never asks
//! for the architecture by name.

mod rope;

pub use rope::{Rope, RopeScaling};

use crate::weights::TensorType;

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
