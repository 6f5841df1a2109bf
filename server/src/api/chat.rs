//! `POST /v1/chat/completions`: answers a conversation.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fields::{self, UnknownFields};
use super::logprobs::ChatLogprobs;
use super::options::{GenerationOptions, MAX_LOGPROBS};
use super::reply::{FinishReason, Reply};

/// Most messages of a conversation.
pub const MAX_MESSAGES: usize = 4096;

/// Most parts of a message's content.
pub const MAX_PARTS: usize = 1024;

/// The request body.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object")]
pub struct ChatRequest {
    /// The conversation, oldest message first; 1 to [`MAX_MESSAGES`] messages.
    #[serde(deserialize_with = "fields::list::<_, _, MAX_MESSAGES>")]
    pub messages: Vec<Message>,
    /// Maximum number of tokens to generate per choice, 1 or above. Default: what the server is
    /// started with (`--default-max-tokens`), or as many as the context length and the KV pool
    /// allow.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { usize::MAX }>")]
    pub max_completion_tokens: Option<usize>,
    /// Older name of `max_completion_tokens`. If both are given they must be equal.
    #[serde(default, deserialize_with = "fields::count::<_, 1, { usize::MAX }>")]
    pub max_tokens: Option<usize>,
    /// Whether to report the log-probability of each generated token. Default false.
    pub logprobs: Option<bool>,
    /// Number of most likely tokens to report per position, 0 to 20. Allowed only with `logprobs`.
    /// Default 0.
    #[serde(default, deserialize_with = "fields::count::<_, 0, MAX_LOGPROBS>")]
    pub top_logprobs: Option<usize>,
    /// Parameters shared with completions.
    #[serde(flatten)]
    pub options: GenerationOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// One message of a conversation.
#[derive(Debug, Deserialize)]
#[serde(expecting = "an object with `role` and `content`")]
pub struct Message {
    /// Who wrote the message.
    pub role: Role,
    /// What it says.
    pub content: Content,
    /// Name of the participant, for chat templates that use it.
    pub name: Option<Value>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// Who wrote a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions. `developer` is OpenAI's newer name for the same role.
    #[serde(alias = "developer")]
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// The role's name as chat templates know it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of parts of type `text`")]
pub enum Content {
    /// A text.
    Text(String),
    /// A list of at most [`MAX_PARTS`] parts, which the model's chat template joins.
    Parts(Vec<ContentPart>),
}

/// One part of a message's content.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentPart {
    /// Text, the only supported type.
    Text {
        /// The text.
        text: String,
        /// Every other member; the chat template receives it unchanged.
        #[serde(flatten)]
        extra: Map<String, Value>,
    },
}

/// A whole reply.
pub type ChatCompletion = Reply<ChatChoice>;

/// One piece of a streamed reply.
pub type ChatCompletionChunk = Reply<ChatChunkChoice>;

/// One choice of a whole reply.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// Number of the choice, from 0.
    pub index: usize,
    /// The answer.
    pub message: AnswerMessage,
    /// Log-probabilities of the answer's tokens, if they were requested.
    pub logprobs: Option<ChatLogprobs>,
    /// Why generation ended.
    pub finish_reason: FinishReason,
    /// Ids of the tokens that were generated, if they were requested. An end-of-sequence token is one of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The model's answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AnswerMessage {
    /// Always `assistant`.
    pub role: Role,
    /// The text.
    pub content: String,
    /// Always `null`.
    pub refusal: Option<String>,
}

/// One piece of a streamed choice: the role first, then pieces of text, then the finish reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice {
    /// Number of the choice, from 0.
    pub index: usize,
    /// What this piece adds to the message.
    pub delta: Delta,
    /// Log-probabilities of the tokens in this piece, if they were requested.
    pub logprobs: Option<ChatLogprobs>,
    /// Why generation ended; `null` in all pieces but the last of a choice.
    pub finish_reason: Option<FinishReason>,
    /// Ids of the tokens that this piece adds, if they were requested. An end-of-sequence token is one of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What a piece adds to a message.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Delta {
    /// `assistant`, in the first piece of a choice only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Text to append; left out of the last piece of a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}
