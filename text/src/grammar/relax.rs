//! JSON schemas as programs write them: what a grammar cannot enforce becomes an annotation, and
//! objects are closed unless they say otherwise.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::Grammar;
use super::disjoint::Disjoint;
use super::schema::{add_to_all_of, count, is_known_format, looks_around, member_schemas};

/// How strictly the JSON schema of a client is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchemaOptions {
    /// Whether keywords that a grammar cannot enforce are refused, by [`Grammar::check`]. Otherwise
    /// they have no effect: `uniqueItems`, `propertyNames`, unknown values of `format`, patterns
    /// that look around or refer back, and that only one alternative of `oneOf` may be valid.
    pub strict: bool,
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
        let mut relax = Relax { options: self, parts, disjoint: Disjoint::new(&root) };
        relax.schema(schema, 0, false)
    }
}

struct Relax<'a> {
    options: SchemaOptions,
    /// Compares alternatives of the schema as the client has written it.
    disjoint: Disjoint<'a>,
    /// References to schemas that do not describe a value completely: those in `allOf`, and those
    /// next to other properties.
    parts: HashSet<String>,
}

impl Relax<'_> {
    /// `is_part` tells whether other schemas describe the same value, so that this one need not
    /// list all properties of an object.
    fn schema(&mut self, schema: Value, depth: usize, is_part: bool) -> Value {
        let Value::Object(mut members) = schema else { return schema };
        if depth > Grammar::MAX_SCHEMA_DEPTH {
            // `Grammar::check` refuses it.
            return Value::Object(members);
        }
        if !self.options.strict {
            self.remove_what_cannot_be_enforced(&mut members);
        }
        let parts = ["allOf", "anyOf", "oneOf", "$ref"];
        let has_parts = parts.iter().any(|keyword| members.contains_key(*keyword));
        let has_properties = members.contains_key("properties");
        let is_open = ["additionalProperties", "patternProperties"]
            .iter()
            .any(|keyword| members.contains_key(*keyword));
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
        members.remove("uniqueItems");
        members.remove("propertyNames");
        members.retain(|keyword, value| match (keyword.as_str(), value.as_str()) {
            ("format", Some(format)) => is_known_format(format),
            ("pattern", Some(pattern)) => !looks_around(pattern),
            _ => true,
        });
        let one_of = members.get("oneOf").and_then(Value::as_array);
        if one_of.is_some_and(|alternatives| !self.disjoint.all(alternatives)) {
            let alternatives = members.remove("oneOf");
            add_to_all_of(members, [json!({ "anyOf": alternatives })]);
        }
    }
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
        SchemaOptions { strict, additional_properties }.apply(schema.clone())
    }

    /// Goal: what cannot be enforced is left out, wherever it is, and stays in a strict schema.
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
                json!({"properties": {"a": object}, "additionalProperties": true}),
                json!({"properties": {"a": closed}, "additionalProperties": true}),
            ),
        ] {
            assert_eq!(relaxed(&schema, false, false), expected);
            assert_eq!(relaxed(&schema, false, true), schema);
        }
    }
}
