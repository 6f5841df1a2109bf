//! The weights of one layer.

use stolon_kernels::Matrix;

use super::attention::Attention;
use super::convolution::Convolution;
use super::delta_net::DeltaNet;
use super::experts::Experts;
use super::linear::{Linear, Loader};
use super::mamba2::Mamba2;
use super::mlp::Mlp;
use super::passes::NormVectors;
use crate::config::{DecoderConfig, FeedForwardWeights, LayerWeights, MixerWeights, NormPlacement};
use crate::error::ModelError;

/// The weights of one layer: the fields of [`LayerWeights`], which describes them, and more.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_input_norm: Option<NormVectors>,
    pub(super) mixers: Vec<Mixer>,
    pub(super) attention_output_norm: Option<Vec<f32>>,
    pub(super) mlp_input_norm: Option<NormVectors>,
    pub(super) feed_forward: Option<FeedForward>,
    pub(super) mlp_output_norm: Option<Vec<f32>>,
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
    /// Gated DeltaNet.
    DeltaNet(DeltaNet),
    /// Mamba-2.
    Mamba2(Mamba2),
}

impl Mixer {
    /// The projection of the output.
    pub(super) fn output(&self) -> &Linear {
        match self {
            Self::Attention(attention) => &attention.output,
            Self::Convolution(convolution) => &convolution.output,
            Self::DeltaNet(delta_net) => &delta_net.output,
            Self::Mamba2(mamba2) => &mamba2.output,
        }
    }

    /// The matrices that the normalized residual stream is multiplied with.
    pub(super) fn inputs(&self) -> Vec<&Matrix> {
        let inputs = match self {
            Self::Attention(Attention { q, k, v, gate, .. }) => {
                [Some(q), Some(k), Some(v), gate.as_ref()]
            }
            Self::Convolution(Convolution { factor, gate, x, .. }) => {
                [Some(factor), Some(gate), Some(x), None]
            }
            Self::DeltaNet(DeltaNet { qkv, gate, strength, step, .. }) => {
                [qkv, gate, strength, step].map(Some)
            }
            Self::Mamba2(Mamba2 { gate, xbc, step, .. }) => {
                [Some(gate), Some(xbc), Some(step), None]
            }
        };
        inputs.into_iter().flatten().map(|linear| &linear.matrix).collect()
    }

    /// Loads what the layer has. `kept` is its index in what it keeps for later positions.
    fn load(
        config: &DecoderConfig,
        spec: &MixerWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        Ok(match (spec, config.delta_net, config.mamba2) {
            (MixerWeights::Attention(spec), ..) => {
                Self::Attention(Attention::load(spec, kept, loader)?)
            }
            (MixerWeights::Convolution(spec), ..) => {
                Self::Convolution(Convolution::load(spec, kept, loader)?)
            }
            (MixerWeights::DeltaNet(spec), Some(config), _) => {
                Self::DeltaNet(DeltaNet::load(config, spec, kept, loader)?)
            }
            (MixerWeights::Mamba2(spec), _, Some(mamba2)) => {
                let factors = config.multipliers.map(|multipliers| multipliers.mamba_inputs);
                Self::Mamba2(Mamba2::load(mamba2, factors, spec, kept, loader)?)
            }
            (MixerWeights::DeltaNet(_), None, _) | (MixerWeights::Mamba2(_), _, None) => {
                unreachable!("`DecoderConfig::check` requires the sizes of such layers")
            }
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
}

impl Layer {
    /// Loads the tensors that `spec` describes. `kept` has, for each mixer of the layer, its index
    /// in the KV store or in the states, among those of its kind.
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
        } = spec;
        let mixers = mixers.iter().zip(kept);
        Ok(Self {
            attention_input_norm: NormVectors::optional(attention_input_norm.as_ref(), loader)?,
            mixers: mixers
                .map(|(mixer, kept)| Mixer::load(config, mixer, *kept, loader))
                .collect::<Result<_, _>>()?,
            attention_output_norm: loader.optional_vector(attention_output_norm.as_ref())?,
            mlp_input_norm: NormVectors::optional(mlp_input_norm.as_ref(), loader)?,
            feed_forward: match mlp {
                Some(FeedForwardWeights::Dense(mlp)) => {
                    Some(FeedForward::Dense(Mlp::load(mlp, loader)?))
                }
                Some(FeedForwardWeights::Experts(experts)) => {
                    Some(FeedForward::Experts(Experts::load(experts, loader)?))
                }
                None => None,
            },
            mlp_output_norm: loader.optional_vector(mlp_output_norm.as_ref())?,
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

    /// The Gated DeltaNet of the layer, if it has any.
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

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let inputs = self.mixers.iter().flat_map(Mixer::inputs).map(Matrix::bytes).sum::<usize>();
        let outputs = self.mixers.iter().map(|mixer| mixer.output().bytes()).sum::<usize>();
        let mlp = match &self.feed_forward {
            Some(FeedForward::Dense(mlp)) => mlp.bytes(),
            Some(FeedForward::Experts(experts)) => experts.bytes(),
            None => 0,
        };
        inputs + outputs + mlp
    }
}
