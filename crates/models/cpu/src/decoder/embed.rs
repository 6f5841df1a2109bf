//! Embeds the tokens and images of a batch into the residual stream: embeddings before the first
//! layer, and the rows that images add after some layers (DeepStack).

use std::ops::Range;
use std::sync::Arc;

use stolon_backend::{SliceImage, StepBatch};
use stolon_checkpoint::config::{DecoderConfig, TensorSpec};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{self as kernels, Matrix, Path};

use super::Decoder;
use super::linear::Loader;
use crate::table::Table;
use crate::workers::Workers;

/// The matrices with a row for each token of the vocabulary, `[vocab_size, hidden_size]`.
#[derive(Debug)]
pub(super) enum TokenMatrices {
    /// The embedding is also the output matrix.
    Tied(Matrix),
    Untied {
        embedding: Table,
        head: Matrix,
    },
    /// Those of a draft head, which uses the matrices of its model in place of those that it does not
    /// have.
    OfHead {
        model: Arc<TokenMatrices>,
        embedding: Option<Table>,
        /// `[tokens that can be guessed, hidden_size]`.
        head: Option<Matrix>,
    },
}

impl TokenMatrices {
    pub(super) fn load(
        embedding: &TensorSpec,
        head: Option<&TensorSpec>,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        Ok(match head {
            Some(head) => {
                Self::Untied { embedding: loader.table(embedding)?, head: loader.matrix(head)? }
            }
            None => Self::Tied(loader.matrix(embedding)?),
        })
    }

    /// Writes the embedding of a token to `out`.
    pub(super) fn row(&self, token: u32, out: &mut [f32]) {
        match self {
            Self::Tied(matrix) => matrix.row(token as usize, out),
            Self::Untied { embedding, .. } | Self::OfHead { embedding: Some(embedding), .. } => {
                embedding.row(token as usize, out);
            }
            Self::OfHead { model, embedding: None, .. } => model.row(token, out),
        }
    }

    /// The output matrix.
    pub(super) fn head(&self) -> &Matrix {
        match self {
            Self::Tied(matrix)
            | Self::Untied { head: matrix, .. }
            | Self::OfHead { head: Some(matrix), .. } => matrix,
            Self::OfHead { model, head: None, .. } => model.head(),
        }
    }

    /// Size in bytes of all packed matrices, without those of another decoder.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Tied(matrix) => matrix.bytes(),
            Self::Untied { embedding, head } => embedding.bytes() + head.bytes(),
            Self::OfHead { model: _, embedding, head } => {
                let embedding = embedding.as_ref().map_or(0, Table::bytes);
                embedding + head.as_ref().map_or(0, Matrix::bytes)
            }
        }
    }
}

impl Decoder {
    /// The embedding of a token below the vocabulary size, `[hidden_size]`.
    pub(crate) fn embedding(&self, token: u32) -> Vec<f32> {
        let mut row = vec![0.0; self.config.hidden_size];
        self.tokens.row(token, &mut row);
        normalize(self.embedding_norm().as_ref(), self.path, &mut row);
        scale_embedding(self.config.embedding_scale, &mut row);
        row
    }

    /// The weights, which are all 1, and the epsilon of the RMS norm of embeddings; `None` if the
    /// model does not normalize them.
    fn embedding_norm(&self) -> Option<(Vec<f32>, f32)> {
        let DecoderConfig { norms, hidden_size, .. } = &self.config;
        norms.embedding.then(|| (vec![1.0; *hidden_size], norms.eps))
    }

    /// Fills the residual stream with the embeddings of the batch's tokens and images. Does nothing in
    /// a draft head that reads embeddings of another size.
    pub(super) fn embed(&mut self, batch: &StepBatch, workers: &Workers) {
        if let Some(assistant) = self.assistant_mut() {
            return assistant.set_tokens(&batch.tokens);
        }
        let (tokens, width) = (&batch.tokens, self.config.hidden_size);
        let in_vocabulary = 0..self.config.vocab_size as u32;
        let chunk = workers.chunk_rows(tokens.len(), width);
        let (embedding, scale) = (&self.tokens, self.config.embedding_scale);
        let (norm, path, adapters) = (self.embedding_norm(), self.path, &self.adapters);
        let x = &mut self.activations.x[..tokens.len() * width];
        let parts = x.chunks_mut(chunk * width).zip(tokens.chunks(chunk)).enumerate();
        workers.run(parts, |(part, (x, tokens))| {
            let rows = (part * chunk..).zip(x.chunks_exact_mut(width).zip(tokens));
            // Other tokens are positions of images, coordinates and sizes.
            for (row, (x, &token)) in rows.filter(|(_, (_, token))| in_vocabulary.contains(token)) {
                embedding.row(token, x);
                // PEFT adds to the result of the module, which includes the norm.
                normalize(norm.as_ref(), path, x);
                adapters.embed(row, token, x);
                scale_embedding(scale, x);
            }
        });
        for (rows, values) in image_rows(batch, width, 0) {
            self.activations.x[rows].copy_from_slice(values);
        }
    }

    /// Adds the rows that the batch's images have for the output of layer `index`. The residual
    /// stream has all rows of the batch.
    pub(super) fn add_deepstack(&mut self, index: usize, batch: &StepBatch) {
        for (rows, values) in image_rows(batch, self.config.hidden_size, index + 1) {
            kernels::add(self.path, &mut self.activations.x[rows], values);
        }
    }
}

/// The ranges of the residual stream that are positions of images, with the values of the images
/// for them. The values are the embeddings for `plane` 0, and the rows that are added to the output
/// of layer `plane - 1` otherwise. Images without this plane are left out.
fn image_rows(
    batch: &StepBatch,
    width: usize,
    plane: usize,
) -> impl Iterator<Item = (Range<usize>, &[f32])> {
    let mut first = 0;
    let slices = batch.sequences.iter().map(move |slice| {
        first += slice.token_count;
        (first - slice.token_count, slice)
    });
    slices.flat_map(move |(first, slice)| {
        slice.images.iter().filter_map(move |image| {
            let SliceImage { start, len, embeddings, .. } = image;
            let values = embeddings.values.get(plane * len * width..(plane + 1) * len * width)?;
            let from = slice.start.max(*start);
            let end = image.positions().end.min(slice.start + slice.token_count);
            let rows = [from, end].map(|position| (first + position - slice.start) * width);
            Some((rows[0]..rows[1], &values[(from - start) * width..(end - start) * width]))
        })
    })
}

/// Normalizes an embedding with these weights and this epsilon, if there are any.
fn normalize(norm: Option<&(Vec<f32>, f32)>, path: Path, row: &mut [f32]) {
    if let Some((weight, eps)) = norm {
        kernels::rms_norm_in_place(path, row, weight, *eps, 0.0);
    }
}

/// Multiplies an embedding by the model's factor, if it has one.
pub(super) fn scale_embedding(scale: Option<f32>, row: &mut [f32]) {
    if let Some(scale) = scale {
        row.iter_mut().for_each(|value| *value *= scale);
    }
}
