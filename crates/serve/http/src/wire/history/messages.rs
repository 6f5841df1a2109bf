//! Turns of Anthropic's API.
//!
//! A turn merges several steps: the results of calls, the additions of the client, and the words of
//! the user. Clients merge a turn that was refused with the next one. So types of blocks that are
//! not known are not an error in the last turn either.

use serde_json::{Map, Value, json};

use super::{as_text, kind, placeholder, settle_role, settle_text, text_of};
use crate::wire::advice::Ignored;

/// Gives a turn the shape that [`TurnMessage`](crate::api::messages::TurnMessage) describes.
pub(super) fn settle(turn: &mut Value, is_last: bool, ignored: &Ignored) {
    let Value::Object(members) = turn else {
        if !is_last {
            *turn = json!({"role": "user", "content": as_text(turn)});
            ignored.note("messages.role");
        }
        return;
    };
    if !is_last {
        settle_role(members, &["user", "assistant", "system"], ignored);
    }
    let is_assistant = members.get("role").is_some_and(|role| role == "assistant");
    match members.get_mut("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(blocks)) => {
            for block in blocks {
                settle_block(block, is_assistant, is_last, ignored);
            }
        }
        content if !is_last => {
            let text = content.map_or(String::new(), |content| as_text(content));
            members.insert("content".to_owned(), text.into());
        }
        _ => {}
    }
}

/// Instructions, which may have blocks of text only.
pub(super) fn settle_system(system: &mut Value, ignored: &Ignored) {
    for block in system.as_array_mut().into_iter().flatten() {
        if !is_well_formed(block) || kind(block) != "text" {
            *block = text_block(shown(block, false, ignored));
        }
    }
}

fn settle_block(block: &mut Value, is_assistant: bool, is_last: bool, ignored: &Ignored) {
    match kind(block) {
        "tool_result" => settle_result(block, "tool_use_id", ignored),
        // A call that Anthropic's service or a server of tools executes has its result in the same
        // turn.
        "server_tool_use" | "mcp_tool_use" if is_assistant => {
            if let Value::Object(call) = block {
                call.insert("type".to_owned(), "tool_use".into());
            }
        }
        of_server if is_assistant && of_server.ends_with("_tool_result") => {
            settle_result(block, "tool_use_id", ignored);
        }
        _ => {}
    }
    match kind(block) {
        "tool_use" if is_assistant => {
            if let Value::Object(call) = block
                && !is_last
            {
                settle_text(call, "id", "");
                settle_text(call, "name", "unknown");
            }
            if let Value::Object(call) = block {
                call.entry("input").or_insert_with(|| json!({}));
            }
        }
        "thinking" if is_assistant => {
            if let Value::Object(thinking) = block {
                settle_text(thinking, "thinking", "");
                thinking.remove("signature");
            }
        }
        "redacted_thinking" if is_assistant => *block = json!({"type": "redacted_thinking"}),
        "tool_result" => {}
        "text" | "image" if is_well_formed(block) => {}
        // Blocks that the client can correct, because they were not sent before.
        "text" | "image" | "tool_use" | "thinking" if is_last => {}
        _ => *block = text_block(shown(block, is_assistant, ignored)),
    }
}

/// The result of a call: its content has blocks of text and images.
fn settle_result(block: &mut Value, id: &str, ignored: &Ignored) {
    let Value::Object(members) = block else { return };
    members.insert("type".to_owned(), "tool_result".into());
    settle_text(members, id, "");
    if !members.get("is_error").is_some_and(Value::is_boolean) {
        members.remove("is_error");
    }
    let content = members.entry("content").or_insert(Value::Null);
    match content {
        Value::Null | Value::String(_) => {}
        Value::Array(blocks) => {
            for block in blocks.iter_mut() {
                if !is_well_formed(block) {
                    *block = text_block(shown(block, false, ignored));
                }
            }
        }
        other => *other = as_text(other).into(),
    }
}

/// Whether a block is a text or an image of the form that the API describes.
fn is_well_formed(block: &Value) -> bool {
    match kind(block) {
        "text" => block["text"].is_string(),
        "image" => {
            let source = &block["source"];
            match kind(source) {
                "base64" => source["data"].is_string() && source["media_type"].is_string(),
                "url" => source["url"].is_string(),
                _ => false,
            }
        }
        _ => false,
    }
}

fn text_block(text: String) -> Value {
    json!({"type": "text", "text": text})
}

/// A block of any type as text.
fn shown(block: &Value, is_assistant: bool, ignored: &Ignored) -> String {
    let text = match kind(block) {
        "document" => document(block),
        "search_result" => {
            let lines = ["title", "source", "content"].map(|name| as_text(&block[name]));
            Some(lines.join("\n"))
        }
        "tool_reference" => block["tool_name"].as_str().map(|name| format!("[tool: {name}]")),
        "text" => Some(as_text(&block["text"])),
        // Binary data is not text, even if it is a string.
        "image" | "redacted_thinking" => None,
        _ => text_of(block),
    };
    match text {
        Some(text) => text,
        // Words that the model did not say would teach it to say them.
        None if is_assistant => {
            placeholder(kind(block), ignored);
            String::new()
        }
        None => placeholder(kind(block), ignored),
    }
}

/// The text of a document, if it is one of text.
fn document(block: &Value) -> Option<String> {
    let source: &Map<String, Value> = block["source"].as_object()?;
    let text = match source.get("type").and_then(Value::as_str)? {
        "text" => source.get("data").and_then(Value::as_str).map(str::to_owned),
        "content" => source.get("content").and_then(text_of),
        _ => None,
    }?;
    let title = block["title"].as_str().map(|title| format!("{title}\n"));
    Some(title.unwrap_or_default() + &text)
}
