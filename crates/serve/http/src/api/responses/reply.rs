//! The reply of `POST /v1/responses` and its events.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::api::chat::Role;
use crate::api::logprobs::ChatTokenLogprobs;
use crate::api::reply::is_zero;

/// The reply, whole or in events.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Response {
    /// Unique id.
    pub id: String,
    /// Always `response`.
    pub object: &'static str,
    /// When the request was accepted: seconds since 1970-01-01 UTC.
    pub created_at: u64,
    /// Whether the answer is complete.
    pub status: Status,
    /// Why there is no complete answer, if the server failed.
    pub error: Option<ResponseError>,
    /// Why the answer ended early, if it did.
    pub incomplete_details: Option<IncompleteDetails>,
    /// The model's name as the request gave it, or its id.
    pub model: String,
    /// The answer; empty until it has ended.
    pub output: Vec<OutputItem>,
    /// Token counts; `null` until the answer has ended.
    pub usage: Option<ResponseUsage>,
    /// The settings of the request.
    #[serde(flatten)]
    pub settings: ResponseSettings,
}

/// Whether a response or an item of it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It is being generated.
    InProgress,
    /// It is complete.
    Completed,
    /// The maximum number of tokens was reached, or a call was cut off.
    Incomplete,
    /// The server failed.
    Failed,
}

/// Why there is no complete answer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ResponseError {
    /// Always `server_error`.
    pub code: &'static str,
    /// What happened.
    pub message: String,
}

/// Why an answer ended early.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct IncompleteDetails {
    /// Always `max_output_tokens`.
    pub reason: &'static str,
}

/// The members of a response that repeat the request or its defaults.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ResponseSettings {
    /// See [`ResponsesRequest`](super::ResponsesRequest).
    pub instructions: Option<String>,
    /// See [`ResponsesRequest`](super::ResponsesRequest).
    pub max_output_tokens: Option<usize>,
    /// See [`ResponsesRequest`](super::ResponsesRequest).
    pub top_logprobs: usize,
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Share of the probabilities that is kept.
    pub top_p: Option<f32>,
    /// The tools, those that are left out included.
    pub tools: Vec<SettingsTool>,
    /// See [`ResponsesRequest`](super::ResponsesRequest).
    pub tool_choice: Value,
    /// See [`ResponsesRequest`](super::ResponsesRequest).
    pub parallel_tool_calls: bool,
    /// See [`ResponsesRequest`](super::ResponsesRequest).
    pub metadata: Map<String, Value>,
    /// The response that this one continues.
    pub previous_response_id: Option<String>,
    /// Whether the response is kept.
    pub store: bool,
    /// Always false.
    pub background: bool,
    /// Always `disabled`.
    pub truncation: &'static str,
    /// The form of the text.
    pub text: SettingsText,
    /// How the model thinks.
    pub reasoning: SettingsReasoning,
}

/// A tool of the request.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SettingsTool {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its name.
    pub name: Option<String>,
    /// The description of a function.
    #[serde(flatten)]
    pub function: Option<SettingsFunction>,
}

/// The description of a function.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SettingsFunction {
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    pub parameters: Option<Value>,
    /// Whether arguments always follow the schema.
    pub strict: bool,
}

/// The form of the text.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SettingsText {
    /// The required format.
    pub format: SettingsFormat,
}

/// The required format of the text.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SettingsFormat {
    /// Any text.
    Text,
    /// It is a JSON object.
    JsonObject,
    /// It follows a JSON schema.
    JsonSchema {
        /// Name of the schema.
        name: Option<String>,
        /// Description of the schema.
        description: Option<String>,
        /// The schema.
        schema: Option<Value>,
        /// Whether the answer follows the schema, as it always does.
        strict: bool,
    },
}

/// How the model thinks.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct SettingsReasoning {
    /// Always `null`.
    pub effort: Option<String>,
    /// Always `null`.
    pub summary: Option<String>,
}

/// Token counts of a response.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ResponseUsage {
    /// Tokens of the prompt.
    pub input_tokens: usize,
    /// More about the prompt tokens.
    pub input_tokens_details: InputTokensDetails,
    /// Generated tokens.
    pub output_tokens: usize,
    /// More about the generated tokens.
    pub output_tokens_details: OutputTokensDetails,
    /// Sum of both.
    pub total_tokens: usize,
}

/// More about the tokens of a prompt.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct InputTokensDetails {
    /// Prompt tokens that were read from the prefix cache; 0 if the server hides it.
    pub cached_tokens: usize,
    /// Prompt tokens that are positions of images; left out if there are none, or if the server
    /// hides what is cached.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub image_tokens: usize,
}

/// More about the generated tokens.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct OutputTokensDetails {
    /// Tokens of the reasoning.
    pub reasoning_tokens: usize,
}

/// An item of the answer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// Text.
    Message {
        /// Unique id.
        id: String,
        /// Whether it is complete.
        status: Status,
        /// Always `assistant`.
        role: Role,
        /// One part, or none before its end.
        content: Vec<OutputPart>,
    },
    /// The model's reasoning.
    Reasoning {
        /// Unique id.
        id: String,
        /// Whether it is complete.
        status: Status,
        /// Always empty: `content` has the whole reasoning.
        summary: Vec<Value>,
        /// One part, or none before its end.
        content: Vec<OutputPart>,
    },
    /// A call.
    FunctionCall {
        /// Unique id.
        id: String,
        /// Whether it is complete.
        status: Status,
        /// The id to which the call's output refers.
        call_id: String,
        /// The namespace of the function, if it has one.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// The function's name.
        name: String,
        /// The arguments: a JSON object as text; empty before their end.
        arguments: String,
    },
    /// A call of a tool with free text.
    CustomToolCall {
        /// Unique id.
        id: String,
        /// Whether it is complete.
        status: Status,
        /// The id to which the call's output refers.
        call_id: String,
        /// The namespace of the tool, if it has one.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// The tool's name.
        name: String,
        /// The text; empty before its end.
        input: String,
    },
}

/// A part of an item.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputPart {
    /// Text of a message.
    OutputText {
        /// The text.
        text: String,
        /// Always empty.
        annotations: Vec<Value>,
        /// Log-probabilities of its tokens; empty unless they were requested.
        logprobs: Vec<ChatTokenLogprobs>,
    },
    /// Reasoning.
    ReasoningText {
        /// The text.
        text: String,
    },
}

/// An event of a streamed response. It has the members that belong to its type.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct ResponseEvent {
    /// The type, which is also the name of the event.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Number of the event, from 0.
    pub sequence_number: usize,
    /// The response so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<Box<Response>>,
    /// Number of the item, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_index: Option<usize>,
    /// The item that begins or has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item: Option<OutputItem>,
    /// Id of the item.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item_id: Option<String>,
    /// Number of the part: always 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_index: Option<usize>,
    /// The part that begins or has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<OutputPart>,
    /// Text to append.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<String>,
    /// The whole text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The whole arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// The whole text of a call of a tool with free text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<String>,
    /// The function's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Log-probabilities of the tokens of the text; empty unless they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<ChatTokenLogprobs>>,
}
