//! The short convolution that LFM2 has in place of attention in most layers: each channel is a
//! weighted sum of the last positions' inputs, between two gates.
//!
//! The inputs of all positions are kept in the KV store, and are read from there, including those
//! of the current step. So a prefix can be used again from any position, and the same bits enter a
//! sum whether a position was computed in this step or in an earlier one.

use stolon_checkpoint::adapter::Site;
use stolon_checkpoint::config::ConvolutionWeights;
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{
    self as kernels, AttentionSequence, Epilogue, KvLayout, KvRows, Matrix, Product, RowSums, Sink,
};

use super::activations::Activations;
use super::adapters::RowUpdates;
use super::attention::Inputs;
use super::linear::{Linear, Loader};
use super::profile::Stage;
use super::{Decoder, passes, plan};
use crate::kv_store::KvStore;
use crate::workers::Workers;

/// The weights of a layer's convolution: the fields of [`ConvolutionWeights`].
#[derive(Debug)]
pub(super) struct Convolution {
    pub(super) factor: Linear,
    pub(super) gate: Linear,
    pub(super) x: Linear,
    /// `[taps, hidden_size]`, the oldest position first.
    taps: Vec<f32>,
    pub(super) output: Linear,
    /// Index of the layer in the KV store.
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
}

impl Decoder {
    /// Computes the gates and the inputs of a convolution. The inputs are written to `kv`.
    pub(super) fn convolution_inputs(
        &mut self,
        index: usize,
        inputs: Inputs,
        kv: &mut KvStore,
        workers: &Workers,
    ) {
        let (path, width) = (self.path, self.config.hidden_size);
        let Some(layer) = self.layers[index].convolution() else { return };
        let Activations { normed, gates, .. } = &mut self.activations;
        let store = kv.inputs_mut(layer.kept).slice_mut();
        // The store has no scales, so parts of a row are written independently of each other.
        let kept = KvRows::new(path, store, KvLayout::Rows, &self.plan.slots, width, 1);
        let updates = self.adapters.updates(index, Site::Inputs);
        let multiply = updates.then([0, 2], |sums: RowSums<'_>| {
            kernels::mul(path, sums.first, sums.second);
        });
        let epilogue_gate = updates.then([1], |_: RowSums<'_>| {});
        let (input_matrices, gate_matrices) =
            ([&layer.factor.matrix, &layer.x.matrix], [&layer.gate.matrix]);
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
            let sink = Sink::Rows(&mut gates[..normed.rows() * width]);
            let matrices = &gate_matrices;
            let epilogue = Some(&epilogue_gate as Epilogue<'_>);
            products.push(Product { group: 0, matrices, step: 1, epilogue, sink });
        }
        let matrices: Vec<&Matrix> =
            products.iter().flat_map(|product| product.matrices.iter().copied()).collect();
        let threads = workers.for_products(&matrices, normed.rows());
        let epilogue_time = kernels::multiply(path, threads, normed, &mut products);
        self.profile.mark_with(Stage::Qkv, epilogue_time, Stage::Heads);
    }

    /// Computes the convolution for `rows` rows and packs it for the output projection.
    pub(super) fn convolve(&mut self, index: usize, rows: usize, kv: &KvStore, workers: &Workers) {
        let (path, width) = (self.path, self.config.hidden_size);
        let Some(layer) = self.layers[index].convolution() else { return };
        let Activations { gates, mixed, taps, .. } = &mut self.activations;
        let count = layer.taps.len() / width;
        let inputs = kv.inputs(layer.kept);
        let row_of = |row: usize, out: &mut [f32]| {
            let slots = &taps[row * count..][..count];
            let gate = &gates[row * width..][..width];
            kernels::convolution(path, inputs, slots, &layer.taps, gate, out);
        };
        mixed.reset(rows, &[&layer.output.matrix]);
        passes::pack_rows(mixed, workers.for_pass(rows, width * count), width, row_of);
        self.adapters.lower((index, Site::Output), path, workers, row_of);
        self.profile.mark(Stage::Attention);
    }
}

/// Fills `taps` with the slots of the last `count` positions up to each row's own, the oldest first;
/// `None` for those before the start of the sequence.
pub(super) fn fill_taps(
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
    use stolon_kvcache::BlockId;

    use super::*;

    /// Goal: the slots of a row are those of its position and of the ones before it, in the blocks of
    /// the sequence. There are none before the start.
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
