//! Tools for models whose chat template does not know them. They are described in the system
//! message, and earlier calls and their results become texts of the assistant and the user. Calls
//! have the form of [`ToolCallFormat::Hermes`](crate::ToolCallFormat::Hermes).

use serde_json::{Value, json};

use super::history::{append, append_content};
use super::messages::text_of;

/// The text before the list of tools.
const BEFORE: &str = "You can call functions. These are the functions that you may call, as JSON:

<tools>";
/// The text after it.
const AFTER: &str = r#"</tools>

To call a function, write its name and its arguments as a JSON object between these tags. Write one such block for each call.

<tool_call>
{"name": "the function's name", "arguments": {"an argument's name": "its value"}}
</tool_call>

The results follow in the next message, between <tool_response> and </tool_response>. If no function helps, answer without a call."#;

/// Turns calls, unless `calls` is false, and results into texts of the assistant and the user.
/// `as_text` tells for a result whether it becomes text; its argument is whether the result follows
/// no call.
pub(super) fn calls_as_text(
    messages: Vec<Value>,
    calls: bool,
    as_text: impl Fn(bool) -> bool,
) -> Vec<Value> {
    let mut described: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    // Whether the last message is one of the user that has results of calls.
    let mut has_results = false;
    // Whether the results that follow belong to a call.
    let mut follows_call = false;
    for message in messages {
        match message["role"].as_str() {
            Some("tool") if as_text(!follows_call) => {
                add_result(&mut described, &message["content"], has_results);
                has_results = true;
                continue;
            }
            Some("user") if has_results => {
                if let Some(last) = described.last_mut() {
                    append_content(last, &message["content"]);
                }
                continue;
            }
            Some("tool") => described.push(message),
            _ => {
                follows_call = message["tool_calls"].is_array();
                described.push(if calls { with_calls(message) } else { message });
            }
        }
        has_results = false;
    }
    described
}

/// Adds the result of a call. All results after one message of the assistant are one message of the
/// user, because many templates accept only roles that alternate. `has_results` tells whether the
/// last message is that one.
fn add_result(messages: &mut Vec<Value>, content: &Value, has_results: bool) {
    let result = format!("<tool_response>\n{}\n</tool_response>", text_of(content));
    match messages.last_mut().filter(|_| has_results) {
        Some(message) => append(message, &result),
        None => messages.push(json!({"role": "user", "content": result})),
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

/// Describes the tools in the system message in front of the conversation.
pub(super) fn add_tools(messages: &mut Vec<Value>, tools: &[Value]) {
    if tools.is_empty() {
        return;
    }
    let tools: String = tools.iter().map(|tool| format!("\n{tool}")).collect();
    let text = format!("{BEFORE}{tools}\n{AFTER}");
    // Never a later message: the prompt would change from its beginning when one appears.
    match messages.first_mut().filter(|first| first["role"] == "system") {
        Some(first) => append(first, &text),
        None => messages.insert(0, json!({"role": "system", "content": text})),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: tools, calls and results become texts, and the roles alternate. The tools are in front,
    /// also if a later message has the role `system`.
    #[test]
    fn a_conversation_with_calls_becomes_text() {
        let call = json!({"function": {"name": "f", "arguments": {"a": 1}}, "id": "1"});
        let messages = vec![
            json!({"role": "user", "content": [{"type": "text", "text": "Hi"}]}),
            json!({"role": "assistant", "content": null, "tool_calls": [call, call]}),
            json!({"role": "tool", "content": "one", "tool_call_id": "1"}),
            json!({"role": "tool", "content": "two", "tool_call_id": "1"}),
            json!({"role": "user", "content": "And?"}),
            json!({"role": "system", "content": "Be brief."}),
        ];
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let mut described = calls_as_text(messages.clone(), true, |_| true);
        add_tools(&mut described, std::slice::from_ref(&tool));
        let roles: Vec<_> =
            described.iter().filter_map(|message| message["role"].as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user", "system"]);
        let system = described[0]["content"].as_str().expect("a text");
        assert!(system.starts_with("You can call"), "{system}");
        assert!(system.contains(&tool.to_string()), "{system}");
        let one = "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>";
        let expected = json!({"role": "assistant", "content": format!("{one}\n{one}")});
        assert_eq!(described[2], expected);
        let results = "<tool_response>\none\n</tool_response>\n\n\
                       <tool_response>\ntwo\n</tool_response>\n\nAnd?";
        assert_eq!(described[3], json!({"role": "user", "content": results}));

        let mut with_system = vec![messages[5].clone(), messages[0].clone()];
        add_tools(&mut with_system, &[tool]);
        let first = with_system[0]["content"].as_str().expect("a text");
        assert!(first.starts_with("Be brief.\n\nYou can call"), "{first}");
        assert_eq!(with_system.len(), 2);
        let same = calls_as_text(messages[..2].to_vec(), false, |_| true);
        assert_eq!(same, messages[..2]);
    }
}
