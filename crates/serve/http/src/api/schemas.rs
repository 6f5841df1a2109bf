//! Schemas for the description at `/openapi.json`: those of fields that the types do not describe,
//! for use with `#[schemars(schema_with = "...")]`, and references to those of types.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::{Map, Value};

use super::fields::UnknownFields;
use super::options::MAX_TOKEN_IDS;

/// Makes the schema of a type.
pub(crate) type Make = fn(&mut SchemaGenerator) -> Schema;

/// A reference to the schema of a type.
pub(crate) fn reference<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// Unknown members are refused unless they request nothing, so there is nothing to describe.
impl JsonSchema for UnknownFields {
    fn schema_name() -> Cow<'static, str> {
        "UnknownFields".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "object"})
    }
}

/// The schema of `fields::seed`.
pub(super) fn seed(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": ["integer", "null"], "minimum": i64::MIN, "maximum": u64::MAX})
}

/// The schema of `fields::logit_bias`.
pub(super) fn logit_bias(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["object", "null"], "maxProperties": MAX_TOKEN_IDS,
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    })
}

/// The schema of `fields::count_or_false`.
pub(super) fn count_or_false<const MIN: usize, const MAX: usize>(
    _: &mut SchemaGenerator,
) -> Schema {
    json_schema!({
        "anyOf": [{"type": ["integer", "null"], "minimum": MIN, "maximum": MAX}, {"const": false}],
    })
}

/// The schema of `fields::truncation`.
pub(super) fn truncation(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [{"type": ["integer", "null"], "minimum": 1}, {"const": -1}]})
}

/// The schema of statistics whose type is in another crate: the members of their default value.
pub(super) fn counters<T: Default + Serialize>(_: &mut SchemaGenerator) -> Schema {
    let value = serde_json::to_value(T::default()).unwrap_or_default();
    let members = value.as_object().into_iter().flatten().map(|(name, value)| {
        let schema = match value {
            Value::Array(_) => serde_json::json!({"type": "array", "items": {"type": "number"}}),
            Value::Number(number) if number.is_f64() => serde_json::json!({"type": "number"}),
            _ => serde_json::json!({"type": "integer", "minimum": 0}),
        };
        (name.clone(), schema)
    });
    let members: Map<String, Value> = members.collect();
    let required: Vec<&String> = members.keys().collect();
    json_schema!({"type": "object", "required": required, "properties": members})
}

/// [`counters`], or null.
pub(super) fn optional_counters<T: Default + Serialize>(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [counters::<T>(generator), {"type": "null"}]})
}

/// The schema of an object whose members are described elsewhere.
pub(super) fn object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object"})
}

/// The constant `session`.
pub(super) fn session_constant(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"const": "session"})
}

/// The constant `list`.
pub(super) fn list_constant(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"const": "list"})
}
