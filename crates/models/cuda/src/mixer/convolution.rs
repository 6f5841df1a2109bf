//! The short convolution that most layers of LFM2 have instead of attention. Each channel is a
//! weighted sum of the inputs of the last positions, between two gates.
//!
//! The inputs of all positions are kept in the KV store and read from there, including those of the
//! current step. A prefix can therefore be resumed from any position, and the same bits enter a sum
//! whether a position was computed in this step or in an earlier one.

use candle_core::{Result, Tensor};
use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::{ConvolutionWeights, StackedWeights};

use super::recurrent::by_tap;
use crate::OpenError;
use crate::linear::Linear;
use crate::loader::Loader;
use crate::pass::Pass;

/// The weights of a layer's convolution: the fields of [`ConvolutionWeights`].
#[derive(Debug)]
pub(super) struct Convolution {
    /// The projections to the factor, the gate and the inputs, concatenated.
    inputs: Linear,
    /// The weights of each tap, `[hidden_size]`, the oldest position first.
    taps: Vec<Tensor>,
    /// Index of the layer among the convolutions in the KV store.
    kept: usize,
}

impl Convolution {
    /// Loads the convolution of a layer, except for the projection of its output.
    pub(super) fn load(
        spec: &ConvolutionWeights,
        kept: usize,
        loader: &mut Loader,
    ) -> std::result::Result<Self, OpenError> {
        let ConvolutionWeights { inputs: StackedWeights { name: _, parts }, taps, output: _ } =
            spec;
        let by_channel = loader.weights.floats(taps)?;
        Ok(Self {
            inputs: loader.stacked(parts)?,
            taps: by_tap(&by_channel, taps.shape[1], &loader.device)?,
            kept,
        })
    }

    /// Computes the gated sums of all rows, `[rows, hidden_size]`. The inputs are written to the KV
    /// store.
    pub(super) fn project(&self, normed: &Tensor, pass: &Pass<'_>) -> Result<Tensor> {
        let width = normed.dim(1)?;
        let updates = pass.updates(Site::Inputs, normed)?;
        let projected = updates.add(0, self.inputs.forward(normed)?)?;
        let [factor, gate, x] = [0, 1, 2].map(|part| projected.narrow(1, part * width, width));
        let plane = pass.kv().convolution(self.kept);
        pass.write(plane, &(factor? * x?)?)?;
        let mut sum = normed.zeros_like()?;
        for (weights, slots) in self.taps.iter().zip(&pass.inputs.taps) {
            let inputs = plane.gather(&slots.slots)?;
            // Positions before the start of a sequence have no slot, and any input may be read.
            let inputs = slots
                .exist
                .broadcast_as(inputs.shape())?
                .where_cond(&inputs, &inputs.zeros_like()?)?;
            sum = (sum + inputs.broadcast_mul(weights)?)?;
        }
        gate? * sum
    }
}
