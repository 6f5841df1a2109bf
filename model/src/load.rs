//! Loads a model from a [`ModelSource`].
//!
//! The result is plain data: a backend is created from the configuration and the weights, and
//! tokenizer and chat templates are created from [`TextSource`]. No file is opened again
//! afterwards.

pub(crate) mod directory;
pub(crate) mod embedding;
pub(crate) mod generation;
pub(crate) mod gguf;

pub use embedding::{EmbeddingConfig, EmbeddingSizes};
pub use gguf::read_gguf_tokenizer;

use stolon_backend::SamplingParams;
use stolon_text::TextSource;

use crate::config::DecoderConfig;
use crate::error::ModelError;
#[cfg(feature = "hub")]
use crate::hub::{self, HubOptions};
use crate::source::ModelSource;
use crate::weights::Weights;

/// A model that was read and checked.
#[derive(Debug)]
pub struct LoadedModel {
    /// The model's name in the server's model list: the hub id, or the name of the directory or
    /// file.
    pub id: String,
    /// The decoder's configuration.
    pub config: DecoderConfig,
    /// The tensors.
    pub weights: Weights,
    /// The data of the tokenizer and the chat templates.
    pub text: TextSource,
    /// The model's special tokens, and the sampling parameters that its authors recommend.
    pub generation: GenerationDefaults,
    /// How embeddings are made; `None` for a model that is not meant for them.
    pub embedding: Option<EmbeddingConfig>,
    /// Whether the model generates text. A model for embeddings may have no output matrix; the
    /// logits that it computes are then meaningless.
    pub generates: bool,
}

/// The keys of `generation_config.json` that the engine uses. `None` means that the key is missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// The token ids that end generation: sorted, without duplicates, all below `vocab_size`.
    pub eos_token_ids: Vec<u32>,
    /// The token that begins every sequence, if the model has one. Below `vocab_size`.
    pub bos_token_id: Option<u32>,
    /// Whether the authors recommend sampling. Unless true, the fields below are ignored, except
    /// `repetition_penalty`.
    pub do_sample: Option<bool>,
    /// Temperature, at least 0. 0 is greedy.
    pub temperature: Option<f32>,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: Option<u32>,
    /// Total probability of the most likely tokens to keep, 0 to 1.
    pub top_p: Option<f32>,
    /// Minimum probability relative to the most likely token, 0 to 1.
    pub min_p: Option<f32>,
    /// Repetition penalty, above 0. 1 has no effect.
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    /// The sampling parameters that the model's authors recommend. Greedy if they recommend none.
    #[must_use]
    pub fn recommended_sampling(&self) -> SamplingParams {
        let mut params = SamplingParams::default();
        params.repetition_penalty = self.repetition_penalty.unwrap_or(params.repetition_penalty);
        if self.do_sample == Some(true) {
            params.temperature = self.temperature.unwrap_or(1.0);
            params.top_k = self.top_k.filter(|&count| count > 0).map(|count| count as usize);
            params.top_p = self.top_p.unwrap_or(params.top_p);
            params.min_p = self.min_p.unwrap_or(params.min_p);
        }
        params
    }
}

/// Options for loading a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Address, token and cache of the hub. The default is read from the environment.
    #[cfg(feature = "hub")]
    pub hub: HubOptions,
}

/// Loads a model: reads its configuration, maps its weights, and checks that every tensor that the
/// configuration requires is present with the right shape and a supported type.
///
/// Blocks the calling thread on disk access, and for [`ModelSource::Hub`] on the network.
///
/// # Errors
/// [`ModelError`]. Its message names the file and the key or tensor in it.
#[cfg_attr(not(feature = "hub"), allow(unused_variables, reason = "all options belong to the hub"))]
pub fn load(source: &ModelSource, options: &LoadOptions) -> Result<LoadedModel, ModelError> {
    match source {
        ModelSource::Directory(path) => directory::load(path, file_name(path)),
        ModelSource::Gguf(path) => gguf::load(path, file_name(path)),
        #[cfg(feature = "hub")]
        ModelSource::Hub { id, revision, file } => {
            let path = hub::fetch(id, revision, file.as_deref(), &options.hub)?;
            match path.is_dir() {
                true => directory::load(&path, id.clone()),
                false => gguf::load(&path, id.clone()),
            }
        }
        #[cfg(not(feature = "hub"))]
        ModelSource::Hub { .. } => Err(ModelError::UnknownSource {
            given: source.to_string(),
            reason: "it looks like a hub id, but this build cannot download (feature `hub`)".into(),
        }),
        #[cfg(feature = "demo-model")]
        ModelSource::Demo => crate::demo::load(),
        ModelSource::Random { preset, seed } => crate::random::load(preset, *seed),
    }
}

/// The last component of a path, which is used as the model's name.
pub(crate) fn file_name(path: &std::path::Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: recommended values apply if the model's authors recommend sampling, and only then.
    #[test]
    fn recommended_sampling_follows_do_sample() {
        let recommended = |do_sample| {
            let generation = GenerationDefaults {
                do_sample,
                temperature: Some(0.6),
                top_k: Some(0),
                top_p: Some(0.95),
                ..GenerationDefaults::default()
            };
            generation.recommended_sampling()
        };
        assert_eq!(recommended(None), SamplingParams::default());
        let sampled = SamplingParams { temperature: 0.6, top_p: 0.95, ..SamplingParams::default() };
        assert_eq!(recommended(Some(true)), sampled);
    }
}
