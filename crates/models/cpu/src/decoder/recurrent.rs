//! The parts that all kinds of recurrent layers have in common: the short convolution, the
//! recurrence, and the state between steps.
//!
//! A layer first computes its projections (`delta_net.rs`, `mamba2.rs`). Then [`Recurrent::advance`]
//! computes, for all rows of a step:
//!
//! 1. the convolution, and the layer's own operations on its outputs and on the strengths and time
//!    steps (`prepare.rs`);
//! 2. the recurrence, token by token, in parallel over sequences and heads (`recur.rs`), which also
//!    copies states to the checkpoints of the step.
//!
//! Tokens that are only proposed do not change the state. Their projections are kept, and those of
//! the accepted ones are added to the state at the beginning of the next step (`accepted.rs`).
//!
//! **Invariant: batch invariance.** All inputs of the recurrence are f32. The convolution's inputs
//! at positions before a slice are read from the state, with the bits that were computed, and the
//! recurrence processes one token after the other. Neither states nor outputs therefore depend on
//! chunks, checkpoints, threads, or the rest of the batch.

mod accepted;
mod prepare;
mod recur;

use stolon_checkpoint::config::RecurrentShape;
use stolon_kernels::Path;

use super::pass::Kept;
use super::passes;
use super::plan::BatchRows;
use crate::workers::Workers;

/// A recurrent layer, apart from its projections.
#[derive(Debug)]
pub(super) struct Recurrent {
    pub(super) shape: RecurrentShape,
    /// The channels of each head's inputs.
    pub(super) heads: Vec<HeadInputs>,
    /// Weights of the convolution, `[taps, channels]`, with the oldest position first.
    pub(super) taps: Vec<f32>,
    /// Bias of the convolution, `[channels]`.
    pub(super) convolution_bias: Option<Vec<f32>>,
    /// Index of the layer among the recurrent layers in the states.
    pub(super) kept: usize,
}

/// The first channels of the query, the key and the value of a head.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadInputs {
    pub(super) query: usize,
    pub(super) key: usize,
    pub(super) value: usize,
}

/// Transposes taps `[channels, taps]` to `[taps, channels]`.
pub(super) fn by_tap(by_channel: &[f32], taps: usize) -> Vec<f32> {
    (0..taps).flat_map(|tap| by_channel.iter().skip(tap).step_by(taps).copied()).collect()
}

/// The buffers of recurrent layers, which are reused. They have at least as many rows as the step.
#[derive(Debug, Default)]
pub(super) struct RecurrentBuffers {
    /// The inputs of the convolution, `[rows, channels]`.
    pub(super) projected: Vec<f32>,
    /// The outputs of the convolution, which are queries, keys and values: `[rows, channels]`.
    pub(super) convolved: Vec<f32>,
    /// Strengths of DeltaNet layers before their sigmoid, `[rows, heads]`.
    pub(super) strengths: Vec<f32>,
    /// Time steps, one for each decay, before their bias and softplus: `[rows, heads * decays]`.
    pub(super) steps: Vec<f32>,
    /// The decays of all heads, followed by their strengths, `[rows, heads * decays + heads]`.
    factors: Vec<f32>,
    /// The outputs of each slice, `[heads, tokens of the slice, value_dim]`, one slice after the
    /// other.
    outputs: Vec<f32>,
    /// The same buffers for the tokens that were proposed in the last step and accepted; `None`
    /// until there are any.
    accepted: Option<Box<RecurrentBuffers>>,
}

/// Finishes a row after the convolution. The arguments are the convolution's output, `[channels]`,
/// which the layer may normalize in place, the strengths and time steps of the row, and the factors
/// to fill in: decays, `[heads, decays]`, followed by strengths, `[heads]`.
pub(super) type FinishRow<'a> = dyn Fn(&mut [f32], [&[f32]; 2], &mut [f32]) + Sync + 'a;

impl RecurrentBuffers {
    /// Grows the buffers to at least `rows` rows.
    pub(super) fn reserve(&mut self, shape: &RecurrentShape, rows: usize) {
        for (buffer, width) in [
            (&mut self.projected, shape.channels),
            (&mut self.convolved, shape.channels),
            (&mut self.strengths, shape.heads),
            (&mut self.steps, shape.decay_width()),
            (&mut self.factors, shape.factor_width()),
            (&mut self.outputs, shape.value_width()),
        ] {
            passes::grow(buffer, rows * width);
        }
    }

    /// The output of head `head` at row `row` of the batch, `[value_dim]`.
    pub(super) fn output(
        &self,
        shape: &RecurrentShape,
        plan: &BatchRows,
        (row, head): (usize, usize),
    ) -> &[f32] {
        let (slice_row, tokens) = plan.slice_of(row);
        let token = slice_row * shape.heads + head * tokens + row - slice_row;
        &self.outputs[token * shape.value_dim..][..shape.value_dim]
    }
}

impl Recurrent {
    /// Computes the outputs of all rows of the batch from their projections, and the states after
    /// the certain tokens of all slices.
    pub(super) fn advance(
        &self,
        path: Path,
        buffers: &mut RecurrentBuffers,
        (plan, kept): (&BatchRows, Kept<'_, '_>),
        finish: &FinishRow<'_>,
        workers: &Workers,
    ) {
        let Kept { batch, step } = kept;
        let slices = plan.slices(batch);
        let (mut states, mut proposals) = step.states.layer_mut(self.kept, &batch.sequences);
        self.add_accepted(path, buffers, (&mut states, &proposals), finish, workers);
        self.prepare(path, buffers, (&slices, &states), finish, workers);
        let mut copies = recur::StateCopies::new(&slices, self.shape.state_len());
        copies.copy_inputs(&self.shape, buffers, &states);
        self.recur(path, buffers, &slices, (&mut states, &mut copies), workers);
        self.keep_inputs(buffers, &slices, &mut states);
        self.keep_proposed(buffers, &slices, &mut proposals);
        copies.write(step.kv, step.states.offset_bytes(self.kept));
    }
}

/// `ln(1 + e^x)`. For large `x`, this equals `x` in f32.
pub(super) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
