//! The sum of the embeddings of tokens, positions and token types, and its norm, if it has one.

use stolon_backend::StepBatch;
use stolon_checkpoint::encoder::LearnedPositions;
use stolon_kernels as kernels;

use super::{Activations, EncoderBackend, Norm};
use crate::table::Table;

/// The tables of embeddings.
#[derive(Debug)]
pub(super) struct Embedding {
    /// `[vocab_size, hidden_size]`.
    pub(super) tokens: Table,
    /// The learned positions, `[rows, hidden_size]`.
    pub(super) positions: Option<Vec<f32>>,
    /// The token types, `[token_types, hidden_size]`.
    pub(super) token_types: Option<Vec<f32>>,
    pub(super) norm: Option<Norm>,
}

impl EncoderBackend {
    /// Fills the residual stream with the embeddings of the batch's tokens.
    pub(super) fn embed(&mut self, batch: &StepBatch) {
        let learned = self.config.learned_positions.map(|positions| rows_of(positions, batch));
        let (width, vocab_size) = (self.config.hidden_size, self.config.vocab_size);
        let chunk = self.workers.chunk_rows(batch.tokens.len(), width);
        let (embedding, path) = (&self.embedding, self.path);
        let scale = self.config.embedding_scale;
        let Activations { x, spare, .. } = &mut self.activations;
        let parts = x.chunks_mut(chunk * width).zip(spare.chunks_mut(chunk * width));
        let parts = parts.zip(batch.tokens.chunks(chunk)).enumerate();
        self.workers.run(parts, |(part, ((x, sums), tokens))| {
            let rows = sums.chunks_exact_mut(width).zip(tokens);
            for (row, (sum, &token)) in (part * chunk..).zip(rows) {
                let (token_type, token) =
                    (token as usize / vocab_size, token as usize % vocab_size);
                embedding.tokens.row(token, sum);
                if let Some(scale) = scale {
                    kernels::scale(path, sum, scale);
                }
                if let Some(types) = &embedding.token_types {
                    kernels::add(path, sum, &types[token_type * width..][..width]);
                }
                if let Some((table, learned)) = embedding.positions.as_ref().zip(learned.as_ref()) {
                    kernels::add(path, sum, &table[learned[row] * width..][..width]);
                }
            }
            match &embedding.norm {
                Some(norm) => norm.apply(sums, x, path),
                None => x.copy_from_slice(sums),
            }
        });
    }
}

/// The row of the table of positions of each token.
fn rows_of(positions: LearnedPositions, batch: &StepBatch) -> Vec<usize> {
    let mut rows = Vec::with_capacity(batch.tokens.len());
    let mut tokens = batch.tokens.as_slice();
    for slice in &batch.sequences {
        let (text, rest) = tokens.split_at(slice.token_count);
        tokens = rest;
        match positions.padding_id {
            None => rows.extend(0..text.len()),
            Some(padding) => {
                let mut next = padding as usize + 1;
                rows.extend(text.iter().map(|&token| {
                    if token == padding {
                        return padding as usize;
                    }
                    next += 1;
                    next - 1
                }));
            }
        }
    }
    rows
}
