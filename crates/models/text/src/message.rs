//! The messages of a conversation, in the format of OpenAI's chat API.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{Answer, ToolCall};

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

    /// Creates the message of an earlier answer with its reasoning and its calls, which get these
    /// ids.
    #[must_use]
    pub fn answer<S: AsRef<str>>(answer: &Answer, ids: &[S]) -> Self {
        let mut message = Self::assistant(answer.text.as_str());
        if !answer.reasoning.is_empty() {
            message.extra.insert("reasoning_content".to_owned(), json!(answer.reasoning));
        }
        let call = |(call, id): (&ToolCall, &S)| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"id": id.as_ref(), "type": "function", "function": function})
        };
        let calls: Vec<Value> = answer.calls.iter().zip(ids).map(call).collect();
        if !calls.is_empty() {
            message.content = message.content.filter(|_| !answer.text.is_empty());
            message.extra.insert("tool_calls".to_owned(), calls.into());
        }
        message
    }

    /// Creates a message with the role `tool`: the result of the call with this id.
    pub fn result(id: &str, function: &str, text: impl Into<String>) -> Self {
        let mut message = Self::new("tool", text);
        message.extra.insert("tool_call_id".to_owned(), json!(id));
        message.extra.insert("name".to_owned(), json!(function));
        message
    }
}
