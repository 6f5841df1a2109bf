//! The formats in which models write their reasoning.

use std::fmt;
use std::str::FromStr;

use super::format::{HARMONY, Headers, MUSE_GLIMMER};

/// The tags around a model's reasoning, which precedes the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReasoningFormat {
    /// `<think>` and `</think>`: DeepSeek R1, Qwen 3 and others.
    Think,
    /// `[THINK]` and `[/THINK]`: Magistral.
    MistralThink,
    /// `<|START_THINKING|>` and `<|END_THINKING|>`: Command A.
    Cohere,
    /// The channel `thought`, between `<|channel>` and `<channel|>`: Gemma 4. The model may reason
    /// again after a text, and a call may end its reasoning.
    Gemma4,
    /// The channel `analysis`: gpt-oss. The text of the answer is in the other channels.
    Harmony,
    /// Messages to the model itself: Muse Glimmer. The text of the answer is in messages to the user.
    MuseGlimmer,
}

impl ReasoningFormat {
    /// All formats.
    pub const ALL: [Self; 6] = [
        Self::Think,
        Self::MistralThink,
        Self::Cohere,
        Self::Gemma4,
        Self::Harmony,
        Self::MuseGlimmer,
    ];

    /// The name, as in `--reasoning-parser`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Think => "think",
            Self::MistralThink => "mistral",
            Self::Cohere => "cohere",
            Self::Gemma4 => "gemma4",
            Self::Harmony => "openai",
            Self::MuseGlimmer => "muse_glimmer",
        }
    }

    /// The format that a chat template mentions.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        let headers = Headers::of_template(source);
        Self::ALL.into_iter().find(|format| match headers {
            Some(_) => format.headers() == headers,
            None => format.headers().is_none() && source.contains(format.tags().1),
        })
    }

    /// The headers of messages, in the formats that have some.
    pub(crate) fn headers(self) -> Option<&'static Headers> {
        match self {
            Self::Harmony => Some(&HARMONY),
            Self::MuseGlimmer => Some(&MUSE_GLIMMER),
            _ => None,
        }
    }

    /// The texts before and after the reasoning.
    #[must_use]
    pub fn tags(self) -> (&'static str, &'static str) {
        match self {
            Self::Think => ("<think>", "</think>"),
            Self::MistralThink => ("[THINK]", "[/THINK]"),
            Self::Cohere => ("<|START_THINKING|>", "<|END_THINKING|>"),
            Self::Gemma4 => ("<|channel>thought", "<channel|>"),
            Self::Harmony => ("<|channel|>analysis<|message|>", "<|end|>"),
            Self::MuseGlimmer => (" to=self<|message|>", "<|eom|>"),
        }
    }

    /// Spellings of the special tokens that may delimit the reasoning. The text that is parsed must
    /// contain them.
    #[must_use]
    pub fn special_tokens(self) -> &'static [&'static str] {
        match self {
            Self::Think => &["<think>", "</think>"],
            Self::MistralThink => &["[THINK]", "[/THINK]"],
            Self::Cohere => &["<|START_THINKING|>", "<|END_THINKING|>"],
            Self::Gemma4 => &["<|channel>", "<channel|>"],
            Self::Harmony => HARMONY.special_tokens,
            Self::MuseGlimmer => MUSE_GLIMMER.special_tokens,
        }
    }

    /// Whether a prompt that ends with this text has begun the reasoning of the answer.
    #[must_use]
    pub fn is_open_after(self, prompt_end: &str) -> bool {
        prompt_end.trim_end().ends_with(self.tags().0)
    }

    /// Whether a prompt that ends with this text is within the reasoning of the answer. `prefill` is
    /// the beginning of the answer in the prompt, which the template may have changed. Empty if the
    /// answer begins after the prompt.
    #[must_use]
    pub fn is_open_in(self, prompt_end: &str, prefill: &str) -> bool {
        let (open, close) = self.tags();
        let (begun, ended) = (prefill.rfind(open), prefill.rfind(close));
        if begun.is_some() || ended.is_some() {
            return begun > ended;
        }
        // Without tags in `prefill`, the text that the template puts before it decides.
        let (end, prefill) = (prompt_end.trim_end(), prefill.trim());
        self.is_open_after(end.strip_suffix(prefill).unwrap_or(end))
    }
}

impl fmt::Display for ReasoningFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ReasoningFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|format| format.name() == name);
        // vLLM has one parser per model family for these tags.
        let alias = || matches!(name, "deepseek_r1" | "qwen3" | "glm45").then_some(Self::Think);
        found.or_else(alias).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("expected one of {names}, got `{name}`")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an answer that is continued is within reasoning exactly if its beginning is.
    #[test]
    fn a_prompt_may_end_within_reasoning() {
        for (prompt_end, prefill, expected) in [
            ("assistant\n<think>\n", "", true),
            ("assistant\n", "", false),
            ("assistant\n<think>\nLet me", "<think>\nLet me", true),
            ("assistant\n<think>\n", "<think>\n", true),
            ("assistant\n<think>\nLet me", "Let me", true),
            ("<think>\nHm.\n</think>\n\nIt is", "<think>\nHm.\n</think>\n\nIt is", false),
            ("<think>\n\n</think>\n\nIt is", "It is", false),
            ("user <think> assistant\nIt is", "It is", false),
        ] {
            let is_open = ReasoningFormat::Think.is_open_in(prompt_end, prefill);
            assert_eq!(is_open, expected, "{prompt_end:?} {prefill:?}");
        }
        let harmony = ReasoningFormat::Harmony;
        let prefill = "<|channel|>analysis<|message|>We";
        assert!(harmony.is_open_in(&format!("<|start|>assistant{prefill}"), prefill));
    }
}
