//! The keywords of JSON schemas, by the values that they have.

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
/// The values of `format` that are enforced.
pub(super) const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];
