//! Old messages of Ollama's API.

use serde_json::{Value, json};

use super::{as_text, settle_role, settle_text};
use crate::wire::advice::Ignored;

/// Gives an old message the shape that [`OllamaMessage`](crate::api::ollama::OllamaMessage)
/// describes.
pub(super) fn settle(message: &mut Value, ignored: &Ignored) {
    let Value::Object(members) = message else {
        *message = json!({"role": "user", "content": as_text(message)});
        ignored.note("messages.role");
        return;
    };
    settle_role(members, &["system", "developer", "user", "assistant", "tool"], ignored);
    for name in ["content", "thinking"] {
        if let Some(value) = members.get_mut(name) {
            *value = as_text(value).into();
        }
    }
    for name in ["tool_name", "name", "tool_call_id"] {
        if members.contains_key(name) {
            settle_text(members, name, "");
        }
    }
    if members.contains_key("tool_name") {
        members.remove("name");
    }
    for (name, is_known) in [
        ("images", Value::is_string as fn(&Value) -> bool),
        ("tool_calls", |call| call["function"]["name"].is_string()),
    ] {
        match members.get_mut(name) {
            Some(Value::Array(items)) => items.retain(is_known),
            Some(_) => drop(members.remove(name)),
            None => {}
        }
    }
    for call in members.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Value::Object(call) = call
            && call.contains_key("id")
        {
            settle_text(call, "id", "");
        }
    }
}
