//! Loading: from a [`ModelSource`] to everything a backend and the
//! text side start from.
//!
//! What comes out is plain data. The backend takes the configuration and the weights, the text
//! side takes [`TextSource`]; neither reads a file again.

pub(crate) mod directory;
pub(crate) mod generation;
mod gguf;

pub use gguf::read_gguf_tokenizer;

use stolon_backend::SamplingParams;
use stolon_text::TextSource;

use crate::config::DecoderConfig;
use crate::error::ModelError;
#[cfg(feature = "hub")]
use crate::hub::{self, HubOptions};
use crate::source::ModelSource;
use crate::weights::Weights;

/// A model, read and checked.
#[derive(Debug)]
pub struct LoadedModel {
    /// Name for people and for the server's model list: the hub id, or the directory's or
    /// file's name.
    pub id: String,
    /// The decoder's shape.
    pub config: DecoderConfig,
    /// The tensors.
    pub weights: Weights,
    /// What the tokenizer and the chat template are made from.
    pub text: TextSource,
    /// What the model's makers recommend for generation.
    pub generation: GenerationDefaults,
}

/// `generation_config.json`, as far as it concerns an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Generation ends at any of these; sorted, without duplicates, all below `vocab_size`.
    pub eos_token_ids: Vec<u32>,
    /// Starts every sequence, where the model has such a token.
    pub bos_token_id: Option<u32>,
    /// False: greedy, whatever the fields below say.
    pub do_sample: Option<bool>,
    /// Above 0.
    pub temperature: Option<f32>,
    /// 0 stands for no limit.
    pub top_k: Option<u32>,
    /// Above 0, at most 1.
    pub top_p: Option<f32>,
    /// 0 to 1.
    pub min_p: Option<f32>,
    /// Above 0; 1 changes nothing.
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

/// How to load.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Where models are fetched from; by default what the environment says.
    #[cfg(feature = "hub")]
    pub hub: HubOptions,
}

/// Loads a model: reads its configuration, maps its weights and checks that every tensor the
/// configuration asks for is there in the right shape and in a type that can be computed with.
///
/// Blocks: on the disk, and for [`ModelSource::Hub`] on the network.
///
/// # Errors
/// [`ModelError`]; its message names the file, and the key or tensor in it.
#[cfg_attr(
    not(feature = "hub"),
    allow(unused_variables, reason = "the only options are the hub's")
)]
pub fn load(source: &ModelSource, options: &LoadOptions) -> Result<LoadedModel, ModelError> {
    match source {
        ModelSource::Directory(path) => directory::load(path, file_name(path)),
        ModelSource::Gguf(path) => gguf::load(path, file_name(path)),
        #[cfg(feature = "hub")]
        ModelSource::Hub { id, revision } => {
            let snapshot = hub::fetch(id, revision, &options.hub)?;
            directory::load(&snapshot, id.clone())
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

/// The last part of a path, for a model's name.
fn file_name(path: &std::path::Path) -> String {
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
