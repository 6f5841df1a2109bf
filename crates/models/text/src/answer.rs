//! Takes an answer apart: the model's reasoning, its text, and its calls of tools.
//!
//! An [`AnswerParser`] reads the answer's text in pieces, as the detokenizer returns it. Its
//! results depend only on the text, not on how it was cut into pieces.
//!
//! Models write calls that are nearly right: markers are missing, strings are not escaped. The name
//! of the function decides: a call of a function that may be called is a call even if its form is
//! incomplete, and a call of any other function is text. So nothing that the model wrote is lost,
//! and the arguments of a complete call are always a JSON object. A call that was cut off by a
//! limit is not completed: it is text, too.

mod block;
mod calls;
mod cursor;
mod envelope;
mod format;
mod free;
mod gemma;
mod harmony;
mod json;
mod lenient;
mod markers;
#[cfg(test)]
mod nearly_right;
mod object_call;
mod offered;
mod parser;
mod python;
mod reasoning;
mod tagged;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::FunctionSchema;

#[cfg(feature = "grammar")]
pub(crate) use self::format::Headers;
pub use self::format::ToolCallFormat;
pub use self::parser::AnswerParser;
pub use self::reasoning::ReasoningFormat;

/// Maximum number of calls of one answer. Further calls become text.
const MAX_CALLS: usize = 128;

/// The parts that an answer may consist of. The default is text alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerFormat {
    /// The tags around reasoning. `None` leaves them in the text.
    pub reasoning: Option<ReasoningFormat>,
    /// Whether the prompt ends within reasoning: with the tag that begins it, or in an answer to be
    /// continued that has begun it.
    pub reasoning_is_open: bool,
    /// The format of calls. `None` leaves them in the text.
    pub tool_calls: Option<ToolCallFormat>,
    /// The functions that may be called. Calls of other functions become text. In formats that
    /// write arguments without quotation marks, the schemas tell which arguments are strings.
    pub functions: Arc<[FunctionSchema]>,
    /// Whether everything after the first call is dropped.
    pub single_call: bool,
    /// Whether a grammar guarantees the form of calls. If so, arguments are passed on while they
    /// arrive, and a call can be incomplete only because the answer was cut off. Otherwise a call
    /// is passed on when it is complete.
    pub guaranteed: bool,
}

impl AnswerFormat {
    /// Whether answers are text alone.
    #[must_use]
    pub fn is_text(&self) -> bool {
        self.reasoning.is_none() && self.tool_calls.is_none()
    }

    /// Spellings of the special tokens that the text has to contain.
    #[must_use]
    pub fn special_tokens(&self) -> Vec<&'static str> {
        let calls = self.tool_calls.map_or(&[][..], ToolCallFormat::special_tokens);
        let tags = self.reasoning.map_or(&[][..], ReasoningFormat::special_tokens);
        calls.iter().chain(tags).copied().collect()
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
    /// The call is complete: its arguments are a JSON object. Only a call whose form is guaranteed
    /// can lack this part: if the answer was cut off within it. Then it is the last part.
    CallEnd {
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
    /// The arguments: a JSON object as a string, or its beginning if the answer was cut off within
    /// a call whose form is guaranteed.
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
        }
    }
}
