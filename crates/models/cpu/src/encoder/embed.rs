//! The sum of the embeddings of tokens, positions and token types, and its norm, if it has one.

use stolon_backend::StepBatch;
use stolon_checkpoint::encoder::EncoderConfig;
use stolon_kernels as kernels;

use super::tasks::{TableTasks, TypedToken};
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
    /// The matrices of tasks for the tables of tokens and of token types.
    pub(super) tasks: [Option<TableTasks>; 2],
    pub(super) norm: Option<Norm>,
}

impl EncoderBackend {
    /// Fills the residual stream with the embeddings of the batch's tokens.
    pub(super) fn embed(&mut self, batch: &StepBatch) {
        let config = &self.config;
        let learned = position_rows(config, batch);
        let width = config.hidden_size;
        let chunk = self.workers.chunk_rows(batch.tokens.len(), width);
        let (embedding, path) = (&self.embedding, self.path);
        let Activations { x, spare, .. } = &mut self.activations;
        let parts = x.chunks_mut(chunk * width).zip(spare.chunks_mut(chunk * width));
        let parts = parts.zip(batch.tokens.chunks(chunk)).enumerate();
        self.workers.run(parts, |(part, ((x, sums), tokens))| {
            let rows = sums.chunks_exact_mut(width).zip(tokens);
            for (row, (sum, &token)) in (part * chunk..).zip(rows) {
                let TypedToken { id, token_type, task } = TypedToken::of(config, token);
                embedding.tokens.row(id, sum);
                if let Some(scale) = config.embedding_scale {
                    kernels::scale(path, sum, scale);
                }
                if let Some(task) = task {
                    let tables = embedding.tasks.iter().zip([id, token_type]);
                    tables.for_each(|(table, row)| {
                        table.iter().for_each(|table| table.add(task, row, sum));
                    });
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

/// The row of the table of positions of each token, if there is a table.
fn position_rows(config: &EncoderConfig, batch: &StepBatch) -> Option<Vec<usize>> {
    let positions = config.learned_positions?;
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
                    if TypedToken::of(config, token).id == padding as usize {
                        return padding as usize;
                    }
                    next += 1;
                    next - 1
                }));
            }
        }
    }
    Some(rows)
}
