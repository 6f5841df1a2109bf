//! The decoder's configuration: one description that all supported architectures fit into.
//!
//! The loader builds and checks it once, from `config.json`, from the metadata of a GGUF file or
//! from a preset. It is constant afterwards. The forward pass reads these fields and never branches
//! on the architecture.

mod architecture;
mod delta_net;
mod experts;
pub(crate) mod gguf;
mod hf;
mod keys;
mod latent;
mod layer;
mod mamba2;
mod multipliers;
mod norms;
mod pairs;
pub(crate) mod quantization;
mod recurrent;
mod rope;
mod tensors;
mod vision;

pub use architecture::Architecture;
pub use delta_net::{DeltaNetConfig, DeltaNetKind};
pub use experts::sigmoid;
pub use experts::{ExpertChoice, ExpertGroups, ExpertScores, ExpertsConfig};
pub(crate) use hf::{ParsedConfig, parse as parse_json};
pub(crate) use keys::Keys;
pub use latent::LatentConfig;
pub use layer::{HeadShape, LayerConfig, MixerKind, MlpKind};
pub use mamba2::Mamba2Config;
pub use multipliers::Multipliers;
pub use norms::{NormKind, NormPlacement};
pub(crate) use pairs::AdjacentPairs;
pub use recurrent::RecurrentShape;
pub use rope::{Rope, RopeScaling, ShortContext};
pub use tensors::{
    AttentionWeights, ConvolutionWeights, DecoderWeights, DeltaNetWeights, DenseAndExpertsWeights,
    ExpertsWeights, FactoredWeights, FeedForwardWeights, LatentWeights, LayerWeights,
    LinearWeights, Mamba2Weights, MixerWeights, MlpInputs, MlpWeights, NormWeights,
    PerLayerEmbeddingWeights, PerLayerWeights, QkvWeights, SelectiveWeights, SharedExpertWeights,
    StackedWeights, TensorRole, TensorSpec,
};
pub use vision::{
    LayerNormWeights, MergerWeights, ProjectorWeights, RegionWeights, ValueWeights,
    VisionLayerWeights, VisionWeights,
};
pub use vision::{PatchPositions, ProjectorConfig, RegionConfig, TowerConfig, VisionConfig};

pub use stolon_kernels::Rule;
use stolon_kernels::TensorType;

use crate::error::ModelError;

/// Maximum number of layers of a configuration. It bounds what is allocated for a malformed file.
pub(crate) const LAYERS_MAX: usize = 4096;

/// Maximum number of elements of a head. Known models have up to 576.
pub(crate) const HEAD_DIM_MAX: usize = 1 << 16;

/// Maximum number of taps of a convolution. Known models have 3.
const CONVOLUTION_TAPS_MAX: usize = 64;

/// The activation function of MLPs: of their gate, if they have one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation (`gelu_pytorch_tanh`).
    GeluTanh,
    /// gpt-oss: `x * sigmoid(alpha * x)`, where `x` is at most `limit`. The other factor is clamped
    /// to `-limit..=limit`, and 1 is added to it.
    ClampedSwiglu {
        /// Factor of the sigmoid's argument, above 0.
        alpha: f32,
        /// Bound of both inputs, above 0.
        limit: f32,
    },
    /// `max(x, 0)^2` (Nemotron-H). Only in MLPs without a gate.
    SquaredRelu,
}

/// What the norms `q_norm` and `k_norm` are applied to, before the rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head. The weights are `[head_dim]`.
    Head,
    /// All heads of a position together (OLMo 2). The weights are `[num_heads * head_dim]` and
    /// `[num_kv_heads * head_dim]`.
    Position,
}

/// A factor of queries that grows with the position, so that attention stays as selective in long
/// contexts (Ministral 3, as in Llama 4): `1 + beta * ln(1 + floor(position / step))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScaling {
    /// How fast the factor grows, above 0.
    pub beta: f32,
    /// Number of positions with the same factor: the context of the original training.
    pub step: usize,
}

impl QueryScaling {
    /// The factor of the queries at `position`. It is 1 at all positions below `step`.
    #[must_use]
    pub fn factor(self, position: usize) -> f32 {
        1.0 + self.beta * ((1 + position / self.step) as f32).ln()
    }
}

/// Everything that the forward pass needs apart from the weights. All sizes are at least 1.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The architecture. Used in messages only; the forward pass does not branch on it.
    pub architecture: Architecture,
    /// Number of rows of the embedding and of the output matrix.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP in layers without experts and without [`LayerConfig::intermediate_size`].
    pub intermediate_size: usize,
    /// The mixture of experts, if at least one layer has one.
    pub experts: Option<ExpertsConfig>,
    /// Number of positions that enter each output of a convolution, its own included: from 2 to 64.
    /// `None` if no layer has one.
    pub convolution_taps: Option<usize>,
    /// Latent attention, which all layers with attention have then; `None` if no layer has it.
    pub latent: Option<LatentConfig>,
    /// The layers with Gated DeltaNet or Kimi Delta Attention; `None` if there are none.
    pub delta_net: Option<DeltaNetConfig>,
    /// The layers with Mamba-2; `None` if there are none. No model has both.
    pub mamba2: Option<Mamba2Config>,
    /// Number of query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Number of key heads and of value heads, in layers without [`LayerConfig::heads`].
    pub num_kv_heads: usize,
    /// Number of elements of a head, which is even, in layers without [`LayerConfig::heads`].
    /// `num_heads * head_dim` may differ from `hidden_size`.
    pub head_dim: usize,
    /// Number of leading elements of each head that are rotated (Phi-4-mini: three of four), which
    /// is even and at most `head_dim`. `None` for all. Only if all layers have the same heads.
    pub rotary_dim: Option<usize>,
    /// Added to the mean square in every RMS norm, and to the variance in layer norms.
    pub rms_norm_eps: f32,
    /// Every RMS norm multiplies by `norm_offset + weight`. 1 for Gemma's safetensors, else 0.
    pub norm_offset: f32,
    /// Context length: the maximum number of positions, prompt and generated tokens together.
    pub max_positions: usize,
    /// Whether the embedding is also the output matrix, so that there is no `lm_head.weight`.
    pub tie_word_embeddings: bool,
    /// Whether the output matrix has a bias. Only if it is not the embedding.
    pub head_bias: bool,
    /// Whether `q_proj`, `k_proj` and `v_proj` have biases.
    pub qkv_bias: bool,
    /// Whether `o_proj` has a bias.
    pub output_bias: bool,
    /// Whether the output of attention is multiplied by the sigmoid of a gate, which is a
    /// projection like that to queries (Qwen3-Next).
    pub output_gate: bool,
    /// Whether `gate_proj`, `up_proj` and `down_proj` have biases, also those of experts.
    pub mlp_bias: bool,
    /// The norms of queries and keys; `None` if there are none.
    pub qk_norm: Option<QkNorm>,
    /// Whether each head of the values is normalized, by an RMS norm without weights (Gemma 4).
    pub value_norm: bool,
    /// Where layers normalize the residual stream.
    pub norms: NormPlacement,
    /// The kind of these norms, and of the one before the output matrix.
    pub norm_kind: NormKind,
    /// The activation function of MLPs.
    pub activation: Activation,
    /// Whether the MLP has a gate: `down(activation(gate(x)) * up(x))`. Otherwise it is
    /// `down(activation(up(x)))`, without experts.
    pub mlp_gate: bool,
    /// Per-layer embeddings (Gemma 4): the number of values that each token has for each layer,
    /// from an embedding of its own and a projection of the usual one. At the end of a layer, they
    /// are the other factor of a gated projection of the residual stream, whose result is added to
    /// it. `None` if there are none.
    pub per_layer_input: Option<usize>,
    /// Whether each layer has a learnt factor, with which the residual stream after it is
    /// multiplied (Gemma 4).
    pub layer_scales: bool,
    /// Whether attention is selective (Moondream 3): queries and values have factors that depend on
    /// the token and on its position, before the rotary embedding. With `x`, a token's queries, keys
    /// and values one after the other, that of a head is
    /// `tanh(w * gelu(x)) + sigmoid(alpha * ln(position + 1)) + 0.5`. Only with plain attention
    /// that has as many key heads as query heads.
    pub selective_attention: bool,
    /// Whether each head has an attention sink: a learnt score that takes part in the softmax as
    /// one more position without a value.
    pub attention_sinks: bool,
    /// Factor of the embeddings (Gemma: the square root of `hidden_size`); `None` for 1.
    pub embedding_scale: Option<f32>,
    /// Factor of the outputs of attention and MLP when they are added to the residual stream, above
    /// 0; `None` for 1.
    pub residual_scale: Option<f32>,
    /// Factors of parts of layers; `None` if there are none.
    pub multipliers: Option<Multipliers>,
    /// Factor of the logits, above 0; `None` for 1.
    pub logit_scale: Option<f32>,
    /// Factor of the attention scores before the softmax, above 0.
    pub attention_scale: f32,
    /// The factor of queries that depends on the position; `None` for 1. Not with
    /// [`QkNorm::Position`].
    pub query_scaling: Option<QueryScaling>,
    /// Attention scores, after the multiplication by `attention_scale`, are bounded by soft-capping
    /// (`cap * tanh(score / cap)`) with this cap, above 0. `None` for no soft-capping.
    pub attention_softcap: Option<f32>,
    /// Logits are bounded by soft-capping with this cap, above 0. `None` for no soft-capping.
    pub logit_softcap: Option<f32>,
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

    /// Chooses what depends on the maximum number of positions, to which users limit the context.
    /// Returns what they are told about the choice.
    pub(crate) fn limit_context(&mut self, max_positions: Option<usize>) -> Vec<String> {
        let notes = self.ropes.iter_mut().filter_map(|rope| rope.scaling.limit(max_positions));
        notes.collect()
    }

    /// Number of leading elements of each head that are rotated, in layers without
    /// [`LayerConfig::heads`].
    #[must_use]
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim.unwrap_or(self.head_dim)
    }

    /// Checks the documented ranges of the fields and the relations between them. `file` is the
    /// file's name in error messages.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`] for the first field that is out of range.
    pub fn check(&self, file: &str) -> Result<(), ModelError> {
        // It names the keys that the sizes of heads are made of.
        self.check_latent(file)?;
        self.check_sizes(file)?;
        self.check_numbers(file)?;
        self.check_blocks(file)?;
        self.check_experts(file)?;
        self.check_mixers(file)?;
        self.check_multipliers(file)?;
        self.check_layers(file)?;
        for (index, rope) in self.ropes.iter().enumerate() {
            rope.check(file, self.rope_dim(index), self.max_positions)?;
        }
        for layer in &self.layers {
            if let Some(rope) = layer.rope.filter(|rope| *rope >= self.ropes.len()) {
                let expected = format!("an index below {}", self.ropes.len());
                return Err(ModelError::key(file, "rope", expected, rope));
            }
            if layer.sliding_window == Some(0) {
                return Err(ModelError::key(file, "sliding_window", "at least 1", 0));
            }
        }
        Ok(())
    }

    fn check_sizes(&self, file: &str) -> Result<(), ModelError> {
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
        let rotary_dim = self.rotary_dim();
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > self.head_dim {
            let expected = format!("an even number from 2 to {}", self.head_dim);
            return Err(ModelError::key(file, "rotary_dim", expected, rotary_dim));
        }
        if (self.num_heads * self.head_dim) as u64 > keys::SIZE_MAX {
            let expected = format!("at most {} with this head_dim", keys::SIZE_MAX);
            return Err(ModelError::key(file, "num_attention_heads", expected, self.num_heads));
        }
        Ok(())
    }

    fn check_numbers(&self, file: &str) -> Result<(), ModelError> {
        let (alpha, limit) = match self.activation {
            Activation::ClampedSwiglu { alpha, limit } => (alpha, limit),
            Activation::Silu | Activation::GeluTanh | Activation::SquaredRelu => (1.0, 1.0),
        };
        let floats = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("attention_scale", self.attention_scale),
            ("llama_4_scaling_beta", self.query_scaling.map_or(1.0, |scaling| scaling.beta)),
            ("embedding_scale", self.embedding_scale.unwrap_or(1.0)),
            ("residual_scale", self.residual_scale.unwrap_or(1.0)),
            ("swiglu_alpha", alpha),
            ("swiglu_limit", limit),
            ("logit_scale", self.logit_scale.unwrap_or(1.0)),
            ("attn_logit_softcapping", self.attention_softcap.unwrap_or(1.0)),
            ("final_logit_softcapping", self.logit_softcap.unwrap_or(1.0)),
        ];
        if let Some(scaling) = self.query_scaling
            && (scaling.step == 0 || self.qk_norm == Some(QkNorm::Position))
        {
            let expected = "a context of at least 1, and no norm over all heads";
            return Err(ModelError::key(file, "llama_4_scaling_beta", expected, scaling.beta));
        }
        match floats.into_iter().find(|(_, number)| !number.is_finite() || *number <= 0.0) {
            Some((key, number)) => {
                Err(ModelError::key(file, key, "a finite number above 0", number))
            }
            None => Ok(()),
        }
    }

    /// Whether at least one layer mixes positions in this way.
    pub(crate) fn has(&self, mixer: MixerKind) -> bool {
        self.layers.iter().any(|layer| layer.has(mixer))
    }

    fn check_mixers(&self, file: &str) -> Result<(), ModelError> {
        let is_known = |layer: &LayerConfig| match layer.mixers {
            [] => layer.mlp.is_some(),
            // Both kinds of gates would be in the same buffer.
            [MixerKind::Attention, MixerKind::Mamba2] => !self.output_gate,
            mixers => mixers.len() == 1,
        };
        if !self.layers.iter().all(is_known) {
            let expected =
                "layers with a mixer, Mamba-2 next to attention without gates, or an MLP";
            return Err(ModelError::unsupported(file, "layer_types", expected, "others"));
        }
        let taps = self.convolution_taps.unwrap_or(0);
        if self.has(MixerKind::Convolution) && !(2..=CONVOLUTION_TAPS_MAX).contains(&taps) {
            let expected = format!("2 to {CONVOLUTION_TAPS_MAX}");
            return Err(ModelError::key(file, "conv_L_cache", expected, taps));
        }
        match (&self.delta_net, &self.mamba2) {
            (Some(delta_net), None) => delta_net.check(file)?,
            (None, Some(mamba2)) => mamba2.check(file)?,
            _ if self.recurrent_layers() == 0 => {}
            _ => {
                let expected = "the sizes of recurrent layers of one kind";
                return Err(ModelError::key(file, "layer_types", expected, "others"));
            }
        }
        // The KV store, whose blocks also have the checkpoints of states, has something to store.
        if self.layers.iter().any(LayerConfig::has_attention) || self.has(MixerKind::Convolution) {
            return Ok(());
        }
        let expected = "at least one layer with full_attention";
        Err(ModelError::unsupported(file, "layer_types", expected, "none"))
    }

    fn check_experts(&self, file: &str) -> Result<(), ModelError> {
        let layers = self.layers.iter().filter(|layer| layer.has_experts()).count();
        let Some(experts) = &self.experts else {
            let missing = || ModelError::key(file, "num_experts", "1 or more", "nothing");
            return if layers > 0 { Err(missing()) } else { Ok(()) };
        };
        let next_to_mlp = |layer: &LayerConfig| layer.mlp == Some(MlpKind::DenseAndExperts);
        let is_known = match self.norms {
            NormPlacement::InputAndOutput => self.layers.iter().all(next_to_mlp),
            norms => !norms.outputs() && !self.layers.iter().any(next_to_mlp),
        };
        if !is_known {
            let expected = "norms of the inputs of experts, or also of the outputs of experts and an \
                            MLP next to each other in all layers";
            return Err(ModelError::unsupported(file, "num_experts", expected, layers));
        }
        experts.check(file, layers)
    }
}
