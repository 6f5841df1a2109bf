//! The reply to a request that failed.

use schemars::JsonSchema;
use serde::Serialize;

/// OpenAI's form of an error reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ErrorReply {
    /// What went wrong.
    pub error: ErrorObject,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ErrorObject {
    /// What was expected and what was received, in English.
    pub message: String,
    /// Class of the error, such as `invalid_request_error` or `rate_limit_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Path of the parameter at fault, such as `messages[0].content`, if it is one parameter.
    pub param: Option<String>,
    /// A code that programs can compare, such as `context_length_exceeded`.
    pub code: Option<&'static str>,
}
