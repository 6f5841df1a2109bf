//! JSON as models write it when it is nearly right: line breaks and quotation marks within strings,
//! single quotation marks and constants of Python, braces that are missing or doubled, and too many
//! or too few commas. Without quotation marks, words are keys, but not strings.

use serde_json::{Map, Value};

use super::cursor::{Cursor, End, Read, Stop};
use super::json::Scanner;
use super::markers::CLOSES;

/// Maximum number of nested lists and objects.
pub(super) const MAX_DEPTH: usize = 64;
/// Maximum number of characters that are looked at to decide whether a quotation mark ends a
/// string.
const MAX_LOOK: usize = 256;

/// The context of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Key,
    InObject,
    InList,
    Alone,
}

/// Reads an object: returns it as the model wrote it if it is JSON, else converts its meaning to
/// JSON.
pub(super) fn object(cursor: &mut Cursor<'_>) -> Read<String> {
    cursor.skip_space();
    if cursor.peek()? != Some('{') {
        return Err(Stop::Other);
    }
    match exact_object(cursor)? {
        Some(text) => Ok(text),
        None => Ok(value(cursor)?.to_string()),
    }
}

/// Takes an object that is JSON.
pub(super) fn exact_object(cursor: &mut Cursor<'_>) -> Read<Option<String>> {
    let mut scanner = Scanner::new();
    for (at, character) in cursor.rest().char_indices() {
        if scanner.push(character).is_err() {
            return Ok(None);
        }
        if scanner.has_ended() {
            let text = &cursor.rest()[..=at];
            cursor.skip(text.len());
            return Ok(Some(text.to_owned()));
        }
    }
    if cursor.end == End::Open { Err(Stop::More) } else { Ok(None) }
}

/// Reads a value.
pub(super) fn value(cursor: &mut Cursor<'_>) -> Read<Value> {
    value_at(cursor, 0, Place::Alone)
}

fn value_at(cursor: &mut Cursor<'_>, depth: usize, place: Place) -> Read<Value> {
    cursor.skip_space();
    let first = cursor.peek()?.ok_or(Stop::Other)?;
    if depth == MAX_DEPTH {
        return Err(Stop::Other);
    }
    match first {
        '{' => object_at(cursor, depth),
        '[' => list_at(cursor, depth),
        '"' | '\'' => text(cursor, place).map(Value::String),
        _ => constant(cursor),
    }
}

/// Whether all objects and lists end here, at this depth: before a marker or, if only the outermost
/// brace is missing after that of an inner object, with the answer.
fn ends_all(cursor: &Cursor<'_>, depth: usize) -> Read<bool> {
    match cursor.peek()? {
        None => {
            let is_closed = cursor.text[..cursor.at].trim_end().ends_with('}');
            Ok(depth == 0 && is_closed && cursor.end == End::Complete)
        }
        Some(_) => Ok(cursor.sees_any(CLOSES)?.is_some()),
    }
}

fn object_at(cursor: &mut Cursor<'_>, depth: usize) -> Read<Value> {
    cursor.skip(1);
    cursor.skip_space();
    if cursor.peek()? == Some('{') {
        // The brace is doubled.
        let inner = value_at(cursor, depth + 1, Place::Alone)?;
        cursor.skip_space();
        if cursor.peek()? == Some('}') {
            cursor.skip(1);
        }
        return Ok(inner);
    }
    let mut entries = Map::new();
    loop {
        cursor.skip_space();
        match cursor.peek()? {
            Some('}') => {
                cursor.skip(1);
                return Ok(Value::Object(entries));
            }
            Some(',') => cursor.skip(1),
            Some(first) if matches!(first, '"' | '\'' | '_') || first.is_alphabetic() => {
                let key = match first {
                    '"' | '\'' => text(cursor, Place::Key)?,
                    _ => cursor.word(|next| next.is_alphanumeric() || next == '_')?.to_owned(),
                };
                cursor.skip_space();
                if cursor.next()? != ':' {
                    return Err(Stop::Other);
                }
                let value = value_at(cursor, depth + 1, Place::InObject)?;
                if entries.insert(key, value).is_some() {
                    return Err(Stop::Other);
                }
            }
            // The brace is missing.
            Some(']') if depth > 0 => return Ok(Value::Object(entries)),
            _ if !entries.is_empty() && ends_all(cursor, depth)? => {
                return Ok(Value::Object(entries));
            }
            _ => return Err(Stop::Other),
        }
    }
}

fn list_at(cursor: &mut Cursor<'_>, depth: usize) -> Read<Value> {
    cursor.skip(1);
    let mut items = Vec::new();
    loop {
        cursor.skip_space();
        match cursor.peek()? {
            Some(']') => {
                cursor.skip(1);
                return Ok(Value::Array(items));
            }
            Some(',') => cursor.skip(1),
            Some('}') if depth > 0 => return Ok(Value::Array(items)),
            _ if !items.is_empty() && ends_all(cursor, depth)? => return Ok(Value::Array(items)),
            _ => items.push(value_at(cursor, depth + 1, Place::InList)?),
        }
    }
}

/// A number, or a constant of JSON or Python.
fn constant(cursor: &mut Cursor<'_>) -> Read<Value> {
    let word = cursor.word(|next| next.is_alphanumeric() || matches!(next, '+' | '-' | '.'))?;
    match word {
        "True" => Ok(Value::Bool(true)),
        "False" => Ok(Value::Bool(false)),
        "None" => Ok(Value::Null),
        word => serde_json::from_str(word).map_err(|_| Stop::Other),
    }
}

/// Reads a string between quotation marks. A quotation mark that is not escaped is part of the
/// string if the text after it cannot follow a string.
fn text(cursor: &mut Cursor<'_>, place: Place) -> Read<String> {
    let quote = cursor.next()?;
    let mut text = String::new();
    loop {
        match cursor.next()? {
            '\\' => escape(cursor, &mut text)?,
            next if next == quote && ends_text(*cursor, place)? => return Ok(text),
            next => text.push(next),
        }
    }
}

/// Whether a quotation mark before the cursor ends a string.
fn ends_text(mut cursor: Cursor<'_>, place: Place) -> Read<bool> {
    let is_near = |cursor: &Cursor<'_>, start: usize| cursor.at - start <= MAX_LOOK;
    let start = cursor.at;
    cursor.skip_space();
    let next = cursor.peek()?;
    Ok(match (place, next) {
        (Place::Key, next) => next == Some(':'),
        (_, None) => true,
        (_, Some('<')) => cursor.sees_any(CLOSES)?.is_some(),
        (Place::InList, Some(',')) => true,
        (Place::InObject, Some(',')) => {
            cursor.skip(1);
            cursor.skip_space();
            match cursor.peek()? {
                None | Some('}') => true,
                Some(quote @ ('"' | '\'')) => {
                    cursor.skip(1);
                    let key = cursor.until(MAX_LOOK, |next| next == quote || next == '\n');
                    match key {
                        Err(Stop::More) => return Err(Stop::More),
                        Err(Stop::Other) => return Ok(false),
                        Ok(_) => {}
                    }
                    cursor.skip(usize::from(cursor.peek()? == Some(quote)));
                    cursor.skip_space();
                    cursor.peek()? == Some(':')
                }
                Some(_) => {
                    let key = cursor.word(|next| next.is_alphanumeric() || next == '_');
                    match key {
                        Err(Stop::More) => return Err(Stop::More),
                        Err(Stop::Other) | Ok("") => false,
                        Ok(_) => cursor.peek()? == Some(':'),
                    }
                }
            }
        }
        (_, Some('}' | ']')) => {
            // In a string with code, more of the string follows.
            while let Some('}' | ']') = cursor.peek()? {
                cursor.skip(1);
                cursor.skip_space();
                if !is_near(&cursor, start) {
                    return Ok(true);
                }
            }
            match cursor.peek()? {
                Some('<') => cursor.sees_any(CLOSES)?.is_some(),
                next => matches!(next, None | Some(',' | ';' | '{' | '[' | '`')),
            }
        }
        // A comma is missing.
        (Place::InObject, Some('"')) => {
            cursor.skip(1);
            match cursor.word(|next| next.is_alphanumeric() || next == '_') {
                Err(Stop::More) => return Err(Stop::More),
                Err(Stop::Other) | Ok("") => return Ok(false),
                Ok(_) => {}
            }
            if cursor.peek()? != Some('"') {
                return Ok(false);
            }
            cursor.skip(1);
            cursor.skip_space();
            cursor.peek()? == Some(':')
        }
        _ => false,
    })
}

/// Reads the rest of an escape. Text that is not an escape is part of the string.
fn escape(cursor: &mut Cursor<'_>, text: &mut String) -> Read<()> {
    match cursor.next()? {
        'n' => text.push('\n'),
        't' => text.push('\t'),
        'r' => text.push('\r'),
        'b' => text.push('\u{8}'),
        'f' => text.push('\u{c}'),
        same @ ('"' | '\'' | '\\' | '/') => text.push(same),
        'u' => match unit(cursor)? {
            None => text.push_str("\\u"),
            Some(high @ 0xd800..0xdc00) => {
                let mut next = *cursor;
                let low = match next.takes("\\u")? {
                    true => unit(&mut next)?.filter(|low| (0xdc00..0xe000).contains(low)),
                    false => None,
                };
                let pair = low.map(|low| 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00));
                if pair.is_some() {
                    *cursor = next;
                }
                text.push(pair.and_then(char::from_u32).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            Some(unit) => text.push(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER)),
        },
        other => text.extend(['\\', other]),
    }
    Ok(())
}

/// The four digits of an escape; `None` if there are others.
fn unit(cursor: &mut Cursor<'_>) -> Read<Option<u32>> {
    let mut value = 0;
    let mut digits = *cursor;
    for _ in 0..4 {
        let Some(digit) = digits.peek()?.and_then(|next| next.to_digit(16)) else {
            return Ok(None);
        };
        digits.skip(1);
        value = value * 16 + digit;
    }
    *cursor = digits;
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &str, end: End) -> Read<Value> {
        value(&mut Cursor::new(text, end))
    }

    /// Goal: objects that are nearly JSON have the meaning that the model intended.
    #[test]
    fn values_that_are_nearly_json_are_read() {
        for (text, expected) in [
            (
                r#"{"a": [1, -2.5e3, true, null, "\u00e9\ud83d\ude00\ud83d"]}"#,
                json!({"a": [1, -2500.0, true, null, "é😀\u{fffd}"]}),
            ),
            ("{'a': 'it\\'s', 'b': [True, None]}", json!({"a": "it's", "b": [true, null]})),
            ("{\"a\": \"x\ny\tz\"}", json!({"a": "x\ny\tz"})),
            (r#"{"a": "\d+", }"#, json!({"a": "\\d+"})),
            (r#"{{"a": {{"b": 1}}}}"#, json!({"a": {"b": 1}})),
            (r#"{"a": {"b": [1, 2</tool_call>"#, json!({"a": {"b": [1, 2]}})),
            (r#"{"a": {"b": [1]} "#, json!({"a": {"b": [1]}})),
            (r#"{"a": "<a href="x">y</a>"}"#, json!({"a": "<a href=\"x\">y</a>"})),
            (r#"{"a": {"b": 1}</tool_call>"#, json!({"a": {"b": 1}})),
            (
                r#"{"a": "print("hi", "there")", "b": 1}"#,
                json!({"a": "print(\"hi\", \"there\")", "b": 1}),
            ),
            (r#"{"a": "{"k": "v"}", "b": "c"}"#, json!({"a": "{\"k\": \"v\"}", "b": "c"})),
            (r#"{"a": 1 "b": "c" "d": 2}"#, json!({"a": 1, "b": "c", "d": 2})),
            ("{a: {b_1: 1}}", json!({"a": {"b_1": 1}})),
            ("{}", json!({})),
        ] {
            assert_eq!(read(text, End::Complete), Ok(expected), "{text}");
        }
    }

    /// Goal: other texts are not values, and a value that is cut off is not completed.
    #[test]
    fn other_texts_are_not_values() {
        for text in [
            "",
            "x",
            "{\"a\": x}",
            "{\"a\": \"x",
            "{\"a\": 1, \"a\": 2}",
            "{\"a\" 1}",
            "{",
            "{\"a\": [1",
            "{\"a\": 1",
        ] {
            assert_eq!(read(text, End::Complete), Err(Stop::Other), "{text}");
        }
        assert_eq!(read("{\"a\": 1", End::Cut), Err(Stop::Other));
        assert_eq!(read("{\"a\": 1", End::Open), Err(Stop::More));
        let nested = "[".repeat(MAX_DEPTH + 1);
        assert_eq!(read(&nested, End::Open), Err(Stop::Other));
    }
}
