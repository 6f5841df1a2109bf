//! Which JSON schemas are supported. A schema is checked and reduced to what constrains an answer
//! before it is compiled, so that no keyword is ignored that would change the answer.

use serde_json::{Map, Value};

use super::{Grammar, GrammarError};

/// Keywords that say nothing about which values are valid.
const ANNOTATIONS: [&str; 18] = [
    "$anchor",
    "$comment",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "id",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
];

/// Keywords with a schema.
const ONE_SCHEMA: [&str; 3] = ["additionalItems", "additionalProperties", "items"];
/// Keywords with a list of schemas.
const SCHEMAS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords with an object whose members are schemas.
const NAMED_SCHEMAS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];
/// Keywords with a number of items, characters or properties.
const COUNTS: [&str; 6] =
    ["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"];
/// Keywords with a value that is not a schema.
const VALUES: [&str; 11] = [
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maximum",
    "minimum",
    "multipleOf",
    "pattern",
    "required",
    "type",
];

/// The schema without annotations.
///
/// # Errors
/// [`GrammarError`] if it exceeds a limit or has a keyword that is not supported.
pub(super) fn supported(schema: &Value) -> Result<Value, GrammarError> {
    let mut check = Check { path: Vec::new(), values: 0, bytes: 0 };
    check.schema(schema)
}

/// Number of values in a value.
pub(super) fn count(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(count).sum::<usize>(),
        Value::Object(members) => 1 + members.values().map(count).sum::<usize>(),
        _ => 1,
    }
}

struct Check {
    /// Names and indices from the root to the value that is checked.
    path: Vec<String>,
    /// Number of values so far.
    values: usize,
    /// Length of all names and texts so far, in bytes.
    bytes: usize,
}

impl Check {
    fn fail<T>(&self, reason: impl Into<String>) -> Result<T, GrammarError> {
        let mut path = self.path.join(".");
        if path.len() > 512 {
            path.truncate((0..=512).rev().find(|&end| path.is_char_boundary(end)).unwrap_or(0));
        }
        Err(GrammarError { path, reason: reason.into() })
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
        Ok(Value::Object(kept))
    }

    /// What is kept of a keyword.
    fn keyword(&mut self, keyword: &str, value: &Value) -> Result<Option<Value>, GrammarError> {
        let is = |list: &[&str]| list.contains(&keyword);
        match value {
            // An extension of its own has the meaning of an annotation.
            _ if is(&ANNOTATIONS) || keyword.starts_with("x-") => Ok(None),
            Value::Bool(false) if keyword == "uniqueItems" || keyword == "nullable" => Ok(None),
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

#[cfg(test)]
mod tests {
    use serde_json::json;

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
            (json!([]), ""),
        ] {
            let error = supported(&schema).expect_err("not supported");
            assert_eq!(error.path, path, "{error}");
        }
    }

    /// Goal: the size of a schema is limited, wherever it has its size.
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
