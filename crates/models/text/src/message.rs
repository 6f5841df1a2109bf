//! The messages of a conversation, in the format of OpenAI's chat API.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// The author: `system`, `user`, `assistant`, `tool`, or another role that the model's chat
    /// template supports.
    pub role: String,
    /// The content; `None` for an assistant's message that only calls tools.
    #[serde(default)]
    pub content: Option<MessageContent>,
    /// All other fields, which the template may read: `name`, `tool_calls`, `tool_call_id`,
    /// `reasoning_content` and so on.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MessageContent {
    /// Plain text.
    Text(String),
    /// A list of parts, such as `{"type": "text", "text": ".."}`.
    Parts(Vec<Value>),
}

impl ChatMessage {
    /// Creates a message of plain text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        let content = Some(MessageContent::Text(text.into()));
        Self { role: role.into(), content, extra: Map::new() }
    }

    /// Creates a message with the role `system`: instructions for the model.
    pub fn system(text: impl Into<String>) -> Self {
        Self::new("system", text)
    }

    /// Creates a message with the role `user`.
    pub fn user(text: impl Into<String>) -> Self {
        Self::new("user", text)
    }

    /// Creates a message with the role `assistant`: an earlier answer of the model.
    pub fn assistant(text: impl Into<String>) -> Self {
        Self::new("assistant", text)
    }
}
