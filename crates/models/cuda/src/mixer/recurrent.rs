//! The parts that all kinds of recurrent layers have in common: the short convolution, the
//! recurrence, and the state between steps.
//!
//! **Invariant: batch invariance.** All inputs of the recurrence are f32. The convolution's inputs
//! at positions before a slice are read from the state, with the bits that were computed, and the
//! recurrence processes one token after the other. Neither states nor outputs therefore depend on
//! chunks, checkpoints, or the rest of the batch.

use candle_core::{Device, Result, Tensor};
use stolon_checkpoint::config::RecurrentShape;

use crate::pass::Pass;
use crate::recurrence::{HeadLayout, recur};
use crate::state_inputs::StateInputs;

/// A recurrent layer, apart from its projections.
#[derive(Debug)]
pub(super) struct Recurrent {
    pub(super) shape: RecurrentShape,
    /// The channels of each head's inputs.
    pub(super) layout: HeadLayout,
    /// The weights of each tap of the convolution, `[channels]`, with the oldest position first.
    pub(super) taps: Vec<Tensor>,
    /// Bias of the convolution, `[channels]`.
    pub(super) convolution_bias: Option<Tensor>,
    /// Index of the layer among the recurrent layers in the states.
    pub(super) kept: usize,
}

/// The results of the convolution of a step.
#[derive(Debug)]
pub(super) struct Convolved {
    /// Queries, keys and values, `[rows, channels]`.
    pub(super) values: Tensor,
    /// The states of the slices before the step, `[slices, state_len]`.
    states: Tensor,
    /// The inputs of the convolution, `[slices * (taps - 1) + rows, channels]`: those that the
    /// states of the slices have, followed by those of the rows.
    inputs: Tensor,
}

/// The weights of each tap from taps by channel, `[channels, taps]`.
pub(super) fn by_tap(by_channel: &[f32], taps: usize, device: &Device) -> Result<Vec<Tensor>> {
    let tap = |tap: usize| by_channel.iter().skip(tap).step_by(taps).copied().collect::<Vec<_>>();
    (0..taps).map(|index| Tensor::new(tap(index), device)).collect()
}

/// `ln(1 + e^x)`, with a small relative error also where the result is small.
pub(super) fn softplus(x: &Tensor) -> Result<Tensor> {
    // ln(1 + y) is y * ln(u) / (u - 1) with the rounded sum u = 1 + y (Kahan), and y if u is 1.
    let y = x.abs()?.neg()?.exp()?;
    let u = y.affine(1.0, 1.0)?;
    let log = ((&y * u.log()?)? / u.affine(1.0, -1.0)?)?;
    let log = u.eq(1_f32)?.where_cond(&y, &log)?;
    x.relu()? + log
}

impl Recurrent {
    /// Computes the convolution of its inputs `projected`, `[rows, channels]`, and the SiLU of the
    /// results.
    pub(super) fn convolve(&self, projected: &Tensor, pass: &Pass<'_>) -> Result<Convolved> {
        let StateInputs { slots, taps, .. } = pass.state_inputs()?;
        let RecurrentShape { channels, .. } = self.shape;
        let states = pass.states().layer(self.kept).index_select(slots, 0)?;
        let kept = states.narrow(1, 0, self.shape.inputs_len())?.contiguous()?;
        let inputs = Tensor::cat(&[kept.reshape(((), channels))?, projected.clone()], 0)?;
        let mut sum = projected.zeros_like()?;
        for (weights, rows) in self.taps.iter().zip(taps) {
            sum = (sum + inputs.index_select(rows, 0)?.broadcast_mul(weights)?)?;
        }
        if let Some(bias) = &self.convolution_bias {
            sum = sum.broadcast_add(bias)?;
        }
        Ok(Convolved { values: sum.silu()?, states, inputs })
    }

    /// Computes the recurrence, and the states after all slices and at the checkpoints of the step.
    /// `values` are queries, keys and values, `[rows, channels]`, and `factors` the decays of all
    /// heads, followed by their strengths, `[rows, factor_width]`. Returns `[rows, heads *
    /// value_dim]`.
    pub(super) fn advance(
        &self,
        convolved: &Convolved,
        values: &Tensor,
        factors: &Tensor,
        pass: &mut Pass<'_>,
    ) -> Result<Tensor> {
        let Convolved { states, inputs, .. } = convolved;
        let StateInputs { slots, kept_inputs, segments, ends, checkpoints, .. } =
            pass.state_inputs()?;
        let inputs_len = self.shape.inputs_len();
        let matrices = states.narrow(1, inputs_len, states.dim(1)? - inputs_len)?;
        let rows = Tensor::cat(&[values, factors], 1)?;
        let (outputs, matrices) = recur((&self.shape, self.layout), &matrices, &rows, segments)?;
        let inputs = inputs.index_select(kept_inputs, 0)?.reshape(((), inputs_len))?;
        let after = Tensor::cat(&[inputs, matrices], 1)?;
        pass.states().write(self.kept, &ends.of(&after)?, slots)?;
        if let Some(checkpoints) = checkpoints {
            let states = after.index_select(&checkpoints.segments, 0)?;
            pass.checkpoints.push(states);
        }
        Ok(outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the softplus has a small relative error for large and small arguments of either sign.
    #[test]
    fn softplus_is_exact_for_small_results() {
        let arguments = [-80.0_f32, -20.0, -16.7, -9.0, -1.0, 0.0, 1e-3, 2.0, 19.0, 21.0, 90.0];
        let x = Tensor::new(&arguments, &Device::Cpu).expect("a vector");
        let got = softplus(&x).and_then(|x| x.to_vec1::<f32>()).expect("numbers");
        for (x, got) in arguments.into_iter().zip(got) {
            let expected = f64::from(x).exp().ln_1p();
            let error = (f64::from(got) / expected - 1.0).abs();
            assert!(error < 1e-6, "{x}: {got}, expected {expected}");
        }
    }
}
