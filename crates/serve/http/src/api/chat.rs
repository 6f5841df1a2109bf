//! `POST /v1/chat/completions`: answers a conversation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fields::{self, UnknownFields};
use super::images::ImageUrl;
use super::logprobs::ChatLogprobs;
use super::options::{ChoiceOptions, GenerationOptions, MAX_LOGPROBS};
use super::reply::{CutReason, FinishReason, Reply};

/// Maximum number of messages of a conversation.
pub const MAX_MESSAGES: usize = 4096;

/// Maximum number of parts of a message's content, and of calls of one message.
pub const MAX_PARTS: usize = 1024;

/// Maximum number of tools of one request.
pub const MAX_TOOLS: usize = 1024;

/// The request body.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct ChatRequest {
    /// The conversation, oldest message first; 1 to [`MAX_MESSAGES`] messages. The last one has to
    /// be as described; what cannot be shown of earlier ones becomes a short placeholder.
    #[serde(deserialize_with = "fields::list::<_, _, MAX_MESSAGES>")]
    #[schemars(length(min = 1, max = MAX_MESSAGES))]
    pub messages: Vec<Message>,
    /// Maximum number of tokens to generate per choice, 1 or above. Default: the server's
    /// `--default-max-tokens`, or as many as the context length and the KV pool allow.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { usize::MAX }>")]
    #[schemars(range(min = 1))]
    pub max_completion_tokens: Option<usize>,
    /// Older name of `max_completion_tokens`. If both are given they must be equal.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { usize::MAX }>")]
    #[schemars(range(min = 1))]
    pub max_tokens: Option<usize>,
    /// Whether to report the log-probability of each generated token. Default false.
    pub logprobs: Option<bool>,
    /// Number of most likely tokens to report per position, 0 to 20. Allowed only with `logprobs`.
    /// Default 0.
    #[serde(default, deserialize_with = "fields::count::<_, 0, MAX_LOGPROBS>")]
    #[schemars(range(min = 0, max = MAX_LOGPROBS))]
    pub top_logprobs: Option<usize>,
    /// Functions that the model may call, at most [`MAX_TOOLS`].
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_TOOLS>")]
    #[schemars(length(max = MAX_TOOLS))]
    pub tools: Option<Vec<Tool>>,
    /// `auto`, the default, lets the model decide whether it calls functions. With `none` the
    /// functions are not shown to the model, and it cannot call any. With `required` the answer has
    /// at least one call, and with the name of a function exactly one, of that function.
    pub tool_choice: Option<Value>,
    /// Whether an answer may have several calls. Default true. With false, an answer ends with its
    /// first call.
    pub parallel_tool_calls: Option<bool>,
    /// Variables for the chat template, such as `enable_thinking`.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Effort of reasoning: a variable of the chat template, if it has one of this name; otherwise
    /// without effect.
    pub reasoning_effort: Option<String>,
    /// Whether the prompt ends with the beginning of the model's answer. Default true.
    pub add_generation_prompt: Option<bool>,
    /// Whether the model continues the last message, which must be the assistant's, instead of
    /// answering it. Default false.
    pub continue_final_message: Option<bool>,
    /// Whether the reply has the model's reasoning. Default true.
    pub include_reasoning: Option<bool>,
    /// What the answer is expected to be, for example the file that it changes. The parts that are
    /// right are generated faster. It never changes the answer.
    pub prediction: Option<Prediction>,
    /// Parameters of replies that are lists of choices.
    #[serde(flatten)]
    pub choices: ChoiceOptions,
    /// Parameters of all APIs for generation.
    #[serde(flatten)]
    pub options: GenerationOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// An expected answer.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `type` and `content`")]
pub struct Prediction {
    /// `content`.
    #[serde(rename = "type")]
    pub kind: PredictionKind,
    /// The text, or parts of type `text`, which are joined.
    pub content: Content,
}

/// The kinds of expected answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PredictionKind {
    /// A text.
    Content,
}

impl Prediction {
    /// The expected text. Parts that are no text have none.
    #[must_use]
    pub fn text(self) -> String {
        match self.content {
            Content::Text(text) => text,
            Content::Parts(parts) => {
                let text = |part| match part {
                    ContentPart::Text { text, .. } => text,
                    ContentPart::ImageUrl { .. } => String::new(),
                };
                parts.into_iter().map(text).collect()
            }
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `role` and `content`")]
pub struct Message {
    /// Who wrote the message.
    pub role: Role,
    /// The content. Of the last message, it may only be absent if the assistant calls functions.
    pub content: Option<Content>,
    /// The functions that the assistant called in this message, at most [`MAX_PARTS`].
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_PARTS>")]
    #[schemars(length(max = MAX_PARTS))]
    pub tool_calls: Option<Vec<RequestToolCall>>,
    /// The call that a message of the role `tool` answers.
    pub tool_call_id: Option<String>,
    /// The assistant's reasoning before this message.
    #[serde(alias = "reasoning")]
    pub reasoning_content: Option<String>,
    /// Name of the participant, for chat templates that use it.
    pub name: Option<Value>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(extend("enum" = ["system", "developer", "user", "assistant", "tool"]))]
pub enum Role {
    /// Instructions. `developer` is OpenAI's newer name for the same role.
    #[serde(alias = "developer")]
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

impl Role {
    /// The role's name as chat templates know it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a string or a list of parts of type `text` or `image_url`")]
pub enum Content {
    /// A text.
    Text(String),
    /// A list of at most [`MAX_PARTS`] parts, which the model's chat template joins.
    Parts(Vec<ContentPart>),
}

/// One part of a message's content.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentPart {
    /// An image, for models that take images.
    ImageUrl {
        /// The image.
        image_url: ImageUrl,
        /// Marks the prompt up to here, as in Anthropic's API.
        #[serde(default, skip_serializing)]
        cache_control: Option<Value>,
    },
    /// Text.
    Text {
        /// The text.
        text: String,
        /// Every other member; the chat template receives it unchanged. `cache_control` marks the prompt
        /// up to here, as in Anthropic's API.
        #[serde(flatten)]
        extra: Map<String, Value>,
    },
}

/// A whole reply.
pub type ChatCompletion = Reply<ChatChoice>;

/// One piece of a streamed reply.
pub type ChatCompletionChunk = Reply<ChatChunkChoice>;

/// One choice of a whole reply.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ChatChoice {
    /// Number of the choice, from 0.
    pub index: usize,
    /// The answer.
    pub message: AnswerMessage,
    /// Log-probabilities of the answer's tokens, if they were requested.
    pub logprobs: Option<ChatLogprobs>,
    /// Why generation ended.
    pub finish_reason: FinishReason,
    /// Why the answer was cut off, if not at a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<CutReason>,
    /// Ids of the tokens that were generated, if they were requested. An end-of-sequence token is
    /// one of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The model's answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct AnswerMessage {
    /// Always `assistant`.
    pub role: Role,
    /// The text; `null` if there are only calls.
    pub content: Option<String>,
    /// Always `null`.
    pub refusal: Option<String>,
    /// The reasoning before the answer, if the model's format marks it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same, under the name that newer clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The functions that the model calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ReplyToolCall>,
}

/// A function that the model may call.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `type` and `function`")]
pub struct Tool {
    /// `function`, or `custom` for a tool with free text. Other types are left out, because no model
    /// can call them.
    #[serde(rename = "type")]
    pub kind: String,
    /// The function. Required for the type `function`.
    pub function: Option<Function>,
    /// The tool with free text. Required for the type `custom`.
    pub custom: Option<CustomTool>,
    /// Every other member; must be empty for the types `function` and `custom`.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The description of a tool that gets free text instead of arguments.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `name`")]
pub struct CustomTool {
    /// Its name: 1 to 256 letters, digits, `_`, `-` or `.`.
    pub name: String,
    /// What it does, for the model.
    pub description: Option<String>,
    /// The form of the text: `text`, or `grammar`, which the model is shown.
    pub format: Option<Value>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The type of a call in a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CallType {
    /// A function with arguments.
    Function,
    /// A tool with free text.
    Custom,
}

/// The type of calls in requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FunctionType {
    /// A function.
    #[default]
    Function,
}

/// The description of a function.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `name`")]
pub struct Function {
    /// Its name: 1 to 256 letters, digits, `_`, `-` or `.`.
    pub name: String,
    /// What it does, for the model.
    pub description: Option<String>,
    /// JSON schema of its arguments, for the model. Default: no arguments.
    pub parameters: Option<Value>,
    /// Whether arguments always follow the schema. Default false. With a `tool_choice` that
    /// requires a call they always do.
    pub strict: Option<bool>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// A call in a message of the assistant.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `id` and `function`")]
pub struct RequestToolCall {
    /// Its id, to which the result refers.
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type", default)]
    pub kind: FunctionType,
    /// The called function.
    pub function: CalledFunction,
}

/// A function with its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `name` and `arguments`")]
pub struct CalledFunction {
    /// Its name.
    pub name: String,
    /// The arguments: a JSON object as text. In a request, anything else is accepted, too.
    pub arguments: String,
}

/// A call in a reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ReplyToolCall {
    /// A new id.
    pub id: String,
    /// `function`, or `custom` for a tool with free text.
    #[serde(rename = "type")]
    pub kind: CallType,
    /// The called function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<CalledFunction>,
    /// The called tool with free text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<CalledTool>,
}

/// A tool with its free text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CalledTool {
    /// Its name.
    pub name: String,
    /// The text.
    pub input: String,
}

/// One piece of a streamed choice: the role first, then pieces of text, then the finish reason.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ChatChunkChoice {
    /// Number of the choice, from 0.
    pub index: usize,
    /// What this piece adds to the message.
    pub delta: Delta,
    /// Log-probabilities of the tokens in this piece, if they were requested.
    pub logprobs: Option<ChatLogprobs>,
    /// Why generation ended; `null` in all pieces but the last of a choice.
    pub finish_reason: Option<FinishReason>,
    /// Why the answer was cut off, if not at a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<CutReason>,
    /// Ids of the tokens that this piece adds, if they were requested. An end-of-sequence token is
    /// one of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What a piece adds to a message.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Delta {
    /// `assistant`, in the first piece of a choice only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Text to append; left out of the last piece of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Reasoning to append.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same, under the name that newer clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// A call that begins, or arguments to append to one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[ToolCallDelta; 1]>,
}

/// What a piece adds to a call: its id, type and name first, then pieces of its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ToolCallDelta {
    /// Number of the call in the message, from 0.
    pub index: usize,
    /// A new id, in the first piece of the call only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function` or `custom`, in the first piece of the call only.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<CallType>,
    /// The called function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<FunctionDelta>,
    /// The called tool with free text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<CustomDelta>,
}

/// What a piece adds to the call of a tool with free text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CustomDelta {
    /// The name, in the first piece of the call only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Text to append.
    pub input: String,
}

/// What a piece adds to the function of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FunctionDelta {
    /// The name, in the first piece of the call only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Text to append to the arguments.
    pub arguments: String,
}
