//! The input of a head for multi-token prediction: the projection of a token's embedding and of the
//! hidden state of the position before it, both normalized.

use stolon_checkpoint::config::MtpWeights;
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{Operands, Sink};

use super::Decoder;
use super::linear::{Linear, Loader, project};
use super::passes::{Norm, NormVectors, pack_rows};
use crate::workers::Workers;

/// The weights: the fields of [`MtpWeights`], and the rows of a step.
#[derive(Debug)]
pub(super) struct MtpInput {
    embedding_norm: NormVectors,
    hidden_norm: NormVectors,
    projection: Linear,
    /// For each row of the step, the hidden state of the position before it, `[rows, hidden_size]`.
    states: Vec<f32>,
    /// Both normalized rows of each row, packed for the projection.
    joined: Operands,
}

impl MtpInput {
    pub(super) fn load(spec: &MtpWeights, loader: &mut Loader<'_>) -> Result<Self, ModelError> {
        let MtpWeights { embedding_norm, hidden_norm, projection } = spec;
        Ok(Self {
            embedding_norm: NormVectors::load(embedding_norm, loader)?,
            hidden_norm: NormVectors::load(hidden_norm, loader)?,
            projection: loader.linear(projection)?,
            states: Vec::new(),
            joined: Operands::default(),
        })
    }

    /// Size in bytes of the packed matrix.
    pub(super) fn bytes(&self) -> usize {
        self.projection.bytes()
    }
}

impl Decoder {
    /// Sets the hidden states that the next step of this head reads: for each of its rows, that of
    /// the position before it, `[rows, hidden_size]`.
    ///
    /// # Panics
    /// If this decoder is no head for multi-token prediction.
    pub(crate) fn set_states(&mut self, states: Vec<f32>) {
        self.mtp_input.as_mut().expect("a head for multi-token prediction").states = states;
    }

    /// The normalized hidden states of the rows that have got logits in the last step of this head,
    /// `[rows, hidden_size]`.
    pub(crate) fn output_states(&self, rows: usize, workers: &Workers) -> Vec<f32> {
        let x = &self.activations.x[..rows * self.config.hidden_size];
        let mut states = vec![0.0; x.len()];
        Norm::of(&self.config, Some(&self.final_norm), self.path).rows(x, &mut states, workers);
        states
    }

    /// Replaces the embeddings of `rows` rows in the residual stream by the input of the head. Does
    /// nothing in other decoders.
    pub(super) fn join_states(&mut self, rows: usize, workers: &Workers) {
        let Some(input) = &mut self.mtp_input else { return };
        let (path, width) = (self.path, self.config.hidden_size);
        let MtpInput { embedding_norm, hidden_norm, projection, states, joined } = input;
        let x = &mut self.activations.x[..rows * width];
        let [of_embedding, of_state] =
            [&*embedding_norm, &*hidden_norm].map(|norm| Norm::of(&self.config, Some(norm), path));
        joined.reset(rows, &[&projection.matrix]);
        pack_rows(joined, workers.for_pass(rows, 2 * width), 2 * width, |row, out| {
            let (embedding, state) = out.split_at_mut(width);
            of_embedding.apply(&x[row * width..][..width], embedding);
            of_state.apply(&states[row * width..][..width], state);
        });
        project(projection, joined, Sink::Rows(x), path, workers);
    }
}
