//! Parameters that every API for generation has.

use serde_json::{Value, json};

use crate::support::{SCRIPTED, Server, TINY};

/// Path, the smallest body, and where the reply has the number of cached tokens.
fn apis() -> [(&'static str, Value, &'static str); 4] {
    let text = "Now script:plain";
    let messages = json!([{"role": "user", "content": text}]);
    [
        (
            "/v1/completions",
            json!({"prompt": text, "max_tokens": 4}),
            "/usage/prompt_tokens_details/cached_tokens",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 4}),
            "/usage/prompt_tokens_details/cached_tokens",
        ),
        (
            "/v1/responses",
            json!({"input": text, "max_output_tokens": 4}),
            "/usage/input_tokens_details/cached_tokens",
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 4}),
            "/usage/cache_read_input_tokens",
        ),
    ]
}

/// A body with further members.
fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    for (name, value) in more.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// Goal: a salt keeps caches apart in every API, priorities and sampling are accepted in each, and
/// wrong values are refused.
#[tokio::test]
async fn every_api_has_the_options_of_generation() {
    for (path, body, cached) in apis() {
        let server = Server::with(SCRIPTED, |engine, _| engine.block_size(4));
        let cached_with = async |salt: &str| {
            let more = json!({"cache_salt": salt, "priority": 3, "seed": 7, "min_p": 0.1});
            let reply = server.ok(path, with(&body, &more)).await;
            reply.pointer(cached).and_then(Value::as_u64).expect("a count")
        };
        assert_eq!(cached_with("a").await, 0, "{path}");
        assert!(cached_with("a").await > 0, "{path}");
        assert_eq!(cached_with("b").await, 0, "{path}");
        let cached_without = async |skipped: &str| {
            let more = json!({"cache_salt": "c", skipped: true});
            let reply = server.ok(path, with(&body, &more)).await;
            reply.pointer(cached).and_then(Value::as_u64).expect("a count")
        };
        assert_eq!(cached_without("skip_writing_prefix_cache").await, 0, "{path}");
        assert_eq!(cached_without("skip_reading_prefix_cache").await, 0, "{path}");
        assert!(cached_without("skip_writing_prefix_cache").await > 0, "{path}");
        assert_eq!(cached_without("skip_reading_prefix_cache").await, 0, "{path}");
        for (more, expected) in [
            (json!({"priority": "high"}), "priority"),
            (json!({"min_p": "low"}), "min_p"),
            (json!({"cache_salt": 1}), "cache_salt"),
            (json!({"skip_writing_prefix_cache": "no"}), "skip_writing_prefix_cache"),
            (json!({"session_id": "none"}), "session `none`"),
            (json!({"guided_regex": "("}), "regular expression is not valid"),
        ] {
            let (status, reply) = server.post(path, with(&body, &more)).await;
            let message = reply["error"]["message"].as_str().unwrap_or_default();
            assert!((400..500).contains(&status) && message.contains(expected), "{path}: {reply}");
        }
    }
}

/// Goal: an API whose replies have one answer refuses parameters of several.
#[tokio::test]
async fn one_answer_has_no_number_of_choices() {
    let server = Server::start(SCRIPTED);
    for (path, body, _) in &apis()[2..] {
        for more in [json!({"n": 2}), json!({"return_token_ids": true})] {
            let (status, reply) = server.post(path, with(body, &more)).await;
            assert_eq!(status, 400, "{path}: {reply}");
        }
        let more = json!({"stop": "x", "stop_sequences": ["y"]});
        let (status, reply) = server.post(path, with(body, &more)).await;
        assert_eq!(status, 400, "{path}: {reply}");
    }
}

/// Goal: an answer that is the same token again and again is ended, in whole and in streamed
/// replies: in conversations unless the request forbids it, in completions if it asks for it.
#[tokio::test]
async fn an_endless_repetition_is_ended() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let server = Server::with(TINY, |engine, _| engine.chat_template(template));
    let letters = json!({"logit_bias": {"97": 100}, "max_tokens": 600});
    let completion = with(&json!({"prompt": "b"}), &letters);
    let chat = with(&json!({"messages": [{"role": "user", "content": "b"}]}), &letters);
    let (on, off) = (json!({"end_repetition": true}), json!({"end_repetition": false}));
    let eos = json!({"ignore_eos": true});
    for (path, body, tokens) in [
        ("/v1/completions", completion.clone(), 600),
        ("/v1/completions", with(&completion, &on), 257),
        ("/v1/chat/completions", chat.clone(), 257),
        ("/v1/chat/completions", with(&chat, &off), 600),
        ("/v1/chat/completions", with(&chat, &eos), 600),
        ("/v1/chat/completions", with(&chat, &json!({"min_tokens": 400})), 400),
    ] {
        let reply = server.ok(path, body.clone()).await;
        let choice = &reply["choices"][0];
        let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
        assert_eq!(text.map(str::len), Some(tokens), "{path}: {body}");
        assert_eq!(reply["usage"]["completion_tokens"], tokens);
        // Clients take `length` for a limit of theirs.
        let (reason, cut) = match tokens {
            257 | 400 => ("stop", json!("repetition")),
            _ => ("length", Value::Null),
        };
        assert_eq!(choice["finish_reason"], reason);
        assert_eq!(choice["stop_reason"], cut, "{path}: {body}");
        let events = server.events(path, body).await;
        let last = events.iter().rfind(|event| !event["choices"][0]["finish_reason"].is_null());
        let last = last.map(|event| &event["choices"][0]).expect("an end");
        assert_eq!(
            (&last["stop_reason"], &last["finish_reason"]),
            (&cut, &json!(reason)),
            "{path}"
        );
    }
    let letters = json!({"logit_bias": {"97": 100}});
    let body = with(&json!({"input": "b", "max_output_tokens": 600}), &letters);
    let reply = server.ok("/v1/responses", body).await;
    assert_eq!(reply["usage"]["output_tokens"], 257);
    assert_eq!(
        (&reply["status"], &reply["incomplete_details"]),
        (&json!("completed"), &Value::Null)
    );
    let message = json!([{"role": "user", "content": "b"}]);
    let body = with(&json!({"messages": message, "max_tokens": 600}), &letters);
    let reply = server.ok("/v1/messages", body).await;
    let ended = (&reply["usage"]["output_tokens"], &reply["stop_reason"]);
    assert_eq!(ended, (&json!(257), &json!("end_turn")));
    server.settled_audit().await;
}

/// Goal: the operator replaces the defaults of requests, not the values that they set.
#[tokio::test]
async fn the_defaults_of_sampling_are_replaced() {
    let config = json!({"temperature": 2.0, "top_p": 1.0});
    for (members, are_drawn) in [(json!({}), false), (config, true)] {
        let server = Server::with(TINY, |engine, _| engine.override_generation_config(members));
        let answer = async |more| {
            let body = with(&json!({"prompt": "abc", "max_tokens": 40}), &more);
            server.ok("/v1/completions", body).await["choices"][0]["text"].clone()
        };
        let (one, other) = (answer(json!({})).await, answer(json!({})).await);
        assert_eq!(one != other, are_drawn);
        let greedy = json!({"temperature": 0});
        assert_eq!(answer(greedy.clone()).await, answer(greedy).await);
    }
}
