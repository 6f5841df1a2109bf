//! Parameters and fields of vLLM's API that its clients use.

use serde_json::{Value, json};

use stolon_http::FormatChoice;

use crate::support::{SCRIPTED, Server, TINY};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn messages(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// Goal: whole replies and all pieces name the version of the server and the model.
#[tokio::test]
async fn replies_have_a_fingerprint() {
    let server = Server::start("demo");
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": "x", "max_tokens": 2})),
        (CHAT, json!({"messages": messages("x"), "max_tokens": 2})),
    ] {
        let whole = server.ok(path, body.clone()).await;
        let fingerprint = whole["system_fingerprint"].as_str().expect("a text");
        assert!(fingerprint.starts_with("stolon-"), "{fingerprint}");
        for event in server.events(path, body).await {
            assert_eq!(event["system_fingerprint"], fingerprint);
        }
    }
}

/// Goal: reasoning has both names, whole and streamed, and an answer that is sent back with both
/// continues the conversation.
#[tokio::test]
async fn reasoning_has_both_names() {
    let server = Server::start(SCRIPTED);
    let body = json!({"messages": messages("script:think"), "temperature": 0, "max_tokens": 20});
    let whole = server.ok(CHAT, body.clone()).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["reasoning"], "Let me think about it.");
    assert_eq!(message["reasoning"], message["reasoning_content"]);
    for event in server.events(CHAT, body).await {
        let delta = &event["choices"][0]["delta"];
        assert_eq!(delta["reasoning"], delta["reasoning_content"]);
    }
    let mut conversation = messages("script:think");
    let turns = conversation.as_array_mut().expect("a list");
    turns.extend([message.clone(), json!({"role": "user", "content": "script:plain"})]);
    let next = json!({"messages": conversation, "temperature": 0, "max_tokens": 20});
    assert_eq!(server.ok(CHAT, next).await["choices"][0]["message"]["content"], "Hello, world.");
}

/// Goal: the reasoning ends when its budget is used up, in each API for conversations, whether the
/// answer or the prompt has begun it, and a model without delimited reasoning refuses a budget.
#[tokio::test]
async fn reasoning_ends_with_its_budget() {
    let server = Server::start(SCRIPTED);
    let with = |budget: i32, more: Value| {
        let mut body = json!({"temperature": 0, "thinking_token_budget": budget});
        for (name, value) in more.as_object().expect("an object") {
            body[name] = value.clone();
        }
        body
    };
    let chat = json!({"messages": messages("script:think"), "max_tokens": 14, "n": 2});
    for (budget, reasoning) in
        [(0, "Let me"), (1, "Let me think about it."), (-1, "Let me think about it.")]
    {
        let reply = server.ok(CHAT, with(budget, chat.clone())).await;
        let counted = &reply["usage"]["completion_tokens_details"]["reasoning_tokens"];
        assert!(counted.as_u64() > Some(0), "{budget}: {reply}");
        for choice in reply["choices"].as_array().expect("choices") {
            assert_eq!(choice["message"]["reasoning"], reasoning, "{budget}: {reply}");
            assert!(choice["message"]["content"].as_str().is_some_and(|text| !text.is_empty()));
        }
    }
    let body = with(0, json!({"input": "script:think", "max_output_tokens": 14}));
    let reply = server.ok("/v1/responses", body).await;
    assert_eq!(reply["output"][0]["content"][0]["text"], "Let me");
    assert!(reply["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0));
    // Here, the prompt begins the reasoning.
    let anthropic = |budget: Value| {
        json!({"messages": messages("x"), "temperature": 0, "max_tokens": 14,
               "thinking": {"type": "enabled", "budget_tokens": budget}})
    };
    let reply = server.ok("/v1/messages", anthropic(json!(100))).await;
    assert_eq!(reply["content"][0]["thinking"], "Hmm, so.", "{reply}");
    let reply = server.ok("/v1/messages", anthropic(json!(0))).await;
    assert_eq!(reply["content"][0]["type"], "text", "{reply}");

    // The operator's limit is for requests that set none.
    let server = Server::with(SCRIPTED, |engine, options| {
        options.reasoning_budget = Some(0);
        engine
    });
    let reply = server.ok(CHAT, chat.clone()).await;
    assert_eq!(reply["choices"][0]["message"]["reasoning"], "Let me", "{reply}");
    let reply = server.ok(CHAT, with(100, chat.clone())).await;
    assert_eq!(reply["choices"][0]["message"]["reasoning"], "Let me think about it.", "{reply}");

    let server = Server::with(SCRIPTED, |engine, options| {
        options.reasoning = FormatChoice::Off;
        engine
    });
    let (status, reply) = server.post(CHAT, with(0, chat)).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("thinking_token_budget")));
    // Anthropic's clients send it to every model.
    server.ok("/v1/messages", anthropic(json!(0))).await;
}

/// Goal: the log-probabilities of a prompt have vLLM's shape and are those of an echo, in
/// completions by choice and in chats for the whole reply; they are `null` if nobody asks.
#[tokio::test]
async fn prompts_have_log_probabilities() {
    let server = Server::start("demo");
    let text = "The keeper of the tower";
    let body = json!({"prompt": [text, "x y"], "max_tokens": 1, "temperature": 0, "n": 2});
    let mut asked = body.clone();
    asked["prompt_logprobs"] = json!(2);
    let reply = server.ok(COMPLETIONS, asked).await;
    assert_eq!(reply["choices"][0]["prompt_logprobs"], reply["choices"][1]["prompt_logprobs"]);
    assert_ne!(reply["choices"][0]["prompt_logprobs"], reply["choices"][2]["prompt_logprobs"]);
    let entries = reply["choices"][0]["prompt_logprobs"].as_array().expect("a list");
    let echo = json!({"prompt": text, "max_tokens": 0, "echo": true, "logprobs": 2});
    let echo = server.ok(COMPLETIONS, echo).await;
    let echo = &echo["choices"][0]["logprobs"];
    let ids = server.ok("/tokenize", json!({"prompt": text})).await;
    assert_eq!(entries.len(), ids["tokens"].as_array().expect("ids").len());
    for (index, entry) in entries.iter().enumerate() {
        let own = &entry[ids["tokens"][index].to_string()];
        assert_eq!(own["logprob"], echo["token_logprobs"][index], "{index}");
        if index == 0 {
            assert_eq!(*entry, Value::Null);
            continue;
        }
        assert_eq!(own["decoded_token"], echo["tokens"][index]);
        let ranks = entry.as_object().expect("tokens").values();
        let mut ranks: Vec<u64> = ranks.filter_map(|token| token["rank"].as_u64()).collect();
        ranks.sort_unstable();
        assert_eq!(ranks[..2], [1, 2], "{entry}");
    }
    let none = server.ok(COMPLETIONS, body).await;
    assert!(none["choices"][0]["prompt_logprobs"].is_null());

    let body = json!({"messages": messages("x"), "max_tokens": 1, "prompt_logprobs": 0});
    let reply = server.ok(CHAT, body).await;
    let entries = reply["prompt_logprobs"].as_array().expect("a list");
    assert_eq!(Some(entries.len() as u64), reply["usage"]["prompt_tokens"].as_u64());
    assert!(entries[1..].iter().all(|entry| entry.as_object().is_some_and(|one| one.len() == 1)));
}

/// Goal: a stream reports the usage so far with each piece if the client wants it, and options of
/// streams have no effect on a whole reply.
#[tokio::test]
async fn streams_report_the_usage_so_far() {
    let server = Server::start("demo");
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    for (path, mut body) in [
        (COMPLETIONS, json!({"prompt": "x", "max_tokens": 4, "ignore_eos": true})),
        (CHAT, json!({"messages": messages("x"), "max_tokens": 4, "ignore_eos": true})),
    ] {
        body["stream_options"] = options.clone();
        let mut events = server.events(path, body.clone()).await;
        let last = events.pop().expect("events");
        assert_eq!(
            (&last["choices"], &last["usage"]["completion_tokens"]),
            (&json!([]), &json!(4))
        );
        let counts: Vec<u64> = events
            .iter()
            .map(|event| event["usage"]["completion_tokens"].as_u64().expect("a count"))
            .collect();
        assert!(counts.is_sorted() && counts.last() == Some(&4), "{counts:?}");
        for event in &events {
            assert_eq!(event["usage"]["prompt_tokens"], last["usage"]["prompt_tokens"]);
        }
        let reply = server.send(path, body.to_string()).await;
        assert_eq!(
            (reply.status().as_u16(), &reply.headers()["x-stolon-ignored"]),
            (200, &"stream_options".parse().expect("a value"))
        );
        body["stream_options"] = json!({"continuous_usage_stats": true});
        assert!(server.events(path, body).await.iter().all(|event| event.get("usage").is_none()));
    }
}

/// Goal: log-probabilities name tokens by their ids, and are those of the tokens that the request
/// names and of the generated one.
#[tokio::test]
async fn log_probabilities_name_tokens() {
    let server = Server::start("demo");
    let body = json!({"prompt": "The keeper", "max_tokens": 3, "temperature": 0, "logprobs": 1,
                      "return_tokens_as_token_ids": true, "return_token_ids": true});
    let reply = server.ok(COMPLETIONS, body).await;
    let choice = &reply["choices"][0];
    let names: Vec<Value> = choice["token_ids"]
        .as_array()
        .expect("ids")
        .iter()
        .map(|id| json!(format!("token_id:{id}")))
        .collect();
    assert_eq!(choice["logprobs"]["tokens"], json!(names));
    assert!(
        choice["logprobs"]["top_logprobs"][0].get(names[0].as_str().expect("a name")).is_some()
    );
    let body = json!({"messages": messages("x"), "max_tokens": 1, "temperature": 0, "logprobs": true,
                      "top_logprobs": 5, "logprob_token_ids": [5, 9, 5],
                      "return_tokens_as_token_ids": true});
    let reply = server.ok(CHAT, body).await;
    let entry = &reply["choices"][0]["logprobs"]["content"][0];
    let mut listed: Vec<&str> = entry["top_logprobs"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|top| top["token"].as_str())
        .collect();
    assert_eq!(listed.remove(0), entry["token"]);
    listed.sort_unstable();
    assert_eq!(listed, ["token_id:5", "token_id:9"], "{entry}");
}

/// Goal: only the tokens that a request allows are generated.
#[tokio::test]
async fn only_allowed_tokens_are_generated() {
    let server = Server::tiny();
    let body = json!({"prompt": "x", "max_tokens": 8, "temperature": 1, "seed": 1, "n": 2,
                      "allowed_token_ids": [98, 97]});
    for choice in server.ok(COMPLETIONS, body).await["choices"].as_array().expect("choices") {
        let text = choice["text"].as_str().expect("a text");
        assert!(text.len() == 8 && text.bytes().all(|byte| b"ab".contains(&byte)), "{text}");
    }
}

/// Goal: a prompt that is too long is cut at the end that the request names, and others are not
/// cut.
#[tokio::test]
async fn prompts_are_cut_on_request() {
    let server = Server::with(TINY, |engine, _| engine.max_positions(64));
    let text: String = ('a'..='z').cycle().take(100).collect();
    let ids = |text: &str| json!(text.bytes().collect::<Vec<u8>>());
    for (more, expected) in [
        (json!({"truncate_prompt_tokens": 5}), &text[95..]),
        (json!({"truncate_prompt_tokens": 5, "truncation_side": "right"}), &text[..5]),
        (json!({"truncate_prompt_tokens": -1}), &text[38..]),
    ] {
        let mut body = json!({"prompt": text, "max_tokens": 2, "return_token_ids": true});
        for (name, value) in more.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let reply = server.ok(COMPLETIONS, body).await;
        assert_eq!(reply["choices"][0]["prompt_token_ids"], ids(expected), "{more}");
        assert_eq!(reply["usage"]["prompt_tokens"], expected.len());
    }
    let server = Server::start("demo");
    let body = json!({"messages": messages("A long question."), "max_tokens": 2,
                      "truncate_prompt_tokens": 3});
    assert_eq!(server.ok(CHAT, body).await["usage"]["prompt_tokens"], 3);
}
