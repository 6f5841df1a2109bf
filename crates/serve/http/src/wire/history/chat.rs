//! Old messages of chat completions.

use serde_json::{Map, Value, json};

use super::{
    as_text, follows_result, kind, placeholder, settle_arguments, settle_role, settle_text, text_of,
};
use crate::wire::advice::Ignored;

const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool"];

/// Gives the messages the shape that [`Message`](crate::api::chat::Message) describes. The last one
/// keeps its faults, except those that are common and have one meaning.
pub(super) fn settle(messages: &mut [Value], ignored: &Ignored) {
    let last = messages.len().saturating_sub(1);
    let mut roles = messages.iter().rev().map(|message| message["role"].as_str().unwrap_or(""));
    let is_of_result = roles.next() == Some("user") && follows_result(roles);
    for (index, message) in messages.iter_mut().enumerate() {
        let is_last = index == last && !is_of_result;
        let Value::Object(members) = message else {
            if !is_last {
                *message = json!({"role": "user", "content": as_text(message)});
                ignored.note("messages.role");
            }
            continue;
        };
        settle_legacy_call(index, members);
        // Clients send both names back, if a server has sent both.
        if members.get("reasoning_content").is_some_and(|own| !own.is_null()) {
            members.remove("reasoning");
        } else if members.contains_key("reasoning") {
            members.remove("reasoning_content");
        }
        if let Some(Value::Array(calls)) = members.get_mut("tool_calls") {
            calls.iter_mut().for_each(settle_call);
        }
        let role = members.get("role").and_then(Value::as_str).unwrap_or_default().to_owned();
        if !is_last {
            settle_members(index, &role, members, ignored);
        }
        if !is_last || role != "user" {
            settle_content(&role, is_last, members, ignored);
        }
    }
}

/// Messages in the form of the API before it had tools: `function_call`, and the role `function`.
fn settle_legacy_call(index: usize, members: &mut Map<String, Value>) {
    let id = |index: usize| format!("function_call_{index}");
    if members.get("role").is_some_and(|role| role == "function") {
        members.insert("role".to_owned(), "tool".into());
        members.entry("tool_call_id").or_insert_with(|| id(index.saturating_sub(1)).into());
    }
    let is_call = members.get("function_call").is_some_and(Value::is_object);
    if is_call
        && !members.contains_key("tool_calls")
        && let Some(function) = members.remove("function_call")
    {
        let call = json!({"id": id(index), "type": "function", "function": function});
        members.insert("tool_calls".to_owned(), json!([call]));
    }
}

/// A call, whose arguments may have any form. One of a tool with free text is shown as a call with
/// one argument.
fn settle_call(call: &mut Value) {
    let Value::Object(members) = call else { return };
    if let Some(custom) = members.remove("custom").filter(Value::is_object) {
        let input = json!({"input": custom["input"]}).to_string();
        let function = json!({"name": custom["name"], "arguments": input});
        members.insert("function".to_owned(), function);
        members.insert("type".to_owned(), "function".into());
    }
    if let Some(Value::Object(function)) = members.get_mut("function") {
        settle_arguments(function);
    }
}

/// The members of an old message, apart from its content.
fn settle_members(index: usize, role: &str, members: &mut Map<String, Value>, ignored: &Ignored) {
    settle_role(members, ROLES, ignored);
    let role = if ROLES.contains(&role) { role } else { "user" };
    if role == "tool" {
        settle_text(members, "tool_call_id", "");
    } else {
        members.remove("tool_call_id");
    }
    for name in ["reasoning", "reasoning_content"] {
        if let Some(value) = members.get_mut(name).filter(|value| !value.is_null()) {
            *value = as_text(value).into();
        }
    }
    let calls = members.remove("tool_calls").filter(|_| role == "assistant");
    let Some(Value::Array(mut calls)) = calls else { return };
    calls.retain(|call| call["function"]["name"].is_string());
    for (number, call) in calls.iter_mut().enumerate() {
        let Value::Object(call) = call else { continue };
        settle_text(call, "id", &format!("call_{index}_{number}"));
        call.insert("type".to_owned(), "function".into());
    }
    members.insert("tool_calls".to_owned(), Value::Array(calls));
}

/// The content of a message that is not the user's last.
fn settle_content(role: &str, is_last: bool, members: &mut Map<String, Value>, ignored: &Ignored) {
    let content = members.entry("content").or_insert(Value::Null);
    match content {
        Value::String(_) => {}
        Value::Null if is_last || role == "assistant" => {}
        Value::Array(parts) => {
            for part in parts.iter_mut() {
                settle_part(part, ignored);
            }
        }
        other => *other = as_text(other).into(),
    }
}

fn settle_part(part: &mut Value, ignored: &Ignored) {
    let is_known = match kind(part) {
        "text" => part["text"].is_string(),
        "image_url" => part["image_url"].is_string() || part["image_url"]["url"].is_string(),
        _ => false,
    };
    if is_known {
        return;
    }
    // Texts of other APIs, and refusals.
    let text = match text_of(part) {
        Some(text) => text,
        None if kind(part) == "text" => String::new(),
        None => placeholder(kind(part), ignored),
    };
    *part = json!({"type": "text", "text": text});
}
