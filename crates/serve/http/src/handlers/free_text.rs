//! Tools with free text instead of arguments (type `custom`). The model is offered a function with
//! one argument, a string. The text is taken out of the argument while the model writes the
//! argument.

use std::collections::HashSet;

use serde_json::{Value, json};
use stolon::{Grammar, GrammarError};

/// The name of the argument.
const ARGUMENT: &str = "input";

/// The tools with free text of a request, by the names under which the model sees them.
pub(crate) type Customs = HashSet<String>;

/// The JSON schema of the arguments, and whether all calls follow it. `format` is the tool's own
/// description of its text, which the model reads. A regular expression is a part of the schema.
pub(crate) fn parameters(format: Option<&Value>) -> (Value, bool) {
    let mut text = json!({"type": "string"});
    let mut description = "The whole text for the tool, as a JSON string.".to_owned();
    let grammar = format.and_then(grammar);
    if let Some((syntax, grammar)) = grammar {
        description.push_str(&format!(" It follows this grammar ({syntax}):\n{grammar}"));
    }
    let pattern = grammar.filter(|(syntax, _)| *syntax == "regex");
    if let Some((_, pattern)) = pattern {
        text["pattern"] = format!("^(?:{pattern})$").into();
    }
    text["description"] = description.into();
    let schema = json!({
        "type": "object",
        "properties": {ARGUMENT: text},
        "required": [ARGUMENT],
        "additionalProperties": false,
    });
    (schema, pattern.is_some())
}

/// The grammar of the arguments of every call, if the text has one in Lark.
///
/// # Errors
/// The grammar has parts that are not possible in arguments.
pub(crate) fn arguments(format: Option<&Value>) -> Result<Option<Grammar>, GrammarError> {
    let lark = format.and_then(grammar).filter(|(syntax, _)| *syntax == "lark");
    lark.map(|(_, definition)| Grammar::text_argument(ARGUMENT, definition)).transpose()
}

/// The syntax and the definition of the grammar in the `format` of a tool. Chat completions have
/// them one level deeper than responses.
fn grammar(format: &Value) -> Option<(&str, &str)> {
    let given = format.get("grammar").unwrap_or(format);
    Some((given["syntax"].as_str()?, given["definition"].as_str()?))
}

/// Takes the text out of the arguments of a call, which arrive in pieces.
#[derive(Debug, Default)]
pub(crate) struct FreeText {
    /// The arguments so far, up to the beginning of the text; all of them if there is no text.
    arguments: String,
    state: State,
    /// The beginning of an escape sequence of the text.
    escape: String,
    /// The first half of a surrogate pair.
    half: Option<u16>,
}

/// The place in the arguments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Before the text.
    #[default]
    Before,
    /// In the text.
    Within,
    /// After the text.
    After,
}

impl FreeText {
    /// The text that these further arguments add.
    pub(crate) fn push(&mut self, json: &str) -> String {
        let mut text = String::new();
        for char in json.chars() {
            match self.state {
                State::Before => {
                    self.arguments.push(char);
                    if char == '"' && begins_text(&self.arguments) {
                        self.state = State::Within;
                    }
                }
                State::Within => self.add(char, &mut text),
                State::After => {}
            }
        }
        text
    }

    /// The text that is known only at the end of the arguments: they do not fit the function that
    /// the model was offered.
    pub(crate) fn finish(&mut self) -> String {
        if self.state != State::Before {
            return self.half.take().map_or(String::new(), |_| replacement());
        }
        let arguments = std::mem::take(&mut self.arguments);
        let Ok(Value::Object(members)) = serde_json::from_str::<Value>(&arguments) else {
            return arguments;
        };
        let only = members.values().next().filter(|_| members.len() == 1);
        match members.get(ARGUMENT).or(only) {
            Some(Value::String(text)) => text.clone(),
            _ if members.is_empty() => String::new(),
            _ => arguments,
        }
    }

    /// Adds a character of the JSON string to the text.
    fn add(&mut self, char: char, text: &mut String) {
        if self.escape.is_empty() {
            match char {
                '\\' => self.escape.push(char),
                '"' => {
                    self.state = State::After;
                    text.extend(self.half.take().map(|_| char::REPLACEMENT_CHARACTER));
                }
                char => self.put(char, text),
            }
            return;
        }
        self.escape.push(char);
        let escape = std::mem::take(&mut self.escape);
        match escape[1..].strip_prefix('u') {
            Some(digits) if digits.len() < 4 => self.escape = escape,
            Some(digits) => match u16::from_str_radix(digits, 16) {
                Ok(unit) => self.put_unit(unit, text),
                Err(_) => self.put(char::REPLACEMENT_CHARACTER, text),
            },
            None => self.put(unescaped(char), text),
        }
    }

    fn put(&mut self, char: char, text: &mut String) {
        text.extend(self.half.take().map(|_| char::REPLACEMENT_CHARACTER));
        text.push(char);
    }

    /// Adds a unit of UTF-16, which may be half of a character.
    fn put_unit(&mut self, unit: u16, text: &mut String) {
        let units = self.half.take().into_iter().chain([unit]);
        if let [only] = units.clone().collect::<Vec<_>>()[..]
            && (0xd800..0xdc00).contains(&only)
        {
            self.half = Some(only);
            return;
        }
        let chars = char::decode_utf16(units);
        text.extend(chars.map(|char| char.unwrap_or(char::REPLACEMENT_CHARACTER)));
    }
}

fn replacement() -> String {
    char::REPLACEMENT_CHARACTER.to_string()
}

/// The character that a backslash and this character stand for.
fn unescaped(char: char) -> char {
    match char {
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        other => other,
    }
}

/// Whether the value of the argument begins with the last quotation mark of these arguments.
fn begins_text(arguments: &str) -> bool {
    let without_spaces = |text: &str| -> String {
        text.chars().filter(|char| !char.is_ascii_whitespace()).collect()
    };
    // Longer beginnings have other members first.
    arguments.len() < 64 && without_spaces(arguments) == format!("{{\"{ARGUMENT}\":\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of arguments that arrive in pieces of this number of characters.
    fn text(arguments: &str, size: usize) -> String {
        let (mut free, mut text) = (FreeText::default(), String::new());
        let chars: Vec<char> = arguments.chars().collect();
        for piece in chars.chunks(size) {
            text.push_str(&free.push(&piece.iter().collect::<String>()));
        }
        text.push_str(&free.finish());
        text
    }

    /// Goal: however the arguments are cut into pieces, the text is the text of the argument, and
    /// arguments that do not fit the function lose nothing.
    #[test]
    fn the_text_is_taken_out_of_the_arguments() {
        for (arguments, expected) in [
            (r#"{"input": "a\nb \"c\" \\ \u00e9 \ud83d\ude00 é"}"#, "a\nb \"c\" \\ é 😀 é"),
            ("{ \"input\" :\n\"x\" }", "x"),
            (r#"{"input": ""}"#, ""),
            (r#"{"input": "\ud83d"}"#, "\u{fffd}"),
            (r#"{"input": "\ud83dx\ude00"}"#, "\u{fffd}x\u{fffd}"),
            // Cut off.
            (r#"{"input": "*** Begin"#, "*** Begin"),
            (r#"{"input": "a\u00"#, "a"),
            (r#"{"inp"#, r#"{"inp"#),
            // Other arguments.
            ("{}", ""),
            (r#"{"patch": "x\ny"}"#, "x\ny"),
            (r#"{"why": "because", "input": "x"}"#, "x"),
            (r#"{"input": 7}"#, r#"{"input": 7}"#),
            (r#"{"a": "x", "b": "y"}"#, r#"{"a": "x", "b": "y"}"#),
        ] {
            for size in [1, 2, 5, 100] {
                assert_eq!(text(arguments, size), expected, "{arguments} by {size}");
            }
        }
    }

    /// Goal: the grammar of a tool is shown to the model, in the forms of both APIs.
    #[test]
    fn the_grammar_is_shown() {
        let plain = json!({"type": "grammar", "syntax": "lark", "definition": "start: /x/"});
        let nested = json!({"type": "grammar", "grammar": plain});
        for format in [plain.clone(), nested] {
            let (schema, is_strict) = parameters(Some(&format));
            assert!(schema.to_string().contains("grammar (lark):\\nstart: /x/"), "{schema}");
            assert!(!is_strict);
        }
        let (schema, _) = parameters(Some(&json!({"type": "text"})));
        assert!(!schema.to_string().contains("grammar"));
        let regex = json!({"type": "grammar", "syntax": "regex", "definition": "a|b"});
        let (schema, is_strict) = parameters(Some(&regex));
        assert_eq!(
            (&schema["properties"]["input"]["pattern"], is_strict),
            (&json!("^(?:a|b)$"), true)
        );
    }
}
