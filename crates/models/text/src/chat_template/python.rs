//! Python's behavior of values in chat templates: printing, conversion to JSON, methods and
//! filters. Used by the environment of [`ChatTemplate`](super::ChatTemplate) only.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value, filters};
use serde_json::Value as Json;

use super::environment::check_width;
use super::limits::Budget;

/// A value as Python's `str` formats it, as `{{ value }}` prints it.
pub(super) fn to_str(budget: &Budget, value: &Value) -> Result<String, Error> {
    // Bounds the depth, so that `write_repr` may be recursive.
    budget.measure(value)?;
    let mut text = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => text.push_str(value.as_str().unwrap_or_default()),
        _ => write_repr(value, &mut text),
    }
    Ok(text)
}

/// The filter `string`.
pub(super) fn to_string(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    to_str(&Budget::of(state), value)
}

/// Writes a value as Python's `repr` formats it, which is how the elements of a list are printed.
/// Its depth is bounded by the caller.
fn write_repr(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&float(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(&item, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(&key, out);
                out.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), out);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// Python uses single quotes, but double quotes for a string that contains single quotes only.
fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for char in text.chars() {
        match char {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            char if char == quote => out.extend(['\\', quote]),
            char if u32::from(char) < 0x20 || (0x7f..0xa0).contains(&u32::from(char)) => {
                out.push_str(&format!("\\x{:02x}", u32::from(char)));
            }
            char => out.push(char),
        }
    }
    out.push(quote);
}

/// Python's `repr` of a float. It has the shortest digits, like Rust's format, but exponents with a
/// sign and at least two digits: `1e+16`, `1e-05`.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    let text = format!("{number:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

/// Whether Python can index the value and take its length: strings, lists and mappings.
/// (minijinja's own test excludes strings.)
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
    )
}

/// The filter `length`, which is 0 for an undefined value.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// The filter `float`, which returns the default for a value that is not a number.
pub(super) fn to_float(state: &State<'_, '_>, value: &Value, default: Option<Value>) -> Value {
    filters::float(state, value).unwrap_or_else(|_| default.unwrap_or_else(|| Value::from(0.0)))
}

/// How JSON is written. The fields have the names and meanings of the arguments of Python's
/// `json.dumps`.
struct JsonStyle {
    /// Indentation per level; `None` writes everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// The filter `tojson` as transformers defines it: `json.dumps` with `ensure_ascii=False`, nothing
/// escaped for HTML.
pub(super) fn to_json(
    state: &State<'_, '_>,
    value: &Value,
    ensure_ascii: Option<bool>,
    arguments: Kwargs,
) -> Result<String, Error> {
    if value.is_undefined() {
        let reason = "tojson: expected a value, got an undefined variable";
        return Err(Error::new(ErrorKind::UndefinedError, reason));
    }
    let ensure_ascii = ensure_ascii.or(arguments.get("ensure_ascii")?).unwrap_or(false);
    let indent = match arguments.get::<Option<Value>>("indent")? {
        Some(indent) if !indent.is_none() => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(check_width(usize::try_from(indent)?)?),
        }),
        _ => None,
    };
    let (item_separator, key_separator) =
        match arguments.get::<Option<Vec<String>>>("separators")? {
            Some(separators) => <[String; 2]>::try_from(separators)
                .map(|[item, key]| (item, key))
                .map_err(|got| {
                    let reason = format!("tojson: expected 2 separators, got {}", got.len());
                    Error::new(ErrorKind::InvalidOperation, reason)
                })?,
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
        };
    let sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    arguments.assert_all_used()?;
    let budget = Budget::of(state);
    let size = budget.measure(value)?;
    let indent_width = check_width(indent.as_ref().map_or(0, String::len))?;
    let separators = check_width(item_separator.len().max(key_separator.len()))?;
    let per_value = indent_width.saturating_mul(size.depth).saturating_add(separators);
    budget.charge(size.values.saturating_mul(per_value))?;
    let json = serde_json::to_value(value).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, "tojson: the value cannot be converted to JSON")
            .with_source(error)
    })?;
    let style = JsonStyle { indent, item_separator, key_separator, ensure_ascii, sort_keys };
    let mut text = String::new();
    style.write(&json, 0, &mut text);
    Ok(text)
}

impl JsonStyle {
    fn write(&self, json: &Json, depth: usize, out: &mut String) {
        match json {
            Json::Null => out.push_str("null"),
            Json::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Json::Number(number) => match number.as_f64() {
                Some(value) if number.is_f64() => out.push_str(&float(value)),
                _ => out.push_str(&number.to_string()),
            },
            Json::String(text) => self.write_string(text, out),
            Json::Array(items) => {
                self.write_items(items, ['[', ']'], depth, out, |item, out| {
                    self.write(item, depth + 1, out);
                });
            }
            Json::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(b.0));
                }
                self.write_items(&entries, ['{', '}'], depth, out, |(key, value), out| {
                    self.write_string(key, out);
                    out.push_str(&self.key_separator);
                    self.write(value, depth + 1, out);
                });
            }
        }
    }

    fn write_items<T>(
        &self,
        items: &[T],
        [open, close]: [char; 2],
        depth: usize,
        out: &mut String,
        write_item: impl Fn(&T, &mut String),
    ) {
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.break_line(depth + 1, out);
            write_item(item, out);
        }
        if !items.is_empty() {
            self.break_line(depth, out);
        }
        out.push(close);
    }

    fn break_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn write_string(&self, text: &str, out: &mut String) {
        // serde_json and Python escape the same characters of a JSON string.
        let quoted = Json::from(text).to_string();
        if !self.ensure_ascii {
            out.push_str(&quoted);
            return;
        }
        for char in quoted.chars() {
            if char.is_ascii() {
                out.push(char);
                continue;
            }
            for unit in char.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
}
