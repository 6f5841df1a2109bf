//! The keywords of JSON schemas, by the values that they have.

use serde_json::Value;

use crate::grammar::disjoint::TYPES;

/// Keywords that say nothing about which values are valid.
pub(super) const ANNOTATIONS: [&str; 18] = [
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
pub(super) const ONE_SCHEMA: [&str; 3] = ["additionalItems", "additionalProperties", "items"];
/// Keywords with a list of schemas.
pub(super) const SCHEMAS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords with an object whose members are schemas.
pub(super) const NAMED_SCHEMAS: [&str; 4] =
    ["$defs", "definitions", "patternProperties", "properties"];
/// Keywords with a number of items, characters or properties.
pub(super) const COUNTS: [&str; 6] =
    ["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"];
/// Keywords with a value that is not a schema.
pub(super) const VALUES: [&str; 11] = [
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
/// Keywords that constrain values, and that no grammar has.
pub(super) const UNSUPPORTED: [&str; 14] = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
/// The values of `format` that are enforced.
pub(super) const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// Whether a keyword of [`VALUES`] can have this value.
pub(super) fn has_value(keyword: &str, value: &Value) -> bool {
    let is_type = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    match (keyword, value) {
        ("const", _) => true,
        ("enum", Value::Array(values)) => !values.is_empty(),
        ("type", Value::Array(names)) => !names.is_empty() && names.iter().all(is_type),
        ("type", name) => is_type(name),
        ("required", Value::Array(names)) => names.iter().all(Value::is_string),
        ("format", format) => format.as_str().is_some_and(|format| FORMATS.contains(&format)),
        ("multipleOf", value) => value.as_f64().is_some_and(|divisor| divisor > 0.0),
        ("maximum" | "minimum", value) => value.is_number(),
        // They were booleans up to draft 4.
        ("exclusiveMaximum" | "exclusiveMinimum", value) => value.is_number() || value.is_boolean(),
        _ => false,
    }
}

/// The values that a keyword of [`VALUES`] can have, for an error.
pub(super) fn expected_value(keyword: &str) -> String {
    match keyword {
        "enum" => "a list of at least one value".to_owned(),
        "type" => format!("one of {}, or a list of them", TYPES.join(", ")),
        "required" => "a list of names".to_owned(),
        "format" => format!("one of {}", FORMATS.join(", ")),
        "multipleOf" => "a number above 0".to_owned(),
        "pattern" => "a regular expression".to_owned(),
        _ => "a number".to_owned(),
    }
}
