//! The reply of `POST /v1/messages`, its events and its errors.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::api::chat::Role;
use crate::api::reply::is_zero;

/// The reply of `/v1/messages`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MessageReply {
    /// Unique id.
    pub id: String,
    /// Always `message`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Always `assistant`.
    pub role: Role,
    /// The model's name as the request gave it, or its id.
    pub model: String,
    /// The answer; empty in the event `message_start`.
    pub content: Vec<ReplyBlock>,
    /// Why the answer ended; `null` in the event `message_start`.
    pub stop_reason: Option<StopReason>,
    /// The string of `stop_sequences` that ended the answer, if one did.
    pub stop_sequence: Option<String>,
    /// Token counts.
    pub usage: MessagesUsage,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The model ended it.
    EndTurn,
    /// The maximum number of tokens was reached.
    MaxTokens,
    /// A string of `stop_sequences` appeared.
    StopSequence,
    /// The model calls functions.
    ToolUse,
}

/// Token counts. Those of the prompt are the sum of three: those that were read from the cache,
/// those after them up to the last `cache_control`, and the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct MessagesUsage {
    /// Prompt tokens that were computed, without those of `cache_creation_input_tokens`.
    pub input_tokens: usize,
    /// Prompt tokens that were computed up to the last `cache_control`, in whole blocks; 0 if the
    /// server hides what is cached.
    pub cache_creation_input_tokens: usize,
    /// The same tokens by their times to live.
    pub cache_creation: CacheCreation,
    /// Prompt tokens that were read from the prefix cache; 0 if the server hides it.
    pub cache_read_input_tokens: usize,
    /// Prompt tokens that are positions of images, computed and cached ones. Not a member of
    /// Anthropic's API. Left out if there are none, if the server hides what is cached, and in the
    /// event `message_start`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub image_tokens: usize,
    /// Generated tokens.
    pub output_tokens: usize,
}

/// Prompt tokens that a `cache_control` marks and that were not cached, by their times to live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CacheCreation {
    /// Those that are marked for five minutes after their last use.
    pub ephemeral_5m_input_tokens: usize,
    /// Those that are marked for an hour.
    pub ephemeral_1h_input_tokens: usize,
}

/// A block of an answer.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ReplyBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// The model's reasoning.
    Thinking {
        /// The reasoning.
        thinking: String,
        /// Always empty.
        signature: String,
    },
    /// A call.
    ToolUse {
        /// A new id.
        id: String,
        /// The function's name.
        name: String,
        /// The arguments: an object.
        input: Value,
    },
}

/// An event of a streamed reply. It has the members that belong to its type.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct MessageEvent {
    /// The type, which is also the name of the event.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The reply as it begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<MessageReply>,
    /// Number of the block, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
    /// The block that begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_block: Option<ReplyBlock>,
    /// The addition to the block or to the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<MessageDelta>,
    /// Token counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<MessagesUsage>,
    /// The error that ends the reply early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<MessagesErrorObject>,
}

/// The addition of an event.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum MessageDelta {
    /// An addition to a block.
    Block(BlockDelta),
    /// An addition to the message, at its end.
    Stop {
        /// Why the answer ended.
        stop_reason: Option<StopReason>,
        /// The string that ended it, if one did.
        stop_sequence: Option<String>,
    },
}

/// The addition of an event to a block.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlockDelta {
    /// Text.
    TextDelta {
        /// Text to append.
        text: String,
    },
    /// Reasoning.
    ThinkingDelta {
        /// Reasoning to append.
        thinking: String,
    },
    /// Arguments of a call.
    InputJsonDelta {
        /// JSON to append.
        partial_json: String,
    },
}

/// An error in Anthropic's form.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MessagesError {
    /// Always `error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What happened.
    pub error: MessagesErrorObject,
}

/// What happened.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MessagesErrorObject {
    /// Anthropic's name for the class of the status code.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// A sentence for people.
    pub message: String,
}

/// The reply of `/v1/messages/count_tokens`.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct TokenCount {
    /// Tokens of the prompt.
    pub input_tokens: usize,
}
