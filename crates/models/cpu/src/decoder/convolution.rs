//! The short convolution that most layers of LFM2 have instead of attention. Each channel is a
//! weighted sum of the inputs of the last positions, between two gates.
//!
//! The inputs of all positions are kept in the KV store and read from there, including those of the
//! current step. A prefix can therefore be resumed from any position, and the same bits enter a sum
//! whether a position was computed in this step or in an earlier one.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::ConvolutionWeights;
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, AttentionSequence, Epilogue, KvLayout, KvRows, Matrix, Product, RowSums, Sink,
};

use super::adapters::RowUpdates;
use super::linear::{Linear, Loader};
use super::pass::{Inputs, Pass};
use super::profile::Stage;
use super::{passes, plan};
use crate::kv_store::KvStore;

/// The weights of a layer's convolution: the fields of [`ConvolutionWeights`].
#[derive(Debug)]
pub(super) struct Convolution {
    factor: Linear,
    gate: Linear,
    x: Linear,
    /// `[taps, hidden_size]`, the oldest position first.
    taps: Vec<f32>,
    pub(super) output: Linear,
    /// Index of the layer among the convolutions in the KV store.
    kept: usize,
}

impl Convolution {
    pub(super) fn load(
        spec: &ConvolutionWeights,
        kept: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let ConvolutionWeights { inputs, taps, output } = spec;
        let [factor, gate, x] = &inputs.parts;
        let by_channel = loader.vector(taps)?;
        let count = taps.shape[1];
        let taps = (0..count).flat_map(|tap| by_channel.iter().skip(tap).step_by(count).copied());
        Ok(Self {
            factor: loader.linear(factor)?,
            gate: loader.linear(gate)?,
            x: loader.linear(x)?,
            taps: taps.collect(),
            output: loader.linear(output)?,
            kept,
        })
    }

    /// The projections of the layer's input.
    pub(super) fn inputs(&self) -> [&Linear; 3] {
        [&self.factor, &self.gate, &self.x]
    }
}

/// The buffers of convolutions, which are reused. They have at least as many rows as the step.
#[derive(Debug, Default)]
pub(super) struct ConvolutionBuffers {
    /// The gates of the outputs, `[rows, hidden_size]`.
    gates: Vec<f32>,
    /// For each row, the slots of the positions in its convolution, `[rows, taps]`; `None` before
    /// the start of the sequence.
    taps: Vec<Option<usize>>,
}

impl ConvolutionBuffers {
    /// Grows the buffers to at least `rows` rows of `width` elements.
    pub(super) fn reserve(&mut self, width: usize, rows: usize) {
        passes::grow(&mut self.gates, rows * width);
    }

    /// Fills in the slots of the positions in a convolution with `count` taps at the rows of
    /// `sequences`.
    pub(super) fn fill_taps(
        &mut self,
        count: usize,
        sequences: &[AttentionSequence<'_>],
        block_size: usize,
    ) {
        fill_taps(&mut self.taps, count, sequences, block_size);
    }
}

impl Convolution {
    /// Computes the gates and the inputs. The inputs are written to `kv`.
    pub(super) fn project(
        &self,
        inputs: Inputs,
        kv: &mut KvStore,
        buffers: &mut ConvolutionBuffers,
        pass: &mut Pass<'_>,
    ) {
        let Pass { index, path, plan, normed, workers, .. } = *pass;
        let width = self.output.out_features();
        let store = kv.inputs_mut(self.kept).slice_mut();
        // Inputs of convolutions have no scales, so parts of a row can be written independently.
        let kept = KvRows::new(path, store, KvLayout::Rows, &plan.slots, width, 1);
        let updates = pass.adapters.updates(index, Site::Inputs);
        let multiply = updates.then([0, 2], |sums: RowSums<'_>| {
            kernels::mul(path, sums.first, sums.second);
        });
        let epilogue_gate = updates.then([1], |_: RowSums<'_>| {});
        let (input_matrices, gate_matrices) =
            ([&self.factor.matrix, &self.x.matrix], [&self.gate.matrix]);
        let mut products = Vec::with_capacity(2);
        if inputs.kept() {
            products.push(Product {
                group: 0,
                matrices: &input_matrices,
                step: 1,
                epilogue: Some(&multiply),
                sink: Sink::Cache(kept),
            });
        }
        if inputs.own() {
            let sink = Sink::Rows(&mut buffers.gates[..normed.rows() * width]);
            let matrices = &gate_matrices;
            let epilogue = Some(&epilogue_gate as Epilogue<'_>);
            products.push(Product { group: 0, matrices, step: 1, epilogue, sink });
        }
        let matrices: Vec<&Matrix> =
            products.iter().flat_map(|product| product.matrices.iter().copied()).collect();
        let threads = workers.for_products(&matrices, normed.rows());
        let epilogue_time = kernels::multiply(path, threads, normed, &mut products);
        drop(products);
        pass.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
    }

    /// Computes the convolution for `rows` rows and packs it for the output projection.
    pub(super) fn mix(
        &self,
        rows: usize,
        kv: &KvStore,
        buffers: &ConvolutionBuffers,
        pass: &mut Pass<'_>,
    ) {
        let (path, width) = (pass.path, self.output.out_features());
        let ConvolutionBuffers { gates, taps } = buffers;
        let count = self.taps.len() / width;
        let inputs = kv.inputs(self.kept);
        let row_of = |row: usize, out: &mut [f32]| {
            let slots = &taps[row * count..][..count];
            let gate = &gates[row * width..][..width];
            kernels::convolution(path, inputs, slots, &self.taps, gate, out);
        };
        let output = (&self.output.matrix, Site::Output);
        pass.pack_result(output, (rows, width * count), row_of);
        pass.profile.mark(Stage::Attention);
    }
}

/// Fills `taps` with the slots of the last `count` positions of each row, including its own, with
/// the oldest first. Positions before the start of the sequence are `None`.
fn fill_taps(
    taps: &mut Vec<Option<usize>>,
    count: usize,
    sequences: &[AttentionSequence<'_>],
    block_size: usize,
) {
    taps.clear();
    for sequence in sequences {
        let slot = |position| plan::slot_of(sequence.block_table, position, block_size);
        for end in sequence.start + 1..=sequence.start + sequence.count {
            taps.extend((0..count).map(|tap| Some(slot((end + tap).checked_sub(count)?))));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stolon_kvcache::BlockId;

    use super::*;
    use crate::decoder::tests::{Case, TOKENS, convolve};

    /// Goal: a convolution equals a plain loop, whether positions were computed in this step or in
    /// an earlier one.
    #[test]
    fn convolutions_equal_a_plain_loop() {
        let case = Case::run(
            &json!({
                "model_type": "lfm2", "num_attention_heads": 4, "layer_types": ["conv"],
                "norm_eps": 1e-5, "block_auto_adjust_ff_dim": false,
            }),
            13,
        );
        let part =
            |part: &str, at: usize| case.project(&format!("conv.in_proj.{part}"), &case.normed[at]);
        let product = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(&b).map(|(a, b)| a * b).collect();
        let inputs: Vec<Vec<f64>> =
            (0..TOKENS).map(|at| product(part("factor", at), part("x", at))).collect();
        let expected = (0..TOKENS).map(|at| {
            let sums = convolve(&inputs, case.weights("conv.conv"), at);
            let gated: Vec<f64> = product(sums, part("gate", at));
            case.project("conv.out_proj", &gated)
        });
        case.check(&expected.collect::<Vec<_>>());
    }

    /// Goal: the slots of a row belong to its position and the positions before it, in the blocks
    /// of the sequence. There are none before the start.
    #[test]
    fn taps_are_the_last_positions_of_the_same_sequence() {
        let sequences = [
            AttentionSequence { start: 0, count: 2, full: false, block_table: &[BlockId(7)] },
            AttentionSequence {
                start: 4,
                count: 2,
                full: false,
                block_table: &[BlockId(5), BlockId(2)],
            },
        ];
        let mut taps = vec![Some(1)];
        fill_taps(&mut taps, 3, &sequences, 4);
        let expected = [
            [None, None, Some(28)],
            [None, Some(28), Some(29)],
            [Some(22), Some(23), Some(8)],
            [Some(23), Some(8), Some(9)],
        ];
        assert_eq!(taps, expected.as_flattened());
    }
}
