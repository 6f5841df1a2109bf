//! Which JSON schemas are supported. A schema is checked and reduced to the keywords that constrain
//! an answer before it is compiled, so that no keyword is ignored that would change the answer.

mod keywords;
#[cfg(feature = "grammar")]
mod locate;

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use self::keywords::{
    ANNOTATIONS, COUNTS, NAMED_SCHEMAS, ONE_SCHEMA, SCHEMAS, UNSUPPORTED, VALUES,
};
#[cfg(feature = "grammar")]
pub(super) use self::locate::locate;
use super::disjoint::Disjoint;
use super::{Grammar, GrammarError};

/// Maximum length of a path in an error, in bytes.
const MAX_PATH: usize = 512;
/// Maximum length of a value in an error, in bytes.
const MAX_VALUE: usize = 100;
/// The reason why a value is not a JSON schema.
const NO_SCHEMA: &str = "expected a JSON schema: an object, `true` or `false`";

/// The schema without annotations.
///
/// # Errors
/// [`GrammarError`] if it exceeds a limit or has a keyword that is not supported.
pub(super) fn supported(schema: &Value) -> Result<Value, GrammarError> {
    let disjoint = Disjoint::new(schema);
    let mut check =
        Check { disjoint, path: Vec::new(), values: 0, bytes: 0, patterns: HashSet::new() };
    check.schema(schema)
}

/// The reason why a keyword with this value cannot be enforced, apart from the schemas that the
/// value contains. `None` for one that can be, and for an annotation.
pub(super) fn obstacle(keyword: &str, value: &Value) -> Option<String> {
    let is = |list: &[&str]| list.contains(&keyword);
    let expected = |what: &str| Some(format!("expected {what}, got {}", brief(value)));
    match value {
        _ if is_annotation(keyword, value) => None,
        Value::Array(items) if items.is_empty() && matches!(keyword, "anyOf" | "oneOf") => {
            expected("a list of at least one JSON schema")
        }
        Value::Array(_) if is(&SCHEMAS) => None,
        Value::Object(_) | Value::Bool(_) if is(&ONE_SCHEMA) => None,
        Value::Object(members) if keyword == "patternProperties" => {
            members.keys().find_map(|pattern| obstacle_of_regex(pattern))
        }
        Value::Object(_) if is(&NAMED_SCHEMAS) => None,
        _ if is(&SCHEMAS) && !is(&ONE_SCHEMA) => expected("a list of JSON schemas"),
        _ if is(&ONE_SCHEMA) => Some(NO_SCHEMA.to_owned()),
        _ if is(&NAMED_SCHEMAS) => expected("an object of JSON schemas"),
        _ if is(&COUNTS) => {
            let max = Grammar::MAX_SCHEMA_COUNT;
            let is_valid = value.as_u64().is_some_and(|count| count <= max);
            if is_valid { None } else { expected(&format!("a whole number from 0 to {max}")) }
        }
        Value::String(path) if keyword == "$ref" && path.starts_with('#') => None,
        _ if keyword == "$ref" => expected("a reference within the schema, such as `#/$defs/name`"),
        Value::String(regex) if keyword == "pattern" => obstacle_of_regex(regex),
        _ if is(&VALUES) && keywords::has_value(keyword, value) => None,
        _ if is(&VALUES) => expected(&keywords::expected_value(keyword)),
        _ => Some(format!("the keyword `{keyword}` of JSON schemas is not supported")),
    }
}

/// Whether a keyword constrains values, and no grammar has it.
pub(super) fn is_unsupported(keyword: &str) -> bool {
    UNSUPPORTED.contains(&keyword)
}

/// Whether a member of this name at the root of a schema has schemas that references may lead to.
pub(super) fn is_root_keyword(name: &str) -> bool {
    ONE_SCHEMA.contains(&name) || SCHEMAS.contains(&name) || NAMED_SCHEMAS.contains(&name)
}

/// Whether a keyword says nothing about which values are valid.
fn is_annotation(keyword: &str, value: &Value) -> bool {
    // Extensions of other programs are annotations, too.
    ANNOTATIONS.contains(&keyword)
        || keyword.starts_with("x-")
        || matches!(keyword, "uniqueItems" | "nullable") && *value == false
}

/// The reason why a regular expression cannot be followed.
fn obstacle_of_regex(regex: &str) -> Option<String> {
    let max = Grammar::MAX_REGEX_BYTES;
    if looks_around(regex) {
        return Some("a regular expression cannot look around or refer back".to_owned());
    }
    if regex.len() > max {
        return Some(format!("expected a regular expression of at most {max} bytes"));
    }
    #[cfg(feature = "grammar")]
    return super::regex::error(regex);
    #[cfg(not(feature = "grammar"))]
    None
}

/// Whether a regular expression uses look-around or back-references. Both are not possible in a
/// grammar.
fn looks_around(regex: &str) -> bool {
    let groups = ["(?=", "(?!", "(?<=", "(?<!", "\\k<"];
    let mut rest = regex.split("\\\\");
    groups.iter().any(|group| regex.contains(group))
        || rest.any(|part| {
            let mut escapes = part.split('\\').skip(1);
            escapes.any(|escape| escape.starts_with(|first: char| matches!(first, '1'..='9')))
        })
}

/// Calls `visit` with the keyword, name and value of every schema in a schema. The name is the name
/// of a property or definition, or the index in a list, or empty if the keyword has one schema.
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
fn shortened(path: String) -> String {
    cut(path, MAX_PATH)
}

/// A value as it is shown in an error message.
fn brief(value: &Value) -> String {
    cut(value.to_string(), MAX_VALUE)
}

fn cut(mut text: String, max: usize) -> String {
    if text.len() > max {
        let end = (0..=max).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
    }
    text
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
    /// The patterns of all `patternProperties` so far.
    patterns: HashSet<String>,
}

impl Check<'_> {
    fn fail<T>(&self, reason: impl Into<String>) -> Result<T, GrammarError> {
        let path = shortened(self.path.join("."));
        Err(GrammarError { function: None, path, reason: reason.into() })
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
            _ => return self.fail(NO_SCHEMA),
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

    /// The value of a keyword without annotations.
    fn keyword(&mut self, keyword: &str, value: &Value) -> Result<Option<Value>, GrammarError> {
        if is_annotation(keyword, value) {
            return Ok(None);
        }
        if let Some(obstacle) = obstacle(keyword, value) {
            return self.fail(obstacle);
        }
        let is = |list: &[&str]| list.contains(&keyword);
        match value {
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
            Value::Object(members) if is(&NAMED_SCHEMAS) => {
                if keyword == "patternProperties" {
                    self.patterns.extend(members.keys().cloned());
                }
                if self.patterns.len() > Grammar::MAX_SCHEMA_PATTERNS {
                    let max = Grammar::MAX_SCHEMA_PATTERNS;
                    return self.fail(format!("expected at most {max} patterns in a JSON schema"));
                }
                self.named(members).map(Some)
            }
            _ => {
                self.value(value)?;
                Ok(Some(value.clone()))
            }
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

    /// Goal: unsupported keywords are refused, with their path.
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
        let patterns: Map<String, Value> =
            (0..=Grammar::MAX_SCHEMA_PATTERNS).map(|k| (format!("^{k}$"), json!({}))).collect();
        let patterns = json!({ "patternProperties": patterns });
        for schema in [json!({ "enum": [long] }), deep, json!({ "enum": many }), patterns] {
            let error = supported(&schema).expect_err("too large");
            assert!(error.reason.starts_with("expected at most"), "{error}");
        }
    }
}
