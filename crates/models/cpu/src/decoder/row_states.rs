//! The hidden states of a step that a draft head reads: those after the last norm, or those of the
//! residual stream after some layers.

use super::Decoder;
use super::passes::Norm;
use crate::workers::Workers;

/// See the [module documentation](self).
#[derive(Debug)]
pub(super) struct RowStates {
    /// After how many layers the residual stream is read, for each state of a row; `None` for the
    /// state after the last norm.
    layers: Option<Vec<usize>>,
    /// The states of the last step, `[rows, states, hidden_size]`: of all rows, or of those with an
    /// output.
    values: Vec<f32>,
}

impl Decoder {
    /// Makes this decoder record hidden states of a step from now on: for each number in `layers`, the
    /// residual stream after that number of layers. With `None`, the state after the last norm. They
    /// are those of all rows, or, unless `of_all`, of the rows that are left at this place.
    pub(super) fn record_states(&mut self, layers: Option<Vec<usize>>, of_all: bool) {
        let all = self.layers.len();
        let last = layers.iter().flatten().copied().max().unwrap_or(all);
        if of_all && last > self.last_keeping {
            // No row is dropped before the end.
            self.last_keeping = all;
        }
        self.row_states = Some(RowStates { layers, values: Vec::new() });
    }

    /// Drops the recorded states of an earlier step.
    pub(super) fn forget_states(&mut self) {
        self.row_states.iter_mut().for_each(|states| states.values.clear());
    }

    /// The recorded hidden states of the last step, `[rows, states, hidden_size]`; empty if none are
    /// recorded.
    pub(crate) fn row_states(&self) -> &[f32] {
        self.row_states.as_ref().map_or(&[], |states| &states.values)
    }

    /// Records the states of `rows` rows that are read after `count` layers, if there are any.
    pub(super) fn record_after(&mut self, count: usize, rows: usize, workers: &Workers) {
        let Some(RowStates { layers, values }) = &mut self.row_states else { return };
        let width = self.config.hidden_size;
        let x = &self.activations.x[..rows * width];
        let Some(layers) = layers else {
            if count == self.layers.len() {
                values.resize(x.len(), 0.0);
                let norm = Norm::of(self.config.hidden_size, Some(&self.final_norm), self.path);
                norm.rows(x, values, workers);
            }
            return;
        };
        let of_row = layers.len() * width;
        for state in (0..layers.len()).filter(|state| layers[*state] == count) {
            values.resize(rows * of_row, 0.0);
            let to = values.chunks_exact_mut(of_row);
            for (to, from) in to.zip(x.chunks_exact(width)) {
                to[state * width..][..width].copy_from_slice(from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use stolon_backend::{LogitRows, SequenceSlice, StepBatch};
    use stolon_checkpoint::kv::{KvShape, KvType};
    use stolon_checkpoint::{LoadOptions, LoadedModel, ModelSource, WeightType, load};
    use stolon_kernels::{KvLayout, Path};
    use stolon_kvcache::BlockId;

    use super::*;
    use crate::decoder::StepState;
    use crate::decoder::linear::Loader;
    use crate::kv_store::KvStore;
    use crate::state_store::StateStore;

    /// Goal: for a head that reads the states of positions with logits only, no other row of a prompt
    /// is computed in the layers that keep nothing; and a step without logits leaves no states of an
    /// earlier step.
    #[test]
    fn only_rows_with_logits_are_recorded() {
        let source = ModelSource::Directory(stolon_fixtures::path("gemma4"));
        let LoadedModel { config, weights, .. } =
            load(&source, &LoadOptions::default()).expect("a model");
        let workers = Workers::new(1);
        let (path, weight_type, map_tables) = (Path::PORTABLE, WeightType::Stored, false);
        let shape = KvShape::of(&config, 16, KvType::F32, |_| KvLayout::Rows);
        let (width, keeping) = (config.hidden_size, config.last_keeping_layer());
        let mut kv = KvStore::new(shape, 4).expect("memory");
        let mut states = StateStore::new(&config, 0).expect("memory");
        let loader = Loader { weights, weight_type, map_tables, path, workers: &workers };
        let mut decoder = Decoder::load(config, loader).expect("a decoder");
        assert!(keeping + 1 < decoder.layers.len());
        for (of_all, logit_rows, recorded) in [
            (false, LogitRows::Last, 1),
            (false, LogitRows::All, 20),
            (false, LogitRows::None, 0),
            (true, LogitRows::None, 20),
        ] {
            decoder.record_states(None, of_all);
            let slice = SequenceSlice {
                token_count: 20,
                block_table: vec![BlockId(0), BlockId(1)],
                logit_rows,
                ..SequenceSlice::default()
            };
            let batch = StepBatch { tokens: (0..20).collect(), sequences: vec![slice] };
            let step = StepState { kv: &mut kv, states: &mut states };
            decoder.forward(&batch, step, &workers);
            assert_eq!(decoder.row_states().len(), recorded * width, "{logit_rows:?}");
        }
    }
}
