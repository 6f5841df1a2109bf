//! Takes an answer apart: the model's reasoning, its text, and its calls of tools.
//!
//! An [`AnswerParser`] reads the answer's text in pieces, as the detokenizer returns it. What it
//! returns depends only on the text, not on how it was cut into pieces. What is not a call after
//! all (broken JSON, an unknown function, a call that does not end) becomes text, so nothing that
//! the model wrote is lost, and the arguments of a complete call are always a JSON object.

mod block;
mod envelope;
mod format;
mod json;
mod parser;
mod python;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use self::format::{ReasoningFormat, ToolCallFormat};
pub use self::parser::AnswerParser;

/// Maximum number of calls of one answer. Further ones are text.
const MAX_CALLS: usize = 128;

/// What an answer may consist of. The default is text alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerFormat {
    /// The tags around reasoning. `None` leaves them in the text.
    pub reasoning: Option<ReasoningFormat>,
    /// Whether the prompt ends with the tag that begins the reasoning.
    pub reasoning_is_open: bool,
    /// The format of calls. `None` leaves them in the text.
    pub tool_calls: Option<ToolCallFormat>,
    /// Names of the functions that may be called. Only formats without a marker use them: JSON that
    /// names none of them is text.
    pub functions: Arc<[String]>,
    /// Whether everything after the first call is dropped.
    pub single_call: bool,
}

impl AnswerFormat {
    /// Spellings of the special tokens that the text has to contain.
    #[must_use]
    pub fn special_tokens(&self) -> Vec<&'static str> {
        let calls = self.tool_calls.map_or(&[][..], ToolCallFormat::special_tokens);
        let tags = self.reasoning.map(ReasoningFormat::tags);
        calls
            .iter()
            .copied()
            .chain(tags.into_iter().flat_map(|(open, close)| [open, close]))
            .collect()
    }
}

/// A part of an answer, in the order in which parts arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Reasoning to append.
    Reasoning(String),
    /// Text to append.
    Text(String),
    /// The call number `index`, from 0, begins.
    Call {
        /// Number of the call.
        index: usize,
        /// The function's name.
        name: String,
    },
    /// JSON to append to the arguments of a call.
    Arguments {
        /// Number of the call.
        index: usize,
        /// A piece of JSON.
        json: String,
    },
    /// The call is complete: its arguments are a JSON object.
    CallEnd {
        /// Number of the call.
        index: usize,
    },
    /// The call, which is the last one, is not a call after all. All that was written of it follows
    /// as text.
    CallBroken {
        /// Number of the call.
        index: usize,
    },
}

impl AnswerPart {
    /// The text of a part that is text.
    #[must_use]
    pub fn into_text(self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// A whole answer, put together from its parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// The reasoning; empty if there is none.
    pub reasoning: String,
    /// The text.
    pub text: String,
    /// The calls, in order.
    pub calls: Vec<ToolCall>,
}

/// A call of a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// The arguments: the text of a JSON object.
    pub arguments: String,
}

impl Answer {
    /// Takes a whole text apart.
    #[must_use]
    pub fn parse(format: &AnswerFormat, text: &str) -> Self {
        let mut parser = AnswerParser::new(format.clone());
        let mut answer = Self::default();
        parser.push(text).into_iter().for_each(|part| answer.add(part));
        parser.finish().into_iter().for_each(|part| answer.add(part));
        answer
    }

    /// Adds the next part.
    pub fn add(&mut self, part: AnswerPart) {
        match part {
            AnswerPart::Reasoning(text) => self.reasoning.push_str(&text),
            AnswerPart::Text(text) => self.text.push_str(&text),
            AnswerPart::Call { name, .. } => {
                self.calls.push(ToolCall { name, arguments: String::new() });
            }
            AnswerPart::Arguments { index, json } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.arguments.push_str(&json);
                }
            }
            AnswerPart::CallEnd { .. } => {}
            AnswerPart::CallBroken { index } => self.calls.truncate(index),
        }
    }
}
