//! Calls whose arguments are written between tags, one by one and without quotes. Whether such an
//! argument is a text is in the schema of its function.

use serde_json::{Map, Value};

use super::MAX_CALLS;
use super::format::ToolCallFormat;
use crate::FunctionSchema;

/// Maximum number of schemas that are read to find out whether an argument is a text.
const MAX_SCHEMAS: usize = 64;

/// The tags of a format.
struct Tags {
    /// What precedes the name of a function. A quotation mark or `>` follows it.
    call: &'static str,
    /// What ends a call.
    call_end: &'static str,
    /// What precedes the name of an argument. A quotation mark or `>` follows it.
    argument: &'static str,
    /// What ends an argument.
    argument_end: &'static str,
}

const QWEN: Tags = Tags {
    call: "<function=",
    call_end: "</function>",
    argument: "<parameter=",
    argument_end: "</parameter>",
};

const MINIMAX: Tags = Tags {
    call: "<invoke name=\"",
    call_end: "</invoke>",
    argument: "<parameter name=\"",
    argument_end: "</parameter>",
};

const DEEPSEEK: Tags = Tags {
    call: "<｜DSML｜invoke name=\"",
    call_end: "</｜DSML｜invoke>",
    argument: "<｜DSML｜parameter name=\"",
    argument_end: "</｜DSML｜parameter>",
};

/// The names and arguments of all calls of a block; `None` if it has anything else.
pub(super) fn parse_calls(
    format: ToolCallFormat,
    block: &str,
    functions: &[FunctionSchema],
) -> Option<Vec<(String, Value)>> {
    let mut calls = Vec::new();
    let mut rest = block.trim();
    while !rest.is_empty() {
        if calls.len() == MAX_CALLS {
            return None;
        }
        let (call, after) = match format {
            ToolCallFormat::Qwen3Coder => call(&QWEN, rest, functions)?,
            ToolCallFormat::MiniMaxM2 => call(&MINIMAX, rest, functions)?,
            ToolCallFormat::DeepSeekV32 => call(&DEEPSEEK, rest, functions)?,
            _ => (glm_call(rest, functions)?, ""),
        };
        calls.push(call);
        rest = after.trim_start();
    }
    (!calls.is_empty()).then_some(calls)
}

/// Reads a call at the beginning of the text. Returns what follows it, too.
fn call<'a>(
    tags: &Tags,
    text: &'a str,
    functions: &[FunctionSchema],
) -> Option<((String, Value), &'a str)> {
    let (head, mut rest) = text.strip_prefix(tags.call)?.split_once('>')?;
    let mut arguments = Arguments::new(name_in(head)?, functions);
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix(tags.call_end) {
            return Some((arguments.into_call(), after));
        }
        let (head, value) = rest.strip_prefix(tags.argument)?.split_once('>')?;
        let ends = |next: &str| next.starts_with(tags.argument) || next.starts_with(tags.call_end);
        let (value, after) = split_value(value, tags.argument_end, ends)?;
        let is_text = match head {
            _ if head.contains("string=\"true\"") => Some(true),
            _ if head.contains("string=\"false\"") => Some(false),
            _ => None,
        };
        arguments.add(name_in(head)?, value, is_text)?;
        rest = after;
    }
}

/// Reads a call of GLM: the name of the function, and its keys and values, each between tags.
fn glm_call(text: &str, functions: &[FunctionSchema]) -> Option<(String, Value)> {
    const KEY: &str = "<arg_key>";
    let (name, mut rest) = text.split_at(text.find(KEY).unwrap_or(text.len()));
    let mut arguments = Arguments::new(name_in(name.trim())?, functions);
    while !rest.is_empty() {
        let (key, value) = rest.strip_prefix(KEY)?.split_once("</arg_key>")?;
        let value = value.trim_start().strip_prefix("<arg_value>")?;
        let ends = |next: &str| next.is_empty() || next.starts_with(KEY);
        let (value, after) = split_value(value, "</arg_value>", ends)?;
        arguments.add(key.trim(), value, None)?;
        rest = after.trim_start();
    }
    Some(arguments.into_call())
}

/// The name at the beginning of a tag, up to a quotation mark.
fn name_in(head: &str) -> Option<&str> {
    let name = head.split('"').next().unwrap_or_default().trim();
    let is_name = !name.is_empty() && !name.contains(['<', '>', '\n']);
    is_name.then_some(name)
}

/// Splits the text into a value and what follows its tag `end`. A value may contain `end`: it ends
/// at the first `end` whose rest satisfies `ends`.
pub(super) fn split_value<'a>(
    text: &'a str,
    end: &str,
    ends: impl Fn(&str) -> bool,
) -> Option<(&'a str, &'a str)> {
    let at = text.match_indices(end).map(|(at, _)| at);
    let mut splits = at.map(|at| (&text[..at], &text[at + end.len()..]));
    splits.find(|(_, after)| ends(after.trim_start()))
}

/// The arguments of a call so far.
struct Arguments<'a> {
    name: &'a str,
    /// The schema of all arguments.
    schema: Option<&'a Value>,
    values: Map<String, Value>,
}

impl<'a> Arguments<'a> {
    fn new(name: &'a str, functions: &'a [FunctionSchema]) -> Self {
        let schema = functions.iter().find(|function| function.name == name);
        let schema = schema.map(|function| &function.parameters);
        Self { name, schema, values: Map::new() }
    }

    /// Adds an argument. `is_text` tells whether its value is a text; `None` leaves that to the
    /// schema. Returns `None` if the call already has an argument with this name.
    fn add(&mut self, key: &str, value: &str, is_text: Option<bool>) -> Option<()> {
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let mut kinds = Kinds::default();
        if let Some(root) = self.schema {
            kinds.add(root, &root["properties"][key]);
        }
        let value = match is_text {
            Some(true) => Value::from(value),
            Some(false) => literal(value),
            None if kinds.text && !(kinds.null && value == "null") => Value::from(value),
            None => literal(value),
        };
        self.values.insert(key.to_owned(), value).is_none().then_some(())
    }

    fn into_call(self) -> (String, Value) {
        (self.name.to_owned(), Value::Object(self.values))
    }
}

/// A value that is not a text: JSON, or a constant of Python. What is neither is a text.
fn literal(text: &str) -> Value {
    match text.trim() {
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "None" => Value::Null,
        json => serde_json::from_str(json).unwrap_or_else(|_| Value::from(text)),
    }
}

/// Which values a schema allows, as far as it matters here.
#[derive(Default)]
struct Kinds {
    text: bool,
    null: bool,
    /// Number of schemas so far.
    schemas: usize,
}

impl Kinds {
    /// Adds what a schema within the schema `root` allows.
    fn add(&mut self, root: &Value, schema: &Value) {
        self.schemas += 1;
        if self.schemas > MAX_SCHEMAS {
            return;
        }
        let types = match &schema["type"] {
            Value::Array(types) => types.as_slice(),
            name => std::slice::from_ref(name),
        };
        self.text |= types.iter().any(|name| name == "string");
        self.null |= types.iter().any(|name| name == "null");
        let constants = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
        for constant in constants {
            self.text |= constant.is_string();
            self.null |= constant.is_null();
        }
        for keyword in ["anyOf", "oneOf", "allOf"] {
            for schema in schema[keyword].as_array().into_iter().flatten() {
                self.add(root, schema);
            }
        }
        let target = schema["$ref"].as_str().and_then(|path| root.pointer(path.strip_prefix('#')?));
        if let Some(target) = target {
            self.add(root, target);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn functions() -> Vec<FunctionSchema> {
        let parameters = json!({
            "properties": {
                "text": {"type": "string"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "colour": {"$ref": "#/$defs/Colour"},
                "count": {"type": "integer"},
                "list": {"type": "array"},
            },
            "$defs": {"Colour": {"enum": ["1", "2"]}},
        });
        vec![FunctionSchema { name: "f".to_owned(), parameters }]
    }

    /// Goal: the schema decides which arguments are texts, also through references.
    #[test]
    fn values_have_the_types_of_the_schema() {
        for (key, text, expected) in [
            ("text", "1", json!("1")),
            ("text", "\n a\nb \n", json!(" a\nb ")),
            ("text", "a</parameter> b", json!("a</parameter> b")),
            ("maybe", "null", json!(null)),
            ("maybe", "true", json!("true")),
            ("colour", "1", json!("1")),
            ("count", "1", json!(1)),
            ("count", "one", json!("one")),
            ("list", "[1, \"a\"]", json!([1, "a"])),
            ("other", "True", json!(true)),
            ("other", "some text", json!("some text")),
        ] {
            let block = format!("<function=f>\n<parameter={key}>{text}</parameter>\n</function>");
            let calls = parse_calls(ToolCallFormat::Qwen3Coder, &block, &functions());
            let expected = Some(vec![("f".to_owned(), json!({ key: expected }))]);
            assert_eq!(calls, expected, "{block}");
        }
    }

    /// Goal: what has another form is no call.
    #[test]
    fn other_texts_are_not_calls() {
        for block in [
            "",
            "<function=f>",
            "<function=>\n</function>",
            "<function=f><parameter=a>1</function>",
            "<function=f><parameter=a>1</parameter><parameter=a>1</parameter></function>",
            "<function=f></function> text",
        ] {
            let calls = parse_calls(ToolCallFormat::Qwen3Coder, block, &functions());
            assert_eq!(calls, None, "{block}");
        }
    }
}
