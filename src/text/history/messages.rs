//! Compares messages of the assistant with answers, and digests messages.

use std::borrow::Cow;

use serde_json::Value;
use stolon_text::{Answer, ChatMessage, MessageContent, ToolCall};

use super::Known;

/// The names of the reasoning in a message. A client may use any of them.
const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// What a message of the assistant says, normalized; `None` for a message of another role, or with
/// content that is not text.
pub(super) fn said(message: &ChatMessage) -> Option<Answer> {
    if message.role != "assistant" {
        return None;
    }
    let text = match &message.content {
        None => String::new(),
        Some(MessageContent::Text(text)) => text.clone(),
        Some(MessageContent::Parts(parts)) => {
            parts.iter().map(|part| part["text"].as_str()).collect::<Option<String>>()?
        }
    };
    let calls = calls(message).map(|call| {
        let function = &call["function"];
        let arguments = match &function["arguments"] {
            Value::String(json) => json.clone(),
            other => other.to_string(),
        };
        ToolCall { name: function["name"].as_str().unwrap_or_default().to_owned(), arguments }
    });
    let calls = calls.collect();
    let reasoning = REASONING.iter().find_map(|name| message.extra.get(*name)?.as_str());
    let reasoning = reasoning.unwrap_or_default().to_owned();
    Some(normalized(Answer { reasoning, text, calls }))
}

/// An answer without what clients and templates change: the spaces around texts, and the spaces and
/// the order of members in the arguments of calls.
pub(crate) fn normalized(answer: Answer) -> Answer {
    let canonical = |json: String| match serde_json::from_str::<Value>(&json) {
        Ok(mut value) => {
            value.sort_all_objects();
            value.to_string()
        }
        Err(_) => json,
    };
    let call = |call: ToolCall| ToolCall { arguments: canonical(call.arguments), ..call };
    Answer {
        reasoning: answer.reasoning.trim().to_owned(),
        text: answer.text.trim().to_owned(),
        calls: answer.calls.into_iter().map(call).collect(),
    }
}

/// Adds a message to a digest. The reasoning of the assistant and the ids of its calls do not count.
pub(super) fn digest(message: &ChatMessage, said: Option<&Answer>, hasher: &mut blake3::Hasher) {
    match said {
        Some(said) => digest_said(said, hasher),
        None => {
            let json = serde_json::to_vec(message);
            let json = json.expect("messages have string keys and cannot fail to serialize");
            add(&json, hasher);
        }
    }
}

/// Adds what an answer says to a digest, without its reasoning.
pub(super) fn digest_said(said: &Answer, hasher: &mut blake3::Hasher) {
    add(said.text.as_bytes(), hasher);
    hasher.update(&(said.calls.len() as u64).to_le_bytes());
    for call in &said.calls {
        add(call.name.as_bytes(), hasher);
        add(call.arguments.as_bytes(), hasher);
    }
}

/// Adds bytes with their number to a digest.
fn add(bytes: &[u8], hasher: &mut blake3::Hasher) {
    hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
}

/// The calls of a message.
fn calls(message: &ChatMessage) -> impl Iterator<Item = &Value> {
    message.extra.get("tool_calls").and_then(Value::as_array).into_iter().flatten()
}

/// The ids of the calls of a message.
pub(super) fn call_ids(message: &ChatMessage) -> impl Iterator<Item = &str> {
    calls(message).filter_map(|call| call["id"].as_str())
}

/// The messages with the reasoning of known answers, where the client left it out.
pub(super) fn restored<'a>(messages: &'a [ChatMessage], known: &[Known]) -> Cow<'a, [ChatMessage]> {
    let mut restored = Cow::Borrowed(messages);
    for Known { message, answer, .. } in known {
        let own = &messages[*message].extra;
        let has_own = REASONING.iter().any(|name| own.get(*name).is_some_and(Value::is_string));
        if answer.said.reasoning.is_empty() || has_own {
            continue;
        }
        let reasoning = answer.said.reasoning.clone().into();
        restored.to_mut()[*message].extra.insert(REASONING[0].to_owned(), reasoning);
    }
    restored
}
