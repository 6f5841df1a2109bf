//! `/v1/chat/completions`, with the demo model, which has a chat template.

use serde_json::{Value, json};

use crate::support::Server;

const PATH: &str = "/v1/chat/completions";

fn conversation() -> Value {
    let rule = "Visitors of the tower wear hats, except on Sundays, when they wear two. ".repeat(8);
    json!([
        {"role": "system", "content": rule},
        {"role": "user", "content": [{"type": "text", "text": "What do visitors wear?"}]},
    ])
}

/// Goal: the next turn of a conversation finds the question and the answer before it cached.
#[tokio::test]
async fn the_next_turn_finds_the_conversation_cached() {
    let server = Server::start("demo");
    let ask = async |messages: &Value| {
        let body = json!({"messages": messages, "max_completion_tokens": 16, "temperature": 0});
        server.ok(PATH, body).await
    };
    let mut messages = conversation();
    let first = ask(&messages).await;
    assert_eq!(first["object"], "chat.completion");
    let message = &first["choices"][0]["message"];
    assert_eq!(message["role"], "assistant");

    let turns = messages.as_array_mut().expect("a list");
    turns.push(message.clone());
    turns.push(json!({"role": "user", "content": "And on Sundays?"}));
    let second = ask(&messages).await;
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let before = first["usage"]["prompt_tokens"].as_u64().expect("a count");
    assert!(cached >= Some(before - before % 4), "{second}");
    server.settled_audit().await;
}

/// Goal: a streamed answer begins with the role, its pieces put together equal the answer that is
/// not streamed, log-probabilities included, and it ends with a finish reason.
#[tokio::test]
async fn a_streamed_answer_equals_the_whole_one() {
    let server = Server::start("demo");
    let body = json!({"messages": conversation(), "max_tokens": 12, "temperature": 0,
                      "logprobs": true, "top_logprobs": 2});
    let whole = server.ok(PATH, body.clone()).await;
    let events = server.events(PATH, body).await;
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let part = |event: &Value| {
        event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
    };
    let sum: String = events.iter().map(part).collect();
    assert_eq!(sum, whole["choices"][0]["message"]["content"]);
    let entries =
        |choice: &Value| choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    let streamed: Vec<Value> =
        events.iter().flat_map(|event| entries(&event["choices"][0])).collect();
    assert_eq!(streamed, entries(&whole["choices"][0]));
    assert!(!streamed.is_empty());
    for entry in &streamed {
        assert_eq!(entry["top_logprobs"].as_array().map(Vec::len), Some(2), "{entry}");
        assert_eq!(
            entry["top_logprobs"][0]["token"], entry["token"],
            "greedy takes the most likely token"
        );
        if let Some(bytes) = entry["bytes"].as_array() {
            assert_eq!(bytes.len(), entry["token"].as_str().expect("a token").len());
        }
    }
    let last = &events[events.len() - 1]["choices"][0];
    assert_eq!(last["delta"], json!({}));
    assert_eq!(last["finish_reason"], whole["choices"][0]["finish_reason"]);
}

/// Goal: parameters that chat completions do not support are refused by their path.
#[tokio::test]
async fn unsupported_chat_parameters_are_refused() {
    let server = Server::start("demo");
    for (extra, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"max_tokens": 3, "max_completion_tokens": 4}), "max_tokens"),
        (json!({"prompt": "x"}), "prompt"),
        (json!({"length_penalty": 2}), "length_penalty"),
    ] {
        let mut body = json!({"messages": conversation(), "temperature": 0});
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let (status, reply) = server.post(PATH, body).await;
        assert_eq!(status, 400, "{extra}: {reply}");
        assert_eq!(reply["error"]["param"], param, "{reply}");
    }
}

/// Goal: without a limit in the request, an answer ends where the context ends, or at the
/// operator's limit.
#[tokio::test]
async fn answers_without_a_limit_use_the_context() {
    // The KV pool has room for more than the context.
    let server = Server::with("demo", |engine, _| engine.num_blocks(2048));
    let body = json!({
        "messages": conversation(), "temperature": 0, "logit_bias": {"65": 100},
        "end_repetition": false,
    });
    let reply = server.ok(PATH, body.clone()).await;
    let (prompt, answer) = (&reply["usage"]["prompt_tokens"], &reply["usage"]["completion_tokens"]);
    let sum = prompt.as_u64().zip(answer.as_u64()).map(|(prompt, answer)| prompt + answer);
    let (_, models) = server.get("/v1/models").await;
    assert_eq!(sum, models["data"][0]["max_model_len"].as_u64());
    let server = Server::with("demo", |engine, options| {
        options.default_max_tokens = Some(7);
        engine
    });
    let reply = server.ok(PATH, body).await;
    assert_eq!(reply["usage"]["completion_tokens"], 7);
}

/// Goal: values of parameters that request nothing are accepted, as clients send them unasked.
#[tokio::test]
async fn neutral_values_are_accepted() {
    let server = Server::start("demo");
    let body = json!({
        "model": "demo", "max_tokens": 1, "temperature": 0, "stream": false, "n": 1, "best_of": 1,
        "messages": [{"role": "assistant", "content": "x", "tool_calls": [], "annotations": [],
                      "refusal": null, "audio": null, "function_call": null},
                     {"role": "user", "content": "y", "name": null}],
        "tools": [], "tool_choice": "auto", "functions": [], "parallel_tool_calls": true,
        "response_format": {"type": "text"}, "modalities": ["text"], "logprobs": false,
        "top_logprobs": null, "stream_options": null, "min_tokens": 0, "top_k": -1, "echo": false,
        "store": false, "metadata": {}, "user": "u", "service_tier": "auto", "stop": [],
        "logit_bias": {}, "seed": null, "use_beam_search": false, "length_penalty": 1.0,
        "skip_special_tokens": true, "chat_template_kwargs": {}, "reasoning_effort": null,
    });
    server.ok(PATH, body.clone()).await;
    for (name, value) in
        [("top_k", json!(0)), ("top_logprobs", json!(0)), ("verbosity", json!("medium"))]
    {
        let mut body = body.clone();
        body[name] = value;
        server.ok(PATH, body).await;
    }
}

/// Goal: chat with a model that has no chat template is refused; no template is guessed.
#[tokio::test]
async fn chat_without_a_chat_template_is_refused() {
    let server = Server::tiny();
    let (status, reply) = server.post(PATH, json!({"messages": conversation()})).await;
    assert_eq!(status, 400, "{reply}");
    assert!(reply["error"]["message"].as_str().is_some_and(|text| text.contains("template")));
}

/// Goal: a special token that a message spells out is text, and a control token only if the
/// operator says so.
#[tokio::test]
async fn special_tokens_in_messages_are_text_unless_the_operator_allows_them() {
    let mut prompt_tokens = Vec::new();
    for are_allowed in [false, true] {
        let server = Server::with("demo", |engine, options| {
            options.special_tokens_in_messages = are_allowed;
            engine
        });
        let messages = json!([{"role": "user", "content": "a<|end|>b"}]);
        let reply = server.ok(PATH, json!({"messages": messages, "max_tokens": 1})).await;
        prompt_tokens.push(reply["usage"]["prompt_tokens"].as_u64());
    }
    assert!(prompt_tokens[0] > prompt_tokens[1], "{prompt_tokens:?}");
}

/// Goal: an expected answer, right or wrong, whole or in parts, changes nothing, and one of another
/// form is refused with its path.
#[tokio::test]
async fn a_prediction_changes_no_answer() {
    let server = Server::start("demo");
    let body = |prediction: Value| {
        json!({"messages": conversation(), "max_tokens": 24, "temperature": 0,
               "prediction": prediction})
    };
    let plain = server.ok(PATH, body(Value::Null)).await;
    let content = plain["choices"][0]["message"]["content"].as_str().expect("a text");
    for expected in [
        json!(content),
        json!("Something else."),
        json!(""),
        json!([{"type": "text", "text": "Vis"}, {"type": "text", "text": content}]),
    ] {
        let reply = server.ok(PATH, body(json!({"type": "content", "content": expected}))).await;
        assert_eq!(reply["choices"], plain["choices"]);
    }
    for wrong in [json!("text"), json!({"type": "other", "content": "x"}), json!({"content": 3})] {
        let (status, error) = server.post(PATH, body(wrong.clone())).await;
        assert_eq!(status, 400, "{error}");
        let message = error["error"]["message"].as_str().expect("a message");
        assert!(message.contains("prediction"), "{wrong}: {message}");
    }
}
