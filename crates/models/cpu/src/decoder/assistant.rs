//! The parts of an assistant of Gemma 4 that are not those of a decoder: the projections to its input
//! and to its hidden state, and the clusters of its vocabulary.

use stolon_checkpoint::config::{AssistantConfig, ClusterConfig, DecoderConfig};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{Matrix, Operands, Path, Sink};

use super::embed::{TokenMatrices, scale_embedding};
use super::linear::{Linear, Loader, project};
use super::passes::pack_rows;
use crate::workers::Workers;

/// The weights, and the buffer of the input.
#[derive(Debug)]
pub(super) struct Assistant {
    /// Number of values of an embedding and of a hidden state of the model.
    model_width: usize,
    /// The projection of both to the residual stream.
    input: Linear,
    /// The projection of the normalized residual stream to a hidden state.
    output: Linear,
    clusters: Option<Clusters>,
    /// The token of each row of the step.
    tokens: Vec<u32>,
}

/// The clusters of a vocabulary. Only the tokens in the best of them get logits, so a guess reads a
/// small part of the output matrix.
#[derive(Debug)]
pub(super) struct Clusters {
    config: ClusterConfig,
    /// The projection to the scores of the clusters.
    scores: Linear,
    /// The tokens of each cluster in order.
    tokens: Vec<u32>,
}

impl Assistant {
    /// Loads the parts of an assistant with this decoder. `cluster_tokens` has the tokens of each
    /// cluster in order, if there are clusters.
    pub(super) fn load(
        (config, decoder): (&AssistantConfig, &DecoderConfig),
        cluster_tokens: Option<Vec<u32>>,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let weights = config.own_weights(decoder);
        let scores = loader.optional(weights.clusters.as_ref())?;
        let clusters = config.clusters.zip(scores).zip(cluster_tokens);
        Ok(Self {
            model_width: config.model_width,
            input: loader.linear(&weights.input)?,
            output: loader.linear(&weights.output)?,
            clusters: clusters.map(|((config, scores), tokens)| Clusters {
                config,
                scores,
                tokens,
            }),
            tokens: Vec::new(),
        })
    }

    /// Size in bytes of the packed matrices.
    pub(super) fn bytes(&self) -> usize {
        let clusters = self.clusters.as_ref().map_or(0, |clusters| clusters.scores.bytes());
        self.input.bytes() + self.output.bytes() + clusters
    }

    pub(super) fn clusters(&self) -> Option<&Clusters> {
        self.clusters.as_ref()
    }

    /// Sets the tokens of the rows of the step.
    pub(super) fn set_tokens(&mut self, tokens: &[u32]) {
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
    }

    /// Writes the input of a step to the residual stream `x`, from the hidden states of its rows and
    /// the embeddings of its tokens.
    pub(super) fn join(
        &self,
        (states, joined, x): (&[f32], &mut Operands, &mut [f32]),
        (matrices, config): (&TokenMatrices, &DecoderConfig),
        path: Path,
        workers: &Workers,
    ) {
        let (width, rows) = (self.model_width, self.tokens.len());
        joined.reset(rows, &[&self.input.matrix]);
        pack_rows(joined, workers.for_pass(rows, 2 * width), 2 * width, |row, out| {
            let (embedding, state) = out.split_at_mut(width);
            let token = self.tokens[row];
            embedding.fill(0.0);
            // Other tokens are positions of images.
            if (token as usize) < config.vocab_size {
                matrices.row(token, embedding);
                scale_embedding(config.embedding_scale, embedding);
            }
            state.copy_from_slice(&states[row * width..][..width]);
        });
        project(&self.input, joined, Sink::Rows(x), path, workers);
    }

    /// The hidden states for the next guesses, `[rows, model_width]`, from the normalized residual
    /// stream.
    pub(super) fn states(&self, normed: &[f32], path: Path, workers: &Workers) -> Vec<f32> {
        let mut states =
            vec![0.0; normed.len() / self.output.matrix.in_features() * self.model_width];
        multiply(&self.output, normed, &mut states, path, workers);
        states
    }
}

impl Clusters {
    /// The logits of rows of the normalized residual stream, `[rows, vocab_size]`. They are
    /// [`f32::NEG_INFINITY`] for tokens of other clusters than the best ones. `head` is the output
    /// matrix.
    pub(super) fn logits(
        &self,
        normed: &[f32],
        head: &Matrix,
        path: Path,
        workers: &Workers,
    ) -> Vec<f32> {
        let (count, width) = (self.config.count, head.in_features());
        let of_cluster = self.tokens.len() / count;
        let rows = normed.len() / width;
        let mut scores = vec![0.0; rows * count];
        multiply(&self.scores, normed, &mut scores, path, workers);
        let mut logits = vec![f32::NEG_INFINITY; rows * self.tokens.len()];
        let each = normed.chunks_exact(width).zip(scores.chunks_exact(count));
        for ((state, scores), logits) in each.zip(logits.chunks_exact_mut(self.tokens.len())) {
            let mut best: Vec<usize> = (0..count).collect();
            best.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            best.truncate(self.config.chosen);
            let chosen = best.iter().flat_map(|cluster| {
                self.tokens[cluster * of_cluster..][..of_cluster].iter().copied()
            });
            let chosen: Vec<u32> = chosen.collect();
            let mut products = vec![0.0; chosen.len()];
            let chunk = workers.chunk_rows(chosen.len(), 2 * width);
            let parts = products.chunks_mut(chunk).zip(chosen.chunks(chunk));
            workers.run(parts, |(products, tokens)| {
                let mut row = vec![0.0; width];
                for (product, token) in products.iter_mut().zip(tokens) {
                    head.row(*token as usize, &mut row);
                    *product = row.iter().zip(state).map(|(a, b)| a * b).sum();
                }
            });
            for (token, product) in chosen.iter().zip(products) {
                logits[*token as usize] = product;
            }
        }
        logits
    }
}

/// Writes the projection of rows to `out`.
fn multiply(linear: &Linear, rows: &[f32], out: &mut [f32], path: Path, workers: &Workers) {
    let width = linear.matrix.in_features();
    let (count, mut packed) = (rows.len() / width, Operands::default());
    packed.reset(count, &[&linear.matrix]);
    packed.pack(workers.for_pass(count, width), rows);
    project(linear, &packed, Sink::Rows(out), path, workers);
}
