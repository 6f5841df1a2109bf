//! The hidden states of all rows of a step that a draft head reads: those after the last norm, or
//! those of the residual stream after some layers.

use super::Decoder;
use super::passes::Norm;
use crate::workers::Workers;

/// See the [module documentation](self).
#[derive(Debug)]
pub(super) struct RowStates {
    /// After how many layers the residual stream is read, for each state of a row; `None` for the
    /// state after the last norm.
    layers: Option<Vec<usize>>,
    /// The states of the last step, `[rows, states, hidden_size]`.
    values: Vec<f32>,
}

impl Decoder {
    /// Makes this decoder record hidden states of all rows of a step from now on: for each number in
    /// `layers`, the residual stream after that number of layers. With `None`, the state after the
    /// last norm.
    pub(super) fn record_states(&mut self, layers: Option<Vec<usize>>) {
        let all = self.layers.len();
        let last = layers.iter().flatten().copied().max().unwrap_or(all);
        if last > self.last_keeping {
            // No row is dropped before the end.
            self.last_keeping = all;
        }
        self.row_states = Some(RowStates { layers, values: Vec::new() });
    }

    /// The recorded hidden states of all rows of the last step, `[rows, states, hidden_size]`; empty
    /// if none are recorded.
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
