//! The mixers: the ways in which layers mix positions. Each has a file of its own, with its
//! weights, its buffers, and the two halves of its computation. [`pass`](super::pass) says when
//! these run.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{DecoderConfig, MixerConfig, MixerWeights};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{AttentionSequence, Matrix};

use super::attention::{Attention, AttentionBuffers};
use super::convolution::{Convolution, ConvolutionBuffers};
use super::delta_net::{DeltaNet, DeltaNetBuffers};
use super::latent::{Latent, LatentBuffers};
use super::linear::{Linear, Loader};
use super::mamba2::{Mamba2, Mamba2Buffers};
use super::pass::{Inputs, Kept, Pass};
use super::sequences::Sequences;
use crate::kv_store::KvStore;

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
    /// Factor by which the output is multiplied.
    pub(super) fn output_factor(&self) -> f32 {
        match self {
            Self::Attention(attention) => attention.output_factor(),
            Self::Mamba2(mamba2) => mamba2.output_factor(),
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

    /// The matrices that the normalized input of the layer is multiplied with.
    pub(super) fn inputs(&self) -> Vec<&Matrix> {
        let inputs: Vec<&Linear> = match self {
            Self::Attention(attention) => attention.inputs(),
            Self::Convolution(convolution) => convolution.inputs().into(),
            Self::DeltaNet(delta_net) => delta_net.inputs().collect(),
            Self::Mamba2(mamba2) => mamba2.inputs().into(),
            Self::Latent(latent) => latent.inputs().into(),
        };
        inputs.into_iter().map(|linear| &linear.matrix).collect()
    }

    /// Size in bytes of all packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let inner = match self {
            Self::Latent(latent) => latent.inner_bytes(),
            Self::DeltaNet(delta_net) => delta_net.inner_bytes(),
            Self::Attention(attention) => attention.inner_bytes(),
            Self::Convolution(_) | Self::Mamba2(_) => 0,
        };
        self.inputs().into_iter().map(Matrix::bytes).sum::<usize>() + self.output().bytes() + inner
    }

    /// Computes the projections of the layer's normalized input that the mixer needs. The results
    /// that later positions need are written to the KV store or the states.
    pub(super) fn project(
        &self,
        inputs: Inputs,
        kept: Kept<'_, '_>,
        buffers: &mut MixerBuffers,
        pass: &mut Pass<'_>,
    ) {
        match self {
            Self::Attention(attention) => {
                attention.project(inputs, kept.step.kv, &mut buffers.attention, pass);
            }
            Self::Convolution(convolution) => {
                convolution.project(inputs, kept.step.kv, &mut buffers.convolution, pass);
            }
            Self::DeltaNet(delta_net) => {
                delta_net.project(inputs, kept, &mut buffers.delta_net, pass);
            }
            Self::Mamba2(mamba2) => mamba2.project(inputs, kept, &mut buffers.mamba2, pass),
            Self::Latent(latent) => {
                latent.project(inputs, kept.step.kv, &mut buffers.latent, pass);
            }
        }
    }

    /// Mixes positions for `rows` rows and packs the result for the output projection. In recurrent
    /// layers, [`Self::project`] has already mixed the positions.
    pub(super) fn mix(
        &self,
        rows: usize,
        (kv, sequences): (&KvStore, &Sequences<'_>),
        buffers: &mut MixerBuffers,
        pass: &mut Pass<'_>,
    ) {
        match self {
            Self::Attention(attention) => {
                attention.mix(rows, (kv, sequences), &mut buffers.attention, pass);
            }
            Self::Convolution(convolution) => {
                convolution.mix(rows, kv, &buffers.convolution, pass);
            }
            Self::DeltaNet(delta_net) => delta_net.mix(rows, &buffers.delta_net, pass),
            Self::Mamba2(mamba2) => mamba2.mix(rows, &buffers.mamba2, pass),
            Self::Latent(latent) => {
                latent.mix(rows, (kv, sequences), &mut buffers.latent, pass);
            }
        }
    }

    /// Loads the tensors that `spec` describes. `kept` is the index of the mixer among the mixers
    /// that keep the same kind of data for later positions.
    pub(super) fn load(
        spec: &MixerWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
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

/// The buffers of all kinds of mixers. The buffers of kinds that a model does not have stay empty.
#[derive(Debug, Default)]
pub(super) struct MixerBuffers {
    attention: AttentionBuffers,
    convolution: ConvolutionBuffers,
    delta_net: DeltaNetBuffers,
    mamba2: Mamba2Buffers,
    latent: LatentBuffers,
}

impl MixerBuffers {
    /// Grows the buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, config: &DecoderConfig, rows: usize) {
        for mixer in config.mixers() {
            match mixer {
                MixerConfig::Attention(attention) => self.attention.reserve(attention, rows),
                MixerConfig::Latent(latent) => self.latent.reserve(latent, rows),
                MixerConfig::Convolution(_) => self.convolution.reserve(config.hidden_size, rows),
                MixerConfig::DeltaNet(delta_net) => self.delta_net.reserve(delta_net, rows),
                MixerConfig::Mamba2(mamba2) => self.mamba2.reserve(mamba2, rows),
            }
        }
    }

    /// Fills in the positions in the convolutions at the rows of `sequences`, if the model has
    /// convolutions.
    pub(super) fn fill_taps(
        &mut self,
        config: &DecoderConfig,
        sequences: &[AttentionSequence<'_>],
        block_size: usize,
    ) {
        if let Some(convolution) = config.convolution() {
            self.convolution.fill_taps(convolution.taps, sequences, block_size);
        }
    }
}
