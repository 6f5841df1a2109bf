//! The weights of a decoder: the names, shapes and kinds of all tensors, and the tensors that files
//! may store as one.
//!
//! [`DecoderConfig::weights`] is the only list of them. Loading checks that each is present, random
//! models fill them, and both backends load a layer from its [`LayerWeights`]. The backends
//! destructure it with every field named, so a field that is added here is a compile error until
//! each backend loads it.

mod delta_net;
mod feed_forward;
mod list;
mod mixers;
mod per_layer;

use super::{DecoderConfig, NormKind};
pub use delta_net::{DeltaNetWeights, FactoredWeights};
pub use feed_forward::{
    DenseAndExpertsWeights, ExpertsWeights, FeedForwardWeights, MlpInputs, MlpWeights,
    SharedExpertWeights,
};
pub use mixers::{
    AttentionWeights, ConvolutionWeights, LatentWeights, Mamba2Weights, MixerWeights, QkvWeights,
    SelectiveWeights,
};
pub use per_layer::{PerLayerEmbeddingWeights, PerLayerWeights};

/// The kind of a tensor. Random models choose its values by it, and backends its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// The embedding that is also the output matrix.
    Embedding,
    /// A matrix of which only rows are read, by token id, such as an embedding that is not also the
    /// output matrix. A backend can leave it in the file.
    Table,
    /// The matrix of a projection.
    Matrix,
    /// A small matrix whose errors would matter more than errors of other matrices, because its
    /// results decide between alternatives or enter many other results. It is never rounded to a
    /// less precise type.
    Router,
    /// The weight of an RMS norm, to which [`NormsConfig::offset`](super::NormsConfig::offset) is added.
    Norm,
    /// The weight of an RMS norm without an offset or of a layer norm, or factors of a layer's
    /// results.
    PlainNorm,
    /// A bias, the scores of attention sinks, or learned positions of patches.
    Bias,
    /// The taps of a convolution.
    Taps,
}

impl TensorRole {
    /// Whether the tensor is a matrix that activations are multiplied with.
    #[must_use]
    pub fn is_matrix(self) -> bool {
        match self {
            Self::Embedding | Self::Table | Self::Matrix | Self::Router => true,
            Self::Norm | Self::PlainNorm | Self::Bias | Self::Taps => false,
        }
    }
}

/// Name, shape and kind of a tensor that a configuration requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The Hugging Face name.
    pub name: String,
    /// The sizes of the dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The kind of tensor.
    pub role: TensorRole,
}

/// A projection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearWeights {
    /// The matrix, `[out, in]`.
    pub weight: TensorSpec,
    /// The bias, `[out]`, if there is one.
    pub bias: Option<TensorSpec>,
}

/// Projections with the same input. A file may store one matrix instead, which has the rows of all
/// of them, one after the other (Phi-3), and a backend may keep them so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackedWeights<const N: usize> {
    /// The name of the matrix that a file may have instead of the parts' matrices.
    pub name: String,
    /// The projections, in the order of their rows.
    pub parts: [LinearWeights; N],
}

/// A norm of rows of the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct NormWeights {
    /// The kind of norm.
    pub kind: NormKind,
    /// Epsilon that is added to the mean square, or to the variance.
    pub eps: f32,
    /// Offset that is added to the weights.
    pub offset: f32,
    /// `[hidden_size]`.
    pub weight: TensorSpec,
    /// `[hidden_size]`, for [`NormKind::Layer`] only.
    pub bias: Option<TensorSpec>,
}

/// The weights of one layer, in the order of the forward pass. Norms are `[hidden_size]` unless
/// stated otherwise, and `None` if the layer does not have them.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerWeights {
    /// Norm of the residual stream before the mixers.
    pub attention_input_norm: Option<NormWeights>,
    /// The mixers, in the order of [`LayerConfig::mixers`].
    ///
    /// [`LayerConfig::mixers`]: super::LayerConfig::mixers
    pub mixers: Vec<MixerWeights>,
    /// Norm of attention's output before it is added to the residual stream.
    pub attention_output_norm: Option<NormWeights>,
    /// Norm of the residual stream before the MLP or the experts. If there is none, they read the
    /// input of attention in parallel layers, and the residual stream itself in other layers.
    pub mlp_input_norm: Option<NormWeights>,
    /// The MLP or the experts, if the layer has any.
    pub mlp: Option<FeedForwardWeights>,
    /// Norm of the MLP's output before it is added to the residual stream.
    pub mlp_output_norm: Option<NormWeights>,
    /// The layer's weights for per-layer embeddings, if the model has them.
    pub per_layer: Option<PerLayerWeights>,
    /// Factor of the layer's output, `[1]`.
    pub scale: Option<TensorSpec>,
}

/// All weights of a decoder, in the order of the forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderWeights {
    /// The embedding, `[vocab_size, hidden_size]`.
    pub embedding: TensorSpec,
    /// The per-layer embeddings, if the model has them.
    pub per_layer: Option<PerLayerEmbeddingWeights>,
    /// One entry per layer.
    pub layers: Vec<LayerWeights>,
    /// Norm of the residual stream before the output matrix.
    pub final_norm: NormWeights,
    /// The output matrix `[vocab_size, hidden_size]`; `None` if it is the embedding.
    pub head: Option<TensorSpec>,
    /// The bias of the output matrix, `[vocab_size]`.
    pub head_bias: Option<TensorSpec>,
}

impl DecoderWeights {
    /// All tensors, in the order of the forward pass.
    #[must_use]
    pub fn tensors(self) -> Vec<TensorSpec> {
        let mut list = Vec::new();
        let Self { embedding, per_layer, layers, final_norm, head, head_bias } = self;
        list.push(embedding);
        if let Some(per_layer) = per_layer {
            per_layer.list(&mut list);
        }
        layers.into_iter().for_each(|layer| layer.list(&mut list));
        final_norm.list(&mut list);
        list.extend(head.into_iter().chain(head_bias));
        list
    }
}

impl DecoderConfig {
    /// All weights that the decoder has.
    #[must_use]
    pub fn weights(&self) -> DecoderWeights {
        let shape = [self.vocab_size, self.hidden_size];
        let embedding =
            if self.tie_word_embeddings { TensorRole::Embedding } else { TensorRole::Table };
        DecoderWeights {
            embedding: matrix("model.embed_tokens", shape, embedding),
            per_layer: self.per_layer_input.map(|input| self.per_layer_embedding(input.width)),
            layers: (0..self.layers.len()).map(|layer| self.layer_weights(layer)).collect(),
            final_norm: self.final_norm(),
            head: (!self.tie_word_embeddings).then(|| matrix("lm_head", shape, TensorRole::Matrix)),
            head_bias: self.head_bias.then(|| bias("lm_head", self.vocab_size)),
        }
    }

    /// All tensors that the decoder reads, in the order of the forward pass.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.weights().tensors()
    }

    /// The matrices that a file may have instead of several: the name of each, and the matrices
    /// whose rows it contains.
    pub(crate) fn stacked(&self) -> Vec<(String, Vec<TensorSpec>)> {
        let mut list = Vec::new();
        for layer in self.weights().layers {
            list.extend(layer.mixers.into_iter().filter_map(|mixer| match mixer {
                MixerWeights::Attention(attention) => attention.qkv.matrices(),
                MixerWeights::Convolution(convolution) => Some(convolution.inputs.matrices()),
                MixerWeights::DeltaNet(_) | MixerWeights::Latent(_) => None,
                MixerWeights::Mamba2(mamba2) => Some(mamba2.inputs.matrices()),
            }));
            let (dense, experts) = match layer.mlp {
                Some(FeedForwardWeights::Dense(mlp)) => (Some(mlp), None),
                Some(FeedForwardWeights::Experts(experts)) => (None, Some(experts)),
                Some(FeedForwardWeights::DenseAndExperts(both)) => {
                    (Some(both.mlp), Some(both.experts))
                }
                None => (None, None),
            };
            let of_experts = |weights: ExpertsWeights| {
                weights.experts.into_iter().chain(weights.shared.map(|shared| shared.mlp))
            };
            let mlps = dense.into_iter().chain(experts.into_iter().flat_map(of_experts));
            list.extend(mlps.filter_map(|mlp| match mlp.inputs {
                MlpInputs::Gated(gate_up, _) => Some(gate_up.matrices()),
                MlpInputs::Plain(..) => None,
            }));
        }
        list
    }

    /// Total number of elements of all tensors, saturating at `u64::MAX`.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        let elements =
            |spec: &TensorSpec| spec.shape.iter().fold(1_u64, |n, d| n.saturating_mul(*d as u64));
        self.tensors().iter().map(elements).fold(0, u64::saturating_add)
    }

    fn layer_weights(&self, index: usize) -> LayerWeights {
        let at = |part: &str| format!("model.layers.{index}.{part}");
        let layer = &self.layers[index];
        let norms = self.layer_norms(layer, &at);
        let mixers = layer.mixers.iter();
        let mixers = mixers.map(|mixer| self.mixer_weights(mixer, &at)).collect();
        LayerWeights {
            attention_input_norm: norms.attention_input,
            mixers,
            attention_output_norm: norms.attention_output,
            mlp_input_norm: norms.mlp_input,
            mlp: layer.mlp.as_ref().map(|mlp| self.feed_forward_weights(mlp, &at)),
            mlp_output_norm: norms.mlp_output,
            per_layer: self.per_layer_input.map(|input| self.per_layer_weights(input, &at)),
            scale: self.layer_scales.then(|| factors(at("layer_scalar"), 1)),
        }
    }
}

fn matrix(module: &str, shape: [usize; 2], role: TensorRole) -> TensorSpec {
    TensorSpec { name: format!("{module}.weight"), shape: shape.into(), role }
}

/// The weight of the norm `module` of `size` elements.
pub(super) fn norm(module: &str, size: usize) -> TensorSpec {
    TensorSpec { name: format!("{module}.weight"), shape: vec![size], role: TensorRole::Norm }
}

/// The tensor `name` of `size` factors.
fn factors(name: String, size: usize) -> TensorSpec {
    TensorSpec { name, shape: vec![size], role: TensorRole::PlainNorm }
}

/// The bias of `module`.
pub(super) fn bias(module: &str, size: usize) -> TensorSpec {
    TensorSpec { name: format!("{module}.bias"), shape: vec![size], role: TensorRole::Bias }
}

/// The projection `module` to `shape[0]` features.
pub(super) fn linear(module: &str, shape: [usize; 2], with_bias: bool) -> LinearWeights {
    LinearWeights {
        weight: matrix(module, shape, TensorRole::Matrix),
        bias: with_bias.then(|| bias(module, shape[0])),
    }
}
