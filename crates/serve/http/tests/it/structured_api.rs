//! Structured output over HTTP: answers that follow a schema, a regular expression or a grammar,
//! and calls of tools that are guaranteed.

use serde_json::{Value, json};

use stolon_http::FormatChoice;

use crate::support::{SCRIPTED, Server};

const CHAT: &str = "/v1/chat/completions";

fn schema() -> Value {
    json!({
        "type": "object", "title": "Answer",
        "properties": {
            "color": {"enum": ["red", "green", "blue"]},
            "parts": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 20},
                      "minItems": 1, "maxItems": 2},
        },
        "required": ["color", "parts"], "additionalProperties": false,
    })
}

fn assert_valid(text: &str) {
    let value: Value = serde_json::from_str(text).expect("JSON");
    assert!(["red", "green", "blue"].iter().any(|color| value["color"] == *color), "{value}");
    let parts = value["parts"].as_array().expect("a list");
    assert!((1..=2).contains(&parts.len()), "{value}");
    assert!(parts.iter().all(|part| (1..=20).any(|number| *part == number)), "{value}");
    assert_eq!(value.as_object().map(|members| members.len()), Some(2), "{value}");
}

/// Goal: each API and each form of the parameter leads to an answer that follows it, whole and
/// streamed alike.
#[tokio::test]
async fn answers_follow_their_schema() {
    let server = Server::start("demo");
    let messages = json!([{"role": "user", "content": "Which color?"}]);
    let format = json!({"type": "json_schema", "json_schema":
                        {"name": "answer", "schema": schema(), "strict": true}});
    for temperature in [0.0, 1.5] {
        let body = json!({"messages": messages, "response_format": format, "max_tokens": 200,
                          "temperature": temperature, "seed": 7});
        let whole = server.ok(CHAT, body.clone()).await;
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{whole}");
        let text = choice["message"]["content"].as_str().expect("a text");
        assert_valid(text);
        let events = server.events(CHAT, body).await;
        let pieces =
            events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        assert_eq!(pieces.collect::<String>(), text);
    }
    let form = json!({"type": "json_schema", "name": "answer", "schema": schema()});
    let body = json!({"input": "Which color?", "text": {"format": form}, "max_output_tokens": 200});
    let reply = server.ok("/v1/responses", body).await;
    assert_valid(reply["output"][0]["content"][0]["text"].as_str().expect("a text"));
    assert_eq!(reply["text"]["format"]["name"], "answer");
    let body = json!({"messages": messages, "max_tokens": 200, "output_config":
                      {"format": {"type": "json_schema", "schema": schema()}}});
    let reply = server.ok("/v1/messages", body).await;
    assert_valid(reply["content"][0]["text"].as_str().expect("a text"));
    for (extra, expected) in [
        (json!({"structured_outputs": {"regex": "(ab){3}"}}), "ababab"),
        (json!({"guided_choice": ["one and two"]}), "one and two"),
        (json!({"guided_grammar": "start: \"x\" y\ny: \"yy\""}), "xyy"),
    ] {
        let mut body = json!({"prompt": "A text: ", "max_tokens": 50, "n": 2, "temperature": 1});
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let reply = server.complete(body).await;
        for choice in reply["choices"].as_array().expect("a list") {
            assert_eq!(choice["text"], expected, "{reply}");
            assert_eq!(choice["finish_reason"], "stop", "{reply}");
        }
    }
    server.settled_audit().await;
}

fn tools(strict: bool) -> Value {
    let function = |name: &str, schema: Value| {
        json!({"type": "function",
               "function": {"name": name, "parameters": schema, "strict": strict}})
    };
    json!([function("paint", schema()), function("wait", json!({"maxProperties": 0}))])
}

/// Goal: with a `tool_choice` that requires a call, the answer is a call with valid arguments,
/// whatever the model would have written; strict tools do not keep it from answering with a text.
#[tokio::test]
async fn required_calls_are_made() {
    // This model would reason without end if the grammar does not permit the text of its script.
    let server = Server::with(SCRIPTED, |engine, options| {
        options.reasoning = FormatChoice::Off;
        engine
    });
    let named = json!({"type": "function", "function": {"name": "paint"}});
    let body = |choice: &Value, temperature: f32| {
        json!({"messages": [{"role": "user", "content": "script:plain"}], "tools": tools(false),
               "tool_choice": choice, "temperature": temperature, "seed": 3, "max_tokens": 400,
               "parallel_tool_calls": false})
    };
    for choice in [json!("required"), named] {
        for temperature in [0.0, 1.0] {
            let reply = server.ok(CHAT, body(&choice, temperature)).await;
            let answer = &reply["choices"][0];
            assert_eq!(answer["finish_reason"], "tool_calls", "{reply}");
            let call = &answer["message"]["tool_calls"][0]["function"];
            let arguments = call["arguments"].as_str().expect("arguments");
            match call["name"].as_str() {
                Some("paint") => assert_valid(arguments),
                Some("wait") if choice == "required" => {
                    assert_eq!(serde_json::from_str(arguments).ok(), Some(json!({})));
                }
                _ => panic!("{reply}"),
            }
        }
    }
    let mut strict = body(&json!("auto"), 0.0);
    strict["tools"] = tools(true);
    let reply = server.ok(CHAT, strict).await;
    assert_eq!(reply["choices"][0]["message"]["content"], "Hello, world.", "{reply}");
    let tool = json!({"name": "paint", "input_schema": schema()});
    let body = json!({"messages": [{"role": "user", "content": "script:plain"}], "tools": [tool],
                      "tool_choice": {"type": "any"}, "max_tokens": 400});
    let reply = server.ok("/v1/messages", body).await;
    assert_valid(&reply["content"][0]["input"].to_string());
    let mut tool = tools(false)[0]["function"].clone();
    tool["type"] = json!("function");
    let body = json!({"input": "script:plain", "tools": [tool], "max_output_tokens": 400,
                      "tool_choice": {"type": "function", "name": "paint"}});
    let reply = server.ok("/v1/responses", body).await;
    assert_valid(reply["output"][0]["arguments"].as_str().expect("arguments"));
}

/// Goal: the grammar applies after the reasoning.
#[tokio::test]
async fn reasoning_comes_before_the_answer() {
    let server = Server::start(SCRIPTED);
    let body = json!({"messages": [{"role": "user", "content": "script:think"}],
                      "guided_choice": ["yes", "no"], "max_tokens": 100});
    let reply = server.ok(CHAT, body).await;
    let message = &reply["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "Let me think about it.", "{reply}");
    assert!(["yes", "no"].iter().any(|answer| message["content"] == *answer), "{reply}");
}

/// Goal: unsupported schemas are refused with their path, and malicious grammars get an error and
/// harm no other request.
#[tokio::test]
async fn grammars_that_cannot_be_followed_are_refused() {
    let server = Server::start("demo");
    let bad = json!({"type": "object", "properties": {"a": {"not": {}}}});
    let tool = json!({"type": "function",
                      "function": {"name": "f", "parameters": bad, "strict": true}});
    let long = "a".repeat(5000);
    for (extra, param) in [
        (json!({"guided_json": bad}), json!("guided_json.properties.a.not")),
        (json!({"guided_regex": long}), json!("guided_regex")),
        (json!({"guided_regex": "(a"}), json!("guided_regex")),
        (json!({"structured_outputs": {"xml": 1}}), json!("structured_outputs.xml")),
        (json!({"guided_json": {"$ref": "#"}}), json!("guided_json")),
        (json!({"guided_choice": ["a"], "guided_regex": "a"}), json!("guided_choice")),
    ] {
        let mut body = json!({"prompt": "x", "max_tokens": 20});
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let (status, reply) = server.post("/v1/completions", body).await;
        assert_eq!((status, &reply["error"]["param"]), (400, &param), "{reply}");
        assert_eq!(reply["error"]["type"], "invalid_request_error");
    }
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": [tool]});
    let (status, reply) = Server::start(SCRIPTED).post(CHAT, body).await;
    let param = "tools[0].function.parameters.properties.a.not";
    assert_eq!((status, &reply["error"]["param"]), (400, &json!(param)), "{reply}");
    // Nested repetitions end, with an answer or an error.
    let complex = json!({"prompt": "x", "guided_regex": "((a{0,500}){0,500}){0,500}b"});
    let (status, reply) = server.post("/v1/completions", complex).await;
    assert!([200, 400].contains(&status), "{reply}");
    let plain = json!({"prompt": "x", "max_tokens": 2});
    assert_eq!(server.complete(plain).await["choices"][0]["finish_reason"], "length");
}
