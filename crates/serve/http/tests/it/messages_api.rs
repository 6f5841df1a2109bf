//! `/v1/messages`, Anthropic's API, with a model that recites scripts.

use serde_json::{Value, json};

use crate::support::{SCRIPTED, Server, api_key};

const PATH: &str = "/v1/messages";

/// A request that is answered with a script.
fn ask(script: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({
        "max_tokens": 32, "temperature": 0,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": format!("Now {script}")}]}],
        "tools": [{"name": "get_weather", "description": "Weather.", "input_schema": schema,
                   "cache_control": {"type": "ephemeral"}}],
    })
}

/// The message that streamed events add up to.
fn put_together(events: &[(String, Value)]) -> Value {
    let (mut message, mut blocks, mut open) = (Value::Null, Vec::new(), None);
    for (name, event) in events {
        assert_eq!(event["type"], name.as_str());
        let index = event["index"].as_u64();
        match name.as_str() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!((index, open), (Some(blocks.len() as u64), None));
                open = index;
                blocks.push((event["content_block"].clone(), String::new()));
            }
            "content_block_delta" => {
                assert_eq!(index, open);
                let (block, json) = blocks.last_mut().expect("a block");
                let delta = &event["delta"];
                match delta["type"].as_str().expect("a type") {
                    "input_json_delta" => {
                        json.push_str(delta["partial_json"].as_str().expect("text"))
                    }
                    kind => {
                        let name = kind.trim_end_matches("_delta");
                        let before = block[name].as_str().expect("text").to_owned();
                        block[name] = json!(before + delta[name].as_str().expect("text"));
                    }
                }
            }
            "content_block_stop" => assert_eq!(open.take(), index),
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => {}
            other => panic!("unexpected event {other}"),
        }
    }
    assert_eq!(open, None);
    assert_eq!(events.last().map(|(name, _)| name.as_str()), Some("message_stop"));
    let finished = blocks.into_iter().map(|(mut block, json)| {
        if !json.is_empty() {
            block["input"] = serde_json::from_str(&json).unwrap_or(json!({}));
        }
        block
    });
    message["content"] = finished.collect();
    message
}

fn without_ids(mut message: Value) -> Value {
    message["id"] = Value::Null;
    message["usage"] = message["usage"]["output_tokens"].clone();
    for block in message["content"].as_array_mut().expect("blocks") {
        block["id"] = Value::Null;
    }
    message
}

/// Asks whole and streamed; the messages must be equal.
async fn answer(server: &Server, body: Value) -> Value {
    let whole = server.ok(PATH, body.clone()).await;
    let streamed = put_together(&server.named_events(PATH, body).await);
    assert_eq!(without_ids(whole.clone()), without_ids(streamed));
    whole
}

/// Goal: text, calls and reasoning are blocks, whole and streamed alike, with the reason of the
/// end.
#[tokio::test]
async fn answers_consist_of_blocks() {
    let server = Server::start(SCRIPTED);
    let message = answer(&server, ask("script:call")).await;
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(message["content"][0], json!({"type": "text", "text": "I look it up."}));
    let call = &message["content"][1];
    assert_eq!(call["input"], json!({"city": "Paris", "days": 2}));
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("get_weather")));
    assert_eq!(message["stop_reason"], "tool_use");

    let message = answer(&server, ask("script:think")).await;
    assert_eq!(message["content"][0]["thinking"], "Let me think about it.");
    assert_eq!(message["content"][1]["text"], "It is sunny.");
    assert_eq!(message["stop_reason"], "end_turn");

    let mut open = ask("Think.");
    open["thinking"] = json!({"type": "enabled", "budget_tokens": 1024});
    assert_eq!(answer(&server, open).await["content"][0]["thinking"], "Hmm, so.");
    // The variable itself does the same, and counts more than `thinking`.
    let mut open = ask("Think.");
    open["chat_template_kwargs"] = json!({"enable_thinking": true});
    open["thinking"] = json!({"type": "disabled"});
    assert_eq!(answer(&server, open).await["content"][0]["thinking"], "Hmm, so.");

    let mut stopped = ask("script:plain");
    stopped["stop_sequences"] = json!(["world"]);
    let message = answer(&server, stopped).await;
    assert_eq!(
        (&message["stop_reason"], &message["stop_sequence"]),
        (&json!("stop_sequence"), &json!("world"))
    );
    let mut cut = ask("script:plain");
    cut["max_tokens"] = json!(1);
    assert_eq!(answer(&server, cut).await["stop_reason"], "max_tokens");
    let mut single = ask("script:two");
    single["tool_choice"] = json!({"type": "auto", "disable_parallel_tool_use": true});
    assert_eq!(answer(&server, single).await["content"].as_array().map(Vec::len), Some(1));
    server.settled_audit().await;
}

/// Goal: a guaranteed call that the answer's length cuts off is one block, whole and streamed alike,
/// and not text in addition.
#[tokio::test]
async fn a_guaranteed_call_that_is_cut_off_is_one_block() {
    let server = Server::start("demo");
    let mut body = ask("hello");
    body["tools"][0]["input_schema"]["required"] = json!(["city"]);
    body["tool_choice"] = json!({"type": "any", "disable_parallel_tool_use": true});
    body["max_tokens"] = json!(45);
    let message = answer(&server, body).await;
    assert_eq!(message["stop_reason"], "max_tokens");
    let content = message["content"].as_array().expect("blocks");
    assert_eq!((content.len(), &content[0]["type"]), (1, &json!("tool_use")), "{message}");
    assert_eq!(content[0]["input"], json!({}), "the arguments are not JSON yet");
}

/// Goal: the results of calls continue the conversation, and everything before them is cached; the
/// counts of tokens agree with it; and the assistant's last message is continued.
#[tokio::test]
async fn results_of_calls_continue_the_conversation() {
    let server = Server::with(SCRIPTED, |engine, _| engine.block_size(4));
    let mut body = ask("script:call");
    let first = server.ok(PATH, body.clone()).await;
    let total = |usage: &Value| {
        let count = |name: &str| usage[name].as_u64().expect("a count");
        let created = count("cache_creation_input_tokens");
        count("input_tokens") + created + count("cache_read_input_tokens")
    };
    let counted = server.ok("/v1/messages/count_tokens", {
        let mut body = body.clone();
        body.as_object_mut().expect("an object").remove("max_tokens");
        body
    });
    let before = total(&first["usage"]);
    assert_eq!(counted.await["input_tokens"], before);
    let result = json!({"type": "tool_result", "tool_use_id": first["content"][1]["id"],
                        "content": [{"type": "text", "text": "18 degrees. script:plain"}]});
    let turns = body["messages"].as_array_mut().expect("a list");
    turns.push(json!({"role": "assistant", "content": first["content"]}));
    turns.push(json!({"role": "user", "content": [result]}));
    let second = server.ok(PATH, body.clone()).await;
    assert_eq!(second["content"][0]["text"], "Hello, world.");
    assert!(
        second["usage"]["cache_read_input_tokens"].as_u64() >= Some(before - before % 4),
        "{second}"
    );
    body["messages"] =
        json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]);
    assert_eq!(server.ok(PATH, body).await["content"][0]["text"], ", world.");
}

/// Goal: a line about the client that differs in every request does not reach the model.
#[tokio::test]
async fn a_line_about_the_client_does_not_prevent_sharing() {
    let server = Server::start(SCRIPTED);
    let mut counts = Vec::new();
    for line in ["x-anthropic-billing-header: a=1", "x-anthropic-billing-header: a=2345"] {
        let mut body = ask("script:plain");
        body["system"]
            .as_array_mut()
            .expect("blocks")
            .insert(0, json!({"type": "text", "text": line}));
        counts.push(server.ok(PATH, body).await["usage"].clone());
    }
    let sum = |usage: &Value| {
        let names = ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"];
        names.map(|name| usage[name].as_u64().expect("a count")).iter().sum::<u64>()
    };
    assert_eq!(sum(&counts[0]), sum(&counts[1]));
    assert!(counts[1]["cache_read_input_tokens"].as_u64() > Some(0), "{counts:?}");
}

/// Goal: errors have Anthropic's form and say what is wrong; a key may be sent as its clients do.
#[tokio::test]
async fn errors_have_the_form_of_the_api() {
    let server = Server::with(SCRIPTED, |engine, options| {
        options.served_names = ["one", "two"].map(String::from).to_vec();
        options.access.api_keys = api_key("0123456789abcdef-key");
        engine
    });
    let (status, reply) = server.post(PATH, ask("script:plain")).await;
    assert_eq!((status, &reply["error"]["type"]), (401, &json!("authentication_error")), "{reply}");
    let key = ("x-api-key", "0123456789abcdef-key");
    assert_eq!(server.post_with(PATH, key, ask("script:plain")).await.0, 200);
    for (extra, words) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "messages[0].content",
        ),
        (
            json!({"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}),
            "messages[0].content[0]",
        ),
        (json!({"tool_choice": {"type": "any"}, "tools": []}), "tool_choice"),
        (json!({"tool_choice": {"type": "some"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"tools": [{"type": "robot_20250124", "name": "robot"}]}), "tools[0].type"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"surprise": 1}), "surprise"),
    ] {
        let mut body = ask("script:plain");
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let (status, reply) = server.post_with(PATH, key, body).await;
        assert_eq!((status, &reply["type"]), (400, &json!("error")), "{extra}: {reply}");
        assert_eq!(reply["error"]["type"], "invalid_request_error");
        assert!(
            reply["error"]["message"].as_str().is_some_and(|text| text.contains(words)),
            "{reply}"
        );
    }
    let mut other = ask("script:plain");
    other["model"] = json!("another");
    let (status, reply) = server.post_with(PATH, key, other).await;
    assert_eq!((status, &reply["error"]["type"]), (404, &json!("not_found_error")));
}
