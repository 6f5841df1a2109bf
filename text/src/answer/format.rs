//! The formats in which models write tool calls and reasoning, and how a chat template tells which
//! one its model uses.

use std::fmt;
use std::str::FromStr;

/// A format of tool calls. The names are those of vLLM's parsers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen, SmolLM and others.
    Hermes,
    /// `{"name": .., "parameters": {..}}` instead of a text, or after `<|python_tag|>`: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS]` and a list of objects, or `[TOOL_CALLS]name[ARGS]{..}`: Mistral.
    Mistral,
    /// Fenced code, `tool_code` with calls in Python or `tool_call` with an object: Gemma.
    Gemma,
}

/// The markers of a format.
#[derive(Debug)]
pub(super) struct Markers {
    /// Texts with which a block of calls begins.
    pub(super) open: &'static [&'static str],
    /// Text with which it ends, if it has one.
    pub(super) close: &'static str,
    /// Special tokens that are part of the format.
    special_tokens: &'static [&'static str],
}

impl ToolCallFormat {
    /// All formats.
    pub const ALL: [Self; 4] = [Self::Hermes, Self::Llama3Json, Self::Mistral, Self::Gemma];

    /// The name, as in `--tool-call-parser`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::Gemma => "gemma",
        }
    }

    /// The format that a chat template uses; `None` if it uses none that is known. It is recognised
    /// by its markers.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |marker: &str| source.contains(marker);
        // Formats that write arguments as XML use the same tag.
        let is_xml = has("<function=") || has("<arg_key>") || has("<parameter=");
        let is_llama = has("<|start_header_id|>") && has("\"parameters\"");
        if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("<tool_call>") {
            (!is_xml).then_some(Self::Hermes)
        } else if has("<|python_tag|>") || is_llama {
            Some(Self::Llama3Json)
        } else if has("```tool_code") || has("```tool_call") {
            Some(Self::Gemma)
        } else {
            None
        }
    }

    /// Spellings of the special tokens that are part of this format. The text that is parsed must
    /// contain them.
    #[must_use]
    pub fn special_tokens(self) -> &'static [&'static str] {
        self.markers().special_tokens
    }

    pub(super) fn markers(self) -> &'static Markers {
        match self {
            Self::Hermes => &Markers {
                open: &["<tool_call>"],
                close: "</tool_call>",
                special_tokens: &["<tool_call>", "</tool_call>"],
            },
            Self::Llama3Json => &Markers {
                open: &["<|python_tag|>"],
                close: "",
                special_tokens: &["<|python_tag|>"],
            },
            Self::Mistral => &Markers {
                open: &["[TOOL_CALLS]"],
                close: "",
                special_tokens: &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            },
            Self::Gemma => &Markers {
                open: &["```tool_code", "```tool_call"],
                close: "```",
                special_tokens: &[],
            },
        }
    }
}

impl fmt::Display for ToolCallFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ToolCallFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|format| format.name() == name);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("expected one of {names}, got `{name}`")
        })
    }
}

/// The tags around a model's reasoning, which precedes the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReasoningFormat {
    /// `<think>` and `</think>`: DeepSeek R1, Qwen 3 and others.
    Think,
    /// `[THINK]` and `[/THINK]`: Magistral.
    MistralThink,
}

impl ReasoningFormat {
    /// All formats.
    pub const ALL: [Self; 2] = [Self::Think, Self::MistralThink];

    /// The name, as in `--reasoning-parser`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Think => "think",
            Self::MistralThink => "mistral",
        }
    }

    /// The format that a chat template mentions.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| source.contains(format.tags().1))
    }

    /// The tags before and after the reasoning. They may be special tokens, in which case the text
    /// that is parsed must contain them.
    #[must_use]
    pub fn tags(self) -> (&'static str, &'static str) {
        match self {
            Self::Think => ("<think>", "</think>"),
            Self::MistralThink => ("[THINK]", "[/THINK]"),
        }
    }

    /// Whether a prompt that ends with this text has begun the reasoning of the answer.
    #[must_use]
    pub fn is_open_after(self, prompt_end: &str) -> bool {
        prompt_end.trim_end().ends_with(self.tags().0)
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
        let alias = || matches!(name, "deepseek_r1" | "qwen3").then_some(Self::Think);
        found.or_else(alias).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("expected one of {names}, got `{name}`")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: templates of the well-known families lead to their formats, and formats that look
    /// alike but are not implemented lead to none.
    #[test]
    fn templates_are_recognised() {
        for (source, tools, reasoning) in [
            ("<tool_call>\n{\"name\": ", Some(ToolCallFormat::Hermes), None),
            (
                "<tool_call>{% if %}</think>",
                Some(ToolCallFormat::Hermes),
                Some(ReasoningFormat::Think),
            ),
            (
                "<|start_header_id|>{\"name\": .., \"parameters\": ..}",
                Some(ToolCallFormat::Llama3Json),
                None,
            ),
            (
                "[TOOL_CALLS][THINK][/THINK]",
                Some(ToolCallFormat::Mistral),
                Some(ReasoningFormat::MistralThink),
            ),
            ("<tool_call>\n<function=name>\n<parameter=a>", None, None),
            ("<start_of_turn>", None, None),
        ] {
            assert_eq!(ToolCallFormat::of_template(source), tools, "{source}");
            assert_eq!(ReasoningFormat::of_template(source), reasoning, "{source}");
        }
        for format in ToolCallFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        assert!("x".parse::<ToolCallFormat>().is_err_and(|message| message.contains("hermes")));
        assert_eq!("deepseek_r1".parse(), Ok(ReasoningFormat::Think));
    }
}
