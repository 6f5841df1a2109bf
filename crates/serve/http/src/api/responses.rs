//! `/v1/responses`: OpenAI's newer API for conversations. Responses are kept in bounded memory.

mod reply;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::chat::{MAX_MESSAGES, MAX_TOOLS};
use super::fields::{self, UnknownFields};
use super::options::{GenerationOptions, MAX_LOGPROBS};
use super::structured::ResponseFormat;

pub use reply::{
    IncompleteDetails, InputTokensDetails, OutputItem, OutputPart, OutputTokensDetails, Response,
    ResponseError, ResponseEvent, ResponseSettings, ResponseUsage, SettingsFormat,
    SettingsFunction, SettingsReasoning, SettingsText, SettingsTool, Status,
};

/// Maximum number of entries of `include`.
pub const MAX_INCLUDED: usize = 64;

/// The request body.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct ResponsesRequest {
    /// The conversation: a text of the user, or 1 to [`MAX_MESSAGES`] items. Items before the last
    /// one may be of any type: items without a text for the model are left out.
    pub input: Input,
    /// The response that this one continues: its conversation, without its instructions, comes
    /// before `input`. Responses are kept in memory, and the oldest are forgotten first.
    pub previous_response_id: Option<String>,
    /// Whether the response is kept, so that others can continue it. Default true. Without effect on
    /// a server that keeps none.
    pub store: Option<bool>,
    /// Instructions that precede the conversation.
    pub instructions: Option<String>,
    /// Maximum number of tokens to generate, 1 or above. Default: as for chat completions.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { usize::MAX }>")]
    #[schemars(range(min = 1))]
    pub max_output_tokens: Option<usize>,
    /// Functions that the model may call, at most [`MAX_TOOLS`].
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_TOOLS>")]
    #[schemars(length(max = MAX_TOOLS))]
    pub tools: Option<Vec<ResponsesTool>>,
    /// See [`ChatRequest::tool_choice`](super::chat::ChatRequest::tool_choice).
    pub tool_choice: Option<Value>,
    /// Whether an answer may have several calls. Default true.
    pub parallel_tool_calls: Option<bool>,
    /// The required format of the answer's text.
    pub text: Option<TextOptions>,
    /// How the model thinks.
    pub reasoning: Option<Reasoning>,
    /// Variables for the chat template, such as `enable_thinking`.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Further parts of the reply. With `message.output_text.logprobs`, a text has the
    /// log-probabilities of its tokens; the others do not exist here. At most [`MAX_INCLUDED`]
    /// entries.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_INCLUDED>")]
    #[schemars(length(max = MAX_INCLUDED))]
    pub include: Option<Vec<String>>,
    /// Number of most likely tokens to report per token of a text, 0 to 20. Above 0, the text has
    /// the log-probabilities of its tokens. Default 0.
    #[serde(default, deserialize_with = "fields::count::<_, 0, MAX_LOGPROBS>")]
    #[schemars(range(min = 0, max = MAX_LOGPROBS))]
    pub top_logprobs: Option<usize>,
    /// Labels, which the reply repeats.
    pub metadata: Option<Map<String, Value>>,
    /// Parameters of all APIs for generation.
    #[serde(flatten)]
    pub options: GenerationOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The reply to `DELETE /v1/responses/{id}`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ResponseDeleted {
    /// The id of the response.
    pub id: String,
    /// Always `response`.
    pub object: &'static str,
    /// Always true.
    pub deleted: bool,
}

/// The form of the text of an answer.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(expecting = "an object", deny_unknown_fields)]
pub struct TextOptions {
    /// `text`, `json_object` or `json_schema` with its `schema`.
    pub format: Option<ResponseFormat>,
    /// How much the model writes. Without effect.
    pub verbosity: Option<String>,
}

/// How the model thinks.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct Reasoning {
    /// Effort of reasoning: the variable `reasoning_effort` of the chat template, if it has one;
    /// otherwise without effect.
    pub effort: Option<String>,
    /// `summary` has no effect: replies have the whole reasoning. Every other member must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The conversation.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a string or a list of items of type message, function_call, \
                 function_call_output or reasoning"
)]
pub enum Input {
    /// A text of the user.
    Text(String),
    /// At most [`MAX_MESSAGES`] items.
    Items(Vec<InputItem>),
}

impl Input {
    /// Whether there are more items than allowed.
    #[must_use]
    pub fn is_too_long(&self) -> bool {
        matches!(self, Self::Items(items) if items.len() > MAX_MESSAGES)
    }
}

/// One item of a conversation.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum InputItem {
    /// An item with a type.
    Typed(TypedItem),
    /// A message, whose type may be left out.
    Message(InputMessage),
}

/// An item with a type.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TypedItem {
    /// A message.
    Message(InputMessage),
    /// A call of the assistant.
    FunctionCall {
        /// Its id, to which the output refers.
        call_id: String,
        /// The namespace of the function, if it has one.
        namespace: Option<String>,
        /// The function's name.
        name: String,
        /// The arguments: a JSON object as text.
        arguments: String,
    },
    /// The result of a call.
    FunctionCallOutput {
        /// The id of the call.
        call_id: String,
        /// The result.
        output: InputContent,
    },
    /// The assistant's reasoning.
    Reasoning {
        /// Parts of the reasoning.
        content: Option<Vec<InputPart>>,
    },
    /// Tools that are offered in addition to those of the request.
    AdditionalTools {
        /// The tools, as in the request.
        tools: Vec<Value>,
    },
    /// An item that is left out.
    #[schemars(skip)]
    Omitted,
}

/// A message.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct InputMessage {
    /// Who wrote it: `user`, `assistant`, `system` or `developer`.
    pub role: InputRole,
    /// The content.
    pub content: InputContent,
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InputRole {
    /// The user.
    User,
    /// The model.
    Assistant,
    /// Instructions.
    #[serde(alias = "developer")]
    System,
}

/// A text or its parts.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a string or a list of parts of type input_text, input_image or output_text"
)]
pub enum InputContent {
    /// A text.
    Text(String),
    /// Parts of a text.
    Parts(Vec<InputPart>),
}

/// A part of a text.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputPart {
    /// An image, for models that take images.
    InputImage {
        /// A data URL in base64: `data:image/png;base64,..`. Other URLs are fetched only from hosts
        /// that the server's operator has named.
        image_url: String,
        /// Without effect: the size in which an image is shown to the model follows from its
        /// processor.
        detail: Option<Value>,
    },
    /// Text of the user, or of an output.
    InputText {
        /// The text.
        text: String,
    },
    /// Text of the assistant.
    OutputText {
        /// The text.
        text: String,
    },
    /// Reasoning of the assistant.
    ReasoningText {
        /// The text.
        text: String,
    },
}

impl InputPart {
    /// The text; the URL of an image.
    pub(crate) fn into_text(self) -> Result<String, String> {
        match self {
            Self::InputText { text } | Self::OutputText { text } | Self::ReasoningText { text } => {
                Ok(text)
            }
            Self::InputImage { image_url, .. } => Err(image_url),
        }
    }
}

/// A tool that the model may call.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `type`")]
pub struct ResponsesTool {
    /// `function`, `custom` for a tool with free text, or `namespace` for a group of tools. Tools
    /// that OpenAI's service executes, such as `web_search`, are left out.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its name: 1 to 256 letters, digits, `_`, `-` or `.`. Required for functions, tools with free
    /// text and namespaces.
    pub name: Option<String>,
    /// What it does, for the model.
    pub description: Option<String>,
    /// JSON schema of its arguments, for the model. Default: no arguments.
    pub parameters: Option<Value>,
    /// Whether arguments always follow the schema. Default false. With a `tool_choice` that
    /// requires a call they always do.
    pub strict: Option<bool>,
    /// The form of the text of a `custom` tool: `text`, or `grammar`, which the model is shown.
    pub format: Option<Value>,
    /// The functions of a namespace, at most [`MAX_TOOLS`]. A call has the namespace in its member
    /// `namespace`, and the function's name without it.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_TOOLS>")]
    #[schemars(length(max = MAX_TOOLS))]
    pub tools: Option<Vec<ResponsesTool>>,
    /// Every other member; must be empty for functions, except for `defer_loading` and
    /// `output_schema`, which have no effect.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}
