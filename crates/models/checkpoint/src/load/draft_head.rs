//! [`DraftHead`] is a draft head after loading.

use super::head::{EMBEDDING, HEAD};
use crate::config::{DecoderConfig, DraftHeadKind, TensorSpec};
use crate::weights::Weights;

/// A draft head: a layer that guesses tokens from hidden states of a model.
#[derive(Debug)]
pub struct DraftHead {
    /// The head as a decoder with one layer. Its vocabulary size is that of the model.
    pub config: DecoderConfig,
    /// What the layer reads.
    pub kind: DraftHeadKind,
    /// The tensors of the head.
    pub weights: Weights,
    /// The model's id of each token that can be guessed: different ids below the vocabulary size, as
    /// many as the output matrix has rows; `None` if the head has the ids of the model.
    pub token_ids: Option<Vec<u32>>,
}

impl DraftHead {
    /// Whether the head has its own embedding. Otherwise it uses the model's.
    #[must_use]
    pub fn has_own_embedding(&self) -> bool {
        self.is_own(EMBEDDING)
    }

    /// Whether the head has its own output matrix. Otherwise it uses the model's.
    #[must_use]
    pub fn has_own_output(&self) -> bool {
        self.is_own(HEAD)
    }

    /// All tensors that the head has itself.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.kind.tensors(&self.config, |name| self.is_own(name))
    }

    /// Heads for multi-token prediction are in the files of the model, which has these matrices.
    fn is_own(&self, name: &str) -> bool {
        self.kind != DraftHeadKind::Mtp && self.weights.contains(name)
    }
}
