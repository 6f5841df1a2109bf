//! The schemas of the API's types, for the description at `/openapi.json`.
//!
//! Trait and derive macro come from `schemars`. In a build without the feature `openapi`, others of
//! the same names do nothing, so that each type and each route is written once.

#[cfg(not(feature = "openapi"))]
mod absent;

#[cfg(not(feature = "openapi"))]
pub(crate) use absent::{JsonSchema, Schema, SchemaGenerator};
#[cfg(feature = "openapi")]
pub(crate) use schemars::{JsonSchema, Schema, SchemaGenerator};

/// Makes the schema of a type.
pub(crate) type Make = fn(&mut SchemaGenerator) -> Schema;

/// A reference to the schema of a type.
pub(crate) fn reference<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}
