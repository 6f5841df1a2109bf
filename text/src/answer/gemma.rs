//! Calls of Gemma 4: `call:name{key:<|"|>text<|"|>,other:[1,{more:true}]}`. Keys have no quotation
//! marks, and texts are between special tokens, so nothing in them is escaped. JSON is accepted, too.

use serde_json::{Map, Value};

use super::MAX_CALLS;
use super::block::MAX_NAME_BYTES;

/// What precedes and what follows a text.
const QUOTE: &str = "<|\"|>";
/// Maximum number of nested lists and objects.
const MAX_DEPTH: usize = 64;

/// What a call of this function begins with.
pub(super) fn beginning(name: &str) -> String {
    format!("call:{name}{{")
}

/// The names and arguments of all calls; `None` if the text is anything else.
pub(super) fn parse_calls(text: &str) -> Option<Vec<(String, Value)>> {
    let mut reader = Reader { rest: text.trim() };
    let mut calls = Vec::new();
    while !reader.rest.is_empty() {
        if calls.len() == MAX_CALLS {
            return None;
        }
        calls.push(reader.call()?);
        reader.skip_space();
    }
    (!calls.is_empty()).then_some(calls)
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Takes this text if it is the next one after space.
    fn takes(&mut self, expected: &str) -> bool {
        self.skip_space();
        let after = self.rest.strip_prefix(expected);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    /// Takes the text before the first of these characters.
    fn until(&mut self, ends: &[char]) -> Option<&'a str> {
        let (text, after) = self.rest.split_at(self.rest.find(ends)?);
        self.rest = after;
        Some(text.trim())
    }

    fn call(&mut self) -> Option<(String, Value)> {
        // Some models leave out the word.
        self.takes("call");
        self.takes(":").then_some(())?;
        let name = self.until(&['{'])?;
        let is_of_name = |next: char| next.is_alphanumeric() || "_-.:/".contains(next);
        let is_name =
            !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.chars().all(is_of_name);
        is_name.then_some(())?;
        let inner = self.rest[1..].trim_start();
        if !inner.starts_with('{') {
            return Some((name.to_owned(), self.object(0)?));
        }
        // A template that was given arguments as JSON puts braces around them, and models repeat it.
        self.rest = inner;
        let arguments = self.object(0)?;
        self.takes("}").then(|| (name.to_owned(), arguments))
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        self.takes("{").then_some(())?;
        let mut entries = Map::new();
        while !self.takes("}") {
            let key = self.key()?;
            self.takes(":").then_some(())?;
            let value = self.value(depth + 1)?;
            if entries.insert(key, value).is_some() {
                return None;
            }
            if !self.takes(",") && !self.rest.starts_with('}') {
                return None;
            }
        }
        Some(Value::Object(entries))
    }

    fn list(&mut self, depth: usize) -> Option<Value> {
        self.takes("[").then_some(())?;
        let mut items = Vec::new();
        while !self.takes("]") {
            items.push(self.value(depth + 1)?);
            if !self.takes(",") && !self.rest.starts_with(']') {
                return None;
            }
        }
        Some(Value::Array(items))
    }

    fn key(&mut self) -> Option<String> {
        self.skip_space();
        if self.rest.starts_with('"') || self.rest.starts_with(QUOTE) {
            return self.text();
        }
        let key = self.until(&[':'])?;
        let is_key = !key.is_empty() && !key.contains(['{', '}', '[', ']', ',', '\n']);
        is_key.then(|| key.to_owned())
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth == MAX_DEPTH {
            return None;
        }
        self.skip_space();
        match self.rest.chars().next()? {
            '{' => self.object(depth),
            '[' => self.list(depth),
            '"' => self.text().map(Value::String),
            _ if self.rest.starts_with(QUOTE) => self.text().map(Value::String),
            _ => self.literal(),
        }
    }

    /// A number or a constant. What is neither is a text whose quotation marks are missing.
    fn literal(&mut self) -> Option<Value> {
        let text = self.until(&[',', '}', ']'])?;
        match text {
            "" => None,
            "None" => Some(Value::Null),
            text => Some(serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))),
        }
    }

    /// A text between quotation marks of the model or of JSON.
    fn text(&mut self) -> Option<String> {
        if let Some(inner) = self.rest.strip_prefix(QUOTE) {
            let (text, after) = inner.split_once(QUOTE)?;
            self.rest = after;
            return Some(text.to_owned());
        }
        let mut values = serde_json::Deserializer::from_str(self.rest).into_iter::<String>();
        let text = values.next()?.ok()?;
        self.rest = &self.rest[values.byte_offset()..];
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: values of every kind are converted to JSON, in the model's form and as JSON.
    #[test]
    fn calls_are_read() {
        let get = |arguments: Value| Some(vec![("get".to_owned(), arguments)]);
        for (text, expected) in [
            ("call:get{}", json!({})),
            (
                r#"call:get{city:<|"|>São "Paulo", {x}<|"|>,days:3}"#,
                json!({"city": "São \"Paulo\", {x}", "days": 3}),
            ),
            (
                r#"call:get{a:[true, -2.5,null , None,<|"|><|"|>],b:{c:{},<|"|>d e<|"|>:[[]]}}"#,
                json!({"a": [true, -2.5, null, null, ""], "b": {"c": {}, "d e": [[]]}}),
            ),
            (r#"call:get{"a": "x\n}\"", "b": ["c"]}"#, json!({"a": "x\n}\"", "b": ["c"]})),
            ("call:get{ a : 1 ,\n b : Paris }", json!({"a": 1, "b": "Paris"})),
            (r#"call:get{{"a": 1}}"#, json!({"a": 1})),
            (r#":get{a:<|"|>call:put{}<|"|>}"#, json!({"a": "call:put{}"})),
        ] {
            assert_eq!(parse_calls(text), get(expected), "{text}");
        }
        let names = parse_calls("call:a.b-c{}\ncall:d/e{x:1}").expect("two calls");
        assert_eq!(
            names.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["a.b-c", "d/e"]
        );
    }

    /// Goal: what has another form is no call.
    #[test]
    fn other_texts_are_not_calls() {
        for text in [
            "",
            "call",
            "call:get",
            "call:{}",
            "get{}",
            "call:get{a:1",
            "call:get{a}",
            "call:get{a:}",
            "call:get{a:1 b:2",
            "call:get{a:1,a:2}",
            "call:get{a:<|\"|>x}",
            "call:get{a:\"x}",
            "call:get{{a:1}",
            "call:get{} text",
            "call:a text {}",
        ] {
            assert_eq!(parse_calls(text), None, "{text}");
        }
        let nested = format!("call:f{{a:{}{}}}", "[".repeat(100), "]".repeat(100));
        assert_eq!(parse_calls(&nested), None);
    }
}
