//! Converts the messages of a conversation to the values that a chat template reads.

use serde_json::{Map, Value, json};

use crate::{ChatMessage, ChatTemplateError, MessageContent};

/// Converts the messages to JSON, with their content in a form that the template supports.
pub(super) fn to_template_values(
    messages: &[ChatMessage],
    takes_parts: bool,
    takes_strings: bool,
) -> Result<Vec<Value>, ChatTemplateError> {
    messages
        .iter()
        .map(|message| {
            let content = match &message.content {
                None => Value::Null,
                Some(MessageContent::Text(text)) if takes_strings => json!(text),
                Some(MessageContent::Text(text)) => json!([{"type": "text", "text": text}]),
                Some(MessageContent::Parts(parts)) if takes_parts => json!(parts),
                Some(MessageContent::Parts(parts)) => json!(joined(parts)?),
            };
            let mut fields = Map::new();
            fields.insert("role".to_owned(), json!(message.role));
            fields.insert("content".to_owned(), content);
            for (name, value) in &message.extra {
                let value =
                    if name == "tool_calls" { with_parsed_arguments(value) } else { value.clone() };
                fields.insert(name.clone(), value);
            }
            Ok(Value::Object(fields))
        })
        .collect()
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

/// In OpenAI's API, the arguments of a call are a string of JSON. Templates expect the object.
fn with_parsed_arguments(calls: &Value) -> Value {
    let mut calls = calls.clone();
    for call in calls.as_array_mut().into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        if let Some(Ok(parsed @ Value::Object(_))) = arguments.as_str().map(serde_json::from_str) {
            *arguments = parsed;
        }
    }
    calls
}
