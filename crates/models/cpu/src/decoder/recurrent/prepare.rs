//! Computes the inputs of the recurrence for each row: queries, keys and values after the
//! convolution, decays and strengths.

use stolon_checkpoint::config::RecurrentShape;
use stolon_kernels::{self as kernels, Path};

use super::{FinishRow, Recurrent, RecurrentBuffers};
use crate::decoder::plan::SliceRows;
use crate::workers::Workers;

impl Recurrent {
    /// Fills in `convolved` and `factors` of the rows of all slices. It reads the projections, and
    /// the states of the layer before each slice.
    pub(super) fn prepare(
        &self,
        path: Path,
        buffers: &mut RecurrentBuffers,
        (slices, states): (&[SliceRows<'_>], &[&mut [f32]]),
        finish: &FinishRow<'_>,
        workers: &Workers,
    ) {
        let shape = &self.shape;
        let RecurrentShape { channels, heads, taps, .. } = *shape;
        let (decays, factor_width) = (shape.decay_width(), shape.factor_width());
        let RecurrentBuffers { projected, convolved, strengths, steps, factors, .. } = buffers;
        let rows = slices.last().map_or(0, |slice| slice.first + slice.tokens);
        let chunk = workers.chunk_rows(rows, 4 * channels);
        let convolved = convolved[..rows * channels].chunks_mut(chunk * channels);
        let factors = factors[..rows * factor_width].chunks_mut(chunk * factor_width);
        workers.run(convolved.zip(factors).enumerate(), |(part, (convolved, factors))| {
            let convolved = convolved.chunks_exact_mut(channels);
            let rows = convolved.zip(factors.chunks_exact_mut(factor_width));
            let mut inputs = Vec::with_capacity(taps);
            for (row, (out, factors)) in (part * chunk..).zip(rows) {
                let index = slices.partition_point(|slice| slice.first <= row) - 1;
                let first = slices[index].first;
                inputs.clear();
                inputs.extend(
                    (row - first..)
                        .take(taps)
                        .map(|input| input_at(shape, (states[index], projected), first, input)),
                );
                let bias = self.convolution_bias.as_deref();
                kernels::convolution_silu(path, &inputs, &self.taps, bias, out);
                let strengths = &strengths[row * heads..(row + 1) * heads];
                finish(out, [strengths, &steps[row * decays..(row + 1) * decays]], factors);
            }
        });
    }

    /// Replaces the last inputs of the convolution in `states` with the ones after the certain
    /// tokens of each slice.
    pub(super) fn keep_inputs(
        &self,
        buffers: &RecurrentBuffers,
        slices: &[SliceRows<'_>],
        states: &mut [&mut [f32]],
    ) {
        let len = self.shape.inputs_len();
        let mut kept = vec![0.0; len];
        for (slice, state) in slices.iter().zip(states) {
            let sources = (&**state, &buffers.projected[..]);
            copy_inputs(&self.shape, sources, (slice.first, slice.certain), &mut kept);
            state[..len].copy_from_slice(&kept);
        }
    }
}

/// Copies the last inputs of the convolution after the first `tokens` tokens of a slice to `to`,
/// `[taps - 1, channels]`. The slice begins at row `first`. `sources` are the state before the
/// slice and the projections of all rows.
pub(super) fn copy_inputs(
    shape: &RecurrentShape,
    sources: (&[f32], &[f32]),
    (first, tokens): (usize, usize),
    to: &mut [f32],
) {
    for (input, to) in (tokens..).zip(to.chunks_exact_mut(shape.channels)) {
        to.copy_from_slice(input_at(shape, sources, first, input));
    }
}

/// Input number `input` of the convolution of a slice. The first `taps - 1` inputs come from the
/// state before the slice, and the others are the rows of the slice, which begins at row `first`.
fn input_at<'a>(
    shape: &RecurrentShape,
    (state, projected): (&'a [f32], &'a [f32]),
    first: usize,
    input: usize,
) -> &'a [f32] {
    let channels = shape.channels;
    match input.checked_sub(shape.taps - 1) {
        Some(row) => &projected[(first + row) * channels..][..channels],
        None => &state[input * channels..][..channels],
    }
}
