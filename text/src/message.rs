//! The messages of a conversation, in the shape of OpenAI's chat API.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// What is said; `None` for an assistant's message that only calls tools.
    #[serde(default)]
    pub content: Option<MessageContent>,
    /// Whatever else the template may read: `name`, `tool_calls`, `tool_call_id`,
    /// `reasoning_content` and so on.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MessageContent {
    /// Plain text.
    Text(String),
    /// A list of parts, such as `{"type": "text", "text": ".."}`.
    Parts(Vec<Value>),
}

impl ChatMessage {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        let content = Some(MessageContent::Text(text.into()));
        Self { role: role.into(), content, extra: Map::new() }
    }

    /// Instructions for the model.
    pub fn system(text: impl Into<String>) -> Self {
        Self::new("system", text)
    }

    /// What the user says.
    pub fn user(text: impl Into<String>) -> Self {
        Self::new("user", text)
    }

    /// What the model has said.
    pub fn assistant(text: impl Into<String>) -> Self {
        Self::new("assistant", text)
    }
}
