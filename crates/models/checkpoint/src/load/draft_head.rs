//! [`DraftHead`] is a draft head after loading, and [`load_draft_head`] loads one that has files of its
//! own.

use super::head::{EMBEDDING, HEAD};
use super::{LoadOptions, directory, eagle3, fetched, gemma4_assistant};
use crate::config::{DecoderConfig, DraftHeadKind, HeadFiles, TensorSpec};
use crate::error::ModelError;
use crate::files::optional;
use crate::source::ModelSource;
use crate::weights::Weights;

/// A draft head: layers that guess tokens from hidden states of a model.
#[derive(Debug)]
pub struct DraftHead {
    /// The head as a decoder. Its vocabulary size is that of the model.
    pub config: DecoderConfig,
    /// What the layer reads.
    pub kind: DraftHeadKind,
    /// The tensors of the head.
    pub weights: Weights,
    /// The model's id of each token that can be guessed: different ids below the vocabulary size, as
    /// many as the output matrix has rows; `None` if the head has the ids of the model.
    pub token_ids: Option<Vec<u32>>,
    /// The tokens of each cluster of the vocabulary in order, ids below the vocabulary size, as many as
    /// it has ([`ClusterConfig`](crate::config::ClusterConfig)); `None` if there are no clusters.
    pub cluster_tokens: Option<Vec<u32>>,
}

/// Loads the draft head in `source`, an EAGLE-3 head or an assistant of Gemma 4, for a model with this
/// configuration and these weights. `None` if `source` is no such head. Blocks the calling thread as
/// [`load`](super::load()) does.
///
/// # Errors
/// [`ModelError`] if the head cannot be read, is not supported, or was made for another model.
pub fn load_draft_head(
    source: &ModelSource,
    options: &LoadOptions,
    model: (&DecoderConfig, &Weights),
) -> Result<Option<DraftHead>, ModelError> {
    let ModelSource::Directory(path) = fetched(source, options)? else { return Ok(None) };
    let Some(value) = optional(directory::read_config(&path))? else { return Ok(None) };
    let file = path.join(directory::CONFIG).display().to_string();
    let head = match HeadFiles::of(&value) {
        Some(HeadFiles::Eagle3) => eagle3::load(&path, (&file, &value), model)?,
        Some(HeadFiles::Gemma4) => gemma4_assistant::load(&path, (&file, &value), model.0)?,
        None => return Ok(None),
    };
    Ok(Some(head))
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
