//! Structured output: the required format of an answer, in the forms of OpenAI's and vLLM's APIs.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::fields::UnknownFields;

/// `response_format`, the form of OpenAI's chat completions, and `text.format` of responses.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `type`")]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The schema of `json_schema` in chat completions.
    pub json_schema: Option<JsonSchemaFormat>,
    /// The schema of `json_schema` in responses and in Anthropic's messages.
    pub schema: Option<Value>,
    /// Name of the schema. Without effect.
    pub name: Option<String>,
    /// Description of the schema. Without effect.
    pub description: Option<String>,
    /// Whether keywords that cannot be enforced are refused. Default false: `uniqueItems`,
    /// `propertyNames`, unknown values of `format`, patterns that look around, and the rule that
    /// only one alternative of `oneOf` may be valid then have no effect. Everything else is always
    /// enforced.
    pub strict: Option<bool>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The schema of a `response_format`.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `schema`")]
pub struct JsonSchemaFormat {
    /// Name of the schema. Without effect.
    pub name: Option<String>,
    /// Description of the schema. Without effect.
    pub description: Option<String>,
    /// The JSON schema.
    pub schema: Option<Value>,
    /// Whether keywords that cannot be enforced are refused. Default false: `uniqueItems`,
    /// `propertyNames`, unknown values of `format`, patterns that look around, and the rule that
    /// only one alternative of `oneOf` may be valid then have no effect. Everything else is always
    /// enforced.
    pub strict: Option<bool>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// `structured_outputs`, the form of vLLM. One member is given.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object with one of json, json_object, regex, choice and grammar")]
pub struct StructuredOutputs {
    /// A JSON schema, as an object or as a string.
    pub json: Option<Value>,
    /// Whether the answer is a JSON object.
    pub json_object: Option<bool>,
    /// A regular expression that matches the whole answer.
    pub regex: Option<String>,
    /// The answers to choose from.
    pub choice: Option<Vec<String>>,
    /// A grammar in the syntax of Lark, or in GBNF.
    pub grammar: Option<String>,
    /// Whether objects have no other properties than those that their schema names, if it does not
    /// have `additionalProperties`. Default true. Also applies to `response_format`, with which
    /// it may be given alone.
    pub disable_additional_properties: Option<bool>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}
