//! What guesses tokens of answers in addition to the sources that need no computation.

use serde::Serialize;

/// What guesses tokens of answers in addition to earlier texts and grammars.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Drafting {
    /// Nothing.
    #[default]
    None,
    /// A draft model ([`EngineBuilder::draft_model`](crate::EngineBuilder::draft_model)).
    DraftModel,
    /// An EAGLE-3 head ([`EngineBuilder::draft_model`](crate::EngineBuilder::draft_model)).
    Eagle3,
    /// An assistant of Gemma 4 ([`EngineBuilder::draft_model`](crate::EngineBuilder::draft_model)).
    Gemma4Assistant,
    /// The model's own head for multi-token prediction
    /// ([`EngineBuilder::mtp`](crate::EngineBuilder::mtp)).
    Mtp,
    /// Nothing, but the files have such a head, which could be used on this device.
    UnusedMtp,
}

impl Drafting {
    /// The name in JSON: `none`, `draft_model`, `eagle3`, `gemma4_assistant`, `mtp` or `unused_mtp`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::DraftModel => "draft_model",
            Self::Eagle3 => "eagle3",
            Self::Gemma4Assistant => "gemma4_assistant",
            Self::Mtp => "mtp",
            Self::UnusedMtp => "unused_mtp",
        }
    }
}
