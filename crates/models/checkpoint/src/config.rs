//! The decoder's configuration: one description that all supported architectures fit into.
//!
//! The loader builds and checks it once, from `config.json`, from the metadata of a GGUF file or
//! from a preset. It is constant afterwards. The forward pass reads these fields and never branches
//! on the architecture.

mod architecture;
mod attention;
mod delta_net;
mod draft_head;
pub(crate) mod eagle3;
mod experts;
pub(crate) mod gemma4_assistant;
pub(crate) mod gguf;
mod hf;
mod keys;
mod latent;
mod layer;
mod mamba2;
mod mlp;
mod mtp;
mod norms;
mod pairs;
pub(crate) mod quantization;
mod recurrent;
mod rope;
mod tensors;
mod vision;

pub use architecture::Architecture;
pub(crate) use architecture::Dialect;
pub use attention::{AttentionConfig, KeysAndValues, QkNorm, QueryScaling};
pub use delta_net::{DeltaNetConfig, DeltaNetKind};
pub use draft_head::DraftHeadKind;
pub(crate) use draft_head::HeadFiles;
pub use eagle3::{Eagle3Config, Eagle3Weights, FeatureNorm};
pub use experts::sigmoid;
pub use experts::{ExpertChoice, ExpertGroups, ExpertScores, ExpertsConfig};
pub use gemma4_assistant::{AssistantConfig, AssistantWeights, ClusterConfig};
pub(crate) use hf::{ParsedConfig, parse as parse_json};
pub(crate) use keys::Keys;
pub use latent::{LatentConfig, LatentSizes};
pub use layer::{ConvolutionConfig, LayerConfig, MixerConfig};
pub use mamba2::Mamba2Config;
pub use mlp::{Activation, FeedForwardConfig, GateConfig, GateFunction, MlpConfig, PlainFunction};
pub use mtp::{MtpInput, MtpWeights};
pub use norms::{NormKind, NormPlacement, NormsConfig};
pub(crate) use pairs::AdjacentPairs;
pub use recurrent::{RecurrentShape, decay_rates};
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

/// Maximum number of layers of a configuration. It bounds the memory that is allocated for a
/// malformed file.
pub(crate) const LAYERS_MAX: usize = 4096;

/// Maximum number of elements of a head. Known models have up to 576.
pub(crate) const HEAD_DIM_MAX: usize = 1 << 16;

/// Per-layer embeddings (Gemma 4). Each token has a vector for each layer, the sum of an embedding
/// of its own and of a projection of the usual embedding. At the end of a layer, a gate computed
/// from the residual stream is multiplied with this vector, and the projection of the product is
/// added to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerInput {
    /// Number of values that a token has for each layer.
    pub width: usize,
    /// The function of the gate.
    pub gate: GateFunction,
}

impl PerLayerInput {
    /// Per-layer embeddings of `width` values, whose gates have the activation function of `mlp`;
    /// `None` if `width` is 0.
    fn of(width: usize, mlp: &MlpConfig) -> Option<Self> {
        let gate = match mlp.activation {
            Activation::Gated(GateConfig { function, .. }) => function,
            Activation::Plain(_) => GateFunction::GeluTanh,
        };
        (width > 0).then_some(Self { width, gate })
    }
}

/// The description of the forward pass, without the weights. All sizes are at least 1.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The architecture. It is used only in messages; the forward pass does not branch on it.
    pub architecture: Architecture,
    /// Number of rows of the embedding and of the output matrix.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The norms of the residual stream.
    pub norms: NormsConfig,
    /// Context length: the maximum number of positions, prompt and generated tokens together.
    pub max_positions: usize,
    /// Whether the embedding is also the output matrix, so that there is no `lm_head.weight`.
    pub tie_word_embeddings: bool,
    /// Whether the output matrix has a bias. This is possible only if it is not the embedding.
    pub head_bias: bool,
    /// Per-layer embeddings (Gemma 4); `None` if there are none.
    pub per_layer_input: Option<PerLayerInput>,
    /// Whether each layer has a learned factor by which the residual stream after it is multiplied
    /// (Gemma 4).
    pub layer_scales: bool,
    /// Factor of the embeddings (Gemma: the square root of `hidden_size`); `None` for 1.
    pub embedding_scale: Option<f32>,
    /// Factor of the outputs of attention and MLP when they are added to the residual stream, above
    /// 0; `None` for 1.
    pub residual_scale: Option<f32>,
    /// Factor of the logits, above 0; `None` for 1.
    pub logit_scale: Option<f32>,
    /// Soft cap of the logits, above 0; `None` if they are not capped.
    pub logit_softcap: Option<f32>,
    /// The rotary embeddings in use: either one, or a global and a local one.
    pub ropes: Vec<Rope>,
    /// One entry per layer.
    pub layers: Vec<LayerConfig>,
    /// The element type of most weights according to the configuration, or F32 if it does not say.
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

    /// Chooses the parameters that depend on `max_positions`, the context length that users have
    /// set. Returns notes for users about the choice.
    pub(crate) fn limit_context(&mut self, max_positions: Option<usize>) -> Vec<String> {
        let notes = self.ropes.iter_mut().filter_map(|rope| rope.scaling.limit(max_positions));
        notes.collect()
    }

    /// Checks the documented ranges of the fields and the relations between them. `file` is the
    /// file's name in error messages.
    ///
    /// # Errors
    /// [`ModelError::InvalidKey`] for the first field that is out of range.
    pub fn check(&self, file: &str) -> Result<(), ModelError> {
        self.check_sizes(file)?;
        self.check_numbers(file)?;
        self.check_blocks(file)?;
        self.check_experts(file)?;
        self.check_layers(file)?;
        for (index, rope) in self.ropes.iter().enumerate() {
            if let Some(rotary_dim) = self.rope_dim(index) {
                rope.check(file, rotary_dim, self.max_positions)?;
            }
        }
        let mut ropes = self.layers.iter().filter_map(LayerConfig::rope);
        if let Some(rope) = ropes.find(|rope| *rope >= self.ropes.len()) {
            let expected = format!("an index below {}", self.ropes.len());
            return Err(ModelError::key(file, "rope", expected, rope));
        }
        Ok(())
    }

    fn check_sizes(&self, file: &str) -> Result<(), ModelError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
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
        let width = self.per_layer_input.map_or(1, |input| input.width);
        for size in [width, width.saturating_mul(self.layers.len())] {
            if self.per_layer_input.is_some() && (size == 0 || size as u64 > keys::SIZE_MAX) {
                let expected = format!("1 to {}", keys::SIZE_MAX);
                return Err(ModelError::key(file, "hidden_size_per_layer_input", expected, size));
            }
        }
        Ok(())
    }

    fn check_numbers(&self, file: &str) -> Result<(), ModelError> {
        let floats = [
            ("rms_norm_eps", self.norms.eps),
            ("embedding_scale", self.embedding_scale.unwrap_or(1.0)),
            ("residual_scale", self.residual_scale.unwrap_or(1.0)),
            ("logit_scale", self.logit_scale.unwrap_or(1.0)),
            ("final_logit_softcapping", self.logit_softcap.unwrap_or(1.0)),
        ];
        match floats.into_iter().find(|(_, number)| !number.is_finite() || *number <= 0.0) {
            Some((key, number)) => {
                Err(ModelError::key(file, key, "a finite number above 0", number))
            }
            None => Ok(()),
        }
    }
}
