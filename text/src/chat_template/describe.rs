//! Tools for models whose chat template does not know them. They are described in the system
//! message, and earlier calls and their results become texts of the assistant and the user. Calls
//! have the form of [`ToolCallFormat::Hermes`](crate::ToolCallFormat::Hermes).

use serde_json::{Value, json};

/// What precedes the list of tools.
const BEFORE: &str = "You can call functions. These are the functions that you may call, as JSON:

<tools>";
/// What follows it.
const AFTER: &str = r#"</tools>

To call a function, write its name and its arguments as a JSON object between these tags. Write one such block for each call.

<tool_call>
{"name": "the function's name", "arguments": {"an argument's name": "its value"}}
</tool_call>

The results follow in the next message, between <tool_response> and </tool_response>. If no function helps, answer without a call."#;

/// Puts the tools and earlier calls of a conversation into its messages. `takes_system` tells
/// whether the template shows the role `system`; if not, the tools are described in the first
/// message of the user.
pub(super) fn describe(messages: Vec<Value>, tools: &[Value], takes_system: bool) -> Vec<Value> {
    let mut described = Vec::with_capacity(messages.len() + 1);
    // Whether the last message is one of the user that has results of calls.
    let mut has_results = false;
    for message in messages {
        match message["role"].as_str() {
            Some("tool") => {
                add_result(&mut described, &message["content"], has_results);
                has_results = true;
            }
            Some("user") if has_results => {
                append(described.last_mut(), &text_of(&message["content"]));
            }
            _ => {
                described.push(with_calls(message));
                has_results = false;
            }
        }
    }
    if !tools.is_empty() {
        let tools: String = tools.iter().map(|tool| format!("\n{tool}")).collect();
        add_instructions(&mut described, format!("{BEFORE}{tools}\n{AFTER}"), takes_system);
    }
    described
}

/// Adds the result of a call. All results after one message of the assistant are one message of the
/// user, because many templates accept only roles that alternate. `has_results` tells whether the
/// last message is that one.
fn add_result(messages: &mut Vec<Value>, content: &Value, has_results: bool) {
    let result = format!("<tool_response>\n{}\n</tool_response>", text_of(content));
    if has_results {
        append(messages.last_mut(), &result);
    } else {
        messages.push(json!({"role": "user", "content": result}));
    }
}

/// The message with its calls as text.
fn with_calls(mut message: Value) -> Value {
    let Some(fields) = message.as_object_mut() else { return message };
    fields.remove("tool_call_id");
    let Some(Value::Array(calls)) = fields.remove("tool_calls") else { return message };
    let mut text = text_of(&message["content"]);
    for call in &calls {
        let function = &call["function"];
        let call = json!({"name": function["name"], "arguments": function["arguments"]});
        text.push_str(if text.is_empty() { "" } else { "\n" });
        text.push_str(&format!("<tool_call>\n{call}\n</tool_call>"));
    }
    message["content"] = text.into();
    message
}

fn add_instructions(messages: &mut Vec<Value>, text: String, takes_system: bool) {
    let role = if takes_system { "system" } else { "user" };
    match messages.iter_mut().find(|message| message["role"] == role) {
        Some(message) if takes_system => append(Some(message), &text),
        Some(message) => {
            message["content"] = format!("{text}\n\n{}", text_of(&message["content"])).into();
        }
        None => messages.insert(0, json!({"role": role, "content": text})),
    }
}

/// Appends a paragraph to the content of a message.
fn append(message: Option<&mut Value>, text: &str) {
    let Some(content) = message.map(|message| &mut message["content"]) else { return };
    match content {
        Value::Array(parts) => parts.push(json!({"type": "text", "text": format!("\n\n{text}")})),
        content => *content = format!("{}\n\n{text}", text_of(content)).into(),
    }
}

/// The text of a content.
pub(super) fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: tools, calls and results become texts, and the roles alternate.
    #[test]
    fn a_conversation_with_calls_becomes_text() {
        let call = json!({"function": {"name": "f", "arguments": {"a": 1}}, "id": "1"});
        let messages = vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": [{"type": "text", "text": "Hi"}]}),
            json!({"role": "assistant", "content": null, "tool_calls": [call, call]}),
            json!({"role": "tool", "content": "one", "tool_call_id": "1"}),
            json!({"role": "tool", "content": "two", "tool_call_id": "1"}),
            json!({"role": "user", "content": "And?"}),
        ];
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let described = describe(messages.clone(), std::slice::from_ref(&tool), true);
        let roles: Vec<_> =
            described.iter().filter_map(|message| message["role"].as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        let system = described[0]["content"].as_str().expect("a text");
        assert!(system.starts_with("Be brief.\n\nYou can call"), "{system}");
        assert!(system.contains(&tool.to_string()), "{system}");
        let one = "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>";
        let expected = json!({"role": "assistant", "content": format!("{one}\n{one}")});
        assert_eq!(described[2], expected);
        let results = "<tool_response>\none\n</tool_response>\n\n\
                       <tool_response>\ntwo\n</tool_response>\n\nAnd?";
        assert_eq!(described[3], json!({"role": "user", "content": results}));

        let without_system = describe(messages[1..].to_vec(), &[tool], false);
        let first = without_system[0]["content"].as_str().expect("a text");
        assert!(first.starts_with("You can call") && first.ends_with("\n\nHi"), "{first}");
        assert_eq!(describe(messages[..2].to_vec(), &[], true), messages[..2]);
    }
}
