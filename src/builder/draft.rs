//! Smaller models and draft heads, which guess tokens of answers and come from their own files.

use stolon_backend::{Backend, WithDraft};
use stolon_checkpoint::{
    AnyModel, DecoderConfig, DraftHead, LoadOptions, LoadedModel, ModelSource, Weights, WindowKv,
};
use stolon_cpu::{CpuBackend, CpuOptions};
use stolon_scheduler::EngineConfig;

use super::load::text_layer;
use super::{EngineBuilder, ModelArg};
use crate::Error;
use crate::text::Text;

/// The name of the setting in errors.
const NAME: &str = "draft_model";

/// A loaded draft model or head.
pub(super) enum Draft {
    Model(DraftModel),
    Head(DraftHead),
}

/// A loaded draft model, without its backend.
pub(super) struct DraftModel {
    id: String,
    config: DecoderConfig,
    weights: Weights,
}

impl EngineBuilder {
    /// A smaller model with the same vocabulary, an EAGLE-3 head for the model, or the assistant of a
    /// Gemma 4 model, which guesses tokens of answers (speculative decoding). Default: none. The
    /// argument is as for [`model`](Self::model).
    ///
    /// The model verifies the guesses, so answers have the same bits with and without, at any
    /// temperature. Nothing is guessed while it is not expected to save time, which the engine
    /// measures, and then the draft model computes nothing. See
    /// [`speculation`](Self::speculation) for the number of tokens.
    ///
    /// The draft model has a KV cache of its own in the same blocks, whose memory is a part of
    /// [`kv_memory`](Self::kv_memory). [`weights`](Self::weights) and [`kv_type`](Self::kv_type)
    /// apply to it, too. Models with recurrent layers cannot be draft models. On a GPU,
    /// [`build`](Self::build) refuses it.
    ///
    /// An EAGLE-3 head is recognized by its `config.json`. It is a directory or a repository of
    /// safetensors files that SpecForge or speculators have written, for example
    /// `AngelSlim/Qwen3-8B_eagle3` for `Qwen/Qwen3-8B`. It must have one layer of Llama's kind, and the
    /// hidden size and the vocabulary of the model. Each position of the KV cache has its keys, values
    /// and a hidden state in addition, and [`kv_type`](Self::kv_type) and [`weights`](Self::weights)
    /// apply to it, too. The model may be quantized and may have recurrent layers or images. Models
    /// with factors or norms of their embeddings, such as Gemma, are refused.
    ///
    /// An assistant of Gemma 4 is recognized in the same way, for example
    /// `google/gemma-4-E2B-it-assistant` for `google/gemma-4-E2B-it`, from safetensors files that are
    /// not quantized. It attends to the keys and values of the model, so each position of the KV cache
    /// has a hidden state in addition and nothing else. With [`WindowKv::States`], it is refused.
    pub fn draft_model(mut self, model: impl Into<ModelArg>) -> Self {
        self.draft_model = Some(model.into());
        self
    }

    /// Checks that a draft model has an effect, if there is one.
    pub(super) fn check_draft_model(&self, config: &EngineConfig) -> Result<(), Error> {
        if self.draft_model.is_some() && config.speculation.max_tokens == 0 {
            return Err(Error::invalid(NAME, "no value, because `speculation` is off", "a value"));
        }
        Ok(())
    }
}

/// Refuses a draft model for a model for which it can guess nothing.
pub(super) fn refuse(draft: Option<ModelArg>, model: &str) -> Result<(), Error> {
    match draft {
        Some(_) => Err(Error::invalid(NAME, format!("no value for {model}"), "a value")),
        None => Ok(()),
    }
}

impl Draft {
    /// Reads what is to guess tokens for a model with this text layer, configuration and weights.
    ///
    /// # Errors
    /// [`Error::Load`] and [`Error::Tokenizer`] if it cannot be read or is a head for another model,
    /// and [`EngineError::InvalidParameter`](crate::EngineError::InvalidParameter) if it is no decoder
    /// or has another vocabulary.
    pub(super) fn load(
        draft: ModelArg,
        options: &LoadOptions,
        text: &Text,
        (config, weights): (&DecoderConfig, &Weights),
    ) -> Result<Self, Error> {
        let mut options = options.clone();
        (options.mmproj, options.generation, options.max_positions) = (None, None, None);
        options.mtp = false;
        let named = draft.source()?;
        let source = stolon_checkpoint::fetched(&named, &options)?;
        let head = stolon_checkpoint::load_draft_head(&source, &options, (config, weights))?;
        match head {
            Some(head) => Ok(Self::Head(head)),
            None => {
                let id = named.to_string();
                let model = DraftModel::load(id, &source, &options, (text, config.vocab_size))?;
                Ok(Self::Model(model))
            }
        }
    }
}

impl DraftModel {
    /// As [`Draft::load`], for a model with this text layer and number of token ids. `id` is the name
    /// in the log.
    fn load(
        id: String,
        source: &ModelSource,
        options: &LoadOptions,
        (text, vocab_size): (&Text, usize),
    ) -> Result<Self, Error> {
        let expected = "a model that generates text";
        let model = match stolon_checkpoint::load_any(source, options)? {
            AnyModel::Decoder(model) if model.generates => *model,
            AnyModel::Decoder(_) => return Err(Error::invalid(NAME, expected, "another one")),
            AnyModel::Encoder(_) => return Err(Error::invalid(NAME, expected, "a text encoder")),
        };
        let LoadedModel { config, weights, text: own, generation, .. } = model;
        let own = text_layer(&own, &generation.eos_token_ids, false)?;
        match (text.has_tokenizer(), own.has_tokenizer()) {
            (true, true) => {
                if let Some([expected, got]) = text.first_difference(&own) {
                    return Err(Error::invalid(NAME, expected, got));
                }
            }
            // Without tokenizers, nothing but the number of tokens is known.
            (false, false) if vocab_size == config.vocab_size => {}
            (false, false) => {
                let expected = format!("a vocabulary of {vocab_size} tokens");
                return Err(Error::invalid(NAME, expected, config.vocab_size));
            }
            (has, _) => {
                let name = |has| if has { "a tokenizer" } else { "no tokenizer" };
                let expected = format!("a model with {}, as the model has", name(has));
                return Err(Error::invalid(NAME, expected, format!("one with {}", name(!has))));
            }
        }
        Ok(Self { id, config, weights })
    }

    /// Opens the backend of the model with `open`, and that of the draft model for it. They divide the
    /// memory of the KV cache.
    ///
    /// # Errors
    /// [`Error::Load`], and [`EngineError::InvalidParameter`](crate::EngineError::InvalidParameter) if
    /// the draft model cannot be used for the model.
    pub(super) fn open(
        self,
        options: CpuOptions,
        open: impl FnOnce(CpuOptions) -> Result<CpuBackend, stolon_checkpoint::ModelError>,
    ) -> Result<Box<dyn Backend>, Error> {
        let Self { id, config, weights } = self;
        let own = CpuOptions { window_kv: WindowKv::Blocks, ..options };
        let block_bytes = CpuBackend::block_bytes(&config, &own)?;
        let other_block_bytes = WithDraft::added_block_bytes(options.block_size, block_bytes);
        let model = open(CpuOptions { other_block_bytes, ..options })?;
        let draft = model.draft(config, weights, own)?;
        tracing::info!(draft_model = id, "a draft model guesses tokens");
        match WithDraft::new(Box::new(model), Box::new(draft)) {
            Ok(both) => Ok(Box::new(both)),
            Err(error) => Err(Error::invalid(NAME, "a draft model that fits the model", error)),
        }
    }
}
