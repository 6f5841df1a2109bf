//! What the recurrence of Gated DeltaNet needs of each row: convolved and normalized queries, keys
//! and values, decays and strengths.

use stolon_kernels::{self as kernels, Path};

use super::{DeltaNet, DeltaNetBuffers};
use crate::config::{DeltaNetConfig, sigmoid};
use crate::decoder::plan::SliceRows;
use crate::workers::Workers;

/// Added to the sum of squares of a query or a key before the root is taken.
const EPS: f32 = 1e-6;

impl DeltaNet {
    /// Fills `convolved` and `factors` of the rows of all slices from the projections, and from
    /// `states`, those of the layer before each slice.
    pub(super) fn prepare(
        &self,
        path: Path,
        buffers: &mut DeltaNetBuffers,
        slices: &[SliceRows<'_>],
        states: &[&mut [f32]],
        workers: &Workers,
    ) {
        let config = &self.config;
        let (channels, heads) = (config.channels(), config.value_heads);
        let DeltaNetBuffers { projected, convolved, strengths, steps, factors, .. } = buffers;
        let rows = slices.last().map_or(0, |slice| slice.first + slice.tokens);
        let chunk = workers.chunk_rows(rows, 4 * channels);
        let convolved = convolved[..rows * channels].chunks_mut(chunk * channels);
        let factors = factors[..rows * 2 * heads].chunks_mut(chunk * 2 * heads);
        let norms = self.head_norms();
        workers.run(convolved.zip(factors).enumerate(), |(part, (convolved, factors))| {
            let convolved = convolved.chunks_exact_mut(channels);
            let rows = convolved.zip(factors.chunks_exact_mut(2 * heads));
            let mut inputs = Vec::with_capacity(config.taps);
            for (row, (out, factors)) in (part * chunk..).zip(rows) {
                let index = slices.partition_point(|slice| slice.first <= row) - 1;
                let slice = &slices[index];
                inputs.clear();
                inputs.extend(
                    (row - slice.first..).take(config.taps).map(|input| {
                        input_at(config, (states[index], projected), slice.first, input)
                    }),
                );
                kernels::convolution_silu(path, &inputs, &self.taps, None, out);
                for (part, norm) in out.chunks_exact_mut(config.key_width()).zip(&norms) {
                    let eps = EPS / config.key_dim as f32;
                    kernels::rms_norm_in_place(path, part, norm, eps, 0.0);
                }
                let at = row * heads..(row + 1) * heads;
                self.fill_factors(&strengths[at.clone()], &steps[at], factors);
            }
        });
    }

    /// The weights with which an RMS norm of a query head and of a key head divides by the root of
    /// the sum of squares and not of their mean; queries are also multiplied by `key_dim^-0.5`.
    fn head_norms(&self) -> [Vec<f32>; 2] {
        let size = self.config.key_dim as f32;
        [1.0 / size, 1.0 / size.sqrt()].map(|weight| vec![weight; self.config.key_dim])
    }

    /// Fills the decays and strengths of a row, `[2, value_heads]`.
    fn fill_factors(&self, strengths: &[f32], steps: &[f32], factors: &mut [f32]) {
        let (decays, factors) = factors.split_at_mut(self.config.value_heads);
        let rates = self.rates.iter().zip(&self.step_bias);
        for ((decay, step), (rate, bias)) in decays.iter_mut().zip(steps).zip(rates) {
            *decay = (rate * softplus(step + bias)).exp();
        }
        for (factor, strength) in factors.iter_mut().zip(strengths) {
            *factor = sigmoid(*strength);
        }
    }

    /// Replaces the last inputs of the convolution in `states` by those after each slice.
    pub(super) fn keep_inputs(
        &self,
        buffers: &DeltaNetBuffers,
        slices: &[SliceRows<'_>],
        states: &mut [&mut [f32]],
    ) {
        let len = self.config.inputs_len();
        let mut kept = vec![0.0; len];
        for (slice, state) in slices.iter().zip(states) {
            let sources = (&**state, &buffers.projected[..]);
            copy_inputs(&self.config, sources, (slice.first, slice.tokens), &mut kept);
            state[..len].copy_from_slice(&kept);
        }
    }
}

/// Copies the last inputs of the convolution after the first `tokens` tokens of the slice that
/// begins at row `first` to `to`, `[taps - 1, channels]`. `sources` are the state before the slice
/// and the projections of all rows.
pub(super) fn copy_inputs(
    config: &DeltaNetConfig,
    sources: (&[f32], &[f32]),
    (first, tokens): (usize, usize),
    to: &mut [f32],
) {
    for (input, to) in (tokens..).zip(to.chunks_exact_mut(config.channels())) {
        to.copy_from_slice(input_at(config, sources, first, input));
    }
}

/// An input of the convolution. Inputs are counted from the first one of the state before a slice:
/// those from `taps - 1` on are the rows of the slice, which begins at row `first`.
fn input_at<'a>(
    config: &DeltaNetConfig,
    (state, projected): (&'a [f32], &'a [f32]),
    first: usize,
    input: usize,
) -> &'a [f32] {
    let channels = config.channels();
    match input.checked_sub(config.taps - 1) {
        Some(row) => &projected[(first + row) * channels..][..channels],
        None => &state[input * channels..][..channels],
    }
}

/// `ln(1 + e^x)`, which is `x` in f32 for large numbers.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
