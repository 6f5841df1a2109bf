//! The flags of speculative decoding.

use clap::{Args, ValueEnum};
use stolon::{EngineBuilder, Speculation};

/// Whether and how tokens of answers are guessed.
#[derive(Clone, Debug, Args)]
pub struct SpeculationArgs {
    /// Whether several tokens of an answer may be computed in one forward pass
    ///
    /// With auto, tokens are guessed from other answers, from the prompt, from grammars, and by a
    /// --draft-model or with --mtp, where that saves time (speculative decoding). Answers stay the
    /// same. Has no effect on GPUs.
    #[arg(long, default_value = "auto", value_name = "MODE")]
    speculation: Mode,
    /// Maximum number of tokens that are guessed at once, from 1 to 32
    #[arg(long, visible_alias = "num-speculative-tokens", default_value_t = 8)]
    #[arg(value_name = "TOKENS", value_parser = clap::value_parser!(u8).range(1..=32))]
    speculation_tokens: u8,
    /// A smaller model, or a draft head, that guesses tokens of answers, given as for --model
    ///
    /// The model verifies the guesses, so answers stay the same. Nothing is guessed where that does
    /// not save time. The weights need memory in addition to the model's, and --kv-memory is divided
    /// between both. A smaller model must have the same vocabulary, and models with recurrent layers
    /// cannot guess. An EAGLE-3 head must have been trained for this model, such as
    /// AngelSlim/Qwen3-8B_eagle3 for Qwen/Qwen3-8B, and an assistant of Gemma 4, such as
    /// google/gemma-4-E2B-it-assistant, for its model, both in safetensors files. Not on GPUs.
    #[arg(long, value_name = "MODEL")]
    draft_model: Option<String>,
    /// Let the model's own head for multi-token prediction (MTP) guess tokens of answers
    ///
    /// The model verifies the guesses, so answers stay the same. Nothing is guessed where that does
    /// not save time. The head takes a part of --kv-memory, and prompts take a little longer. The
    /// files of Qwen3-Next, Qwen3.5, Qwen3.6, GLM-4.5 to 4.7, DeepSeek-V3 and MiMo-7B have such a head
    /// (stolon model inspect), GGUF files only if they were converted with it. Not on GPUs, and not
    /// with --draft-model.
    #[arg(long, conflicts_with = "draft_model")]
    mtp: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Where it saves time
    Auto,
    /// Never
    Off,
}

impl SpeculationArgs {
    pub(super) fn apply(&self, builder: EngineBuilder) -> EngineBuilder {
        let speculation = match self.speculation {
            Mode::Off => Speculation::off(),
            Mode::Auto => {
                let max_tokens = self.speculation_tokens.into();
                Speculation { max_tokens, ..Speculation::default() }
            }
        };
        let builder = builder.speculation(speculation).mtp(self.mtp);
        match &self.draft_model {
            Some(model) => builder.draft_model(model),
            None => builder,
        }
    }
}
