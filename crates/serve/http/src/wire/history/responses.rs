//! Items of OpenAI's API for responses.

use serde_json::{Map, Value, json};

use super::{
    as_text, follows_result, kind, placeholder, settle_arguments, settle_role, settle_text, text_of,
};
use crate::wire::advice::Ignored;
use crate::wire::error::ApiError;

const ROLES: &[&str] = &["user", "assistant", "system", "developer"];

/// The type of items that are left out.
const OMITTED: &str = "omitted";

/// Types of items that are of no use for the model, wherever they are.
const WITHOUT_TEXT: &[&str] = &[
    "code_interpreter_call",
    "compaction",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "item_reference",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "web_search_call",
];

/// Gives the items the shape that [`TypedItem`](crate::api::responses::TypedItem) describes.
///
/// # Errors
/// The last item is of a type that is not known: it may request something that the server cannot
/// do.
pub(super) fn settle(items: &mut [Value], ignored: &Ignored) -> Result<(), ApiError> {
    let last = items.len().saturating_sub(1);
    let mut roles = items.iter().rev().map(role_of);
    let is_of_result = roles.next() == Some("user") && follows_result(roles);
    for (index, item) in items.iter_mut().enumerate() {
        let is_last = index == last && !is_of_result;
        let Value::Object(members) = item else {
            if !is_last {
                *item = json!({"role": "user", "content": as_text(item)});
                ignored.note("input.type");
            }
            continue;
        };
        let of_type = members.get("type").and_then(Value::as_str).unwrap_or("message").to_owned();
        match of_type.as_str() {
            "message" => settle_message(members, is_last, ignored),
            "function_call" => {
                if !is_last {
                    settle_text(members, "call_id", "");
                    settle_text(members, "name", "unknown");
                }
                settle_arguments(members);
            }
            "reasoning" => settle_reasoning(members),
            "additional_tools" => settle_tools(members),
            "agent_message" => *item = agent_message(members, ignored),
            output if output.ends_with("_output") && members.contains_key("call_id") => {
                settle_output(members, ignored);
            }
            call if call.ends_with("_call") && has_text(members, "call_id") => {
                settle_call(call, members);
            }
            known if WITHOUT_TEXT.contains(&known) => *item = omitted(known, ignored),
            unknown if is_last => {
                let expected = "a type of item that is known";
                return Err(ApiError::expected(
                    &format!("input[{index}].type"),
                    expected,
                    &json!(unknown),
                ));
            }
            unknown => *item = other(unknown, members, ignored),
        }
    }
    Ok(())
}

/// The role that the message of an item has in other APIs.
fn role_of(item: &Value) -> &str {
    match kind(item) {
        output if output.ends_with("_output") => "tool",
        call if call.ends_with("_call") || call == "reasoning" => "assistant",
        _ => item["role"].as_str().unwrap_or(""),
    }
}

fn has_text(members: &Map<String, Value>, name: &str) -> bool {
    members.get(name).is_some_and(Value::is_string)
}

fn omitted(of_type: &str, ignored: &Ignored) -> Value {
    ignored.note(&format!("input.{of_type}"));
    json!({"type": OMITTED})
}

/// An item of a type that is not known: a message if it has a text, otherwise nothing.
fn other(of_type: &str, members: &Map<String, Value>, ignored: &Ignored) -> Value {
    ignored.note(&format!("input.{of_type}"));
    let text = ["content", "text", "summary", "output"]
        .into_iter()
        .find_map(|name| members.get(name).and_then(text_of).filter(|text| !text.is_empty()));
    match text {
        Some(text) => json!({"role": "user", "content": text}),
        None => json!({"type": OMITTED}),
    }
}

fn settle_message(members: &mut Map<String, Value>, is_last: bool, ignored: &Ignored) {
    if !is_last {
        settle_role(members, ROLES, ignored);
    }
    let is_question = is_last && members.get("role").is_some_and(|role| role == "user");
    if !is_question {
        settle_content(members, "content", is_last, ignored);
    }
}

/// The content of a message, or the output of a call.
fn settle_content(members: &mut Map<String, Value>, name: &str, is_last: bool, ignored: &Ignored) {
    match members.get_mut(name) {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => parts.iter_mut().for_each(|part| settle_part(part, ignored)),
        None | Some(Value::Null) if is_last => {}
        value => {
            let text = value.map_or(String::new(), |value| as_text(value));
            members.insert(name.to_owned(), text.into());
        }
    }
}

fn settle_part(part: &mut Value, ignored: &Ignored) {
    let is_known = match kind(part) {
        "input_text" | "output_text" | "reasoning_text" => part["text"].is_string(),
        "input_image" => part["image_url"].is_string(),
        _ => false,
    };
    if is_known {
        return;
    }
    // The content of a file is not text for the model.
    let text = text_of(part).filter(|_| kind(part) != "input_file");
    let text = text.unwrap_or_else(|| placeholder(kind(part), ignored));
    *part = json!({"type": "input_text", "text": text});
}

/// The reasoning: its parts of text, if it has some that can be read.
fn settle_reasoning(members: &mut Map<String, Value>) {
    let parts = members.remove("content").as_ref().and_then(|content| content.as_array().cloned());
    let texts = parts.into_iter().flatten().filter_map(|part| {
        let text = part["text"].as_str()?;
        Some(json!({"type": "reasoning_text", "text": text}))
    });
    members.insert("content".to_owned(), texts.collect());
}

/// Tools that are offered in the middle of the conversation.
fn settle_tools(members: &mut Map<String, Value>) {
    if !members.get("tools").is_some_and(Value::is_array) {
        members.insert("tools".to_owned(), json!([]));
    }
}

/// A message of another agent.
fn agent_message(members: &Map<String, Value>, ignored: &Ignored) -> Value {
    let author = members.get("author").and_then(Value::as_str).unwrap_or("another agent");
    let text = members.get("content").and_then(text_of);
    match text {
        Some(text) => json!({"role": "user", "content": format!("Message of {author}:\n{text}")}),
        None => omitted("agent_message", ignored),
    }
}

/// The result of any call.
fn settle_output(members: &mut Map<String, Value>, ignored: &Ignored) {
    members.insert("type".to_owned(), "function_call_output".into());
    settle_text(members, "call_id", "");
    if !members.contains_key("output") {
        let names = ["tools", "result", "content"];
        let found = names.into_iter().find_map(|name| members.remove(name));
        members.insert(
            "output".to_owned(),
            found.map_or(Value::Null, |found| found.to_string().into()),
        );
    }
    settle_content(members, "output", false, ignored);
}

/// A call of a tool that is not a function, in the form of a function call.
fn settle_call(of_type: &str, members: &mut Map<String, Value>) {
    if !has_text(members, "name") {
        members.insert("name".to_owned(), of_type.trim_end_matches("_call").into());
    }
    let found = ["input", "arguments", "action", "operation"]
        .into_iter()
        .find_map(|name| members.remove(name).map(|value| (name, value)));
    let arguments = match found {
        Some(("input", input)) => json!({"input": input}),
        Some((_, value)) => value,
        None => Value::Null,
    };
    members.insert("arguments".to_owned(), arguments);
    members.insert("type".to_owned(), "function_call".into());
    settle_arguments(members);
}
