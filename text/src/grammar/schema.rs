//! Which JSON schemas are supported. A schema is checked and reduced to what constrains an answer
//! before it is compiled, so that no keyword is ignored that would change the answer.

mod keywords;
#[cfg(feature = "grammar")]
mod locate;

use serde_json::{Map, Value, json};

use self::keywords::{ANNOTATIONS, COUNTS, FORMATS, NAMED_SCHEMAS, ONE_SCHEMA, SCHEMAS, VALUES};
#[cfg(feature = "grammar")]
pub(super) use self::locate::locate;
use super::disjoint::{Disjoint, TYPES};
use super::{Grammar, GrammarError};

/// Maximum length of a path in an error, in bytes.
const MAX_PATH: usize = 512;

/// The schema without annotations.
///
/// # Errors
/// [`GrammarError`] if it exceeds a limit or has a keyword that is not supported.
pub(super) fn supported(schema: &Value) -> Result<Value, GrammarError> {
    let disjoint = Disjoint::new(schema);
    let mut check = Check { disjoint, path: Vec::new(), values: 0, bytes: 0 };
    check.schema(schema)
}

/// Whether this value of `format` is enforced.
pub(super) fn is_known_format(format: &str) -> bool {
    FORMATS.contains(&format)
}

/// Whether a regular expression looks around, or refers back to what it has matched. Both are not
/// possible in a grammar.
pub(super) fn looks_around(regex: &str) -> bool {
    let groups = ["(?=", "(?!", "(?<=", "(?<!", "\\k<"];
    let mut rest = regex.split("\\\\");
    groups.iter().any(|group| regex.contains(group))
        || rest.any(|part| {
            let mut escapes = part.split('\\').skip(1);
            escapes.any(|escape| escape.starts_with(|first: char| matches!(first, '1'..='9')))
        })
}

/// Calls `visit` with the keyword, name and value of every schema in a schema. The name is that of
/// a property or definition, or the index in a list, or empty if the keyword has one schema.
pub(super) fn member_schemas(
    members: &mut Map<String, Value>,
    mut visit: impl FnMut(&str, &str, &mut Value),
) {
    for (keyword, value) in members {
        let is = |list: &[&str]| list.contains(&keyword.as_str());
        match value {
            Value::Array(items) if is(&SCHEMAS) => {
                let items = items.iter_mut().enumerate();
                items.for_each(|(index, item)| visit(keyword, &index.to_string(), item));
            }
            Value::Object(named) if is(&NAMED_SCHEMAS) => {
                named.iter_mut().for_each(|(name, member)| visit(keyword, name, member));
            }
            value if is(&ONE_SCHEMA) => visit(keyword, "", value),
            _ => {}
        }
    }
}

/// A path that fits in an error message.
fn shortened(mut path: String) -> String {
    if path.len() > MAX_PATH {
        let end = (0..=MAX_PATH).rev().find(|&end| path.is_char_boundary(end));
        path.truncate(end.unwrap_or(0));
    }
    path
}

/// Adds schemas to `allOf`: a value has to be valid under each of them.
pub(super) fn add_to_all_of(
    members: &mut Map<String, Value>,
    schemas: impl IntoIterator<Item = Value>,
) {
    match members.get_mut("allOf").and_then(Value::as_array_mut) {
        Some(all_of) => all_of.extend(schemas),
        None => drop(members.insert("allOf".to_owned(), schemas.into_iter().collect())),
    }
}

/// Number of values in a value.
pub(super) fn count(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(count).sum::<usize>(),
        Value::Object(members) => 1 + members.values().map(count).sum::<usize>(),
        _ => 1,
    }
}

struct Check<'a> {
    /// Compares alternatives of the whole schema.
    disjoint: Disjoint<'a>,
    /// Names and indices from the root to the value that is checked.
    path: Vec<String>,
    /// Number of values so far.
    values: usize,
    /// Length of all names and texts so far, in bytes.
    bytes: usize,
}

impl Check<'_> {
    fn fail<T>(&self, reason: impl Into<String>) -> Result<T, GrammarError> {
        Err(GrammarError { path: shortened(self.path.join(".")), reason: reason.into() })
    }

    fn within<T>(
        &mut self,
        name: impl ToString,
        check: impl FnOnce(&mut Self) -> Result<T, GrammarError>,
    ) -> Result<T, GrammarError> {
        self.path.push(name.to_string());
        let result = check(self)?;
        self.path.pop();
        Ok(result)
    }

    /// Counts a value and its text.
    fn add(&mut self, bytes: usize) -> Result<(), GrammarError> {
        self.values += 1;
        self.bytes += bytes;
        if self.path.len() > Grammar::MAX_SCHEMA_DEPTH {
            let max = Grammar::MAX_SCHEMA_DEPTH;
            return self.fail(format!("expected at most {max} levels of a JSON schema"));
        }
        if self.values > Grammar::MAX_SCHEMA_VALUES {
            let max = Grammar::MAX_SCHEMA_VALUES;
            return self.fail(format!("expected at most {max} values in a JSON schema"));
        }
        if self.bytes > Grammar::MAX_SCHEMA_BYTES {
            let max = Grammar::MAX_SCHEMA_BYTES;
            return self.fail(format!("expected at most {max} bytes of text in a JSON schema"));
        }
        Ok(())
    }

    fn schema(&mut self, schema: &Value) -> Result<Value, GrammarError> {
        self.add(0)?;
        let members = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(members) => members,
            _ => return self.fail("expected a JSON schema: an object, `true` or `false`"),
        };
        let mut kept = Map::new();
        for (keyword, value) in members {
            let kept_value = self.within(keyword, |check| {
                check.add(keyword.len())?;
                check.keyword(keyword, value)
            })?;
            kept.extend(kept_value.map(|value| (keyword.clone(), value)));
        }
        // The alternatives are disjoint, so that both mean the same.
        if let Some(one_of) = kept.remove("oneOf") {
            match kept.remove("anyOf") {
                Some(any_of) => {
                    let both = [any_of, one_of].map(|list| json!({ "anyOf": list }));
                    add_to_all_of(&mut kept, both);
                }
                None => drop(kept.insert("anyOf".to_owned(), one_of)),
            }
        }
        Ok(Value::Object(kept))
    }

    /// What is kept of a keyword.
    fn keyword(&mut self, keyword: &str, value: &Value) -> Result<Option<Value>, GrammarError> {
        let is = |list: &[&str]| list.contains(&keyword);
        match value {
            // Extensions of other programs are annotations, too.
            _ if is(&ANNOTATIONS) || keyword.starts_with("x-") => Ok(None),
            Value::Bool(false) if keyword == "uniqueItems" || keyword == "nullable" => Ok(None),
            Value::Array(alternatives)
                if keyword == "oneOf" && !self.disjoint.all(alternatives) =>
            {
                self.fail(
                    "expected alternatives that are told apart by their types, or by constants of \
                     a property that all of them require",
                )
            }
            Value::Array(items) if is(&SCHEMAS) => {
                let mut kept = Vec::with_capacity(items.len());
                for (index, item) in items.iter().enumerate() {
                    kept.push(self.within(index, |check| check.schema(item))?);
                }
                Ok(Some(Value::Array(kept)))
            }
            _ if is(&ONE_SCHEMA) => self.schema(value).map(Some),
            _ if is(&COUNTS) => match value.as_u64() {
                Some(count) if count <= Grammar::MAX_SCHEMA_COUNT => Ok(Some(value.clone())),
                _ => {
                    let max = Grammar::MAX_SCHEMA_COUNT;
                    self.fail(format!("expected a whole number from 0 to {max}"))
                }
            },
            Value::String(path) if keyword == "$ref" => {
                if path.starts_with('#') {
                    return Ok(Some(value.clone()));
                }
                self.fail("expected a reference within the schema, such as `#/$defs/name`")
            }
            Value::Object(patterns) if keyword == "patternProperties" => {
                for pattern in patterns.keys() {
                    self.regex(pattern)?;
                }
                self.named(patterns).map(Some)
            }
            Value::Object(members) if is(&NAMED_SCHEMAS) => self.named(members).map(Some),
            Value::String(format) if keyword == "format" && !is_known_format(format) => {
                self.fail(format!("expected one of {}, got `{format}`", FORMATS.join(", ")))
            }
            _ if keyword == "type" && !is_type(value) => {
                let (types, got) = (TYPES.join(", "), shortened(value.to_string()));
                self.fail(format!("expected one of {types}, or a list of them, got {got}"))
            }
            Value::String(regex) if keyword == "pattern" => {
                self.regex(regex)?;
                self.value(value)?;
                Ok(Some(value.clone()))
            }
            _ if is(&VALUES) => {
                self.value(value)?;
                Ok(Some(value.clone()))
            }
            _ if is(&SCHEMAS) => self.fail("expected a list of JSON schemas"),
            _ if is(&NAMED_SCHEMAS) => self.fail("expected an object of JSON schemas"),
            _ => self.fail(format!("the keyword `{keyword}` of JSON schemas is not supported")),
        }
    }

    /// An object whose members are schemas.
    fn named(&mut self, members: &Map<String, Value>) -> Result<Value, GrammarError> {
        let mut kept = Map::new();
        for (name, member) in members {
            let schema = self.within(name, |check| {
                check.add(name.len())?;
                check.schema(member)
            })?;
            kept.insert(name.clone(), schema);
        }
        Ok(Value::Object(kept))
    }

    fn regex(&self, regex: &str) -> Result<(), GrammarError> {
        let max = Grammar::MAX_REGEX_BYTES;
        if looks_around(regex) {
            return self.fail("a regular expression cannot look around or refer back");
        }
        if regex.len() <= max {
            return Ok(());
        }
        self.fail(format!("expected a regular expression of at most {max} bytes"))
    }

    /// Counts a value that is not a schema.
    fn value(&mut self, value: &Value) -> Result<(), GrammarError> {
        match value {
            Value::String(text) => self.add(text.len()),
            Value::Array(items) => {
                self.add(0)?;
                let mut items = items.iter().enumerate();
                items.try_for_each(|(index, item)| self.within(index, |check| check.value(item)))
            }
            Value::Object(members) => {
                self.add(0)?;
                let mut members = members.iter();
                members.try_for_each(|(name, member)| {
                    self.within(name, |check| {
                        check.add(name.len())?;
                        check.value(member)
                    })
                })
            }
            _ => self.add(0),
        }
    }
}

/// Whether this is a value of `type`.
fn is_type(value: &Value) -> bool {
    let is_name = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    match value {
        Value::Array(names) => names.iter().all(is_name),
        name => is_name(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: annotations are left out, also where a property has the name of one.
    #[test]
    fn only_what_constrains_is_kept() {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T",
            "type": "object", "x-order": 1, "uniqueItems": false,
            "properties": {"title": {"type": "string", "description": "d"}},
            "$defs": {"a": {"items": {"const": {"title": 1}, "default": 2}}},
        });
        let kept = json!({
            "type": "object",
            "properties": {"title": {"type": "string"}},
            "$defs": {"a": {"items": {"const": {"title": 1}}}},
        });
        assert_eq!(supported(&schema), Ok(kept));
    }

    /// Goal: what is not supported is refused, with its path.
    #[test]
    fn other_keywords_are_refused_with_their_path() {
        for (schema, path) in [
            (json!({"properties": {"a": {"uniqueItems": true}}}), "properties.a.uniqueItems"),
            (json!({"anyOf": [true, {"not": {}}]}), "anyOf.1.not"),
            (json!({"items": {"if": {}}}), "items.if"),
            (json!({"minimums": 1}), "minimums"),
            (json!({"$ref": "https://example.org/schema"}), "$ref"),
            (json!({"maxLength": 1e9}), "maxLength"),
            (json!({"minItems": -1}), "minItems"),
            (json!({"properties": [1]}), "properties"),
            (json!({"items": 1}), "items"),
            (json!({"items": {"format": "ip"}}), "items.format"),
            (json!({"items": {"type": "text"}}), "items.type"),
            (json!({"items": {"pattern": "(?=a)"}}), "items.pattern"),
            (json!({"items": {"pattern": "(a)\\\\\\1"}}), "items.pattern"),
            (json!({"items": {"oneOf": [{}, {}]}}), "items.oneOf"),
            (json!([]), ""),
        ] {
            let error = supported(&schema).expect_err("not supported");
            assert_eq!(error.path, path, "{error}");
        }
    }

    /// Goal: disjoint alternatives are kept, also next to others.
    #[test]
    fn disjoint_alternatives_are_kept() {
        let (first, second) = (json!([{"type": "null"}, {"const": 1}]), json!([{}, {"const": 2}]));
        assert_eq!(supported(&json!({ "oneOf": first })), Ok(json!({ "anyOf": first })));
        let both = json!({"oneOf": first, "anyOf": second, "allOf": [true]});
        let kept = json!({"allOf": [true, {"anyOf": second}, {"anyOf": first}]});
        assert_eq!(supported(&both), Ok(kept));
        assert!(!looks_around(r"\\1") && looks_around(r"(a)\1"));
    }

    /// Goal: the size of a schema is limited: by its depth, its values and its texts.
    #[test]
    fn the_size_is_limited() {
        let long = "x".repeat(Grammar::MAX_SCHEMA_BYTES + 1);
        let mut deep = json!({});
        for _ in 0..=Grammar::MAX_SCHEMA_DEPTH {
            deep = json!({ "items": deep });
        }
        let many = vec![json!(1); Grammar::MAX_SCHEMA_VALUES];
        for schema in [json!({ "enum": [long] }), deep, json!({ "enum": many })] {
            let error = supported(&schema).expect_err("too large");
            assert!(error.reason.starts_with("expected at most"), "{error}");
        }
    }
}
