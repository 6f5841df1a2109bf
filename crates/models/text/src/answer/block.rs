//! A block of tool calls whose form a grammar guarantees, from the marker that begins it. The
//! arguments are passed on while they arrive, in the formats that write them as JSON.

use std::sync::Arc;

use super::calls::{Beginning, Reader};
use super::cursor::End;
use super::envelope::{CallPart, Envelope};
use super::format::ToolCallFormat;
use super::json::{NotJson, Scanner};
use super::offered::Offered;
use crate::FunctionSchema;

/// Maximum length of a call as the model writes it, in bytes.
const MAX_CALL_BYTES: usize = 1 << 20;
/// Maximum length of a function's name that is written before its arguments, in bytes.
pub(super) const MAX_NAME_BYTES: usize = 256;
/// Maximum number of closing markers within a call.
const MAX_CLOSES: usize = 8;

/// Reads one block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    format: ToolCallFormat,
    functions: Arc<[FunctionSchema]>,
    /// Whether only these functions may be called.
    only_these: bool,
    state: State,
    /// Whether the calls are in a list.
    listed: bool,
    /// The text since the last complete call, or since the beginning.
    raw: String,
}

#[derive(Clone, Debug)]
enum State {
    /// Before a call.
    Before,
    /// In an object with a call.
    Envelope(Envelope),
    /// In the name before the arguments, which are an object.
    Name(String),
    /// In arguments whose name has been read.
    Arguments(Scanner),
    /// In calls that are not JSON, which are read when they are complete.
    Written(Written),
    /// After a complete call.
    After,
}

/// Calls that are read when they are complete.
#[derive(Clone, Debug, Default)]
struct Written {
    text: String,
    /// Number of closing markers within a call so far.
    closes: usize,
}

/// The addition of a character to a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Part(CallPart),
    /// The call that began last is complete.
    CallEnd,
}

/// The effect of a character on the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The character belongs to the block, which has not ended.
    Continue,
    /// The character may begin the text that follows the block.
    MayEnd,
    /// The text since the last complete call is not a call.
    Broken,
}

impl Block {
    /// A block that begins with `space` and `marker`, which is empty in an answer that begins with
    /// a call.
    pub(super) fn new(
        format: ToolCallFormat,
        functions: Arc<[FunctionSchema]>,
        space: String,
        marker: &str,
    ) -> Self {
        let (state, raw) = (State::Before, space + marker);
        Self { format, functions, only_these: marker.is_empty(), state, listed: false, raw }
    }

    /// Whether a function may be called.
    fn allows(&self, name: &str) -> bool {
        !self.only_these || self.functions.iter().any(|function| function.name == name)
    }

    /// The calls in a text that has all of them.
    fn read(&self, text: &str, changes: &mut Vec<Change>) -> Result<(), NotJson> {
        let reader = Reader { format: self.format, offered: Offered(&self.functions) };
        let read = reader.read(text, End::Cut, Beginning::Marked).map_err(|_| NotJson)?;
        if !text[read.len..].trim().is_empty() {
            return Err(NotJson);
        }
        for (name, arguments) in read.calls {
            changes.push(Change::Part(CallPart::Name(name)));
            changes.push(Change::Part(CallPart::Arguments(arguments)));
            changes.push(Change::CallEnd);
        }
        Ok(())
    }

    /// The text that is not part of a complete call.
    pub(super) fn into_raw(self) -> String {
        self.raw
    }

    /// Reads the next character. If the result is not [`Next::Continue`], the character is not
    /// part of the block.
    pub(super) fn push(&mut self, character: char, changes: &mut Vec<Change>) -> Next {
        if let State::After = self.state {
            match character {
                '{' => {
                    self.raw.clear();
                    self.state = State::Before;
                }
                ']' if self.listed => {
                    self.listed = false;
                    return Next::Continue;
                }
                ',' | ';' => return Next::Continue,
                space if space.is_whitespace() => return Next::Continue,
                _ => return Next::MayEnd,
            }
        }
        self.raw.push(character);
        if self.raw.len() > MAX_CALL_BYTES || self.advance(character, changes).is_err() {
            self.raw.pop();
            return Next::Broken;
        }
        Next::Continue
    }

    /// The text has ended within the block.
    pub(super) fn finish(&mut self, changes: &mut Vec<Change>) -> Next {
        let ended = match &self.state {
            State::After => Ok(()),
            State::Written(written) => self
                .read(&written.text, changes)
                .or_else(|_| read_cut(self.format, &written.text, changes)),
            _ => Err(NotJson),
        };
        if ended.is_ok() { Next::Continue } else { Next::Broken }
    }

    fn advance(&mut self, character: char, changes: &mut Vec<Change>) -> Result<(), NotJson> {
        match &mut self.state {
            State::Before | State::After => self.begin(character, changes),
            State::Envelope(envelope) => {
                let mut parts = Vec::new();
                envelope.push(character, &mut parts)?;
                let ended = envelope.has_ended();
                for part in parts {
                    if let CallPart::Name(name) = &part
                        && !self.allows(name)
                    {
                        return Err(NotJson);
                    }
                    changes.push(Change::Part(part));
                }
                if ended {
                    self.end_call(changes);
                }
                Ok(())
            }
            State::Name(name) if character == '{' => {
                let function = function_name(name).ok_or(NotJson)?;
                changes.push(Change::Part(CallPart::Name(function)));
                let mut scanner = Scanner::new();
                scanner.push(character)?;
                changes.push(Change::Part(CallPart::Arguments(character.to_string())));
                self.state = State::Arguments(scanner);
                Ok(())
            }
            State::Name(name) => {
                name.push(character);
                if name.len() > MAX_NAME_BYTES || character == '\n' { Err(NotJson) } else { Ok(()) }
            }
            State::Arguments(scanner) => {
                scanner.push(character)?;
                let ended = scanner.has_ended();
                changes.push(Change::Part(CallPart::Arguments(character.to_string())));
                if ended {
                    self.end_call(changes);
                }
                Ok(())
            }
            State::Written(_) => self.in_written(character, changes),
        }
    }

    /// Reads a character of calls that are not JSON.
    fn in_written(&mut self, character: char, changes: &mut Vec<Change>) -> Result<(), NotJson> {
        let State::Written(written) = &mut self.state else { return Err(NotJson) };
        written.text.push(character);
        let close = self.format.markers().close;
        if !written.text.ends_with(close) {
            return Ok(());
        }
        written.closes += 1;
        let (closes, len) = (written.closes, written.text.len() - close.len());
        let text = std::mem::take(&mut written.text);
        if self.read(&text[..len], changes).is_ok() {
            self.raw.clear();
            self.state = State::After;
            return Ok(());
        }
        // The marker may be part of an argument.
        if closes == MAX_CLOSES {
            return Err(NotJson);
        }
        self.state = State::Written(Written { text, closes });
        Ok(())
    }

    /// Reads a character before a call.
    fn begin(&mut self, character: char, changes: &mut Vec<Change>) -> Result<(), NotJson> {
        match character {
            '{' => {
                self.state = State::Envelope(Envelope::new());
                self.advance(character, changes)
            }
            '[' if !self.listed => {
                self.listed = true;
                Ok(())
            }
            space if space.is_whitespace() => Ok(()),
            first if self.begins_name(first) => {
                self.state = State::Name(first.to_string());
                Ok(())
            }
            first if self.format.is_written() => {
                self.state = State::Written(Written::default());
                self.in_written(first, changes)
            }
            _ => Err(NotJson),
        }
    }

    /// Whether the name of a function begins here, and its arguments follow it.
    fn begins_name(&self, first: char) -> bool {
        match self.format {
            ToolCallFormat::Mistral => is_of_name(first),
            ToolCallFormat::MiniCpm5 => first == '"',
            _ => false,
        }
    }

    fn end_call(&mut self, changes: &mut Vec<Change>) {
        changes.push(Change::CallEnd);
        self.raw.clear();
        self.state = State::After;
    }
}

/// The calls in a text that the end of the answer has cut off: the last one as far as it came, if its
/// name is complete.
fn read_cut(format: ToolCallFormat, text: &str, changes: &mut Vec<Change>) -> Result<(), NotJson> {
    let [begin, separator, end] = format.call_markers().unwrap_or(["call:", "", ""]);
    let (mut rest, before) = (text, changes.len());
    while let Some(call) = rest.trim_start().strip_prefix(begin) {
        // Without a separator, the arguments follow the name.
        let parts = match separator {
            "" => call.find('{').map(|at| call.split_at(at)),
            separator => call.split_once(separator),
        };
        let Some((name, arguments)) = parts else { break };
        let name = match format {
            ToolCallFormat::Kimi => name.strip_prefix("functions.").ok_or(NotJson)?,
            _ => name,
        };
        let name = name.split(':').next().unwrap_or_default().trim();
        changes.push(Change::Part(CallPart::Name(name.to_owned())));
        let mut scanner = Scanner::new();
        let mut len = arguments.len();
        for (at, character) in arguments.char_indices() {
            scanner.push(character)?;
            if scanner.has_ended() {
                len = at + character.len_utf8();
                break;
            }
        }
        let (arguments, after) = arguments.split_at(len);
        changes.push(Change::Part(CallPart::Arguments(arguments.to_owned())));
        if !scanner.has_ended() {
            break;
        }
        changes.push(Change::CallEnd);
        rest = after.strip_prefix(end).unwrap_or(after);
    }
    if changes.len() > before { Ok(()) } else { Err(NotJson) }
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.')
}

/// The name in `name`, `name[ARGS]`, `name[CALL_ID]id[ARGS]` or `"name">`.
fn function_name(text: &str) -> Option<String> {
    let quoted = text.strip_prefix('"').and_then(|text| text.trim_end().strip_suffix("\">"));
    let text = quoted.unwrap_or(text);
    let name = text.split('[').next().unwrap_or_default().trim_end();
    let rest = text[name.len()..].trim();
    let expected = rest.is_empty()
        || rest == "[ARGS]"
        || (rest.starts_with("[CALL_ID]") && rest.ends_with("[ARGS]"));
    (expected && !name.is_empty() && name.chars().all(is_of_name)).then(|| name.to_owned())
}
