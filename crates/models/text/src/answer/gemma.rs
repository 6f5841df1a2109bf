//! Calls of Gemma 4: `call:name{key:<|"|>text<|"|>,other:[1,{more:true}]}`. Keys have no quotation
//! marks, and strings are between special tokens, so nothing in them is escaped.
//!
//! Models also write parentheses and `=`, JSON, single quotation marks, and leave out or double
//! quotation marks. A quotation mark ends a string if the text after it can follow a string.

use serde_json::{Map, Value};

use super::cursor::{Cursor, End, Read, Stop};
use super::lenient::{self, MAX_DEPTH};
use super::markers::{CLOSES, OPENS};
use super::offered;
use super::tagged::follows_call;
use crate::FunctionSchema;

/// The mark before and after a string.
const QUOTE: &str = "<|\"|>";
/// The other marks that may enclose a string.
const QUOTES: [char; 2] = ['"', '\''];
/// Maximum length of the text that is examined to decide whether a string ends, in bytes.
const MAX_LOOK: usize = 256;

/// Reads the arguments of a call.
pub(super) fn call(cursor: &mut Cursor<'_>, function: &FunctionSchema) -> Read<(String, String)> {
    cursor.skip_space();
    let arguments = match cursor.peek()? {
        Some('{') => {
            if let Some(json) = lenient::exact_object(cursor)? {
                return Ok((function.name.clone(), json));
            }
            Reader { function }.arguments(cursor, '}')?
        }
        Some('(') => Reader { function }.arguments(cursor, ')')?,
        _ if follows_call(*cursor)? => Value::Object(Map::new()),
        _ => return Err(Stop::Other),
    };
    Ok((function.name.clone(), arguments.to_string()))
}

/// Reads the values of a call of one function.
#[derive(Clone, Copy)]
struct Reader<'a> {
    function: &'a FunctionSchema,
}

/// The context of a value.
#[derive(Clone, Copy)]
struct Place<'a> {
    /// The character that ends the object or list with the value.
    close: char,
    depth: usize,
    /// The key of the argument, and the arguments before it; `None` within a value.
    argument: Option<(&'a str, &'a Map<String, Value>)>,
}

impl Reader<'_> {
    /// All arguments, which end with `close`.
    fn arguments(self, cursor: &mut Cursor<'_>, close: char) -> Read<Value> {
        let mut inner = *cursor;
        inner.skip(1);
        inner.skip_space();
        if inner.peek()? != Some('{') {
            return self.object(cursor, close, 0);
        }
        // A template that was given arguments as JSON puts braces around them, and models repeat it.
        let arguments = self.object(&mut inner, '}', 0)?;
        inner.skip_space();
        *cursor = inner;
        if cursor.peek()? == Some(close) {
            cursor.skip(1);
            return Ok(arguments);
        }
        if follows_call(*cursor)? { Ok(arguments) } else { Err(Stop::Other) }
    }

    fn object(self, cursor: &mut Cursor<'_>, close: char, depth: usize) -> Read<Value> {
        cursor.skip(1);
        let mut entries = Map::new();
        loop {
            cursor.skip_space();
            let next = cursor.peek()?.ok_or(Stop::Other)?;
            if next == close {
                cursor.skip(1);
                return Ok(Value::Object(entries));
            }
            if next == ',' {
                cursor.skip(1);
                continue;
            }
            if !entries.is_empty() && cursor.sees_any(CLOSES)?.is_some() {
                // The brace is missing.
                return Ok(Value::Object(entries));
            }
            let key = key(cursor)?;
            cursor.skip_space();
            let argument = (depth == 0).then_some((key.as_str(), &entries));
            let value = self.value(cursor, Place { close, depth: depth + 1, argument })?;
            if entries.insert(key, value).is_some() {
                return Err(Stop::Other);
            }
        }
    }

    fn list(self, cursor: &mut Cursor<'_>, depth: usize) -> Read<Value> {
        cursor.skip(1);
        let mut items = Vec::new();
        loop {
            cursor.skip_space();
            match cursor.peek()?.ok_or(Stop::Other)? {
                ']' => {
                    cursor.skip(1);
                    return Ok(Value::Array(items));
                }
                ',' => cursor.skip(1),
                _ if !items.is_empty() && cursor.sees_any(CLOSES)?.is_some() => {
                    return Ok(Value::Array(items));
                }
                _ => {
                    let place = Place { close: ']', depth: depth + 1, argument: None };
                    items.push(self.value(cursor, place)?);
                }
            }
        }
    }

    fn value(self, cursor: &mut Cursor<'_>, place: Place<'_>) -> Read<Value> {
        if place.depth == MAX_DEPTH {
            return Err(Stop::Other);
        }
        match cursor.peek()?.ok_or(Stop::Other)? {
            '{' => return self.object(cursor, '}', place.depth),
            '[' => return self.list(cursor, place.depth),
            '"' | '\'' => {}
            _ if cursor.sees(QUOTE)? => {}
            _ => return self.bare(cursor, place),
        }
        let text = self.text(cursor, place)?;
        Ok(match place.argument {
            Some((key, _)) => offered::quoted_value(self.function, key, text),
            None => Value::String(text),
        })
    }

    /// A number or a constant. Anything else is a string whose quotation marks are missing.
    fn bare(self, cursor: &mut Cursor<'_>, place: Place<'_>) -> Read<Value> {
        let start = *cursor;
        let mut open = 0_usize;
        loop {
            let next = cursor.peek()?.ok_or(Stop::Other)?;
            if cursor.sees(QUOTE)? {
                // The first quotation mark is missing.
                let mut after = *cursor;
                after.skip(QUOTE.len());
                if self.ends_text(after, place)? {
                    let text = start.text[start.at..cursor.at].trim_start().to_owned();
                    *cursor = after;
                    return Ok(Value::String(text));
                }
            }
            match next {
                '(' => open += 1,
                ')' if open > 0 => open -= 1,
                ')' if place.close == ')' => break,
                '}' | ']' => break,
                ',' if self.follows_comma(*cursor, place)? => break,
                '<' if cursor.sees_any(CLOSES)?.is_some() => break,
                _ => {}
            }
            cursor.skip(next.len_utf8());
        }
        let text = start.text[start.at..cursor.at].trim();
        if text.is_empty() {
            return Err(Stop::Other);
        }
        let key = place.argument.map_or("", |(key, _)| key);
        Ok(offered::value(self.function, key, text, None))
    }

    /// Whether the comma at the cursor ends a value.
    fn follows_comma(self, mut cursor: Cursor<'_>, place: Place<'_>) -> Read<bool> {
        cursor.skip(1);
        if place.close == ']' {
            return Ok(true);
        }
        cursor.skip_space();
        if cursor.peek()? == Some(place.close) {
            return Ok(true);
        }
        match key(&mut cursor) {
            Err(Stop::Other) => Ok(false),
            read => read.map(|_| true),
        }
    }

    /// Reads a string between quotation marks.
    fn text(self, cursor: &mut Cursor<'_>, place: Place<'_>) -> Read<String> {
        let quote = cursor.next()?;
        let is_special = quote == '<';
        if is_special {
            cursor.skip(QUOTE.len() - 1);
            if cursor.sees(QUOTE)? {
                let mut after = *cursor;
                after.skip(QUOTE.len());
                let is_empty = self.ends_text(after, place)?;
                *cursor = after;
                if is_empty {
                    return Ok(String::new());
                }
                // The quotation mark is doubled.
            }
        }
        let start = cursor.at;
        let mut text = String::new();
        // The place where the call may end if no quotation mark ends the string.
        let mut marker = None;
        loop {
            let Some(next) = cursor.peek()? else {
                let end = marker.filter(|_| cursor.end == End::Complete).ok_or(Stop::Other)?;
                return Ok(self.unclosed(cursor, start, end, place));
            };
            let at = cursor.at;
            if cursor.takes(QUOTE)? {
                if self.ends_text(*cursor, place)? {
                    return Ok(text);
                }
                if let Some(comma) = self.next_argument(&cursor.text[start..at], place) {
                    // The last quotation mark is missing: this one begins another string.
                    let len = text.len() - (at - start - comma);
                    text.truncate(len);
                    cursor.at = start + comma;
                    return Ok(text);
                }
                if cursor.sees(QUOTE)? {
                    let mut after = *cursor;
                    after.skip(QUOTE.len());
                    if self.ends_text(after, place)? {
                        *cursor = after;
                        return Ok(text);
                    }
                }
                text.push('"');
                continue;
            }
            if next == '<' && cursor.sees_any(CLOSES)?.is_some() {
                marker.get_or_insert(at);
                let mut after = *cursor;
                after.takes_any(CLOSES)?;
                after.skip_space();
                if after.sees_any(OPENS)?.is_some() {
                    return Ok(self.unclosed(cursor, start, marker.unwrap_or(at), place));
                }
            }
            cursor.skip(next.len_utf8());
            if is_special {
                text.push(next);
            } else if next == '\\' {
                let escaped = cursor.next()?;
                match escaped {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'u' => text.push(unit(cursor)?),
                    '"' | '\'' | '\\' | '/' => text.push(escaped),
                    other => text.extend(['\\', other]),
                }
            } else if next == quote && self.ends_text(*cursor, place)? {
                return Ok(text);
            } else {
                text.push(next);
            }
        }
    }

    /// A string that no quotation mark ends before the end of the call at `end`.
    fn unclosed(
        self,
        cursor: &mut Cursor<'_>,
        start: usize,
        end: usize,
        place: Place<'_>,
    ) -> String {
        let text = &cursor.text[start..end];
        if let Some(comma) = self.first_argument(text, place) {
            cursor.at = start + comma;
            return text[..comma].to_owned();
        }
        let mut inner = text.trim_end();
        for _ in 0..place.depth {
            let Some(shorter) = inner.strip_suffix(['}', ']', ')']) else { break };
            inner = shorter.trim_end();
        }
        cursor.at = start + inner.len();
        inner.strip_suffix(QUOTES).unwrap_or(inner).replace(QUOTE, "\"")
    }

    /// The end of a string that is followed by a comma and the key of another argument, at the end
    /// of `text`.
    fn next_argument(self, text: &str, place: Place<'_>) -> Option<usize> {
        let text = text.trim_end();
        let near = (text.len().saturating_sub(MAX_LOOK)..).find(|&at| text.is_char_boundary(at))?;
        let comma = near + text[near..].rfind(',')?;
        self.is_argument(&text[comma + 1..], place).then_some(comma)
    }

    /// The end of a string that is followed by a comma and the key of another argument.
    fn first_argument(self, text: &str, place: Place<'_>) -> Option<usize> {
        let commas = text.match_indices(',').map(|(at, _)| at);
        let mut ends = commas.filter(|at| {
            let mut after = Cursor::new(&text[at + 1..], End::Complete);
            let key = after.until(MAX_LOOK, |next| matches!(next, ':' | '=' | ','));
            key.is_ok_and(|key| {
                self.is_argument(&after.text[..after.text.len().min(key.len() + 1)], place)
            })
        });
        ends.next()
    }

    /// Whether this is the key of an argument that the call does not have yet.
    fn is_argument(self, key: &str, place: Place<'_>) -> bool {
        let Some((own, before)) = place.argument else { return false };
        let key = key.trim();
        let Some(key) = key.strip_suffix([':', '=']).map(str::trim) else { return false };
        key != own && !before.contains_key(key) && offered::has_argument(self.function, key)
    }

    /// Whether a quotation mark before the cursor ends a string.
    fn ends_text(self, mut cursor: Cursor<'_>, place: Place<'_>) -> Read<bool> {
        cursor.skip_space();
        match cursor.peek()? {
            None => return Ok(true),
            Some(',') => return self.follows_comma(cursor, place),
            Some('<') => return Ok(cursor.sees_any(CLOSES)?.is_some()),
            Some('}' | ']' | ')') => {}
            Some(_) => {
                // A comma is missing.
                let start = cursor.at;
                return match key(&mut cursor) {
                    Err(Stop::Other) => Ok(false),
                    Err(Stop::More) => Err(Stop::More),
                    Ok(_) => Ok(self.is_argument(&cursor.text[start..cursor.at], place)),
                };
            }
        }
        if cursor.peek()? != Some(place.close) {
            return Ok(false);
        }
        // In a string with code, more of the string follows.
        let start = cursor.at;
        while let Some('}' | ']' | ')') = cursor.peek()? {
            cursor.skip(1);
            cursor.skip_space();
            if cursor.at - start > MAX_LOOK {
                return Ok(true);
            }
        }
        match cursor.peek()? {
            None | Some(',') => Ok(true),
            Some('<') => {
                Ok(cursor.sees_any(CLOSES)?.is_some() || cursor.sees_any(OPENS)?.is_some())
            }
            Some(_) => cursor.sees("call:"),
        }
    }
}

/// The character of an escape.
fn unit(cursor: &mut Cursor<'_>) -> Read<char> {
    let mut value = 0;
    for _ in 0..4 {
        value = value * 16 + cursor.next()?.to_digit(16).ok_or(Stop::Other)?;
    }
    Ok(char::from_u32(value).unwrap_or(char::REPLACEMENT_CHARACTER))
}

/// Takes a key and the separator after it.
fn key(cursor: &mut Cursor<'_>) -> Read<String> {
    cursor.skip_space();
    let key = match cursor.peek()? {
        Some(quote @ ('"' | '\'')) => {
            cursor.skip(1);
            let key = cursor.until(MAX_LOOK, |next| next == quote)?;
            if cursor.next()? != quote {
                return Err(Stop::Other);
            }
            key
        }
        _ if cursor.takes(QUOTE)? => {
            let near = cursor.near(MAX_LOOK + QUOTE.len());
            let Some(len) = near.find(QUOTE) else {
                let is_open = cursor.end == End::Open && near.len() == cursor.rest().len();
                return Err(if is_open { Stop::More } else { Stop::Other });
            };
            cursor.skip(len + QUOTE.len());
            &near[..len]
        }
        _ => cursor.word(|next| next.is_alphanumeric() || matches!(next, '_' | '-' | '.' | '$'))?,
    };
    cursor.skip_space();
    if key.is_empty() || !matches!(cursor.peek()?, Some(':' | '=')) {
        return Err(Stop::Other);
    }
    cursor.skip(1);
    Ok(key.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn function() -> FunctionSchema {
        let text = json!({"type": "string"});
        let parameters = json!({"properties": {
            "q": text, "path": text, "text": text, "n": {"type": "integer"},
            "l": {"type": "array"},
        }});
        FunctionSchema::new("get", parameters)
    }

    fn read(text: &str, end: End) -> Read<Value> {
        let mut cursor = Cursor::new(text, end);
        let (_, arguments) = call(&mut cursor, &function())?;
        Ok(serde_json::from_str(&arguments).expect("JSON"))
    }

    /// Goal: values of every kind are converted to JSON, as the model should write them, and as it
    /// writes them.
    #[test]
    fn calls_are_read() {
        for (text, expected) in [
            ("{}", json!({})),
            ("", json!({})),
            (r#"{q:<|"|>São "Paulo", {x}<|"|>,n:3}"#, json!({"q": "São \"Paulo\", {x}", "n": 3})),
            (
                r#"{a:[true, -2.5,null , None,<|"|><|"|>],b:{c:{},<|"|>d e<|"|>:[[]]}}"#,
                json!({"a": [true, -2.5, null, null, ""], "b": {"c": {}, "d e": [[]]}}),
            ),
            (r#"{"a": "x\n}\"\ud83d\ude00", "b": ["c"]}"#, json!({"a": "x\n}\"😀", "b": ["c"]})),
            ("{ a : 1 ,\n b : Paris }", json!({"a": 1, "b": "Paris"})),
            (r#"{{"a": 1}}"#, json!({"a": 1})),
            (r#"{a:<|"|>call:put{}<|"|>}"#, json!({"a": "call:put{}"})),
            (r#"(q=<|"|>red kites<|"|>, n=3)"#, json!({"q": "red kites", "n": 3})),
            (r#"(q:<|"|>ls (a)<|"|>)"#, json!({"q": "ls (a)"})),
            ("(q=a (b) c)", json!({"q": "a (b) c"})),
            (r#"{q:red kites<|"|>}"#, json!({"q": "red kites"})),
            (r#"{q:Paris, France<|"|>,n:5}"#, json!({"q": "Paris, France", "n": 5})),
            (r#"{q:<|"|>red kites}<tool_call|>"#, json!({"q": "red kites"})),
            (r#"{q:<|"|>red kites,n:3}<tool_call|>"#, json!({"q": "red kites", "n": 3})),
            (r#"{path:<|"|>a,text:<|"|>b<|"|>}"#, json!({"path": "a", "text": "b"})),
            (r#"{q:<|"|><|"|>red kites<|"|><|"|>,n:1}"#, json!({"q": "red kites", "n": 1})),
            (
                r#"{path:<|"|>a<|"|>,text:<|"|>print(<|"|>hi<|"|>)<|"|>}"#,
                json!({"path": "a", "text": "print(\"hi\")"}),
            ),
            (
                "{path:'out, v2.txt',text:'x: {y}'}",
                json!({"path": "out, v2.txt", "text": "x: {y}"}),
            ),
            ("{text:'it's'}", json!({"text": "it's"})),
            (r#"{q:"red kites<|"|>}"#, json!({"q": "red kites"})),
            (r#"{q:<|"|>red kites"}<tool_call|>"#, json!({"q": "red kites"})),
            (r#"{q:<|"|>a<|"|>n:3}"#, json!({"q": "a", "n": 3})),
            (r#"{q:<|"|>a<|"|>,l:["b",'c']}"#, json!({"q": "a", "l": ["b", "c"]})),
            (r#"{q:10115,n:<|"|>3<|"|>}"#, json!({"q": "10115", "n": 3})),
            (r#"{q:<|"|>a<|"|><tool_call|>"#, json!({"q": "a"})),
            (r#"{l:[1,2<tool_call|>"#, json!({"l": [1, 2]})),
            (r#"{a:{x:<|"|>y<|"|>},q:<|"|>z<|"|>}"#, json!({"a": {"x": "y"}, "q": "z"})),
        ] {
            assert_eq!(read(text, End::Complete), Ok(expected), "{text}");
        }
    }

    /// Goal: text of another form is not a call.
    #[test]
    fn other_texts_are_not_calls() {
        for text in [
            "x",
            "{a:1",
            "{a}",
            "{a:}",
            "{a:1 b:2",
            "{a:1,a:2}",
            "{a:<|\"|>x}",
            "{a:\"x}",
            "{{a:1}x",
        ] {
            assert_eq!(read(text, End::Complete), Err(Stop::Other), "{text}");
        }
        let nested = format!("{{a:{}{}}}", "[".repeat(100), "]".repeat(100));
        assert_eq!(read(&nested, End::Complete), Err(Stop::Other));
        assert_eq!(read("{a:1", End::Open), Err(Stop::More));
        assert_eq!(read("{a:<|\"|>x}<tool_call|>", End::Cut), Err(Stop::Other));
    }
}
