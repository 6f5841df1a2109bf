//! The formats in which models write tool calls, and how a chat template tells which one its model
//! uses.

use std::fmt;
use std::str::FromStr;

/// A format of tool calls. The names are those of vLLM's parsers where it has one.
///
/// The format says how a model is asked to write calls, and how guaranteed calls are written. Other
/// calls are read in any of the forms, also if they are nearly right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ToolCallFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen, SmolLM and others.
    /// Models without a format are asked to use it.
    Hermes,
    /// `{"name": .., "parameters": {..}}` instead of text, or after `<|python_tag|>`: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS]` and a list of objects, or `[TOOL_CALLS]name[ARGS]{..}`: Mistral.
    Mistral,
    /// Fenced code, `tool_code` with calls in Python or `tool_call` with an object: Gemma.
    Gemma,
    /// `<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>`: Gemma 4.
    Gemma4,
    /// `[name(key="value"), ..]` instead of text, or after `<|python_start|>`: Llama 4.
    Pythonic,
    /// `<|tool_call_start|>[name(key="value"), ..]<|tool_call_end|>`: LFM2.
    Lfm2,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3
    /// Coder, Nemotron 3.
    Qwen3Coder,
    /// `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5.
    Glm,
    /// `<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke>`
    /// `</minimax:tool_call>`: MiniMax M2.
    MiniMaxM2,
    /// `<tool_calls>` and objects as in Hermes: MiniMax M1.
    MiniMax,
    /// `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{..}<｜tool▁call▁end｜>`: DeepSeek R1, V3 and V3.1.
    DeepSeek,
    /// `<｜DSML｜invoke name="name"><｜DSML｜parameter name="key" string="true">value`
    /// `</｜DSML｜parameter></｜DSML｜invoke>`: DeepSeek V3.2.
    DeepSeekV32,
    /// `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`:
    /// Kimi K2.
    Kimi,
    /// `<|START_ACTION|>[{"tool_name": .., "parameters": {..}}]<|END_ACTION|>`: Command R7B, A.
    Cohere,
    /// `<|tool_call|>[{"name": .., "arguments": {..}}]`: Granite 3.
    Granite,
    /// `<TOOLCALL>[{"name": .., "arguments": {..}}]</TOOLCALL>`: Nemotron Nano 2.
    Nemotron,
    /// `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{..}<|call|>`: gpt-oss.
    Harmony,
    /// ` to=name<|message|>` and a block like that of MiniMax M2, in tags that begin with `atem:`:
    /// Muse Glimmer.
    MuseGlimmer,
    /// `<function name="name"><param name="key">value</param></function>`: MiniCPM 5.
    MiniCpm5,
    /// `<|function_call|>{"name": .., "arguments": {..}}`: GigaChat 3.1.
    GigaChat3,
}

/// How answers are written that consist of messages with headers. Each header follows
/// `<|start|>assistant`, and is given as its parts, of which some are special tokens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Headers {
    /// The header of a message that is reasoning.
    pub(crate) reasoning: &'static [&'static str],
    /// The header of a message that is text.
    pub(crate) text: &'static [&'static str],
    /// The special tokens that end a message. The first one ends one that is not the last.
    pub(crate) closes: &'static [&'static str],
    /// The same, and the special tokens that begin the next header, or a part of it.
    pub(super) ends: &'static [&'static str],
    /// Spellings of the special tokens. The text that is parsed must contain them.
    pub(super) special_tokens: &'static [&'static str],
}

/// Those of gpt-oss.
pub(super) static HARMONY: Headers = Headers {
    reasoning: &["<|channel|>", "analysis", "<|message|>"],
    text: &["<|channel|>", "final", "<|message|>"],
    closes: &["<|end|>", "<|call|>", "<|return|>"],
    ends: &["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"],
    special_tokens: &[
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ],
};

/// Those of Muse Glimmer.
pub(super) static MUSE_GLIMMER: Headers = Headers {
    reasoning: &[" to=self", "<|message|>"],
    text: &[" to=user", "<|message|>"],
    closes: &["<|eom|>", "<|eot|>"],
    ends: &["<|eom|>", "<|eot|>", "<|start|>"],
    special_tokens: &["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
};

impl Headers {
    /// Those that a chat template mentions.
    pub(super) fn of_template(source: &str) -> Option<&'static Self> {
        if has_all(source, &["<|channel|>", "<|message|>"]) {
            return Some(&HARMONY);
        }
        source.contains(" to=self<|message|>").then_some(&MUSE_GLIMMER)
    }
}

/// The markers of a format.
#[derive(Debug)]
pub(super) struct Markers {
    /// Strings with which a block of calls begins.
    pub(super) open: &'static [&'static str],
    /// String with which it ends, if it has one.
    pub(super) close: &'static str,
    /// Special tokens that are part of the format.
    special_tokens: &'static [&'static str],
}

/// The special tokens of DeepSeek: around all calls, and around the parts of each.
const DEEPSEEK: &[&str] = &[
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];

/// The special tokens of Kimi, in the same order, and those that it writes instead at times.
const KIMI: &[&str] = &[
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
];

/// The special tokens of GLM.
const GLM: &[&str] =
    &["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"];

/// Whether a template contains all of these strings.
pub(super) fn has_all(source: &str, markers: &[&str]) -> bool {
    markers.iter().all(|&marker| source.contains(marker))
}

impl ToolCallFormat {
    /// All formats.
    pub const ALL: [Self; 21] = [
        Self::Hermes,
        Self::Llama3Json,
        Self::Mistral,
        Self::Gemma,
        Self::Gemma4,
        Self::Pythonic,
        Self::Lfm2,
        Self::Qwen3Coder,
        Self::Glm,
        Self::MiniMaxM2,
        Self::MiniMax,
        Self::DeepSeek,
        Self::DeepSeekV32,
        Self::Kimi,
        Self::Cohere,
        Self::Granite,
        Self::Nemotron,
        Self::Harmony,
        Self::MuseGlimmer,
        Self::MiniCpm5,
        Self::GigaChat3,
    ];

    /// The name, as in `--tool-call-parser`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::Gemma => "gemma",
            Self::Gemma4 => "gemma4",
            Self::Pythonic => "pythonic",
            Self::Lfm2 => "lfm2",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Glm => "glm45",
            Self::MiniMaxM2 => "minimax_m2",
            Self::MiniMax => "minimax",
            Self::DeepSeek => "deepseek_v3",
            Self::DeepSeekV32 => "deepseek_v32",
            Self::Kimi => "kimi_k2",
            Self::Cohere => "cohere",
            Self::Granite => "granite",
            Self::Nemotron => "nemotron_json",
            Self::Harmony => "openai",
            Self::MuseGlimmer => "muse_glimmer",
            Self::MiniCpm5 => "minicpm5",
            Self::GigaChat3 => "gigachat3",
        }
    }

    /// The format that a chat template uses; `None` if it uses none that is known. It is recognized
    /// by its markers.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        if let Some(headers) = Headers::of_template(source) {
            return Self::ALL.into_iter().find(|format| format.headers() == Some(headers));
        }
        // The first format whose markers all occur.
        let formats: [(&[&str], Self); 25] = [
            (&["[TOOL_CALLS]"], Self::Mistral),
            (&["｜DSML｜"], Self::DeepSeekV32),
            (&["<｜tool▁calls▁begin｜>"], Self::DeepSeek),
            (&["<|tool_calls_section_begin|>"], Self::Kimi),
            (&["<minimax:tool_call>"], Self::MiniMaxM2),
            (&["<|START_ACTION|>"], Self::Cohere),
            (&["<|tool_call_start|>"], Self::Lfm2),
            (&["List of tools: "], Self::Lfm2),
            (&["<|tool_call>", "<tool_call|>"], Self::Gemma4),
            (&["<|start_of_role|>", "<|tool_call|>"], Self::Granite),
            (&["<TOOLCALL>"], Self::Nemotron),
            (&["<tool_call>", "<arg_key>"], Self::Glm),
            (&["<function=", "<parameter="], Self::Qwen3Coder),
            (&["<function name=", "<param name="], Self::MiniCpm5),
            (&["<|role_sep|>", "<|function_call|>"], Self::GigaChat3),
            (&["<tool_call>"], Self::Hermes),
            (&["<tool_calls>"], Self::MiniMax),
            (&["[func_name"], Self::Pythonic),
            (&["[func1("], Self::Pythonic),
            (&["<|python_tag|>"], Self::Llama3Json),
            (&["<|start_header_id|>", "\"parameters\""], Self::Llama3Json),
            (&["<|header_start|>", "\"parameters\""], Self::Llama3Json),
            (&["<|python_start|>"], Self::Pythonic),
            (&["```tool_code"], Self::Gemma),
            (&["```tool_call"], Self::Gemma),
        ];
        let used = |&(markers, _): &(&[&str], Self)| has_all(source, markers);
        formats.into_iter().find(used).map(|(_, format)| format)
    }

    /// The headers of messages, in the formats that have some.
    pub(crate) fn headers(self) -> Option<&'static Headers> {
        match self {
            Self::Harmony => Some(&HARMONY),
            Self::MuseGlimmer => Some(&MUSE_GLIMMER),
            _ => None,
        }
    }

    /// Spellings of the special tokens that are part of this format. The text that is parsed must
    /// contain them.
    #[must_use]
    pub fn special_tokens(self) -> &'static [&'static str] {
        self.headers().map_or(self.markers().special_tokens, |headers| headers.special_tokens)
    }

    /// The markers before the name of a function, after it, and after its arguments, in the formats
    /// that write each call between special tokens.
    pub(crate) fn call_markers(self) -> Option<[&'static str; 3]> {
        match (self, self.special_tokens()) {
            (Self::DeepSeek | Self::Kimi, &[_, begin, separator, end, ..]) => {
                Some([begin, separator, end])
            }
            _ => None,
        }
    }

    /// Whether guaranteed calls have no marker.
    pub(super) fn needs_no_marker(self) -> bool {
        matches!(self, Self::Llama3Json | Self::Pythonic)
    }

    /// Whether calls are written as a program in Python.
    pub(super) fn is_python(self) -> bool {
        matches!(self, Self::Gemma | Self::Pythonic | Self::Lfm2)
    }

    /// Whether guaranteed calls are neither JSON objects nor a name and an object.
    pub(super) fn is_written(self) -> bool {
        matches!(self, Self::DeepSeek | Self::Kimi | Self::Gemma4)
    }

    pub(super) fn markers(self) -> &'static Markers {
        match self {
            Self::Hermes | Self::Qwen3Coder => &Markers {
                open: &["<tool_call>"],
                close: "</tool_call>",
                special_tokens: &["<tool_call>", "</tool_call>"],
            },
            Self::Glm => {
                &Markers { open: &["<tool_call>"], close: "</tool_call>", special_tokens: GLM }
            }
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
            Self::Gemma4 => &Markers {
                open: &["<|tool_call>"],
                close: "<tool_call|>",
                special_tokens: &["<|tool_call>", "<tool_call|>", "<|\"|>"],
            },
            Self::Pythonic => &Markers {
                open: &["<|python_start|>"],
                close: "<|python_end|>",
                special_tokens: &["<|python_start|>", "<|python_end|>"],
            },
            Self::Lfm2 => &Markers {
                open: &["<|tool_call_start|>"],
                close: "<|tool_call_end|>",
                special_tokens: &["<|tool_call_start|>", "<|tool_call_end|>"],
            },
            Self::MiniMaxM2 => &Markers {
                open: &["<minimax:tool_call>"],
                close: "</minimax:tool_call>",
                special_tokens: &["<minimax:tool_call>", "</minimax:tool_call>"],
            },
            Self::MiniMax => &Markers {
                open: &["<tool_calls>"],
                close: "</tool_calls>",
                special_tokens: &["<tool_calls>", "</tool_calls>"],
            },
            Self::DeepSeek => &Markers {
                open: &["<｜tool▁calls▁begin｜>"],
                close: "<｜tool▁calls▁end｜>",
                special_tokens: DEEPSEEK,
            },
            Self::DeepSeekV32 => &Markers {
                open: &["<｜DSML｜function_calls>"],
                close: "</｜DSML｜function_calls>",
                special_tokens: &["｜DSML｜"],
            },
            Self::Kimi => &Markers {
                open: &["<|tool_calls_section_begin|>"],
                close: "<|tool_calls_section_end|>",
                special_tokens: KIMI,
            },
            Self::Cohere => &Markers {
                open: &["<|START_ACTION|>"],
                close: "<|END_ACTION|>",
                special_tokens: &["<|START_ACTION|>", "<|END_ACTION|>"],
            },
            Self::Granite => {
                &Markers { open: &["<|tool_call|>"], close: "", special_tokens: &["<|tool_call|>"] }
            }
            Self::Nemotron => &Markers {
                open: &["<TOOLCALL>"],
                close: "</TOOLCALL>",
                special_tokens: &["<TOOLCALL>", "</TOOLCALL>"],
            },
            Self::Harmony | Self::MuseGlimmer => {
                &Markers { open: &[], close: "", special_tokens: &[] }
            }
            Self::MiniCpm5 => {
                &Markers { open: &["<function name="], close: "</function>", special_tokens: &[] }
            }
            Self::GigaChat3 => &Markers {
                open: &["<|function_call|>"],
                close: "",
                special_tokens: &["<|function_call|>"],
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReasoningFormat;

    /// Goal: templates of the well-known families lead to their formats.
    #[test]
    fn templates_are_recognized() {
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
            ("<tool_call>\n<function=name>\n<parameter=a>", Some(ToolCallFormat::Qwen3Coder), None),
            ("<tool_call>{name}\n<arg_key>", Some(ToolCallFormat::Glm), None),
            ("<minimax:tool_call><invoke", Some(ToolCallFormat::MiniMaxM2), None),
            (
                "<think></think><｜tool▁calls▁begin｜>",
                Some(ToolCallFormat::DeepSeek),
                Some(ReasoningFormat::Think),
            ),
            ("<｜DSML｜function_calls>", Some(ToolCallFormat::DeepSeekV32), None),
            ("<|tool_calls_section_begin|>", Some(ToolCallFormat::Kimi), None),
            (
                "<|START_THINKING|><|END_THINKING|><|START_ACTION|>",
                Some(ToolCallFormat::Cohere),
                Some(ReasoningFormat::Cohere),
            ),
            (
                "<|start|>assistant<|channel|>analysis<|message|>",
                Some(ToolCallFormat::Harmony),
                Some(ReasoningFormat::Harmony),
            ),
            ("<|python_start|>[func_name1(a=b)]", Some(ToolCallFormat::Pythonic), None),
            (
                "<|header_start|><|python_start|>{\"name\": .., \"parameters\": ..}",
                Some(ToolCallFormat::Llama3Json),
                None,
            ),
            ("<|tool_call_start|>", Some(ToolCallFormat::Lfm2), None),
            ("List of tools: <|tool_list_start|>[", Some(ToolCallFormat::Lfm2), None),
            (
                "<|channel>thought\n<channel|><|tool_call>call:{}<tool_call|>",
                Some(ToolCallFormat::Gemma4),
                Some(ReasoningFormat::Gemma4),
            ),
            (
                "<|start_of_role|>assistant, respond only with <|tool_call|>",
                Some(ToolCallFormat::Granite),
                None,
            ),
            ("{{- '<TOOLCALL>[' -}}", Some(ToolCallFormat::Nemotron), None),
            (
                "'<|start|>assistant to=self<|message|>' '<atem:function_calls>\\n'",
                Some(ToolCallFormat::MuseGlimmer),
                Some(ReasoningFormat::MuseGlimmer),
            ),
            (
                "<function name=\"f\"><param name=\"p\"></think>",
                Some(ToolCallFormat::MiniCpm5),
                Some(ReasoningFormat::Think),
            ),
            (
                "role_sep=\"<|role_sep|>\" \"<|function_call|>\"",
                Some(ToolCallFormat::GigaChat3),
                None,
            ),
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
