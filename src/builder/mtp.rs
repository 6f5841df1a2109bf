//! The setting of a model's own head for multi-token prediction.

use stolon_scheduler::EngineConfig;

use super::EngineBuilder;
use crate::Error;

/// The name of the setting in errors.
const NAME: &str = "mtp";

impl EngineBuilder {
    /// Whether the model's own head for multi-token prediction (MTP) guesses tokens of answers
    /// (speculative decoding). Default: false. The files of Qwen3-Next, Qwen3.5, Qwen3.6, GLM-4.5
    /// to 4.7, DeepSeek-V3 and MiMo-7B have such a head, and so have GGUF files that were converted with
    /// it. A model without one is refused. [`ModelInfo::drafting`](crate::ModelInfo::drafting) says
    /// whether a model has one.
    ///
    /// The model verifies the guesses, so answers have the same bits with and without, at any
    /// temperature. The head needs memory for each position of the KV cache, which is a part of
    /// [`kv_memory`](Self::kv_memory), and prompts take a little longer, because the last layer
    /// computes all of their positions. Nothing is guessed while it is not expected to save time,
    /// which the engine measures. See [`speculation`](Self::speculation) for the number of tokens.
    ///
    /// [`build`](Self::build) refuses it together with a [`draft_model`](Self::draft_model), and on
    /// a GPU.
    pub fn mtp(mut self, on: bool) -> Self {
        self.load_options.mtp = on;
        self
    }

    /// Whether [`mtp`](Self::mtp) was set.
    pub(crate) fn has_mtp(&self) -> bool {
        self.load_options.mtp
    }

    /// Checks that the head has an effect, if it is to be used.
    pub(super) fn check_mtp(&self, config: &EngineConfig) -> Result<(), Error> {
        let refused = |expected| Err(Error::invalid(NAME, expected, "true"));
        match self.has_mtp() {
            true if config.speculation.max_tokens == 0 => {
                refused("false, because `speculation` is off")
            }
            true if self.draft_model.is_some() => {
                refused("false with a `draft_model`, because one of them guesses the tokens")
            }
            _ => Ok(()),
        }
    }
}
