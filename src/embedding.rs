//! Embeddings of prompts, and the properties of a model that computes them.

use serde::Serialize;
use stolon_checkpoint::EmbeddingConfig;

use crate::Error;

/// The embedding of a prompt. Made with [`Engine::embed`](crate::Engine::embed).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Embedding {
    /// The vector: [`EmbeddingInfo::size`] finite values, or as many as were requested.
    pub values: Vec<f32>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of them that were read from the prefix cache.
    pub cached_tokens: usize,
}

/// Describes the embeddings of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EmbeddingInfo {
    /// Number of values of an embedding that is not shortened.
    pub size: usize,
    /// How embeddings are made.
    #[serde(flatten)]
    pub config: EmbeddingConfig,
}

impl EmbeddingInfo {
    pub(crate) fn new(size: usize, config: EmbeddingConfig) -> EmbeddingInfo {
        EmbeddingInfo { size, config }
    }

    /// The number of values of an embedding with these `dimensions`.
    pub(crate) fn size_with(&self, dimensions: Option<usize>) -> Result<usize, Error> {
        let Some(size) = dimensions else { return Ok(self.size) };
        if self.config.sizes.allow(size, self.size) {
            return Ok(size);
        }
        let full = self.size;
        let expected = match &self.config.sizes {
            crate::EmbeddingSizes::Full => format!(
                "{full}, because the model does not declare that its embeddings can be shortened \
                 (`is_matryoshka` or `matryoshka_dimensions` in config.json)"
            ),
            crate::EmbeddingSizes::Any => format!("from 1 to {full}"),
            crate::EmbeddingSizes::Listed(sizes) => format!("{full} or one of {sizes:?}"),
        };
        Err(Error::invalid("dimensions", expected, size))
    }

    /// The first `size` values of a pooled hidden state, normalized if the model's embeddings are.
    pub(crate) fn finish(&self, mut values: Vec<f32>, size: usize) -> Vec<f32> {
        values.truncate(size);
        if self.config.normalize {
            let squares = values.iter().map(|&value| f64::from(value) * f64::from(value));
            // The same bound as in PyTorch.
            let norm = squares.sum::<f64>().sqrt().max(1e-12);
            values.iter_mut().for_each(|value| *value = (f64::from(*value) / norm) as f32);
        }
        values
    }
}
