//! Schemas in a build without the feature `openapi`: every type has one, and nothing reads it.

pub(crate) use stolon_http_derive::JsonSchema;

/// Implemented by all types.
pub(crate) trait JsonSchema {
    /// The schema of the type.
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        Schema
    }
}

impl<T> JsonSchema for T {}

/// A schema.
#[derive(Debug)]
pub(crate) struct Schema;

/// A generator of schemas.
#[derive(Debug)]
pub(crate) struct SchemaGenerator;

impl SchemaGenerator {
    pub(crate) fn subschema_for<T: JsonSchema>(&mut self) -> Schema {
        T::json_schema(self)
    }
}
