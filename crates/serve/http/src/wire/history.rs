//! Makes the history of a conversation acceptable, before its request is parsed.
//!
//! An agent sends its whole history with each request. If the server refused an old message, every
//! later request of the conversation would fail, and the agent cannot take the message back. So the
//! rule is: strict for parameters and for the last message, tolerant for everything before it. A
//! last message that only adds to the results of calls counts as an old one.
//!
//! 1. [`settle`] gives old messages, blocks and items the shape that the API's types describe.
//!    Content that the types do not know becomes its text, if it has any, or else a short
//!    placeholder. The number of messages stays the same, so that errors name the right one.
//! 2. [`conversation`] removes from the messages of all APIs what must not reach the model: images,
//!    if it takes none, and a line of some clients that would keep prefixes from being shared.
//! 3. The chat template's own limits are left to the engine, which changes messages that the
//!    template would refuse or lose.
//!
//! Content that is left out or replaced is named in the header `x-stolon-ignored`.

mod chat;
mod messages;
mod ollama;
mod responses;

use serde_json::{Map, Value, json};
use stolon::{ChatMessage, Engine, MessageContent};

use crate::api::neutral::Scope;
use crate::wire::advice::Ignored;
use crate::wire::error::{ApiError, cut};

/// Some clients begin the instructions with a line about themselves that differs in every request,
/// so that no prefix could be shared. Only Anthropic's own service uses it.
const BILLING: &str = "x-anthropic-billing-header:";

/// Maximum length of a type that a placeholder names, in bytes.
const KIND_MAX: usize = 40;

/// Gives the old messages of a request's body the shape that the API describes.
///
/// # Errors
/// The last message is of a type that is not known.
pub(crate) fn settle(scope: Scope, body: &mut Value, ignored: &Ignored) -> Result<(), ApiError> {
    let list = |name: &str, body: &mut Value| match body.get_mut(name) {
        Some(Value::Array(list)) => std::mem::take(list),
        _ => Vec::new(),
    };
    let name = if scope == Scope::Responses { "input" } else { "messages" };
    let mut messages = list(name, body);
    if messages.is_empty() {
        return Ok(());
    }
    let last = messages.len() - 1;
    match scope {
        Scope::Responses => responses::settle(&mut messages, ignored)?,
        Scope::Messages => {
            for (index, turn) in messages.iter_mut().enumerate() {
                messages::settle(turn, index == last, ignored);
            }
        }
        // The last message can be corrected.
        Scope::Ollama => {
            messages[..last].iter_mut().for_each(|message| ollama::settle(message, ignored));
        }
        _ => chat::settle(&mut messages, ignored),
    }
    body[name] = Value::Array(messages);
    if let Some(system) = body.get_mut("system").filter(|_| scope == Scope::Messages) {
        messages::settle_system(system, ignored);
    }
    Ok(())
}

/// Whether a message of the user follows the result of a call; `roles` are those of the messages
/// before it, newest first. Clients put there what their API has no place for in a result, for
/// example a picture that was read, and cannot take it back either.
fn follows_result<'a>(roles: impl Iterator<Item = &'a str>) -> bool {
    let mut roles = roles.take_while(|role| *role != "assistant");
    roles.any(|role| matches!(role, "tool" | "function"))
}

/// The messages of a request as the model gets them. With `keeps_images`, an image of the user in
/// the last message stays, so that a model that takes none refuses it, unless it is of a result.
pub(crate) fn conversation(
    engine: &Engine,
    mut messages: Vec<ChatMessage>,
    keeps_images: bool,
    ignored: &Ignored,
) -> Vec<ChatMessage> {
    let takes_images = engine.model_info().takes_images;
    let last = messages.len().saturating_sub(1);
    let mut roles = messages.iter().rev().map(|message| message.role.as_str());
    let is_users_own = roles.next() == Some("user") && !follows_result(roles);
    for (index, message) in messages.iter_mut().enumerate() {
        if message.role == "system" {
            cut_billing(message);
        }
        let keeps_own = keeps_images && index == last && is_users_own;
        if !(takes_images || keeps_own) {
            omit_images(message, ignored);
        }
    }
    messages
}

/// Replaces the images of a message by placeholders.
fn omit_images(message: &mut ChatMessage, ignored: &Ignored) {
    let Some(MessageContent::Parts(parts)) = &mut message.content else { return };
    for part in parts {
        if part["type"] == "image_url" {
            ignored.note("messages.image");
            *part = json!({"type": "text", "text": "[image omitted: the model takes no images]"});
        }
    }
}

/// Removes the line of some clients about themselves from instructions.
fn cut_billing(message: &mut ChatMessage) {
    match &mut message.content {
        Some(MessageContent::Text(text)) => {
            if let Some(rest) = without_billing(text) {
                *text = rest.to_owned();
            }
        }
        Some(MessageContent::Parts(parts)) => {
            let Some(first) = parts.first_mut() else { return };
            let Some(rest) = first["text"].as_str().and_then(without_billing) else { return };
            if rest.is_empty() {
                parts.remove(0);
            } else {
                first["text"] = rest.to_owned().into();
            }
        }
        None => {}
    }
}

/// The text after a client's line about itself; `None` if it does not begin with such a line. The
/// line is a list of `name=value;`, so that text which a proxy has joined to it is kept.
fn without_billing(text: &str) -> Option<&str> {
    let mut rest = text.trim_start().strip_prefix(BILLING)?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    loop {
        let entry = rest.trim_start_matches([' ', '\t']);
        let (name, after) = entry.split_at(entry.find(|c| !is_name(c)).unwrap_or(entry.len()));
        let Some(value) = after.strip_prefix('=').filter(|_| !name.is_empty()) else {
            return Some(entry.trim_start());
        };
        let end = value.find(|c: char| c == ';' || c.is_whitespace()).unwrap_or(value.len());
        rest = value[end..].strip_prefix(';').unwrap_or(&value[end..]);
    }
}

/// The placeholder for a part of a message that cannot be shown to the model. The part is also
/// noted as ignored.
fn placeholder(kind: &str, ignored: &Ignored) -> String {
    let kind = cut(kind.to_owned(), KIND_MAX);
    ignored.note(&format!("messages.{kind}"));
    format!("[{kind} omitted]")
}

/// The type of a part, a block or an item.
fn kind(part: &Value) -> &str {
    part["type"].as_str().unwrap_or("part")
}

/// The text of a value of any shape; `None` if it has none.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(items) => {
            let texts: Vec<String> = items.iter().filter_map(text_of).collect();
            (!texts.is_empty()).then(|| texts.join("\n"))
        }
        Value::Object(members) => {
            let names = ["title", "text", "refusal", "summary", "content", "output", "url"];
            let texts = names.iter().filter_map(|name| members.get(*name).and_then(text_of));
            let texts: Vec<String> = texts.filter(|text| !text.is_empty()).collect();
            (!texts.is_empty()).then(|| texts.join("\n"))
        }
        _ => None,
    }
}

/// Any value as text: `null` as the empty text, and a value without text as JSON.
fn as_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        value => text_of(value).unwrap_or_else(|| value.to_string()),
    }
}

/// Makes the arguments of a call a string, as OpenAI's APIs have it.
fn settle_arguments(function: &mut Map<String, Value>) {
    let arguments = function.entry("arguments").or_insert(Value::Null);
    match arguments {
        Value::String(_) => {}
        Value::Null => *arguments = "{}".into(),
        other => *other = other.to_string().into(),
    }
}

/// Replaces a member that is not a string by `default`.
fn settle_text(members: &mut Map<String, Value>, name: &str, default: &str) {
    if !members.get(name).is_some_and(Value::is_string) {
        members.insert(name.to_owned(), default.into());
    }
}

/// Replaces the role of an old message by the user's, unless it is among `known`.
fn settle_role(message: &mut Map<String, Value>, known: &[&str], ignored: &Ignored) {
    let role = message.get("role").and_then(Value::as_str);
    if !role.is_some_and(|role| known.contains(&role)) {
        ignored.note("messages.role");
        message.insert("role".to_owned(), "user".into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a client's line about itself is cut, and text that is joined to it in any way is kept.
    #[test]
    fn lines_about_clients_are_cut() {
        for (text, expected) in [
            ("x-anthropic-billing-header: v=2.1.3; c=cli; h=0a;\nBe brief.", Some("Be brief.")),
            ("x-anthropic-billing-header: v=2.1.3; c=cli; h=0a; Be a=b; c.", Some("Be a=b; c.")),
            ("x-anthropic-billing-header: v=2;h=0a;Be brief.", Some("Be brief.")),
            ("x-anthropic-billing-header: v=2; h=0a\n\n  Be brief.", Some("Be brief.")),
            ("x-anthropic-billing-header: v=2; h=0a Be brief.", Some("Be brief.")),
            ("x-anthropic-billing-header: a=1", Some("")),
            ("x-anthropic-billing-header:", Some("")),
            ("Be brief.\nx-anthropic-billing-header: a=1;", None),
        ] {
            assert_eq!(without_billing(text), expected, "{text}");
        }
    }
}
