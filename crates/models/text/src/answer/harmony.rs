//! The answers of gpt-oss and Muse Glimmer: messages. Each has a header, which names its channel or
//! its recipient, and ends with a special token. Those of gpt-oss:
//!
//! ```text
//! <|channel|>analysis<|message|>Reasoning.<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}<|call|>
//! <|start|>assistant<|channel|>final<|message|>Text.<|return|>
//! ```
//!
//! Those of Muse Glimmer, with calls in tags:
//!
//! ```text
//!  to=self<|message|>Reasoning.<|eom|>
//! <|start|>assistant to=get<|message|><atem:function_calls>..</atem:function_calls><|eom|>
//! <|start|>assistant to=user<|message|>Text.<|eot|>
//! ```
//!
//! The prompt ends with `<|start|>assistant`. <https://cookbook.openai.com/articles/openai-harmony>

use std::sync::Arc;

use super::calls::{Beginning, Reader};
use super::cursor::{Cursor, End};
use super::format::Headers;
use super::object_call::{self, Call};
use super::offered::Offered;
use super::parser::find;
use super::{AnswerFormat, AnswerPart, MAX_CALLS, ToolCallFormat};
use crate::FunctionSchema;

/// The marker that begins the header of the next message.
const NEXT: &str = "<|start|>";
/// The text between two messages of an answer that are both text, or both reasoning.
const SEPARATOR: &str = "\n\n";
/// The marker that ends a header.
const MESSAGE: &str = "<|message|>";
/// Maximum length of a header in bytes.
const MAX_HEADER: usize = 512;
/// Maximum length of the arguments of a call in bytes.
const MAX_ARGUMENTS: usize = 1 << 20;

/// Takes one answer apart.
#[derive(Clone, Debug)]
pub(super) struct Harmony {
    headers: &'static Headers,
    state: State,
    /// Text that was not read yet.
    pending: String,
    /// Number of calls so far.
    calls: usize,
    single_call: bool,
    functions: Arc<[FunctionSchema]>,
    /// Whether a grammar guarantees the form of calls.
    guaranteed: bool,
    /// Whether text was passed on, and reasoning.
    has_text: bool,
    has_reasoning: bool,
    /// Whether the next part begins a message.
    is_first: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// In the header of a message.
    Header,
    /// In a message of the channel `analysis`, or to the model itself.
    Reasoning,
    /// In any other message that is not a call.
    Text,
    /// In the arguments of a call of the function `name`, which have been read so far.
    Call { name: String, arguments: String },
    /// All further text is text of the answer, also if it contains markers.
    PlainText,
    /// The rest is dropped.
    Dropped,
}

impl Harmony {
    pub(super) fn new(headers: &'static Headers, format: &AnswerFormat) -> Self {
        Self {
            headers,
            state: if format.reasoning_is_open { State::Reasoning } else { State::Header },
            pending: String::new(),
            calls: 0,
            single_call: format.single_call,
            functions: format.functions.clone(),
            guaranteed: format.guaranteed,
            has_text: false,
            has_reasoning: false,
            is_first: true,
        }
    }

    pub(super) fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        self.pending.push_str(piece);
        while self.advance(parts, false) {}
    }

    pub(super) fn finish(&mut self, end: End, parts: &mut Vec<AnswerPart>) {
        while self.advance(parts, true) {}
        match std::mem::replace(&mut self.state, State::Dropped) {
            State::Call { name, arguments } => self.end_call(name, &arguments, end, parts),
            State::Header if end == End::Complete && self.is_call() => {
                self.end_header(self.pending.len());
                if let State::Call { name, .. } = std::mem::replace(&mut self.state, State::Dropped)
                {
                    let arguments = std::mem::take(&mut self.pending);
                    self.end_call(name, &arguments, end, parts);
                }
            }
            // The answer has ended in a header. The header of a further message has no text.
            State::Header if self.pending.starts_with(NEXT) => {}
            State::Header => self.add_text(&self.pending.clone(), parts),
            _ => {}
        }
    }

    /// Reads pending text. Returns whether more of it can be read now.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>, at_end: bool) -> bool {
        match self.state {
            State::Header => self.in_header(),
            State::PlainText => {
                let text = std::mem::take(&mut self.pending);
                self.add_text(&text, parts);
                false
            }
            State::Dropped => {
                self.pending.clear();
                false
            }
            State::Reasoning | State::Text | State::Call { .. } => self.in_message(parts, at_end),
        }
    }

    fn in_header(&mut self) -> bool {
        let header = self.pending.trim_start();
        let begins = [NEXT, "<|channel|>", MESSAGE, "<|constrain|>", "assistant", "to="];
        if !begins.iter().any(|begin| header.starts_with(begin) || begin.starts_with(header)) {
            // A message without a header.
            self.state = State::Text;
            self.is_first = true;
            return true;
        }
        let message = self.pending.find(MESSAGE).filter(|&len| len <= MAX_HEADER);
        let closes = self.headers.closes;
        let closed = closes.iter().filter_map(|close| self.pending.find(close)).min();
        if let Some(len) =
            closed.filter(|&len| len <= MAX_HEADER && message.is_none_or(|at| at > len))
        {
            self.end_header(len);
            return true;
        }
        if let Some(len) = message {
            let header: String = self.pending.drain(..len + MESSAGE.len()).collect();
            self.state = message_of(&header[..len], Offered(&self.functions));
            self.is_first = true;
            return true;
        }
        if self.pending.len() > MAX_HEADER + MESSAGE.len() {
            self.state = State::PlainText;
            return true;
        }
        false
    }

    /// Whether the header belongs to a call and lacks the marker after it.
    fn is_call(&self) -> bool {
        let message = message_of(&self.pending, Offered(&self.functions));
        matches!(message, State::Call { .. }) && body_in(&self.pending).contains('{')
    }

    /// The message ends within its header, after `len` bytes, because the marker after the header
    /// is missing. The text after the words of the header is the message.
    fn end_header(&mut self, len: usize) {
        let header: String = self.pending.drain(..len).collect();
        let body = body_in(&header);
        self.state = message_of(&header[..header.len() - body.len()], Offered(&self.functions));
        self.is_first = true;
        if body.contains(char::is_alphanumeric) {
            self.pending.insert_str(0, body);
        }
    }

    fn in_message(&mut self, parts: &mut Vec<AnswerPart>, at_end: bool) -> bool {
        let Headers { closes, ends, .. } = self.headers;
        let found = find(&self.pending, ends, at_end);
        let text: String = self.pending.drain(..found.text).collect();
        match &mut self.state {
            State::Call { arguments, .. } => {
                arguments.push_str(&text);
                if arguments.len() > MAX_ARGUMENTS {
                    let arguments = std::mem::take(arguments);
                    self.state = State::Text;
                    self.add_text(&arguments, parts);
                }
            }
            State::Reasoning => self.add_reasoning(text, parts),
            _ => self.add_text(&text, parts),
        }
        if found.marker == 0 {
            return false;
        }
        // The other markers begin the next header.
        if closes.iter().any(|close| self.pending.starts_with(close)) {
            self.pending.drain(..found.marker);
        }
        if let State::Call { name, arguments } = std::mem::replace(&mut self.state, State::Header) {
            self.end_call(name, &arguments, End::Complete, parts);
        }
        true
    }

    fn add_text(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        if text.is_empty() {
            return;
        }
        let separator = if self.is_first && self.has_text { SEPARATOR } else { "" };
        (self.is_first, self.has_text) = (false, true);
        parts.push(AnswerPart::Text(format!("{separator}{text}")));
    }

    fn add_reasoning(&mut self, text: String, parts: &mut Vec<AnswerPart>) {
        if text.is_empty() {
            return;
        }
        let separator = if self.is_first && self.has_reasoning { SEPARATOR } else { "" };
        (self.is_first, self.has_reasoning) = (false, true);
        parts.push(AnswerPart::Reasoning(format!("{separator}{text}")));
    }

    /// Passes on the calls of a message, or its text if it has none. The generated part of a
    /// guaranteed call that was cut off is passed on.
    fn end_call(&mut self, name: String, arguments: &str, end: End, parts: &mut Vec<AnswerPart>) {
        let complete = match arguments.trim_start().starts_with('<') {
            true => self.tagged(arguments.trim_start(), end),
            false => self.object(arguments, end).map(|json| vec![(name.clone(), json)]),
        };
        let is_complete = complete.is_some();
        let cut = || self.guaranteed.then(|| vec![(name, arguments.trim_start().to_owned())]);
        let fits = |calls: &Vec<Call>| self.calls + calls.len() <= MAX_CALLS;
        let Some(mut calls) = complete.or_else(cut).filter(fits) else {
            return self.add_text(arguments, parts);
        };
        if self.single_call {
            self.state = State::Dropped;
            calls.truncate(1);
        }
        for (name, json) in calls {
            let index = self.calls;
            self.calls += 1;
            parts.push(AnswerPart::Call { index, name });
            if !json.is_empty() {
                parts.push(AnswerPart::Arguments { index, json });
            }
            if is_complete {
                parts.push(AnswerPart::CallEnd { index });
            } else {
                self.state = State::Dropped;
            }
        }
    }

    /// The calls in a message that consists of them, whose arguments are between tags.
    fn tagged(&self, message: &str, end: End) -> Option<Vec<Call>> {
        let format = ToolCallFormat::MuseGlimmer;
        let reader = Reader { format, offered: Offered(&self.functions) };
        let read = reader.read(message, end, Beginning::Marked).ok()?;
        message[read.len..].trim().is_empty().then_some(read.calls)
    }

    /// The JSON of an object. A model that passes no arguments may write nothing.
    fn object(&self, arguments: &str, end: End) -> Option<String> {
        if arguments.trim().is_empty() && end == End::Cut {
            return None;
        }
        let mut cursor = Cursor::new(arguments, end);
        let object = object_call::arguments(&mut cursor, &[]).ok()?;
        let rest = cursor
            .rest()
            .trim_start_matches(|next: char| next.is_whitespace() || "}]".contains(next));
        rest.is_empty().then_some(object)
    }
}

/// The text in a header without the marker that ends it.
fn body_in(header: &str) -> &str {
    const WORDS: [&str; 9] = [
        NEXT,
        "<|channel|>",
        "<|constrain|>",
        "assistant",
        "analysis",
        "commentary",
        "final",
        "json",
        "code",
    ];
    let mut body = header;
    loop {
        body = body.trim_start();
        if let Some(recipient) = body.strip_prefix("to=") {
            let len = recipient.find(|next: char| next.is_whitespace() || "<{".contains(next));
            body = &recipient[len.unwrap_or(recipient.len())..];
            continue;
        }
        match WORDS.iter().find_map(|word| body.strip_prefix(word)) {
            Some(after) => body = after,
            None => return body,
        }
    }
}

/// The state in the message with this header. Messages to other tools than functions are text.
fn message_of(header: &str, offered: Offered<'_>) -> State {
    let words = || header.split_whitespace().flat_map(|word| word.split("<|"));
    let recipient = words().find_map(|word| word.strip_prefix("to="));
    match recipient.and_then(|name| offered.find_numbered(name)) {
        Some(function) => State::Call { name: function.name.clone(), arguments: String::new() },
        None if recipient == Some("self") || header.contains("<|channel|>analysis") => {
            State::Reasoning
        }
        None => State::Text,
    }
}
