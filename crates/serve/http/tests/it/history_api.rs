//! Old messages that a client cannot take back: no request fails for one of them, in any API. The
//! last message has to be right.

use serde_json::{Value, json};

use crate::support::{SCRIPTED, Server};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// Sends a body whole and streamed, and returns the names of the parts that were left out.
async fn ask(server: &Server, path: &str, mut body: Value) -> String {
    let limit = if path == RESPONSES { "max_output_tokens" } else { "max_tokens" };
    body[limit] = json!(2);
    let mut ignored = String::new();
    for stream in [false, true] {
        body["stream"] = json!(stream);
        let reply = server.send(path, body.to_string()).await;
        let (status, names) = (reply.status(), reply.headers().get("x-stolon-ignored").cloned());
        let text = reply.text().await.expect("a text");
        assert!(status.is_success(), "{path} {body}: {status} {text}");
        ignored = names.map_or(String::new(), |names| names.to_str().expect("ASCII").to_owned());
    }
    ignored
}

/// The prompt of messages, as the model gets it.
async fn prompt(server: &Server, messages: &Value) -> String {
    let body = json!({"messages": messages, "add_generation_prompt": false});
    let tokens = server.ok("/tokenize", body).await["tokens"].take();
    let text = server.ok("/detokenize", json!({ "tokens": tokens })).await["prompt"].take();
    text.as_str().expect("a text").to_owned()
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// Goal: old messages of chat completions of any shape are accepted, also where conversations are
/// only tokenized or looked up, and their text is shown.
#[tokio::test]
async fn old_messages_of_chats_are_accepted() {
    let server = Server::start(SCRIPTED);
    let call = |arguments: Value| {
        json!({"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]})
    };
    let audio = json!({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}});
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}});
    let text = json!({"type": "text", "text": "b"});
    for (old, shown, ignored) in [
        (json!({"role": "assistant", "content": null}), "|assistant||", ""),
        (json!({"role": "assistant"}), "|assistant||", ""),
        (json!({"role": "assistant", "content": []}), "|assistant||", ""),
        (json!({"role": "assistant", "content": 7}), "|assistant|7", ""),
        (
            json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}),
            "No.",
            "",
        ),
        (
            json!({"role": "assistant", "content": "b", "reasoning": "r", "reasoning_content": "r"}),
            "|assistant|b",
            "",
        ),
        (json!({"role": "user"}), "|user||", ""),
        (json!({"role": "robot", "content": "b"}), "|user|b", "messages.role"),
        (json!({"role": "user", "content": "b", "mood": 1}), "|user|b", "messages.mood"),
        (
            json!({"role": "user", "content": [text, audio]}),
            "b\n[input_audio omitted]",
            "messages.input_audio",
        ),
        (
            json!({"role": "user", "content": [text, image]}),
            "b\n[image omitted: the model takes no images]",
            "messages.image",
        ),
        (json!("b"), "|user|b", "messages.role"),
        (json!({"role": "tool", "content": "b"}), "|tool|b", ""),
        (json!({"role": "tool", "tool_call_id": "1", "content": null}), "|tool||", ""),
        (json!({"role": "function", "name": "f", "content": "b"}), "|tool|b", ""),
        (
            json!({"role": "assistant", "content": null, "function_call": {"name": "f"}}),
            "{\"name\": \"f\", \"arguments\": {}}",
            "",
        ),
        (call(json!({"a": 1})), "\"arguments\": {\"a\": 1}}", ""),
        (call(json!("{\"a\"")), "\"arguments\": {\"arguments\": \"{\\\"a\\\"\"}}", ""),
        (call(Value::Null), "\"arguments\": {}}", ""),
        (call(json!([1])), "\"arguments\": {\"arguments\": [1]}}", ""),
        (
            json!({"role": "assistant", "tool_calls": [
            {"id": "1", "type": "custom", "custom": {"name": "f", "input": "b"}}]}),
            "\"arguments\": {\"input\": \"b\"}}",
            "",
        ),
        (json!({"role": "assistant", "content": "b", "tool_calls": [{}]}), "|assistant|b", ""),
    ] {
        let messages = json!([user("a"), old, user("script:plain")]);
        assert_eq!(ask(&server, CHAT, json!({ "messages": messages })).await, ignored, "{old}");
        let text = prompt(&server, &messages).await;
        assert!(text.contains(shown), "expected {shown:?} for {old}, got {text:?}");
        server.ok("/v1/cache/query", json!({ "messages": messages })).await;
    }
    for (last, param) in [
        (json!({"role": "robot", "content": "b"}), "messages[1].role"),
        (json!({"role": "user"}), "messages[1].content"),
        (json!({"role": "user", "content": [audio]}), "messages[1].content[0]"),
        (json!({"role": "tool", "content": "b"}), "messages[1].tool_call_id"),
        (json!("b"), "messages[1]"),
    ] {
        let (status, reply) = server.post(CHAT, json!({"messages": [user("a"), last]})).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{reply}");
    }
    let (status, reply) =
        server.post(CHAT, json!({"messages": [{"role": "user", "content": [image]}]})).await;
    assert_eq!(status, 400);
    assert!(reply["error"]["message"].to_string().contains("image"), "{reply}");
    // A client adds to a result what a result cannot have, and cannot take it back either.
    let called = call(json!({}));
    let result = json!({"role": "tool", "tool_call_id": "1", "content": "script:plain"});
    for (part, ignored) in [(&image, "messages.image"), (&audio, "messages.input_audio")] {
        let added = json!({"role": "user", "content": [part, {"type": "text", "text": "b"}]});
        let mut messages = json!([user("a"), called, result, added]);
        assert_eq!(ask(&server, CHAT, json!({ "messages": messages })).await, ignored);
        // An answer in between makes it a question of the user.
        messages[2] = json!({"role": "assistant", "content": "b"});
        assert_eq!(server.post(CHAT, json!({ "messages": messages })).await.0, 400, "{part}");
    }
}

/// Goal: blocks that Anthropic's clients send are accepted: those with a text show it, others are
/// shown as a placeholder, and the actions of a server of tools are shown as a call with its
/// result.
#[tokio::test]
async fn old_blocks_are_accepted() {
    let server = Server::start(SCRIPTED);
    let text = json!({"type": "text", "text": "b"});
    let of_result = |content: Value| {
        json!([
            user("a"),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": content}]},
        ])
    };
    let of_user = |block: Value| json!([{"role": "user", "content": [block, text]}]);
    let of_assistant = |blocks: Value| json!([user("a"), {"role": "assistant", "content": blocks}, user("script:plain")]);
    let image = json!({"type": "image",
                       "source": {"type": "base64", "media_type": "image/png", "data": "AA"}});
    let document = json!({"type": "document", "title": "ledger",
                          "source": {"type": "text", "media_type": "text/plain", "data": "oats"}});
    let pdf = json!({"type": "document",
                     "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}});
    let search = json!([
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "oats"}},
        {"type": "web_search_tool_result", "tool_use_id": "1",
         "content": [{"type": "web_search_result", "title": "Oats", "url": "http://x"}]},
        text,
    ]);
    for (messages, ignored) in [
        (of_result(json!([{"type": "tool_reference", "tool_name": "Stop"}, text])), ""),
        (of_result(json!([document.clone()])), ""),
        (of_result(json!([image.clone()])), "messages.image"),
        (of_result(json!([pdf.clone()])), "messages.document"),
        (of_result(json!({"a": 1})), ""),
        (of_result(Value::Null), ""),
        (of_user(document), ""),
        (of_user(pdf), "messages.document"),
        (of_user(image), "messages.image"),
        (of_user(json!({"type": "container_upload", "file_id": "1"})), "messages.container_upload"),
        (of_user(json!({"type": "text", "text": "", "new": 1})), ""),
        (of_assistant(search), ""),
        (of_assistant(json!([{"type": "compaction", "content": "It was read."}])), ""),
        (
            of_assistant(json!([{"type": "thinking", "thinking": "Hm.", "signature": {}, "x": 1}])),
            "",
        ),
        (of_assistant(json!([{"type": "hologram", "data": 1}])), "messages.hologram"),
        (of_assistant(json!([])), ""),
        (json!([{"role": "user", "content": null}, user("b")]), ""),
        (json!([{"role": "user", "content": "b", "id": "1"}]), ""),
    ] {
        let got = ask(&server, MESSAGES, json!({ "messages": messages })).await;
        assert_eq!(got, ignored, "{messages}");
        server.ok("/v1/messages/count_tokens", json!({ "messages": messages })).await;
    }
    let wrong = json!({"max_tokens": 1, "messages": [user("a"), {"role": "user", "content": [{"type": "text"}]}]});
    let (status, reply) = server.post(MESSAGES, wrong).await;
    assert_eq!(status, 400);
    assert!(reply["error"]["message"].to_string().contains("messages[1].content"), "{reply}");
}

/// Goal: items of Codex and of types that do not exist yet are accepted; only the last one has to be
/// known, and an error names its index.
#[tokio::test]
async fn old_items_are_accepted() {
    let server = Server::start(SCRIPTED);
    let output = |kind: &str| json!({"type": kind, "call_id": "1", "output": "Done."});
    let message = |part: Value| json!({"type": "message", "role": "user", "content": [part]});
    for (items, ignored) in [
        (
            json!([{"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "x"},
                output("custom_tool_call_output")]),
            "",
        ),
        (
            json!([{"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}},
                output("function_call_output")]),
            "",
        ),
        (
            json!([{"type": "tool_search_call", "call_id": "1", "arguments": {"query": "x"}},
                {"type": "tool_search_output", "call_id": "1", "tools": []}]),
            "",
        ),
        (
            json!([{"type": "function_call", "call_id": "1", "name": "f", "arguments": {"a": 1}},
                {"type": "function_call_output", "call_id": "1", "output": {"b": 1}}]),
            "",
        ),
        (
            json!([{"type": "function_call", "call_id": "1", "name": "f", "arguments": null},
                {"type": "function_call_output", "call_id": "1", "output": null}]),
            "",
        ),
        (
            json!([{"type": "agent_message", "author": "clerk",
                 "content": [{"type": "input_text", "text": "b"}]}]),
            "",
        ),
        (json!([{"type": "reasoning", "summary": [], "content": null}]), ""),
        (json!([{"type": "additional_tools", "tools": [{"type": "function", "name": "f"}]}]), ""),
        (
            json!([{"type": "additional_tools", "tools": [{"type": "function"}]}]),
            "input.additional_tools",
        ),
        (json!([{"type": "compaction", "encrypted_content": "x"}]), "input.compaction"),
        (json!([{"type": "web_search_call", "id": "1"}]), "input.web_search_call"),
        (json!([{"type": "item_reference", "id": "1"}]), "input.item_reference"),
        (json!([{"type": "weather_report", "id": "1"}]), "input.weather_report"),
        (json!([message(json!({"type": "input_file", "file_data": "x"}))]), "messages.input_file"),
        (
            json!([message(
                json!({"type": "input_image", "image_url": "data:image/png;base64,AA"})
            )]),
            "messages.image",
        ),
        (
            json!([{"role": "robot", "content": "b"}, {"role": "assistant", "content": [
            {"type": "refusal", "refusal": "No."}]}]),
            "messages.role",
        ),
    ] {
        let mut input = vec![user("a")];
        input.extend(items.as_array().expect("a list").iter().cloned());
        input.push(user("script:plain"));
        assert_eq!(ask(&server, RESPONSES, json!({ "input": input })).await, ignored, "{items}");
    }
    for (last, param) in [
        (json!({"type": "weather_report"}), "input[1].type"),
        (json!({"role": "robot", "content": "b"}), "input[1].role"),
        (message(json!({"type": "input_file"})), "input[1].content[0]"),
        (json!({"type": "function_call", "call_id": "1"}), "input[1].name"),
    ] {
        let (status, reply) = server.post(RESPONSES, json!({"input": [user("a"), last]})).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{reply}");
    }
    // A client adds to a result what a result cannot have.
    let call = json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "1", "output": "b"});
    let image = json!({"type": "input_image", "image_url": "data:image/png;base64,AA"});
    for (part, ignored) in
        [(image, "messages.image"), (json!({"type": "input_file"}), "messages.input_file")]
    {
        let input = json!([user("a"), call, output, message(part.clone())]);
        assert_eq!(ask(&server, RESPONSES, json!({ "input": input })).await, ignored);
        let input = json!([user("a"), call, output, {"role": "assistant", "content": "b"},
            message(part)]);
        assert_eq!(server.post(RESPONSES, json!({ "input": input })).await.0, 400, "{input}");
    }
}

/// Goal: half of an emoji, which a client has cut off, becomes the replacement character.
#[tokio::test]
async fn halves_of_surrogate_pairs_are_replaced() {
    let server = Server::start(SCRIPTED);
    for (path, body) in [
        (CHAT, r#"{"max_tokens": 1, "messages": [{"role": "user", "content": "cut \ud83d"}]}"#),
        (
            CHAT,
            r#"{"max_tokens": 1, "\ud83d": null, "messages": [{"role": "user", "content": "x"}]}"#,
        ),
        ("/v1/completions", r#"{"max_tokens": 1, "prompt": "\ude00 x"}"#),
        (
            MESSAGES,
            r#"{"max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "text", "text": "\ud83d\ud83d"}]}]}"#,
        ),
        (RESPONSES, r#"{"max_output_tokens": 1, "input": "\ude00\ud83d"}"#),
    ] {
        let reply = server.send(path, body.to_owned()).await;
        assert_eq!(reply.status(), 200, "{path} {body}");
    }
    let tokens = server.send("/tokenize", r#"{"prompt": "\ud83d\ude00 \ud83d|"}"#.to_owned()).await;
    let tokens: Value = tokens.json().await.expect("JSON");
    let text = server.ok("/detokenize", json!({"tokens": tokens["tokens"]})).await;
    assert_eq!(text["prompt"], "\u{1f600} \u{fffd}|");
}

/// Goal: a client's line about itself is cut in each form and API, and the instructions after it
/// stay.
#[tokio::test]
async fn lines_of_clients_about_themselves_are_cut() {
    let server = Server::start(SCRIPTED);
    let line = |hash: &str| {
        format!("x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={hash};")
    };
    let rules = "You are a careful clerk: x=1; y=2.";
    let text = |text: String| json!({"type": "text", "text": text});
    let count = async |system: Value| {
        let body = json!({"system": system, "messages": [user("hey")]});
        server.ok("/v1/messages/count_tokens", body).await["input_tokens"].clone()
    };
    let expected = count(json!(rules)).await;
    for hash in ["0aaaa", "f9b1c2"] {
        for joined in ["\n", "\n\n", " ", ""] {
            let whole = line(hash) + joined + rules;
            assert_eq!(count(json!(whole)).await, expected, "{whole}");
            assert_eq!(count(json!([text(whole.clone())])).await, expected, "{whole}");
        }
        let own_block = json!([text(line(hash)), text(rules.to_owned())]);
        assert_eq!(count(own_block.clone()).await, expected);
        let whole = line(hash) + "\n" + rules;
        for system in [own_block, json!(whole), json!([text(whole)])] {
            let messages = json!([{"role": "system", "content": system}, user("hey")]);
            let text = prompt(&server, &messages).await;
            assert_eq!(text, format!("|system|{rules}|user|hey"));
        }
        let body = json!({"instructions": line(hash) + "\n" + rules, "input": "script:plain",
                          "max_output_tokens": 2});
        let reply = server.ok(RESPONSES, body).await;
        assert_eq!(
            reply["usage"]["input_tokens"],
            count_of_script(&server, rules).await,
            "{reply}"
        );
    }
}

/// The number of tokens of the prompt with these instructions and the question `script:plain`.
async fn count_of_script(server: &Server, rules: &str) -> Value {
    let body = json!({"system": rules, "messages": [user("script:plain")]});
    server.ok("/v1/messages/count_tokens", body).await["input_tokens"].clone()
}
