//! Makes the messages of a conversation acceptable for a chat template.
//!
//! Clients send their whole history with each request. One old message that a template refuses, or
//! loses, would end the conversation for good. Messages that a template cannot show as they are get
//! another form here: instructions in the middle become a part of the message before them, roles
//! are made to alternate, calls and results become texts, and so on.
//!
//! Each change depends on the capabilities of the template ([`Capabilities`]) and on the messages
//! just before it, never on later ones. So old messages become the same text when a turn is added.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Map, Value, json};

use super::capabilities::{CallContent, Capabilities};
use super::describe;
use super::messages::text_of;
use crate::json::parse_object;

/// Placeholder for a message of the user before a conversation that begins with the assistant.
const NO_QUESTION: &str = "(The conversation continues.)";
/// Placeholder for the text of an answer that is empty or missing between a result and the user's
/// next message.
const NO_TEXT: &str = "(no text)";
/// Placeholder for the result of a call that has none.
const NO_RESULT: &str = "(no result)";
/// Length of an id as Mistral's templates want it, in characters.
const SHORT_ID: usize = 9;

/// Gives the messages a form that the template can show. `described` are the tools, if the template
/// does not get them: they are described in the first message.
pub(super) fn settle(
    mut messages: Vec<Value>,
    described: Option<&[Value]>,
    can: &Capabilities,
) -> Vec<Value> {
    let (calls, results) = match described {
        Some(_) => (false, false),
        None => (can.calls, can.results),
    };
    settle_arguments(&mut messages, can.object_arguments || !calls);
    if !can.any_ids {
        shorten_ids(&mut messages);
    }
    if calls && !can.several_calls {
        messages = split_calls(messages);
    }
    if calls && results && !can.unanswered_calls {
        messages = answer_calls(messages, can);
    }
    let as_text = |is_orphan: bool| !results || (is_orphan && !can.orphans);
    messages = describe::calls_as_text(messages, !calls, as_text);
    if let Some(tools) = described {
        describe::add_tools(&mut messages, tools);
    }
    settle_contents(&mut messages, can);
    messages = settle_systems(messages, can);
    settle_roles(messages, can)
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

/// The calls of a message.
fn calls_of(message: &Value) -> &[Value] {
    message["tool_calls"].as_array().map_or(&[], Vec::as_slice)
}

fn calls_mut(message: &mut Value) -> &mut [Value] {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    calls.map_or(&mut [], Vec::as_mut_slice)
}

/// Appends a paragraph to the content of a message.
pub(super) fn append(message: &mut Value, text: &str) {
    match &mut message["content"] {
        Value::Array(parts) => parts.push(json!({"type": "text", "text": format!("\n\n{text}")})),
        content => {
            let own = text_of(content);
            let separator = if own.is_empty() { "" } else { "\n\n" };
            *content = format!("{own}{separator}{text}").into();
        }
    }
}

/// Appends the content of another message.
pub(super) fn append_content(message: &mut Value, content: &Value) {
    let Value::Array(added) = content else { return append(message, &text_of(content)) };
    let own = match message["content"].take() {
        Value::Array(parts) => parts,
        own => vec![json!({"type": "text", "text": text_of(&own)})],
    };
    let between = json!({"type": "text", "text": "\n\n"});
    message["content"] = own.into_iter().chain([between]).chain(added.iter().cloned()).collect();
}

/// In OpenAI's API, the arguments of a call are a string of JSON. Templates expect the object, or
/// the string if not `objects`. Arguments that are not an object are shown as one.
fn settle_arguments(messages: &mut [Value], objects: bool) {
    for message in messages {
        for call in calls_mut(message) {
            let function = call.get_mut("function").and_then(Value::as_object_mut);
            let Some(function) = function else { continue };
            let given = function.entry("arguments").or_insert(Value::Null);
            let settled = match (objects, &*given) {
                (true, given) => parse_object(given),
                (false, Value::String(text)) if !text.trim().is_empty() => continue,
                (false, given) => parse_object(given).to_string().into(),
            };
            *given = settled;
        }
    }
}

/// Replaces ids of calls by nine letters and digits that are the same in each request.
fn shorten_ids(messages: &mut [Value]) {
    let shorten = |id: &mut Value| {
        let Some(text) = id.as_str() else { return };
        let is_short =
            text.len() == SHORT_ID && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !is_short {
            *id = short_id(text).into();
        }
    };
    for message in messages {
        if let Some(id) = message.get_mut("tool_call_id") {
            shorten(id);
        }
        for call in calls_mut(message) {
            if let Some(id) = call.get_mut("id") {
                shorten(id);
            }
        }
    }
}

fn short_id(id: &str) -> String {
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    let mut rest = hasher.finish();
    let digits = std::iter::from_fn(|| {
        let digit = char::from_digit((rest % 36) as u32, 36);
        rest /= 36;
        digit
    });
    digits.take(SHORT_ID).collect()
}

/// Makes a message of its own of each call, followed by its result.
fn split_calls(messages: Vec<Value>) -> Vec<Value> {
    let mut split = Vec::with_capacity(messages.len());
    let mut rest = messages.into_iter().peekable();
    while let Some(mut message) = rest.next() {
        if calls_of(&message).len() < 2 {
            split.push(message);
            continue;
        }
        let calls = match message["tool_calls"].take() {
            Value::Array(calls) => calls,
            _ => Vec::new(),
        };
        let mut results = Vec::new();
        while let Some(result) = rest.next_if(|next| role(next) == "tool") {
            results.push(result);
        }
        for call in calls {
            let own = results.iter().position(|result| result["tool_call_id"] == call["id"]);
            message["tool_calls"] = json!([call]);
            split.push(message);
            split.extend(own.map(|own| results.remove(own)));
            message = json!({"role": "assistant", "content": null});
        }
        // Results that name none of the calls.
        split.append(&mut results);
    }
    split
}

/// Gives each call that is not the last message's a result.
fn answer_calls(messages: Vec<Value>, can: &Capabilities) -> Vec<Value> {
    let mut answered = Vec::with_capacity(messages.len());
    // The ids of the last calls that have no result yet.
    let mut open: Vec<Value> = Vec::new();
    for message in messages {
        if role(&message) == "tool" {
            let own = open.iter().position(|id| *id == message["tool_call_id"]);
            if !open.is_empty() {
                open.remove(own.unwrap_or(0));
            }
        } else {
            for id in open.drain(..) {
                let content = can.content(NO_RESULT.to_owned());
                answered.push(json!({"role": "tool", "content": content, "tool_call_id": id}));
            }
            open = calls_of(&message).iter().map(|call| call["id"].clone()).collect();
        }
        answered.push(message);
    }
    answered
}

/// Content of the assistant that is missing or empty.
fn settle_contents(messages: &mut [Value], can: &Capabilities) {
    for message in messages {
        if role(message) != "assistant" {
            if message["content"].is_null() {
                message["content"] = can.content(String::new());
            }
            continue;
        }
        let content = &message["content"];
        let is_empty = content.is_null()
            || content.as_array().is_some_and(Vec::is_empty)
            || (!content.is_array() && text_of(content).is_empty());
        if !is_empty {
            continue;
        }
        let has_calls = !calls_of(message).is_empty();
        let content = match (has_calls, can.call_content) {
            (true, CallContent::Any) => continue,
            (true, CallContent::Null) => Value::Null,
            (false, _) if !can.empty_answers => can.content(NO_TEXT.to_owned()),
            (true, CallContent::Empty) | (false, _) => can.content(String::new()),
        };
        message["content"] = content;
    }
}

/// Moves instructions to where the template shows them.
fn settle_systems(messages: Vec<Value>, can: &Capabilities) -> Vec<Value> {
    let leading = messages.iter().take_while(|message| role(message) == "system").count();
    let mut rest = messages.into_iter();
    let mut settled: Vec<Value> = Vec::new();
    for message in rest.by_ref().take(leading) {
        match settled.last_mut() {
            Some(first) if !can.systems => append_content(first, &message["content"]),
            _ => settled.push(message),
        }
    }
    if !can.system
        && let Some(mut first) = settled.pop()
    {
        first["role"] = "user".into();
        let mut next = rest.next();
        if let Some(question) = next.take_if(|next| role(next) == "user") {
            append_content(&mut first, &question["content"]);
        }
        settled.push(first);
        settled.extend(next);
    }
    for message in rest {
        if can.system_between || role(&message) != "system" {
            settled.push(message);
            continue;
        }
        let text = format!("<system>\n{}\n</system>", text_of(&message["content"]));
        match settled.last_mut().filter(|last| matches!(role(last), "user" | "tool")) {
            Some(last) => append(last, &text),
            None => settled.push(json!({"role": "user", "content": can.content(text)})),
        }
    }
    settled
}

/// Makes the roles alternate as the template wants it.
fn settle_roles(messages: Vec<Value>, can: &Capabilities) -> Vec<Value> {
    let mut settled: Vec<Value> = Vec::with_capacity(messages.len());
    let say =
        |role: &str, text: &str| json!({"role": role, "content": can.content(text.to_owned())});
    for message in messages {
        let before = settled.last().map_or("system", role);
        match (before, role(&message)) {
            ("system", "assistant" | "tool") if !can.assistant_first => {
                settled.push(say("user", NO_QUESTION));
            }
            ("user", "user") if !can.user_runs => {
                merge(settled.last_mut(), message);
                continue;
            }
            ("assistant", "assistant") if !can.assistant_runs => {
                merge(settled.last_mut(), message);
                continue;
            }
            // A result that follows an answer, and no call, is not a turn of its own.
            ("tool", "user") if !can.user_after_result && !follows_answer(&settled) => {
                settled.push(say("assistant", NO_TEXT));
            }
            _ => {}
        }
        settled.push(message);
    }
    settled
}

/// Whether the last message apart from results is an answer without calls.
fn follows_answer(messages: &[Value]) -> bool {
    let said = messages.iter().rfind(|message| role(message) != "tool");
    said.is_some_and(|said| role(said) == "assistant" && calls_of(said).is_empty())
}

/// Merges a message into the one before, of the same role.
fn merge(before: Option<&mut Value>, mut message: Value) {
    let Some(before) = before else { return };
    let content = message["content"].take();
    let is_empty = content.is_null() || content.as_str() == Some("");
    if !is_empty {
        append_content(before, &content);
    }
    let (Some(own), Value::Object(added)) = (before.as_object_mut(), message) else { return };
    merge_fields(own, added);
}

/// Adds the calls and the reasoning of a message to those of the one before. Other members are
/// those of the first.
fn merge_fields(own: &mut Map<String, Value>, added: Map<String, Value>) {
    for (name, value) in added {
        match (own.get_mut(&name), value) {
            (Some(Value::Array(calls)), Value::Array(more)) if name == "tool_calls" => {
                calls.extend(more);
            }
            (Some(Value::String(text)), Value::String(more)) if name == "reasoning_content" => {
                text.push('\n');
                text.push_str(&more);
            }
            (None, value) => drop(own.insert(name, value)),
            (Some(_), _) => {}
        }
    }
}
