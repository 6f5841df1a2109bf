//! Calls that a model writes in Python: `name(key="value", other=[1, 2.5, True])`, several in a row
//! or in a list, and also within `print(..)`. Arguments are literals with keywords.

use std::iter::Peekable;
use std::str::Chars;

use serde_json::{Map, Number, Value};

use super::MAX_CALLS;

/// Maximum number of nested lists and dictionaries.
const MAX_DEPTH: usize = 64;
/// Gemma's prompt has the functions as members of this module.
const MODULE: &str = "default_api.";

/// The names and arguments of all calls; `None` if the text is anything else.
pub(super) fn parse_calls(text: &str) -> Option<Vec<(String, Value)>> {
    let mut reader = Reader { rest: text.chars().peekable() };
    let mut calls = Vec::new();
    let listed = reader.takes('[');
    loop {
        if calls.len() == MAX_CALLS {
            return None;
        }
        calls.push(reader.call(true)?);
        while reader.takes(',') || reader.takes(';') {}
        if listed && reader.takes(']') {
            break;
        }
        if reader.next_is(None) {
            if listed {
                return None;
            }
            break;
        }
    }
    reader.next_is(None).then_some(calls)
}

struct Reader<'a> {
    rest: Peekable<Chars<'a>>,
}

impl Reader<'_> {
    fn skip_space(&mut self) {
        while self.rest.next_if(|next| next.is_whitespace()).is_some() {}
    }

    fn next_is(&mut self, expected: Option<char>) -> bool {
        self.skip_space();
        self.rest.peek().copied() == expected
    }

    /// Takes the next character if it is this one.
    fn takes(&mut self, expected: char) -> bool {
        self.next_is(Some(expected)) && self.rest.next().is_some()
    }

    fn word(&mut self) -> Option<String> {
        self.skip_space();
        let is_part = |next: &char| next.is_alphanumeric() || matches!(next, '_' | '.');
        let mut word = String::new();
        while let Some(next) = self.rest.next_if(is_part) {
            word.push(next);
        }
        let valid = word.starts_with(|first: char| first.is_alphabetic() || first == '_');
        valid.then_some(word)
    }

    fn call(&mut self, may_print: bool) -> Option<(String, Value)> {
        let name = self.word()?;
        self.takes('(').then_some(())?;
        if may_print && name == "print" {
            let call = self.call(false)?;
            return self.takes(')').then_some(call);
        }
        let mut arguments = Map::new();
        while !self.takes(')') {
            let key = self.word()?;
            self.takes('=').then_some(())?;
            let value = self.value(0)?;
            if arguments.insert(key, value).is_some()
                || !(self.takes(',') || self.next_is(Some(')')))
            {
                return None;
            }
        }
        let name = name.strip_prefix(MODULE).unwrap_or(&name).to_owned();
        Some((name, Value::Object(arguments)))
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth == MAX_DEPTH {
            return None;
        }
        self.skip_space();
        match *self.rest.peek()? {
            quote @ ('"' | '\'') => self.string(quote).map(Value::String),
            '[' => self.list('[', ']', depth),
            '(' => self.list('(', ')', depth),
            '{' => self.dictionary(depth),
            '-' | '+' | '.' | '0'..='9' => self.number(),
            _ => match self.word()?.as_str() {
                "True" | "true" => Some(Value::Bool(true)),
                "False" | "false" => Some(Value::Bool(false)),
                "None" | "null" => Some(Value::Null),
                _ => None,
            },
        }
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Option<Value> {
        self.takes(open).then_some(())?;
        let mut items = Vec::new();
        while !self.takes(close) {
            items.push(self.value(depth + 1)?);
            if !(self.takes(',') || self.next_is(Some(close))) {
                return None;
            }
        }
        Some(Value::Array(items))
    }

    fn dictionary(&mut self, depth: usize) -> Option<Value> {
        self.takes('{').then_some(())?;
        let mut entries = Map::new();
        while !self.takes('}') {
            let Value::String(key) = self.value(depth + 1)? else { return None };
            self.takes(':').then_some(())?;
            let value = self.value(depth + 1)?;
            entries.insert(key, value);
            if !(self.takes(',') || self.next_is(Some('}'))) {
                return None;
            }
        }
        Some(Value::Object(entries))
    }

    fn number(&mut self) -> Option<Value> {
        let mut text = String::new();
        let is_part =
            |next: &char| next.is_ascii_alphanumeric() || matches!(next, '+' | '-' | '.' | '_');
        while let Some(next) = self.rest.next_if(is_part) {
            if next != '_' {
                text.push(next);
            }
        }
        let text = text.strip_prefix('+').unwrap_or(&text);
        match text.parse::<i64>() {
            Ok(whole) => Some(whole.into()),
            Err(_) => Number::from_f64(text.parse().ok()?).map(Value::Number),
        }
    }

    fn string(&mut self, quote: char) -> Option<String> {
        self.rest.next();
        let mut text = String::new();
        if self.rest.next_if_eq(&quote).is_some() {
            if self.rest.next_if_eq(&quote).is_none() {
                return Some(text);
            }
            return self.long_string(quote);
        }
        loop {
            match self.rest.next()? {
                '\\' => self.escape(&mut text)?,
                next if next == quote => return Some(text),
                '\n' => return None,
                next => text.push(next),
            }
        }
    }

    /// The rest of a string in triple quotes.
    fn long_string(&mut self, quote: char) -> Option<String> {
        let mut text = String::new();
        let end = quote.to_string().repeat(3);
        loop {
            match self.rest.next()? {
                '\\' => self.escape(&mut text)?,
                next => text.push(next),
            }
            if text.ends_with(&end) {
                text.truncate(text.len() - 3);
                return Some(text);
            }
        }
    }

    fn escape(&mut self, text: &mut String) -> Option<()> {
        let simple = |character| Ok(Some(character));
        let escaped = match self.rest.next()? {
            '\n' => Ok(None),
            'n' => simple('\n'),
            't' => simple('\t'),
            'r' => simple('\r'),
            same @ ('\\' | '\'' | '"') => simple(same),
            'x' => Err(2),
            'u' => Err(4),
            'U' => Err(8),
            _ => return None,
        };
        let digits = match escaped {
            Ok(character) => {
                text.extend(character);
                return Some(());
            }
            Err(digits) => digits,
        };
        let mut code = 0;
        for _ in 0..digits {
            code = code * 16 + self.rest.next()?.to_digit(16)?;
        }
        text.push(char::from_u32(code)?);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: literals of every kind are converted to JSON, and calls are found in a row, in a list
    /// and in `print`.
    #[test]
    fn calls_are_read() {
        let text = r#"f(a="x\n\u00e9", b=[1, -2.5, (True, None)], c={'k': "v"},)"#;
        let arguments = json!({"a": "x\né", "b": [1, -2.5, [true, null]], "c": {"k": "v"}});
        assert_eq!(parse_calls(text), Some(vec![("f".to_owned(), arguments)]));
        let names = |text: &str| {
            parse_calls(text)
                .map(|calls| calls.into_iter().map(|(name, _)| name).collect::<Vec<_>>())
        };
        let expected = Some(vec!["f".to_owned(), "m.g".to_owned()]);
        assert_eq!(names("f()\nprint(m.g(a=1))"), expected);
        assert_eq!(names("[default_api.f(), m.g(s='''a'b''')]"), expected);
    }

    /// Goal: other programs, and literals that JSON does not have, are not calls.
    #[test]
    fn other_code_is_not_a_call() {
        for text in [
            "",
            "f",
            "f(",
            "f(1)",
            "f(a=b)",
            "f(a=1, a=2)",
            "x = f()",
            "f(a=1e999)",
            "[f()",
            "f()]",
            "f(a='x)",
            "f(a='\\q')",
            "print(1)",
            "import os",
            "f(a={1: 2})",
        ] {
            assert_eq!(parse_calls(text), None, "{text}");
        }
        let nested = format!("f(a={}{})", "[".repeat(100), "]".repeat(100));
        assert_eq!(parse_calls(&nested), None);
    }
}
