//! [`LoadedModel`] is a model after loading.

use std::path::PathBuf;

use stolon_backend::SamplingParams;
use stolon_text::TextSource;

use super::draft_head::DraftHead;
use super::embedding::EmbeddingConfig;
use super::encoder::TextPrompts;
use super::images::ImageModel;
use super::skills::SkillPrompts;
use super::suppressed::SuppressedTokens;
use crate::config::DecoderConfig;
use crate::encoder::{HeadConfig, ScoreConfig};
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
    /// How embeddings are computed; `None` for a model that is not an embedding model.
    pub embedding: Option<EmbeddingConfig>,
    /// The texts that an embedding model expects before others; empty for other models.
    pub prompts: TextPrompts,
    /// The tasks for which an embedding model has adapters in its files, and the directories of the
    /// adapters. It computes nothing without a task. Empty for other models.
    pub tasks: Vec<(String, PathBuf)>,
    /// How scores of texts are computed; `None` for a model that is not a classifier.
    pub scores: Option<LoadedScores>,
    /// Whether the model generates text. An embedding model may have no output matrix; its logits
    /// then have no meaning.
    pub generates: bool,
    /// How the model reads images; `None` if it reads text only.
    pub images: Option<ImageModel>,
    /// The prompts of the model's skills; `None` if it has none.
    pub skills: Option<SkillPrompts>,
    /// Whether the files have a head for multi-token prediction that can be used.
    pub has_mtp: bool,
    /// The model's own head for multi-token prediction, if
    /// [`LoadOptions::mtp`](super::LoadOptions::mtp) is set.
    pub mtp: Option<DraftHead>,
}

/// How two texts become one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairForm {
    /// The tokenizer joins them, as it does for classifiers.
    Tokenizer,
    /// They are parts of a template, and a language model answers.
    Template,
}

/// What a classifier or reranker with a decoder computes from the hidden state of the last token.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedScores {
    /// The projection to the labels. Its tensors are among the weights.
    pub head: HeadConfig,
    /// The labels.
    pub config: ScoreConfig,
    /// The prompts of pairs of texts.
    pub pairs: PairForm,
}

/// The keys of `generation_config.json` that the engine uses. `None` means that the key is missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// The token ids that end generation: sorted, without duplicates, all below `vocab_size`.
    pub eos_token_ids: Vec<u32>,
    /// The token that begins every sequence, if the model has one. Below `vocab_size`.
    pub bos_token_id: Option<u32>,
    /// Whether the authors recommend sampling. Unless this is true, all fields below except
    /// `repetition_penalty` are ignored.
    pub do_sample: Option<bool>,
    /// Temperature, at least 0. 0 means greedy decoding.
    pub temperature: Option<f32>,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: Option<u32>,
    /// Total probability of the most likely tokens to keep, 0 to 1.
    pub top_p: Option<f32>,
    /// Minimum probability relative to the most likely token, 0 to 1.
    pub min_p: Option<f32>,
    /// Repetition penalty, above 0. 1 has no effect.
    pub repetition_penalty: Option<f32>,
    /// The tokens that the model must not generate.
    pub suppressed: SuppressedTokens,
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

    /// The sampling parameters for chats. These are the authors' recommended parameters, or the
    /// usual ones if there are none, because greedy answers of small models often end in a loop.
    #[must_use]
    pub fn chat_sampling(&self) -> SamplingParams {
        if self.do_sample.is_some() {
            return self.recommended_sampling();
        }
        // These are the defaults of llama.cpp.
        let usual = Self {
            do_sample: Some(true),
            temperature: self.temperature.or(Some(0.8)),
            top_k: self.top_k.or(Some(40)),
            top_p: self.top_p.or(Some(0.95)),
            min_p: self.min_p.or(Some(0.05)),
            ..self.clone()
        };
        usual.recommended_sampling()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: chats are sampled unless the authors recommend otherwise, with the recommended
    /// parameters.
    #[test]
    fn chats_are_sampled_by_default() {
        let none = GenerationDefaults::default();
        let sampling = none.chat_sampling();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (0.8, Some(40), 0.95));
        assert_eq!(none.recommended_sampling(), SamplingParams::default());
        let greedy = GenerationDefaults { do_sample: Some(false), ..none.clone() };
        assert_eq!(greedy.chat_sampling(), SamplingParams::default());
        let own = GenerationDefaults { temperature: Some(0.2), ..none.clone() };
        assert_eq!((own.chat_sampling().temperature, own.chat_sampling().top_k), (0.2, Some(40)));
        let given = GenerationDefaults { do_sample: Some(true), ..none };
        assert_eq!((given.chat_sampling().temperature, given.chat_sampling().top_k), (1.0, None));
    }

    /// Goal: recommended values apply only if the model's authors recommend sampling.
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
