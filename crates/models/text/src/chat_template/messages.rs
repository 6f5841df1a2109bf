//! Converts the messages of a conversation to the values that a chat template reads.

use serde_json::{Map, Value, json};

use super::capabilities::Capabilities;
use crate::{ChatMessage, ChatTemplateError, MessageContent};

/// Converts the messages to JSON, with their content in a form that the template supports.
pub(super) fn to_values(
    messages: &[ChatMessage],
    can: &Capabilities,
) -> Result<Vec<Value>, ChatTemplateError> {
    messages
        .iter()
        .map(|message| {
            let content = match &message.content {
                None => Value::Null,
                Some(MessageContent::Text(text)) => can.content(text.clone()),
                Some(MessageContent::Parts(parts)) if parts.is_empty() => {
                    can.content(String::new())
                }
                Some(MessageContent::Parts(parts)) if can.parts => {
                    match can.several_parts.contains(&message.role) {
                        true => json!(parts),
                        // Images are not part of a text.
                        false => joined(parts).map_or(json!(parts), |text| can.content(text)),
                    }
                }
                Some(MessageContent::Parts(parts)) => json!(joined(parts)?),
            };
            let mut fields = Map::new();
            fields.insert("role".to_owned(), json!(message.role));
            fields.insert("content".to_owned(), content);
            let extra = message.extra.iter().map(|(name, value)| (name.clone(), value.clone()));
            fields.extend(extra);
            Ok(Value::Object(fields))
        })
        .collect()
}

/// Text as content: a string for a template that supports `strings`, or else a part.
pub(super) fn content(text: String, strings: bool) -> Value {
    if strings { text.into() } else { json!([{"type": "text", "text": text}]) }
}

/// The text of a content.
pub(super) fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

/// Joins the parts of a content that have become several, for the roles whose content must not have
/// more than one text.
pub(super) fn join_parts(messages: &mut [Value], can: &Capabilities) {
    for message in messages {
        let role = message["role"].as_str().unwrap_or_default();
        if !can.parts || can.several_parts.contains(role) {
            continue;
        }
        let Value::Array(parts) = &message["content"] else { continue };
        if parts.len() > 1 && parts.iter().all(|part| part["text"].is_string()) {
            message["content"] = can.content(text_of(&message["content"]));
        }
    }
}

/// The usual name of the reasoning of an answer.
pub(super) const REASONING: &str = "reasoning_content";

/// Gives the reasoning of earlier answers the name that the template reads.
pub(super) fn name_reasoning(messages: &mut [Value], member: &str) {
    for message in messages {
        let Some(message) = message.as_object_mut() else { continue };
        // The template of gpt-oss refuses a message with calls that has both.
        let has_calls = message.get("tool_calls").is_some_and(Value::is_array);
        let has_text = message.get("content").is_some_and(|content| !text_of(content).is_empty());
        if message.contains_key(member) || (member == "thinking" && has_calls && has_text) {
            continue;
        }
        if let Some(reasoning) = message.get(REASONING).filter(|value| value.is_string()).cloned() {
            message.insert(member.to_owned(), reasoning);
        }
    }
}

/// Moves the results of calls into the message with the calls, as its member `tool_responses`.
pub(super) fn with_responses(messages: Vec<Value>) -> Vec<Value> {
    let mut moved: Vec<Value> = Vec::with_capacity(messages.len());
    for message in messages {
        let is_result = message["role"] == "tool";
        let calls = moved.last_mut().filter(|last| is_result && last["tool_calls"].is_array());
        match calls.and_then(Value::as_object_mut) {
            Some(calls) => add_response(calls, &message),
            None => moved.push(message),
        }
    }
    moved
}

fn add_response(message: &mut Map<String, Value>, result: &Value) {
    let earlier = message.get("tool_responses").and_then(Value::as_array).map_or(0, Vec::len);
    let calls = message.get("tool_calls").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let has_id = |call: &&Value| call["id"].is_string() && call["id"] == result["tool_call_id"];
    let call = calls.iter().find(has_id).or(calls.get(earlier));
    let name = call.map_or(&result["name"], |call| &call["function"]["name"]).clone();
    let text = text_of(&result["content"]);
    let object = serde_json::from_str(&text).ok().filter(Value::is_object);
    let response = json!({"name": name, "response": object.unwrap_or(Value::String(text))});
    let responses = message.entry("tool_responses").or_insert_with(|| json!([]));
    if let Value::Array(responses) = responses {
        responses.push(response);
    }
}

/// Marks the end of the last message's content. A conversation is not expected to contain it. If
/// one does, the text is cut at the last occurrence.
const END_MARK: &str = "\u{10fffd}5tolon end\u{10fffd}";

/// Adds a mark to the content of the last message, which has to be the assistant's.
pub(super) fn mark_end(messages: &mut [Value]) -> Result<(), ChatTemplateError> {
    let last = messages.last_mut().filter(|message| message["role"] == "assistant");
    let content = last.map(|message| &mut message["content"]);
    let text = match content {
        Some(Value::Array(parts)) => parts.last_mut().map(|part| &mut part["text"]),
        content => content,
    };
    if let Some(Value::String(text)) = text {
        text.push_str(END_MARK);
        return Ok(());
    }
    let reason = "expected a text of the assistant as the last message, to be continued";
    Err(ChatTemplateError::Failed { reason: reason.to_owned() })
}

/// Cuts a rendered text where the content of the last message ends.
pub(super) fn cut_at_mark(text: &mut String) -> Result<(), ChatTemplateError> {
    let end = text.rfind(END_MARK).ok_or_else(|| ChatTemplateError::Failed {
        reason: "the template does not contain the text of the last message".to_owned(),
    })?;
    text.truncate(end);
    Ok(())
}

/// The text of all parts, joined by newlines.
fn joined(parts: &[Value]) -> Result<String, ChatTemplateError> {
    let texts = parts
        .iter()
        .map(|part| {
            part["text"].as_str().or(part.as_str()).ok_or_else(|| {
                let got = part["type"].as_str().unwrap_or("an unknown type").to_owned();
                ChatTemplateError::UnsupportedPart { got }
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join("\n"))
}
