//! Conversations of agents with the chat templates of well-known models.
//!
//! The templates are too large for the repository. `crates/models/checkpoint/tests/fetch_vocabularies.py` downloads
//! them:
//!
//! ```sh
//! python crates/models/checkpoint/tests/fetch_vocabularies.py target/vocabularies
//! STOLON_VOCABULARIES=$PWD/target/vocabularies \
//!     cargo test -p stolon-text --test text real_templates -- --ignored
//! ```

use std::path::PathBuf;

use serde_json::{Map, Value, json};
use stolon_text::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};

fn tools() -> Vec<Value> {
    let parameters = json!({
        "type": "object", "required": ["path"],
        "properties": {"path": {"type": "string", "description": "A file"}},
    });
    let function = |name: &str| {
        json!({"type": "function", "function": {
            "name": name, "description": format!("{name} a file."), "parameters": parameters}})
    };
    vec![function("read_page"), function("seal_page")]
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    let function = json!({"name": name, "arguments": arguments});
    json!({"id": id, "type": "function", "function": function})
}

fn calls(calls: &[Value]) -> Value {
    json!({"role": "assistant", "content": null, "tool_calls": calls})
}

fn result(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

fn message(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

fn parts(first: &str, second: &str) -> Value {
    json!([{"type": "text", "text": first}, {"type": "text", "text": second}])
}

/// A conversation, and the texts that the prompt has to have, in this order. The text of the system
/// message may be anywhere.
struct Conversation {
    name: &'static str,
    messages: Value,
    tools: Vec<Value>,
    in_order: &'static [&'static str],
    anywhere: &'static [&'static str],
}

fn conversations() -> [Conversation; 6] {
    let first = [message("system", "You keep the ledger."), message("user", "Which grain is due?")];
    let read = || calls(&[call("call_1", "read_page", r#"{"path": "mill.txt"}"#)]);
    let with_first = |rest: &[Value]| Value::Array([&first[..], rest].concat());
    [
        Conversation {
            name: "answers",
            messages: with_first(&[
                message("assistant", "Barley."),
                message("user", "And in spring?"),
            ]),
            tools: Vec::new(),
            in_order: &["Which grain is due?", "Barley.", "And in spring?"],
            anywhere: &["You keep the ledger."],
        },
        Conversation {
            name: "call without text",
            messages: with_first(&[read(), result("call_1", "Oats for the miller.")]),
            tools: tools(),
            in_order: &["Which grain is due?", "read_page", "mill.txt", "Oats for the miller."],
            anywhere: &["You keep the ledger.", "seal_page"],
        },
        Conversation {
            name: "two calls at once, and a question after the results",
            messages: json!([
                first[1].clone(),
                calls(&[
                    call("toolu_01Abc", "read_page", r#"{"path": "rye.txt"}"#),
                    call("toolu_02Def", "seal_page", r#"{"path": "wax.txt"}"#),
                ]),
                result("toolu_01Abc", "Rye for the baker."),
                result("toolu_02Def", "The wax is dry."),
                message("user", "Is that all?"),
                message("assistant", "It is."),
                message("user", "Then close."),
            ]),
            tools: tools(),
            in_order: &[
                "Which grain is due?",
                "read_page",
                "rye.txt",
                "Rye for the baker.",
                "The wax is dry.",
                "Is that all?",
                "It is.",
                "Then close.",
            ],
            anywhere: &["seal_page", "wax.txt"],
        },
        Conversation {
            name: "instructions in the middle",
            messages: with_first(&[
                message("system", "Clerk and miller exist."),
                read(),
                result("call_1", "Oats for the miller."),
                message("system", "900 tokens are left."),
                message("assistant", "Oats."),
                message("user", "And now?"),
                message("system", "800 tokens are left."),
            ]),
            tools: tools(),
            in_order: &[
                "Which grain is due?",
                "Clerk and miller exist.",
                "mill.txt",
                "Oats for the miller.",
                "900 tokens are left.",
                "Oats.",
                "And now?",
                "800 tokens are left.",
            ],
            anywhere: &["You keep the ledger."],
        },
        Conversation {
            name: "texts in several parts",
            messages: json!([
                {"role": "system", "content": parts("You keep the ledger.", "Weigh the sacks.")},
                {"role": "user", "content": parts("Which grain is due?", "And what is not?")},
                read(),
                {"role": "tool", "tool_call_id": "call_1",
                 "content": parts("Oats for the miller.", "Rye for nobody.")},
                {"role": "assistant", "content": parts("Oats are.", "Rye is not.")},
                message("user", "And now?"),
            ]),
            tools: tools(),
            in_order: &[
                "Which grain is due?",
                "And what is not?",
                "mill.txt",
                "Oats for the miller.",
                "Rye for nobody.",
                "Oats are.",
                "Rye is not.",
                "And now?",
            ],
            anywhere: &["You keep the ledger.", "Weigh the sacks."],
        },
        Conversation {
            name: "turns that were cut off",
            messages: json!([
                first[1].clone(),
                {"role": "assistant"},
                message("user", "Go on."),
                message("user", "Please."),
                calls(&[call("call_1", "read_page", r#"{"path": "mill.t"#)]),
                result("call_1", "The call was cut off."),
                {"role": "assistant", "content": ""},
                message("user", "Once more."),
            ]),
            tools: Vec::new(),
            in_order: &[
                "Which grain is due?",
                "Go on.",
                "Please.",
                "read_page",
                "mill.t",
                "The call was cut off.",
                "Once more.",
            ],
            anywhere: &[],
        },
    ]
}

/// The prompt, with the tools as a server offers them.
fn render(
    template: &ChatTemplate,
    conversation: &Conversation,
) -> Result<String, ChatTemplateError> {
    let messages: Vec<ChatMessage> =
        serde_json::from_value(conversation.messages.clone()).expect("messages");
    let options = ChatOptions { tools: conversation.tools.clone(), ..ChatOptions::default() };
    template.render(&messages, &options)
}

/// Templates that do not show all that they should, each with a part of the names of the
/// conversations that are excepted.
const EXCEPTIONS: [(&str, &str); 2] = [
    // This one reads the variables `functions` and `datetime`, which its authors' server sets.
    ("fireworks-ai-llama-3-firefunction-v2.jinja", ""),
    // This one shows the instructions only in front of a last message of the user.
    ("mistralai-Mistral-Nemo-Instruct-2407.jinja", "call without text"),
];

/// The fault in the prompt of a conversation, if there is one.
fn fault(template: &ChatTemplate, conversation: &Conversation) -> Option<String> {
    let text = match render(template, conversation) {
        Ok(text) => text,
        Err(error) => return Some(error.to_string()),
    };
    let mut rest = text.as_str();
    for expected in conversation.in_order {
        match rest.find(expected) {
            Some(place) => rest = &rest[place + expected.len()..],
            None => return Some(format!("expected {expected:?} in its place, got {text:?}")),
        }
    }
    let absent = conversation.anywhere.iter().find(|expected| !text.contains(**expected));
    if let Some(absent) = absent {
        return Some(format!("expected {absent:?}, got {text:?}"));
    }
    text.contains("None").then(|| format!("expected no `None`, got {text:?}"))
}

/// Goal: with the templates of well-known models, no conversation of an agent ends at one old
/// message: each is rendered, and shows the text of every message.
#[test]
#[ignore = "needs the templates that fetch_vocabularies.py fetches"]
fn no_template_ends_a_conversation() {
    let directory = std::env::var_os("STOLON_VOCABULARIES").expect("the directory of templates");
    let files = std::fs::read_dir(PathBuf::from(directory).join("templates"));
    let mut paths: Vec<PathBuf> = files
        .expect("run fetch_vocabularies.py first")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jinja"))
        .collect();
    paths.sort();
    let special_tokens = json!({"bos_token": "<s>", "eos_token": "</s>"});
    let special_tokens: Map<String, Value> =
        special_tokens.as_object().cloned().expect("an object");
    let (conversations, mut faults, mut count) = (conversations(), Vec::new(), 0);
    for path in &paths {
        let name = path.file_name().expect("a file").to_string_lossy();
        let source = std::fs::read_to_string(path).expect("a template");
        let template = ChatTemplate::new([("default", source)], special_tokens.clone());
        let template = template.unwrap_or_else(|error| panic!("{name}: {error}"));
        for conversation in &conversations {
            count += 1;
            let is_exception = EXCEPTIONS.iter().any(|(of_template, of_conversation)| {
                *of_template == name && conversation.name.contains(of_conversation)
            });
            let fault = fault(&template, conversation);
            if is_exception {
                assert!(fault.is_some(), "{name}, {}: no exception any more", conversation.name);
            } else if let Some(fault) = fault {
                faults.push(format!("{name}, {}: {fault}", conversation.name));
            }
        }
    }
    assert!(!paths.is_empty(), "the directory has no templates");
    let right = count - faults.len();
    assert!(faults.is_empty(), "{right} of {count} are right:\n{}", faults.join("\n"));
}
