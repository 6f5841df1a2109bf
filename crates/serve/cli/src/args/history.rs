//! How earlier answers of a conversation become tokens, and whether its next turn is computed in
//! advance, as flags.

use clap::{Args, ValueEnum};
use stolon::EngineBuilder;

use crate::memory::parse_bytes;

/// How earlier answers of a conversation become tokens.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct HistoryArgs {
    /// How an earlier answer in a conversation becomes tokens
    ///
    /// Clients send an answer back as text. Tokenized again, it may give other tokens than those
    /// that the model sampled; and clients write the JSON of calls with other spaces and leave out
    /// the reasoning. The model would continue what it has not said, and everything after the first
    /// other token would be computed again.
    #[arg(long, value_enum, default_value_t, value_name = "TOKENS")]
    pub history: History,
    /// Memory for the requests and answers of `--history exact-tokens`; the oldest are forgotten
    /// first. Default 32M, for a few million tokens
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    pub history_memory: Option<u64>,
    /// Whether to compute what the next turn of a conversation begins with, while no request runs or
    /// waits: on or off
    ///
    /// When an answer has ended, the end of it, the text of the chat template after it and, where
    /// the template strips the reasoning of earlier answers, the conversation without it are
    /// computed. The next turn then computes only its new text. A request that comes meanwhile waits
    /// for at most one step of 16 tokens. Default: on, with a prefix cache and `--history
    /// exact-tokens`.
    #[arg(long, value_enum, value_name = "ON|OFF")]
    pub next_turn_prefill: Option<Switch>,
}

/// Whether something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// It is done
    On,
    /// It is not done
    Off,
}

/// The tokens of an earlier answer in a conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum History {
    /// The tokens that were sampled, if the engine remembers the answer, with the reasoning where
    /// the chat template shows it; else the tokens of the text
    #[default]
    ExactTokens,
    /// The tokens of the text that the client sends
    Retokenize,
}

impl HistoryArgs {
    /// Applies these flags to an engine builder.
    ///
    /// # Errors
    /// If a flag has no effect in combination with another one.
    pub(super) fn apply(&self, builder: EngineBuilder) -> anyhow::Result<EngineBuilder> {
        anyhow::ensure!(
            self.next_turn_prefill != Some(Switch::On) || self.history == History::ExactTokens,
            "expected --next-turn-prefill on without --history retokenize, because the next turn \
             begins with the tokens that were sampled"
        );
        let builder = builder.next_turn_prefill(self.next_turn_prefill != Some(Switch::Off));
        match (self.history, self.history_memory) {
            (History::Retokenize, Some(_)) => anyhow::bail!(
                "expected --history-memory without --history retokenize, because nothing is \
                 remembered then"
            ),
            (History::Retokenize, None) => Ok(builder.history_bytes(0)),
            (History::ExactTokens, None) => Ok(builder),
            (History::ExactTokens, Some(bytes)) => {
                Ok(builder.history_bytes(usize::try_from(bytes).unwrap_or(usize::MAX)))
            }
        }
    }
}
