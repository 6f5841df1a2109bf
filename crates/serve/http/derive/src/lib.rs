//! A derive macro `JsonSchema` that makes nothing.
//!
//! The types of `stolon-http` derive `schemars::JsonSchema` for the description of the API. In a
//! build without the description they derive this instead, so that it compiles no schemars.
#![forbid(unsafe_code)]

use proc_macro::TokenStream;

/// Accepts the attributes of schemars and adds nothing.
#[proc_macro_derive(JsonSchema, attributes(schemars))]
pub fn json_schema(_: TokenStream) -> TokenStream {
    TokenStream::new()
}
