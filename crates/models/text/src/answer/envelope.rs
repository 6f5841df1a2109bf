//! The JSON object in which a model writes a call: `{"name": "...", "arguments": {...}}`.
//!
//! It is read one character at a time. As soon as the name is known, the arguments are passed on
//! while they arrive, exactly as the model wrote them.

use serde_json::Value;

use super::json::{NotJson, Scanner, Seen};

/// The addition of a character of the object to its call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallPart {
    /// The call of this function begins.
    Name(String),
    /// Text to append to the arguments.
    Arguments(String),
}

/// Reads one object.
#[derive(Clone, Debug)]
pub(super) struct Envelope {
    scanner: Scanner,
    /// What is being read.
    field: Field,
    /// The meaning of the value after the key that was read last.
    next: Field,
    /// The text of `field` so far, as far as it is needed.
    text: String,
    name_known: bool,
    arguments: Arguments,
}

/// A part of the outermost object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    /// Punctuation, or a value that is ignored.
    Other,
    Key,
    Name,
    Arguments,
}

/// The state of the arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Arguments {
    Missing,
    /// They are passed on while they arrive.
    Streamed,
    /// They arrive before the name, or are not written as an object.
    Buffered,
    /// They arrived before the name.
    Held(String),
    /// All of them have been passed on.
    Complete,
}

impl Envelope {
    pub(super) fn new() -> Self {
        Self {
            scanner: Scanner::new(),
            field: Field::Other,
            next: Field::Other,
            text: String::new(),
            name_known: false,
            arguments: Arguments::Missing,
        }
    }

    /// Whether the object has ended, so that its call is complete.
    pub(super) fn has_ended(&self) -> bool {
        self.scanner.has_ended()
    }

    /// Reads the next character, from the first brace on.
    ///
    /// # Errors
    /// The text is not an object of a call.
    pub(super) fn push(
        &mut self,
        character: char,
        parts: &mut Vec<CallPart>,
    ) -> Result<(), NotJson> {
        let before = self.scanner.depth();
        let seen = self.scanner.push(character)?;
        match (before, seen) {
            (1, Seen::KeyStart) => self.begin(Field::Key),
            (1, Seen::ValueStart) => self.begin_value(character)?,
            _ => {}
        }
        self.add(character, parts);
        match (self.scanner.depth(), seen) {
            (1, Seen::KeyEnd) => self.end_key()?,
            (1, Seen::ValueEnd) => self.end_value(parts)?,
            (0, Seen::ValueEnd) => self.end(parts)?,
            _ => {}
        }
        Ok(())
    }

    fn begin(&mut self, field: Field) {
        self.field = field;
        self.text.clear();
    }

    fn begin_value(&mut self, character: char) -> Result<(), NotJson> {
        self.begin(self.next);
        match self.field {
            Field::Name if self.name_known || character != '"' => return Err(NotJson),
            Field::Arguments => {
                if self.arguments != Arguments::Missing || !matches!(character, '{' | '"' | 'n') {
                    return Err(NotJson);
                }
                let streamed = character == '{' && self.name_known;
                self.arguments = if streamed { Arguments::Streamed } else { Arguments::Buffered };
            }
            _ => {}
        }
        Ok(())
    }

    fn add(&mut self, character: char, parts: &mut Vec<CallPart>) {
        match (self.field, &self.arguments) {
            (Field::Arguments, Arguments::Streamed) => match parts.last_mut() {
                Some(CallPart::Arguments(text)) => text.push(character),
                _ => parts.push(CallPart::Arguments(character.to_string())),
            },
            (Field::Other, _) => {}
            _ => self.text.push(character),
        }
    }

    fn end_key(&mut self) -> Result<(), NotJson> {
        let key: String = serde_json::from_str(&self.text).map_err(|_| NotJson)?;
        self.next = match key.as_str() {
            "name" | "tool_name" => Field::Name,
            "arguments" | "parameters" => Field::Arguments,
            "id" | "type" | "tool_call_id" => Field::Other,
            _ => return Err(NotJson),
        };
        self.begin(Field::Other);
        Ok(())
    }

    /// A value of the outermost object has ended.
    fn end_value(&mut self, parts: &mut Vec<CallPart>) -> Result<(), NotJson> {
        match self.field {
            Field::Name => {
                let name: String = serde_json::from_str(&self.text).map_err(|_| NotJson)?;
                if name.is_empty() {
                    return Err(NotJson);
                }
                self.name_known = true;
                parts.push(CallPart::Name(name));
            }
            Field::Arguments if self.arguments == Arguments::Buffered => {
                self.arguments = Arguments::Held(object_text(&self.text)?);
            }
            Field::Arguments => self.arguments = Arguments::Complete,
            Field::Key | Field::Other => {}
        }
        if self.name_known && matches!(self.arguments, Arguments::Held(_)) {
            let held = std::mem::replace(&mut self.arguments, Arguments::Complete);
            parts.extend(if let Arguments::Held(text) = held {
                Some(CallPart::Arguments(text))
            } else {
                None
            });
        }
        self.begin(Field::Other);
        Ok(())
    }

    /// The object has ended. A call without arguments has none.
    fn end(&mut self, parts: &mut Vec<CallPart>) -> Result<(), NotJson> {
        if !self.name_known {
            return Err(NotJson);
        }
        if self.arguments == Arguments::Missing {
            parts.push(CallPart::Arguments("{}".to_owned()));
        }
        Ok(())
    }
}

/// Arguments as the JSON of an object. Some models write the object into a string, and `null` for
/// no arguments.
fn object_text(text: &str) -> Result<String, NotJson> {
    match serde_json::from_str(text).map_err(|_| NotJson)? {
        Value::Object(_) => Ok(text.to_owned()),
        Value::Null => Ok("{}".to_owned()),
        Value::String(inner) => match serde_json::from_str(&inner) {
            Ok(Value::Object(_)) => Ok(inner),
            _ => Err(NotJson),
        },
        _ => Err(NotJson),
    }
}
