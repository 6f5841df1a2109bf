//! `POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API.
//!
//! Every prefix is cached. `cache_control` marks what precedes it: that is evicted last, until it was
//! not used for the mark's time to live. For a model with a recurrent state, there is a checkpoint at
//! the mark.

mod reply;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::chat::{MAX_MESSAGES, MAX_PARTS, MAX_TOOLS};
use super::fields::{self, UnknownFields};
use super::options::GenerationOptions;
use super::structured::ResponseFormat;
pub use reply::{
    BlockDelta, CacheCreation, MessageDelta, MessageEvent, MessageReply, MessagesError,
    MessagesErrorObject, MessagesUsage, ReplyBlock, StopReason, TokenCount,
};

/// The request body. `max_tokens` is required by `/v1/messages` only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct MessagesRequest {
    /// The conversation, oldest message first; 1 to [`MAX_MESSAGES`] messages. The model continues
    /// a last message of the assistant.
    #[serde(deserialize_with = "fields::list::<_, _, MAX_MESSAGES>")]
    #[schemars(length(min = 1, max = MAX_MESSAGES))]
    pub messages: Vec<TurnMessage>,
    /// Instructions that precede the conversation.
    pub system: Option<BlockContent>,
    /// Maximum number of tokens to generate, 1 or above.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { usize::MAX }>")]
    #[schemars(range(min = 1))]
    pub max_tokens: Option<usize>,
    /// Anthropic's name of `stop`.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_STOP_SEQUENCES>")]
    #[schemars(length(max = MAX_STOP_SEQUENCES))]
    pub stop_sequences: Option<Vec<String>>,
    /// Functions that the model may call, at most [`MAX_TOOLS`].
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_TOOLS>")]
    #[schemars(length(max = MAX_TOOLS))]
    pub tools: Option<Vec<MessagesTool>>,
    /// Whether the model may call functions. Default `auto`.
    pub tool_choice: Option<MessagesToolChoice>,
    /// The required format of the answer's text, and the effort of reasoning.
    pub output_config: Option<OutputConfig>,
    /// Whether the model reasons before it answers, if its chat template has the variable
    /// `enable_thinking`. Default: it does not.
    pub thinking: Option<Thinking>,
    /// Whether the whole prompt is marked: as in a block.
    pub cache_control: Option<Value>,
    /// Variables for the chat template. One that `thinking` sets as well has the value given here.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Parameters of all APIs for generation.
    #[serde(flatten)]
    pub options: GenerationOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The form of an answer.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `format` or `effort`", deny_unknown_fields)]
pub struct OutputConfig {
    /// `json_schema` with its `schema`.
    pub format: Option<ResponseFormat>,
    /// Effort of reasoning: the variable `reasoning_effort` of the chat template, if it has one;
    /// otherwise without effect.
    pub effort: Option<String>,
}

/// Maximum number of strings in `stop_sequences`.
pub const MAX_STOP_SEQUENCES: usize = super::options::MAX_STOP_STRINGS;

/// One message of a conversation.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `role` and `content`")]
pub struct TurnMessage {
    /// Who wrote the message.
    pub role: TurnRole,
    /// The content.
    pub content: BlockContent,
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TurnRole {
    /// The user, or the results of calls.
    User,
    /// The model.
    Assistant,
    /// Instructions in the middle of a conversation.
    System,
}

/// A text or a list of blocks.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a string or a list of blocks of type text, tool_use, tool_result or thinking"
)]
pub enum BlockContent {
    /// A text.
    Text(String),
    /// At most [`MAX_PARTS`] blocks.
    Blocks(Vec<Block>),
}

impl BlockContent {
    /// Whether there are more blocks than allowed.
    #[must_use]
    pub fn is_too_long(&self) -> bool {
        matches!(self, Self::Blocks(blocks) if blocks.len() > MAX_PARTS)
    }
}

/// One block of a message. Blocks of other types become text, if they have some, or else a short
/// placeholder. Other members have no effect.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    /// Text.
    Text {
        /// The text.
        text: String,
        /// Whether what precedes it, and the block itself, is marked: `{"type": "ephemeral"}`, with
        /// `"ttl"` of `5m` (the default) or `1h`.
        cache_control: Option<Value>,
        /// Without effect.
        citations: Option<Value>,
    },
    /// An image, for models that take images.
    Image {
        /// The image.
        source: super::images::ImageSource,
        /// Whether what precedes it, and the block itself, is marked: `{"type": "ephemeral"}`, with
        /// `"ttl"` of `5m` (the default) or `1h`.
        cache_control: Option<Value>,
    },
    /// A call, in a message of the assistant. `server_tool_use` and `mcp_tool_use` mean the same.
    ToolUse {
        /// Its id, to which the result refers.
        id: String,
        /// The function's name.
        name: String,
        /// The arguments: an object.
        input: Value,
        /// Whether what precedes it, and the block itself, is marked: `{"type": "ephemeral"}`, with
        /// `"ttl"` of `5m` (the default) or `1h`.
        cache_control: Option<Value>,
        /// Without effect.
        caller: Option<Value>,
        /// Without effect.
        toolset_name: Option<Value>,
    },
    /// The result of a call, in a message of the user, or of the assistant if a server has executed
    /// it.
    ToolResult {
        /// The id of the call.
        tool_use_id: String,
        /// The result: a text or blocks of text.
        content: Option<Box<BlockContent>>,
        /// Whether the call failed. The model sees only the content.
        is_error: Option<bool>,
        /// Whether what precedes it, and the block itself, is marked: `{"type": "ephemeral"}`, with
        /// `"ttl"` of `5m` (the default) or `1h`.
        cache_control: Option<Value>,
        /// Without effect.
        toolset_name: Option<Value>,
    },
    /// The assistant's reasoning.
    Thinking {
        /// The reasoning.
        thinking: String,
        /// Without effect.
        signature: Option<String>,
    },
    /// Reasoning of another model that cannot be read. It is left out.
    RedactedThinking {
        /// Without effect.
        data: Option<String>,
    },
}

/// A function that the model may call.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `name`")]
pub struct MessagesTool {
    /// `custom`, or left out. Tools that only Anthropic's own models know, such as
    /// `web_search_20250305`, are left out.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Its name: 1 to 256 letters, digits, `_`, `-` or `.`.
    pub name: String,
    /// What it does, for the model.
    pub description: Option<String>,
    /// JSON schema of its arguments, for the model. Default: no arguments.
    pub input_schema: Option<Value>,
    /// Whether arguments always follow the schema. Default false. With a `tool_choice` that
    /// requires a call they always do.
    pub strict: Option<bool>,
    /// Whether the tools and the system message, or the tools alone if there is none, are marked: as
    /// in a block.
    pub cache_control: Option<Value>,
    /// Without effect: arguments are always streamed while they are generated.
    pub eager_input_streaming: Option<bool>,
    /// Every other member. Must be empty for functions, except for `defer_loading`,
    /// `allowed_callers` and `input_examples`, which have no effect.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Whether the model may call functions.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `type`")]
pub struct MessagesToolChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Whether an answer may have only one call. Default false.
    pub disable_parallel_tool_use: Option<bool>,
    /// The function to call, with `tool`.
    pub name: Option<String>,
}

/// Whether the model reasons before it answers.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object with `type`")]
pub struct Thinking {
    /// `enabled`, `adaptive` or `disabled`.
    #[serde(rename = "type")]
    pub kind: ThinkingType,
    /// Maximum number of tokens of the reasoning, if `type` is `enabled`. It has no effect on a model
    /// whose reasoning is not delimited.
    pub budget_tokens: Option<Value>,
    /// Without effect.
    pub display: Option<Value>,
}

/// Whether the model reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingType {
    /// The model reasons.
    Enabled,
    /// The model decides whether it reasons.
    Adaptive,
    /// The model does not reason.
    Disabled,
}
