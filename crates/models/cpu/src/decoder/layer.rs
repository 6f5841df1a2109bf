//! The weights of one layer.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{
    DecoderConfig, FeedForwardWeights, LayerWeights, MixerWeights, NormPlacement,
};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::Matrix;

use super::attention::Attention;
use super::convolution::Convolution;
use super::delta_net::DeltaNet;
use super::experts::{DenseAndExperts, Experts};
use super::latent::Latent;
use super::linear::{Linear, Loader};
use super::mamba2::Mamba2;
use super::mlp::Mlp;
use super::passes::NormVectors;
use super::per_layer::PerLayer;
use super::selective::Selective;

/// The weights of one layer: the fields of [`LayerWeights`], which describes them, and more.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_input_norm: Option<NormVectors>,
    pub(super) mixers: Vec<Mixer>,
    pub(super) attention_output_norm: Option<Vec<f32>>,
    pub(super) mlp_input_norm: Option<NormVectors>,
    pub(super) feed_forward: Option<FeedForward>,
    pub(super) mlp_output_norm: Option<Vec<f32>>,
    pub(super) per_layer: Option<PerLayer>,
    /// The factor of the residual stream after the layer; `None` for 1.
    pub(super) scale: Option<f32>,
    /// Whether attention and the MLP read the same rows.
    pub(super) parallel: bool,
}

/// A way in which a layer mixes positions.
#[derive(Debug)]
pub(super) enum Mixer {
    /// Attention.
    Attention(Attention),
    /// A short convolution.
    Convolution(Convolution),
    /// Gated DeltaNet or Kimi Delta Attention.
    DeltaNet(DeltaNet),
    /// Mamba-2.
    Mamba2(Mamba2),
    /// Latent attention.
    Latent(Latent),
}

impl Mixer {
    /// The factor of the output.
    pub(super) fn output_factor(&self) -> f32 {
        match self {
            Self::Attention(attention) => attention.config.output_factor,
            Self::Mamba2(mamba2) => mamba2.config.output_factor,
            Self::Convolution(_) | Self::DeltaNet(_) | Self::Latent(_) => 1.0,
        }
    }

    /// The projection of the output.
    pub(super) fn output(&self) -> &Linear {
        match self {
            Self::Attention(attention) => &attention.output,
            Self::Convolution(convolution) => &convolution.output,
            Self::DeltaNet(delta_net) => &delta_net.output,
            Self::Mamba2(mamba2) => &mamba2.output,
            Self::Latent(latent) => &latent.output,
        }
    }

    /// The sites of the projections of the input and of the output.
    pub(super) fn sites(&self) -> [Site; 2] {
        match self {
            Self::Mamba2(_) => [Site::MambaInputs, Site::MambaOutput],
            _ => [Site::Inputs, Site::Output],
        }
    }

    /// The matrices that the normalized residual stream is multiplied with.
    pub(super) fn inputs(&self) -> Vec<&Matrix> {
        let inputs: Vec<&Linear> = match self {
            Self::Attention(Attention { q, k, v, gate, .. }) => {
                [q].into_iter().chain(k).chain(v).chain(gate).collect()
            }
            Self::Convolution(Convolution { factor, gate, x, .. }) => vec![factor, gate, x],
            Self::DeltaNet(delta_net) => delta_net.inputs().collect(),
            Self::Mamba2(Mamba2 { gate, xbc, step, .. }) => vec![gate, xbc, step],
            Self::Latent(latent) => latent.inputs().into(),
        };
        inputs.into_iter().map(|linear| &linear.matrix).collect()
    }

    /// Size in bytes of all packed matrices.
    fn bytes(&self) -> usize {
        let inner = match self {
            Self::Latent(latent) => latent.inner_bytes(),
            Self::DeltaNet(delta_net) => delta_net.inner_bytes(),
            Self::Attention(attention) => attention.selective.as_ref().map_or(0, Selective::bytes),
            Self::Convolution(_) | Self::Mamba2(_) => 0,
        };
        self.inputs().into_iter().map(Matrix::bytes).sum::<usize>() + self.output().bytes() + inner
    }

    /// Loads what `spec` describes. `kept` is its index in what it keeps for later positions.
    fn load(spec: &MixerWeights, kept: usize, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        Ok(match spec {
            MixerWeights::Attention(spec) => Self::Attention(Attention::load(spec, kept, loader)?),
            MixerWeights::Convolution(spec) => {
                Self::Convolution(Convolution::load(spec, kept, loader)?)
            }
            MixerWeights::DeltaNet(spec) => Self::DeltaNet(DeltaNet::load(spec, kept, loader)?),
            MixerWeights::Mamba2(spec) => Self::Mamba2(Mamba2::load(spec, kept, loader)?),
            MixerWeights::Latent(spec) => Self::Latent(Latent::load(spec, kept, loader)?),
        })
    }
}

/// What a layer computes after it has mixed positions.
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
    /// Loads what `spec` describes.
    fn load(spec: &FeedForwardWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        Ok(match spec {
            FeedForwardWeights::Dense(mlp) => Self::Dense(Mlp::load(mlp, loader)?),
            FeedForwardWeights::Experts(experts) => Self::Experts(Experts::load(experts, loader)?),
            FeedForwardWeights::DenseAndExperts(both) => {
                Self::DenseAndExperts(Box::new(DenseAndExperts::load(both, loader)?))
            }
        })
    }

    /// The MLP for all rows, if there is one.
    pub(super) fn dense(&self) -> Option<&Mlp> {
        match self {
            Self::Dense(mlp) => Some(mlp),
            Self::DenseAndExperts(both) => Some(&both.mlp),
            Self::Experts(_) => None,
        }
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
    /// Loads the tensors that `spec` describes. `kept` has, for each mixer of
    /// the layer, its index in the KV store or in the states, among those of its kind.
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
            attention_output_norm: loader.optional_vector(attention_output_norm.as_ref())?,
            mlp_input_norm: NormVectors::optional(mlp_input_norm.as_ref(), loader)?,
            feed_forward: mlp.as_ref().map(|mlp| FeedForward::load(mlp, loader)).transpose()?,
            mlp_output_norm: loader.optional_vector(mlp_output_norm.as_ref())?,
            per_layer: per_layer.as_ref().map(|own| PerLayer::load(own, loader)).transpose()?,
            scale: loader.optional_vector(scale.as_ref())?.map(|factor| factor[0]),
            parallel: config.norms == NormPlacement::Parallel,
        })
    }

    /// The attention of the layer, if it has any.
    pub(super) fn attention(&self) -> Option<&Attention> {
        self.mixers.iter().find_map(|mixer| match mixer {
            Mixer::Attention(attention) => Some(attention),
            _ => None,
        })
    }

    /// The convolution of the layer, if it has one.
    pub(super) fn convolution(&self) -> Option<&Convolution> {
        self.mixers.iter().find_map(|mixer| match mixer {
            Mixer::Convolution(convolution) => Some(convolution),
            _ => None,
        })
    }

    /// The Gated DeltaNet or Kimi Delta Attention of the layer, if it has any.
    pub(super) fn delta_net(&self) -> Option<&DeltaNet> {
        self.mixers.iter().find_map(|mixer| match mixer {
            Mixer::DeltaNet(delta_net) => Some(delta_net),
            _ => None,
        })
    }

    /// The Mamba-2 of the layer, if it has any.
    pub(super) fn mamba2(&self) -> Option<&Mamba2> {
        self.mixers.iter().find_map(|mixer| match mixer {
            Mixer::Mamba2(mamba2) => Some(mamba2),
            _ => None,
        })
    }

    /// The latent attention of the layer, if it has any.
    pub(super) fn latent(&self) -> Option<&Latent> {
        self.mixers.iter().find_map(|mixer| match mixer {
            Mixer::Latent(latent) => Some(latent),
            _ => None,
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
