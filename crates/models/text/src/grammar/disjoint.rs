//! Whether no value is valid under two alternatives of `oneOf`. If so, `oneOf` is `anyOf`.

use serde_json::Value;

/// Maximum number of alternatives that are compared.
const MAX_ALTERNATIVES: usize = 256;
/// Maximum number of values of one schema that are compared with each other, together with the
/// length of the references that are followed for it, in bytes.
const MAX_COMPARISONS: usize = 1 << 20;
/// Maximum number of references that are followed to a schema.
const MAX_REFERENCES: usize = 8;
/// The types of JSON schemas.
pub(super) const TYPES: [&str; 7] =
    ["array", "boolean", "integer", "null", "number", "object", "string"];

/// Compares the alternatives within one schema. The limit of work holds for all comparisons
/// together.
pub(super) struct Disjoint<'a> {
    /// The schema in which references are paths.
    root: &'a Value,
    /// Number of values that may still be compared.
    left: usize,
}

impl<'a> Disjoint<'a> {
    /// Compares alternatives in the schema `root`.
    pub(super) fn new(root: &'a Value) -> Self {
        Self { root, left: MAX_COMPARISONS }
    }

    /// Whether every two alternatives are disjoint, as far as it can be seen: by their types, their
    /// constants, or constants of a property that both require, such as a discriminator.
    pub(super) fn all(&mut self, alternatives: &[Value]) -> bool {
        if alternatives.len() > MAX_ALTERNATIVES {
            return false;
        }
        let resolved: Vec<&Value> =
            alternatives.iter().map(|schema| self.resolve(schema)).collect();
        let mut pairs = resolved.iter().enumerate();
        pairs.all(|(index, first)| {
            resolved[index + 1..].iter().all(|second| self.are_disjoint(first, second, true))
        })
    }

    /// The schema, or the one that it refers to.
    fn resolve<'s>(&mut self, mut schema: &'s Value) -> &'s Value
    where
        'a: 's,
    {
        for _ in 0..MAX_REFERENCES {
            let path = schema["$ref"].as_str().and_then(|path| path.strip_prefix('#'));
            let Some(path) = path.filter(|path| self.may_compare(path.len())) else { break };
            match self.root.pointer(path) {
                Some(target) => schema = target,
                None => break,
            }
        }
        schema
    }

    /// Takes `count` comparisons of values from the limit. Returns whether the limit allowed them.
    fn may_compare(&mut self, count: usize) -> bool {
        let left = self.left.checked_sub(count);
        self.left = left.unwrap_or(0);
        left.is_some()
    }

    fn are_disjoint(&mut self, first: &Value, second: &Value, with_properties: bool) -> bool {
        if let (Some(first), Some(second)) = (constants(first), constants(second)) {
            return self.may_compare(first.len().saturating_mul(second.len()))
                && first.iter().all(|value| !second.contains(value));
        }
        let (first_types, second_types) = (types(first), types(second));
        if !self.may_compare(first_types.len().saturating_mul(second_types.len())) {
            return false;
        }
        if first_types.iter().all(|name| !overlaps(name, &second_types)) {
            return true;
        }
        with_properties
            && first_types == ["object"]
            && second_types == ["object"]
            && self.have_disjoint_properties(first, second)
    }

    /// Whether a property that two objects require has disjoint values.
    fn have_disjoint_properties(&mut self, first: &Value, second: &Value) -> bool {
        let required = |schema: &Value| schema["required"].as_array().map_or(0, Vec::len);
        if !self.may_compare(required(first).saturating_mul(required(second))) {
            return false;
        }
        let (Some(first_names), Some(second_names)) =
            (first["required"].as_array(), second["required"].as_array())
        else {
            return false;
        };
        let common = first_names.iter().filter(|name| second_names.contains(name));
        common.filter_map(Value::as_str).any(|name| {
            let property = self.resolve(property_of(first, name));
            let other = self.resolve(property_of(second, name));
            self.are_disjoint(property, other, false)
        })
    }
}

/// The schema of a property.
fn property_of<'a>(schema: &'a Value, name: &str) -> &'a Value {
    &schema["properties"][name]
}

/// The values that a schema allows, if it lists them.
fn constants(schema: &Value) -> Option<&[Value]> {
    match (schema.get("const"), &schema["enum"]) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Value::Array(values)) => Some(values),
        _ => None,
    }
}

/// The types of the values that a schema allows.
fn types(schema: &Value) -> Vec<&str> {
    if let Some(values) = constants(schema) {
        return values.iter().map(type_of).collect();
    }
    match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => TYPES.to_vec(),
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Whether a value of a type may have one of the others. An integer is a number.
fn overlaps(name: &str, others: &[&str]) -> bool {
    let general = |name| if name == "integer" { "number" } else { name };
    others.iter().any(|other| general(other) == general(name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: types, constants and discriminators tell alternatives apart, also through references.
    #[test]
    fn alternatives_are_told_apart() {
        let kind = |name: &str| {
            json!({"type": "object", "properties": {"kind": {"const": name}, "a": {}},
                   "required": ["kind"]})
        };
        let mut optional = kind("b");
        optional["required"] = json!([]);
        let root = json!({"$defs": {"A": kind("a"), "B": {"$ref": "#/$defs/C"}, "C": kind("b")}});
        for (alternatives, expected) in [
            (json!([{"type": "string"}, {"type": ["null", "integer"]}]), true),
            (json!([{"type": "number"}, {"type": "integer"}]), false),
            (json!([{"enum": [1, 2]}, {"const": 3}, {"type": "string"}]), true),
            (json!([{"enum": [1, 2]}, {"enum": [2]}]), false),
            (json!([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]), true),
            (json!([kind("a"), kind("b"), kind("a")]), false),
            (json!([kind("a"), optional]), false),
            (json!([{"type": "string"}, {}]), false),
            (json!([{"$ref": "#/$defs/D"}, {"type": "string"}]), false),
        ] {
            let alternatives = alternatives.as_array().expect("a list");
            let found = Disjoint::new(&root).all(alternatives);
            assert_eq!(found, expected, "{alternatives:?}");
        }
    }
}
