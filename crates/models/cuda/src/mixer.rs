//! The mixers: the ways in which layers mix positions. Each has a file of its own.
//!
//! A layer first calls [`Mixer::project`] for all rows of the step, which writes what later
//! positions need to the KV store or the states. After the last layer that keeps something, rows
//! without an output are dropped. Then [`Mixer::finish`] computes the outputs.

use candle_core::{Result, Tensor, bail};
use stolon_checkpoint::DecoderConfig;
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::MixerWeights;

use crate::OpenError;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::pass::Pass;
use attention::Attention;
use convolution::Convolution;
use delta_net::DeltaNet;
use latent::Latent;
use mamba2::Mamba2;

mod attention;
mod convolution;
mod delta_net;
mod latent;
mod mamba2;
mod recurrent;
mod selective;

/// A way in which a layer mixes positions, and the projection of its output.
#[derive(Debug)]
pub(crate) struct Mixer {
    kind: Kind,
    output: Linear,
    /// Factor by which the output is multiplied.
    output_factor: f32,
}

#[derive(Debug)]
enum Kind {
    Attention(Box<Attention>),
    Convolution(Convolution),
    DeltaNet(Box<DeltaNet>),
    Mamba2(Box<Mamba2>),
    Latent(Box<Latent>),
}

/// The results of a mixer's projections for each row.
#[derive(Debug)]
pub(crate) enum Projected {
    /// The rows that the output is projected from, in f32. The mixer has mixed positions already.
    Mixed(Tensor),
    /// The queries of attention, `[rows, heads, head_dim]`, and the gates of its output, `[rows,
    /// heads * head_dim]`, if it has any. Both are f32.
    Queries { queries: Tensor, gates: Option<Tensor> },
}

impl Projected {
    /// The same for the rows `rows` only.
    pub(crate) fn select(self, rows: &Tensor) -> Result<Self> {
        Ok(match self {
            Self::Mixed(mixed) => Self::Mixed(mixed.contiguous()?.index_select(rows, 0)?),
            Self::Queries { queries, gates } => Self::Queries {
                queries: queries.index_select(rows, 0)?,
                gates: gates.map(|gates| gates.contiguous()?.index_select(rows, 0)).transpose()?,
            },
        })
    }
}

impl Mixer {
    /// Loads the tensors that `spec` describes. `kept` is the index of the mixer among the mixers
    /// that keep the same kind of data for later positions.
    pub(crate) fn load(
        config: &DecoderConfig,
        spec: &MixerWeights,
        kept: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let (kind, output, output_factor) = match spec {
            MixerWeights::Attention(spec) => (
                Kind::Attention(Box::new(Attention::load(config, spec, kept, loader)?)),
                &spec.output,
                spec.config.output_factor,
            ),
            MixerWeights::Convolution(spec) => {
                (Kind::Convolution(Convolution::load(spec, kept, loader)?), &spec.output, 1.0)
            }
            MixerWeights::DeltaNet(spec) => (
                Kind::DeltaNet(Box::new(DeltaNet::load(config, spec, kept, loader)?)),
                &spec.output,
                1.0,
            ),
            MixerWeights::Mamba2(spec) => (
                Kind::Mamba2(Box::new(Mamba2::load(config, spec, kept, loader)?)),
                &spec.output,
                spec.config.output_factor,
            ),
            MixerWeights::Latent(spec) => (
                Kind::Latent(Box::new(Latent::load(config, spec, kept, loader)?)),
                &spec.output,
                1.0,
            ),
        };
        Ok(Self { kind, output: loader.linear(output)?, output_factor })
    }

    /// Factor by which the output is multiplied.
    pub(crate) fn output_factor(&self) -> f32 {
        self.output_factor
    }

    /// Computes the projections of the layer's normalized input, `[rows, hidden_size]`. The results
    /// that later positions need are written to the KV store or the states.
    pub(crate) fn project(&self, normed: &Tensor, pass: &mut Pass<'_>) -> Result<Projected> {
        match &self.kind {
            Kind::Attention(attention) => attention.project(normed, pass),
            Kind::Convolution(convolution) => {
                convolution.project(normed, pass).map(Projected::Mixed)
            }
            Kind::DeltaNet(delta_net) => delta_net.project(normed, pass).map(Projected::Mixed),
            Kind::Mamba2(mamba2) => mamba2.project(normed, pass).map(Projected::Mixed),
            Kind::Latent(latent) => latent.project(normed, pass),
        }
    }

    /// Computes the output from the projections, `[rows, hidden_size]` in f32.
    pub(crate) fn finish(&self, projected: Projected, pass: &Pass<'_>) -> Result<Tensor> {
        let mixed = match (&self.kind, projected) {
            (_, Projected::Mixed(mixed)) => mixed,
            (Kind::Attention(attention), Projected::Queries { queries, gates }) => {
                attention.attend(&queries, gates.as_ref(), pass)?
            }
            (Kind::Latent(latent), Projected::Queries { queries, gates: _ }) => {
                latent.attend(&queries, pass)?
            }
            (
                Kind::Convolution(_) | Kind::DeltaNet(_) | Kind::Mamba2(_),
                Projected::Queries { .. },
            ) => {
                bail!("a mixer without attention has no queries")
            }
        };
        let site = match self.kind {
            Kind::Mamba2(_) => Site::MambaOutput,
            _ => Site::Output,
        };
        pass.updates(site, &mixed)?.add(0, self.output.forward(&mixed)?)
    }
}
