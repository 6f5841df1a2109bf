//! JSON schemas as programs write them: constraints that a grammar cannot enforce have no effect,
//! and objects are closed unless they say otherwise.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::Grammar;
use super::disjoint::Disjoint;
use super::schema::{
    add_to_all_of, count, is_root_keyword, is_unsupported, member_schemas, obstacle,
};

/// How strictly the JSON schema of a client is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchemaOptions {
    /// Whether [`Grammar::check`] refuses constraints that a grammar cannot enforce. Otherwise
    /// these have no effect: unknown keywords, such as `not`, `contains` and those of editors;
    /// keywords with a value that they cannot have, or with a number above
    /// [`Grammar::MAX_SCHEMA_COUNT`]; unknown values of `format`; patterns that are not in the
    /// syntax of the crate `regex`; references that lead nowhere; and the rule that only one
    /// alternative of `oneOf` may be valid.
    pub strict: bool,
    /// Whether keywords that constrain values in JSON Schema and that no grammar has, such as `not`,
    /// `if` and `contains`, are refused nonetheless.
    pub refuse_unsupported: bool,
    /// Whether an object may have properties that are not in `properties`, if its schema does not
    /// have `additionalProperties`. Small models invent properties otherwise.
    pub additional_properties: bool,
}

impl SchemaOptions {
    /// The schema for [`Grammar::JsonSchema`] or [`FunctionSchema`](crate::FunctionSchema).
    #[must_use]
    pub fn apply(self, schema: Value) -> Value {
        if count(&schema) > Grammar::MAX_SCHEMA_VALUES {
            // `Grammar::check` refuses it.
            return schema;
        }
        let mut parts = HashSet::new();
        add_parts(&schema, &mut parts);
        let root = schema.clone();
        let (disjoint, patterns) = (Disjoint::new(&root), HashSet::new());
        let mut relax =
            Relax { options: self, root: &root, parts, disjoint, patterns, regex_bytes: 0 };
        relax.schema(schema, 0, false)
    }
}

struct Relax<'a> {
    options: SchemaOptions,
    /// The schema as the client has written it.
    root: &'a Value,
    /// Compares alternatives of `root`.
    disjoint: Disjoint<'a>,
    /// References to schemas that do not describe a value completely: those in `allOf`, and those
    /// next to other properties.
    parts: HashSet<String>,
    /// The patterns of all `patternProperties` so far.
    patterns: HashSet<String>,
    /// Length in bytes of all regular expressions so far. Their syntax is checked.
    regex_bytes: usize,
}

impl Relax<'_> {
    /// `is_part` tells whether other schemas describe the same value, so that this one may leave
    /// out properties of an object.
    fn schema(&mut self, schema: Value, depth: usize, is_part: bool) -> Value {
        let mut members = match schema {
            Value::Object(members) => members,
            // Where a schema is expected, any other value has no effect.
            other if !self.options.strict && !other.is_boolean() => return Value::Bool(true),
            other => return other,
        };
        if depth > Grammar::MAX_SCHEMA_DEPTH {
            // `Grammar::check` refuses it.
            return Value::Object(members);
        }
        let is_open = is_open(&members);
        if !self.options.strict {
            self.remove_what_cannot_be_enforced(&mut members);
        }
        let parts = ["allOf", "anyOf", "oneOf", "$ref"];
        let has_parts = parts.iter().any(|keyword| members.contains_key(*keyword));
        let has_properties = members.contains_key("properties");
        if !self.options.additional_properties
            && has_properties
            && !is_open
            && !has_parts
            && !is_part
        {
            members.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
        member_schemas(&mut members, |keyword, name, schema| {
            let is_alternative = matches!(keyword, "anyOf" | "oneOf") && has_properties;
            let is_referred_part = matches!(keyword, "$defs" | "definitions")
                && self.parts.contains(&format!("#/{keyword}/{name}"));
            let is_part = keyword == "allOf" || is_alternative || is_referred_part;
            *schema = self.schema(schema.take(), depth + 1, is_part);
        });
        Value::Object(members)
    }

    fn remove_what_cannot_be_enforced(&mut self, members: &mut Map<String, Value>) {
        let had_patterns = members.contains_key("patternProperties");
        members.retain(|keyword, value| {
            (self.options.refuse_unsupported && is_unsupported(keyword))
                || self.is_within_limits(keyword, value)
                    && obstacle(keyword, value).is_none()
                    && (keyword != "$ref" || self.leads_to_a_schema(value))
        });
        if had_patterns && !members.contains_key("patternProperties") {
            // Without the patterns, it would forbid the names that they allow.
            members.remove("additionalProperties");
        }
        let one_of = members.get("oneOf").and_then(Value::as_array);
        if one_of.is_some_and(|alternatives| !self.disjoint.all(alternatives)) {
            let alternatives = members.remove("oneOf");
            add_to_all_of(members, [json!({ "anyOf": alternatives })]);
        }
    }

    /// Whether the regular expressions of a keyword are within the limits of all together.
    fn is_within_limits(&mut self, keyword: &str, value: &Value) -> bool {
        match (keyword, value) {
            ("pattern", Value::String(regex)) => self.regex_bytes += regex.len(),
            ("patternProperties", Value::Object(patterns)) => {
                self.regex_bytes += patterns.keys().map(String::len).sum::<usize>();
                self.patterns.extend(patterns.keys().cloned());
            }
            _ => return true,
        }
        self.regex_bytes <= Grammar::MAX_SCHEMA_BYTES
            && (keyword == "pattern" || self.patterns.len() <= Grammar::MAX_SCHEMA_PATTERNS)
    }

    /// Whether a reference leads to a schema that is still there when all that cannot be enforced
    /// has been removed.
    fn leads_to_a_schema(&self, reference: &Value) -> bool {
        let Some(path) = reference.as_str().and_then(|path| path.strip_prefix('#')) else {
            return false;
        };
        let keyword = path.trim_start_matches('/').split('/').next().unwrap_or_default();
        path.is_empty() || is_root_keyword(keyword) && self.root.pointer(path).is_some()
    }
}

/// Whether an object may have properties that are not in `properties`, as its schema says.
fn is_open(members: &Map<String, Value>) -> bool {
    let says_so = ["additionalProperties", "patternProperties"];
    let requires_others = || {
        let properties = members.get("properties").and_then(Value::as_object);
        let names = members.get("required").and_then(Value::as_array);
        let mut names = names.into_iter().flatten().filter_map(Value::as_str);
        names.any(|name| properties.is_none_or(|properties| !properties.contains_key(name)))
    };
    says_so.iter().any(|keyword| members.contains_key(*keyword)) || requires_others()
}

/// Adds the references that are items of `allOf`, or have properties next to them.
fn add_parts(value: &Value, parts: &mut HashSet<String>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| add_parts(item, parts)),
        Value::Object(members) => {
            let mut add = |schema: &Value| parts.extend(schema["$ref"].as_str().map(str::to_owned));
            if let Some(Value::Array(all)) = members.get("allOf")
                && all.len() > 1
            {
                all.iter().for_each(&mut add);
            }
            if members.contains_key("properties") {
                add(value);
            }
            members.values().for_each(|member| add_parts(member, parts));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relaxed(schema: &Value, strict: bool, additional_properties: bool) -> Value {
        let refuse_unsupported = false;
        SchemaOptions { strict, refuse_unsupported, additional_properties }.apply(schema.clone())
    }

    /// Goal: constraints that cannot be enforced are left out, wherever they are, and stay in a
    /// strict schema.
    #[test]
    fn what_cannot_be_enforced_is_an_annotation() {
        let schema = json!({
            "properties": {
                "uniqueItems": {"type": "array", "uniqueItems": true, "items": {"format": "ip"}},
                "b": {"pattern": "(?=a)b", "format": "date"},
                "c": {"pattern": "a+", "propertyNames": {"pattern": "x"}},
                "d": {"oneOf": [{"type": "string"}, {"maxLength": 3}]},
                "e": {"oneOf": [{"type": "string"}, {"type": "null"}]},
                "f": {"const": {"format": "ip"}},
            },
        });
        let expected = json!({
            "properties": {
                "uniqueItems": {"type": "array", "items": {}},
                "b": {"format": "date"},
                "c": {"pattern": "a+"},
                "d": {"allOf": [{"anyOf": [{"type": "string"}, {"maxLength": 3}]}]},
                "e": {"oneOf": [{"type": "string"}, {"type": "null"}]},
                "f": {"const": {"format": "ip"}},
            },
        });
        assert_eq!(relaxed(&schema, false, true), expected);
        assert_eq!(relaxed(&schema, true, true), schema);
        assert_eq!(Grammar::JsonSchema(expected).check(), Ok(()));
    }

    /// Goal: a schema with keywords that a grammar cannot enforce, or with wrong values of
    /// keywords, is accepted, and a strict one is refused with the path.
    #[test]
    fn what_a_grammar_does_not_know_is_an_annotation() {
        for (keyword, value) in [
            ("nullable", json!(true)),
            ("markdownDescription", json!("**d**")),
            ("enumDescriptions", json!(["a"])),
            ("strict", json!(true)),
            ("not", json!({"type": "null"})),
            ("if", json!({"type": "null"})),
            ("then", json!({"if": 1})),
            ("contains", json!({"const": 1})),
            ("dependentRequired", json!({"a": ["b"]})),
            ("unevaluatedProperties", json!(false)),
            ("maxLength", json!(524_288)),
            ("maxItems", json!(9_007_199_254_740_991_i64)),
            ("maxProperties", json!(1e20)),
            ("minLength", json!(-1)),
            ("minItems", json!("1")),
            ("minimum", json!("0")),
            ("multipleOf", json!(0)),
            ("exclusiveMinimum", json!(null)),
            ("required", json!(true)),
            ("required", json!(["a", 1])),
            ("enum", json!([])),
            ("enum", json!("a")),
            ("type", json!("any")),
            ("type", json!([])),
            ("type", json!(null)),
            ("items", json!(1)),
            ("anyOf", json!([])),
            ("allOf", json!({})),
            ("properties", json!(null)),
            ("additionalProperties", json!(null)),
            ("format", json!("int64")),
            ("pattern", json!(["a"])),
            ("pattern", json!("(?<!a)b")),
            ("$ref", json!("https://example.org/schema")),
            ("$ref", json!("other.json#/a")),
        ] {
            let schema = json!({"properties": {"p": {"title": "t", keyword: value}}});
            let expected = json!({"properties": {"p": {"title": "t"}}});
            assert_eq!(relaxed(&schema, false, true), expected);
            assert_eq!(Grammar::JsonSchema(expected).check(), Ok(()));
            let error = Grammar::JsonSchema(schema).check().expect_err("strict");
            assert_eq!(error.path, format!("properties.p.{keyword}"), "{error}");
        }
        let wrong = json!({"properties": {"a": 1, "b": "string", "c": true}});
        let free = json!({"properties": {"a": true, "b": true, "c": true}});
        assert_eq!(relaxed(&wrong, false, true), free);
    }

    /// Goal: on request, a constraint that cannot be enforced is an error, and a keyword that
    /// constrains nothing is not.
    #[test]
    fn unsupported_constraints_are_kept_on_request() {
        let options =
            SchemaOptions { strict: false, refuse_unsupported: true, additional_properties: true };
        let schema =
            |not: Value| json!({"items": {"not": not, "nullable": true, "maxLength": 1e9}});
        let kept = options.apply(schema(json!({})));
        assert_eq!(kept, json!({"items": {"not": {}}}));
        assert_eq!(Grammar::JsonSchema(kept).check().expect_err("refused").path, "items.not");
    }

    /// Goal: a reference stays if its schema stays, and leads nowhere otherwise.
    #[test]
    fn references_lead_to_what_is_kept() {
        for (reference, is_kept) in [
            ("#", true),
            ("#/$defs/a", true),
            ("#/properties/p", true),
            ("#/$defs/missing", false),
            ("#/components/schemas/a", false),
            ("#anchor", false),
        ] {
            let schema = json!({
                "properties": {"p": {"$ref": reference}}, "$defs": {"a": {"type": "null"}},
                "components": {"schemas": {"a": {}}},
            });
            let relaxed = relaxed(&schema, false, true);
            assert_eq!(relaxed["properties"]["p"].get("$ref").is_some(), is_kept, "{reference}");
        }
    }

    /// Goal: if a pattern cannot be enforced, the names that it allows are not forbidden.
    #[test]
    fn names_of_unknown_patterns_are_allowed() {
        let patterns = json!({"(?=a)": {}});
        let schema = json!({
            "properties": {"a": {}}, "patternProperties": patterns, "additionalProperties": false,
        });
        assert_eq!(relaxed(&schema, false, false), json!({"properties": {"a": {}}}));
    }

    /// Goal: objects are closed, but not those that other schemas describe, too.
    #[test]
    fn objects_are_closed() {
        let object = json!({"type": "object", "properties": {"a": {}}});
        let mut closed = object.clone();
        closed["additionalProperties"] = json!(false);
        for (schema, expected) in [
            (object.clone(), closed.clone()),
            (json!({"type": "object"}), json!({"type": "object"})),
            (json!({"items": object}), json!({"items": closed})),
            (json!({"anyOf": [object, {}]}), json!({"anyOf": [closed, {}]})),
            (json!({"allOf": [object, object]}), json!({"allOf": [object, object]})),
            (
                json!({"properties": {}, "anyOf": [object]}),
                json!({"properties": {}, "anyOf": [object]}),
            ),
            (
                json!({"allOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": object, "b": object}}),
                json!({"allOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": object, "b": closed}}),
            ),
            (
                json!({"properties": {"a": {}}, "required": ["a", "b"]}),
                json!({"properties": {"a": {}}, "required": ["a", "b"]}),
            ),
            (
                json!({"properties": {"a": object}, "additionalProperties": true}),
                json!({"properties": {"a": closed}, "additionalProperties": true}),
            ),
        ] {
            assert_eq!(relaxed(&schema, false, false), expected);
            assert_eq!(relaxed(&schema, false, true), schema);
        }
    }
}
