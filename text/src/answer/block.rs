//! A block of tool calls in an answer, from the marker that begins it.

use std::sync::Arc;

use super::envelope::{CallPart, Envelope};
use super::format::ToolCallFormat;
use super::json::{NotJson, Scanner};
use super::python;

/// Maximum length of a call as the model writes it, in bytes.
const MAX_CALL_BYTES: usize = 1 << 20;
/// Maximum length of a function's name that is written before its arguments, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// Reads one block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    format: ToolCallFormat,
    /// The only functions that may be called, if they are limited.
    names: Option<Arc<[String]>>,
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
    /// In a program, which is read when it is complete.
    Program(String),
    /// After a complete call.
    After,
}

/// What a character adds to a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Part(CallPart),
    /// The call that began last is complete.
    CallEnd,
}

/// How a block goes on after a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The character belongs to the block, which goes on.
    Continue,
    /// The character may begin the text that follows the block.
    MayEnd,
    /// The text since the last complete call is not a call.
    Broken,
}

impl Block {
    /// A block that began with `raw`.
    pub(super) fn new(format: ToolCallFormat, names: Option<Arc<[String]>>, raw: String) -> Self {
        Self { format, names, state: State::Before, listed: false, raw }
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
            State::Program(program) => run(&program.clone(), changes),
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
                    if let (CallPart::Name(name), Some(names)) = (&part, &self.names)
                        && !names.contains(name)
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
            State::Program(program) => {
                program.push(character);
                let Some(complete) = program.strip_suffix(self.format.markers().close) else {
                    return Ok(());
                };
                run(complete, changes)?;
                self.raw.clear();
                self.state = State::After;
                Ok(())
            }
        }
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
            first if self.format == ToolCallFormat::Mistral && is_of_name(first) => {
                self.state = State::Name(first.to_string());
                Ok(())
            }
            first if self.format == ToolCallFormat::Gemma => {
                let list = if self.listed { "[" } else { "" };
                self.listed = false;
                self.state = State::Program(format!("{list}{first}"));
                Ok(())
            }
            _ => Err(NotJson),
        }
    }

    fn end_call(&mut self, changes: &mut Vec<Change>) {
        changes.push(Change::CallEnd);
        self.raw.clear();
        self.state = State::After;
    }
}

/// The calls of a program.
fn run(program: &str, changes: &mut Vec<Change>) -> Result<(), NotJson> {
    for (name, arguments) in python::parse_calls(program).ok_or(NotJson)? {
        changes.push(Change::Part(CallPart::Name(name)));
        changes.push(Change::Part(CallPart::Arguments(arguments.to_string())));
        changes.push(Change::CallEnd);
    }
    Ok(())
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.')
}

/// The name in `name`, `name[ARGS]` or `name[CALL_ID]id[ARGS]`.
fn function_name(text: &str) -> Option<String> {
    let name = text.split('[').next().unwrap_or_default().trim_end();
    let rest = text[name.len()..].trim();
    let expected = rest.is_empty()
        || rest == "[ARGS]"
        || (rest.starts_with("[CALL_ID]") && rest.ends_with("[ARGS]"));
    (expected && !name.is_empty() && name.chars().all(is_of_name)).then(|| name.to_owned())
}
