//! The functions that may be called, by the names that models write, and the types of their
//! arguments.

use serde_json::Value;

use super::block::MAX_NAME_BYTES;
use super::cursor::{Cursor, End};
use super::lenient;
use crate::FunctionSchema;

/// Maximum number of schemas that are read to find out whether an argument is a string.
const MAX_SCHEMAS: usize = 64;
/// Characters that may separate a namespace from a name.
const NAMESPACE_ENDS: [char; 3] = ['.', ':', '/'];

/// The functions that may be called.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offered<'a>(pub(super) &'a [FunctionSchema]);

impl<'a> Offered<'a> {
    /// The function with this name. Models write namespaces in front of names (`functions.`,
    /// `default_api.`, `google:mcp:`), which do not count unless a function has them in its name.
    pub(super) fn find(self, name: &str) -> Option<&'a FunctionSchema> {
        let name = name.trim().trim_end_matches("()").trim_end_matches(".call");
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return None;
        }
        let exact = |name: &str| self.0.iter().find(|function| function.name == name);
        exact(name).or_else(|| {
            let is_of_namespace =
                |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
            let ends = name.match_indices(NAMESPACE_ENDS);
            let ends = ends.filter(|&(at, _)| name[..at].bytes().all(is_of_namespace));
            ends.map(|(at, _)| &name[at + 1..]).find_map(exact)
        })
    }

    /// The function of a call that Kimi names `functions.NAME:INDEX`. It also writes
    /// `functions.NAME`, `NAME:INDEX`, `functions_NAME_INDEX` and `functionsNAMEINDEX`.
    pub(super) fn find_numbered(self, id: &str) -> Option<&'a FunctionSchema> {
        let id = id.trim();
        let bare =
            id.strip_prefix("functions").map(|rest| rest.trim_start_matches(['.', '_', ':']));
        [Some(id), bare].into_iter().flatten().find_map(|id| {
            self.find(id).or_else(|| {
                let digits = id.bytes().rev().take_while(u8::is_ascii_digit).count();
                // A name may end with digits, too.
                (1..=digits).rev().find_map(|count| {
                    let name = &id[..id.len() - count];
                    self.find(name.strip_suffix([':', '_', '-', '.']).unwrap_or(name))
                })
            })
        })
    }
}

/// The schema of one argument.
fn of_argument<'a>(function: &'a FunctionSchema, key: &str) -> &'a Value {
    &function.parameters["properties"][key]
}

/// Whether the function has an argument with this name.
pub(super) fn has_argument(function: &FunctionSchema, key: &str) -> bool {
    !of_argument(function, key).is_null()
}

/// Whether the function always has an argument with this name.
pub(super) fn requires(function: &FunctionSchema, key: &str) -> bool {
    required(function).any(|name| name == key)
}

/// The names of the arguments that the function always has.
pub(super) fn required(function: &FunctionSchema) -> impl Iterator<Item = &str> {
    function.parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// The value of an argument that is written without quotation marks. `is_text` tells whether it is
/// a string; `None` leaves that to the schema.
pub(super) fn value(
    function: &FunctionSchema,
    key: &str,
    text: &str,
    is_text: Option<bool>,
) -> Value {
    let mut kinds = Kinds::default();
    kinds.add(&function.parameters, of_argument(function, key));
    match is_text {
        Some(true) => Value::from(text),
        None if kinds.text && !(kinds.null && text.trim() == "null") => Value::from(text),
        Some(false) | None => literal(text),
    }
}

/// A value that is written with quotation marks, although the schema may not allow a string.
pub(super) fn quoted_value(function: &FunctionSchema, key: &str, text: String) -> Value {
    let mut kinds = Kinds::default();
    kinds.add(&function.parameters, of_argument(function, key));
    if kinds.text || !kinds.other {
        return Value::String(text);
    }
    match literal(&text) {
        Value::String(_) => Value::String(text),
        value => value,
    }
}

/// A value that is not a string: JSON, or a literal of Python. Anything else is a string.
fn literal(text: &str) -> Value {
    let trimmed = text.trim();
    match trimmed {
        "True" => return Value::Bool(true),
        "False" => return Value::Bool(false),
        "None" => return Value::Null,
        _ => {}
    }
    if let Ok(value) = serde_json::from_str(trimmed) {
        return value;
    }
    let mut cursor = Cursor::new(trimmed, End::Cut);
    match lenient::value(&mut cursor) {
        Ok(value) if trimmed.starts_with(['{', '[']) && cursor.rest().is_empty() => value,
        _ => Value::from(text),
    }
}

/// The kinds of values that a schema allows, as far as they matter here.
#[derive(Default)]
struct Kinds {
    text: bool,
    null: bool,
    /// Any other value.
    other: bool,
    /// Number of schemas so far.
    schemas: usize,
}

impl Kinds {
    /// Adds the kinds that a schema within the schema `root` allows.
    fn add(&mut self, root: &Value, schema: &Value) {
        self.schemas += 1;
        if self.schemas > MAX_SCHEMAS {
            return;
        }
        let types = match &schema["type"] {
            Value::Array(types) => types.as_slice(),
            name => std::slice::from_ref(name),
        };
        for name in types.iter().filter_map(Value::as_str) {
            match name {
                "string" => self.text = true,
                "null" => self.null = true,
                _ => self.other = true,
            }
        }
        let constants = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
        for constant in constants {
            match constant {
                Value::String(_) => self.text = true,
                Value::Null => self.null = true,
                _ => self.other = true,
            }
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
                "color": {"$ref": "#/$defs/Color"},
                "count": {"type": "integer"},
                "list": {"type": "array"},
            },
            "$defs": {"Color": {"enum": ["1", "2"]}},
        });
        let function = |name: &str| FunctionSchema::new(name, parameters.clone());
        ["f", "get", "get2", "a.b"].map(function).into()
    }

    /// Goal: the schema decides which arguments are strings, also through references.
    #[test]
    fn values_have_the_types_of_the_schema() {
        let functions = functions();
        for (key, text, expected) in [
            ("text", "1", json!("1")),
            ("text", " a\nb ", json!(" a\nb ")),
            ("maybe", "null", json!(null)),
            ("maybe", "true", json!("true")),
            ("color", "1", json!("1")),
            ("count", "1", json!(1)),
            ("count", "one", json!("one")),
            ("list", "[1, \"a\"]", json!([1, "a"])),
            ("list", "['a', True]", json!(["a", true])),
            ("list", "['a'", json!("['a'")),
            ("other", "True", json!(true)),
            ("other", "some text", json!("some text")),
        ] {
            assert_eq!(value(&functions[0], key, text, None), expected, "{key} {text}");
        }
        assert_eq!(value(&functions[0], "other", "1", Some(true)), json!("1"));
        let quoted = |key: &str| quoted_value(&functions[0], key, "3".to_owned());
        assert_eq!(
            [quoted("count"), quoted("text"), quoted("other")],
            [json!(3), json!("3"), json!("3")]
        );
    }

    /// Goal: names are found with the namespaces and numbers that models add.
    #[test]
    fn names_are_found_as_models_write_them() {
        let functions = functions();
        let offered = Offered(&functions);
        let name =
            |function: Option<&FunctionSchema>| function.map(|function| function.name.clone());
        for (written, expected) in [
            ("get", Some("get")),
            ("functions.get", Some("get")),
            ("google:mcp:x:get", Some("get")),
            ("a.b", Some("a.b")),
            ("default_api.a.b", Some("a.b")),
            ("b", None),
            ("", None),
            (" get() ", Some("get")),
            ("forget", None),
        ] {
            assert_eq!(name(offered.find(written)).as_deref(), expected, "{written}");
        }
        for (written, expected) in [
            ("functions.get:0", Some("get")),
            ("functions.get", Some("get")),
            ("get:12", Some("get")),
            ("functionsget5", Some("get")),
            ("functionsget25", Some("get")),
            ("functions.get2:5", Some("get2")),
            ("functions_get_1", Some("get")),
            ("call_ab12cd34", None),
            ("functions.put:0", None),
        ] {
            assert_eq!(name(offered.find_numbered(written)).as_deref(), expected, "{written}");
        }
    }
}
