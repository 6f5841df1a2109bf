//! The weights of one layer.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{DecoderConfig, FeedForwardWeights, LayerWeights, NormPlacement};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::Matrix;

use super::experts::{DenseAndExperts, Experts};
use super::linear::Loader;
use super::mixer::Mixer;
use super::mlp::Mlp;
use super::passes::NormVectors;
use super::per_layer::PerLayer;

/// The weights of one layer: the fields of [`LayerWeights`], which describes them, and `parallel`.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_input_norm: Option<NormVectors>,
    pub(super) mixers: Vec<Mixer>,
    pub(super) attention_output_norm: Option<NormVectors>,
    pub(super) mlp_input_norm: Option<NormVectors>,
    pub(super) feed_forward: Option<FeedForward>,
    pub(super) mlp_output_norm: Option<NormVectors>,
    pub(super) per_layer: Option<PerLayer>,
    /// Factor by which the layer's output is multiplied; `None` for 1.
    pub(super) scale: Option<f32>,
    /// Whether attention and the MLP have the same input.
    pub(super) parallel: bool,
}

/// The second half of a layer, after its mixers.
#[derive(Debug)]
pub(super) enum FeedForward {
    /// One MLP for all rows.
    Dense(Mlp),
    /// A mixture of experts.
    Experts(Experts),
    /// An MLP and a mixture of experts next to each other.
    DenseAndExperts(Box<DenseAndExperts>),
}

impl FeedForward {
    /// Loads the tensors that `spec` describes.
    fn load(spec: &FeedForwardWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        Ok(match spec {
            FeedForwardWeights::Dense(mlp) => Self::Dense(Mlp::load(mlp, loader)?),
            FeedForwardWeights::Experts(experts) => Self::Experts(Experts::load(experts, loader)?),
            FeedForwardWeights::DenseAndExperts(both) => {
                Self::DenseAndExperts(Box::new(DenseAndExperts::load(both, loader)?))
            }
        })
    }

    /// Size in bytes of all packed matrices.
    fn bytes(&self) -> usize {
        match self {
            Self::Dense(mlp) => mlp.bytes(),
            Self::Experts(experts) => experts.bytes(),
            Self::DenseAndExperts(both) => both.mlp.bytes() + both.experts.bytes(),
        }
    }
}

impl Layer {
    /// Loads the tensors that `spec` describes. For each mixer of the layer, `kept` has its index
    /// among the mixers of its kind in the KV store or in the states.
    pub(super) fn load(
        config: &DecoderConfig,
        spec: &LayerWeights,
        kept: &[usize],
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let LayerWeights {
            attention_input_norm,
            mixers,
            attention_output_norm,
            mlp_input_norm,
            mlp,
            mlp_output_norm,
            per_layer,
            scale,
        } = spec;
        let mixers = mixers.iter().zip(kept);
        Ok(Self {
            attention_input_norm: NormVectors::optional(attention_input_norm.as_ref(), loader)?,
            mixers: mixers
                .map(|(mixer, kept)| Mixer::load(mixer, *kept, loader))
                .collect::<Result<_, _>>()?,
            attention_output_norm: NormVectors::optional(attention_output_norm.as_ref(), loader)?,
            mlp_input_norm: NormVectors::optional(mlp_input_norm.as_ref(), loader)?,
            feed_forward: mlp.as_ref().map(|mlp| FeedForward::load(mlp, loader)).transpose()?,
            mlp_output_norm: NormVectors::optional(mlp_output_norm.as_ref(), loader)?,
            per_layer: per_layer.as_ref().map(|own| PerLayer::load(own, loader)).transpose()?,
            scale: loader.optional_vector(scale.as_ref())?.map(|factor| factor[0]),
            parallel: config.norms.placement == NormPlacement::Parallel,
        })
    }

    /// The matrices that the normalized input of the layer is multiplied with.
    pub(super) fn inputs(&self) -> Vec<&Matrix> {
        let mut inputs: Vec<_> = self.mixers.iter().flat_map(Mixer::inputs).collect();
        if let Some(FeedForward::Dense(mlp)) = &self.feed_forward
            && self.parallel
        {
            inputs.extend(mlp.inputs());
        }
        inputs
    }

    /// The sites of the projections of the normalized input of the layer.
    pub(super) fn input_sites(&self) -> Vec<Site> {
        let mut sites: Vec<_> = self.mixers.iter().map(|mixer| mixer.sites()[0]).collect();
        if self.parallel {
            sites.push(Site::GateUp);
        }
        sites
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let mixers = self.mixers.iter().map(Mixer::bytes).sum::<usize>();
        let mlp = self.feed_forward.as_ref().map_or(0, FeedForward::bytes);
        let per_layer = self.per_layer.as_ref().map_or(0, PerLayer::bytes);
        mixers + mlp + per_layer
    }
}
