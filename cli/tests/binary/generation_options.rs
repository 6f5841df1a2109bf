//! Parameters that every API for generation has.

use serde_json::{Value, json};

use crate::support::Server;
use crate::tools_api::SCRIPTED;

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
        let server = Server::start(SCRIPTED, &["--block-size", "4"]);
        let cached_with = async |salt: &str| {
            let more = json!({"cache_salt": salt, "priority": 3, "seed": 7, "min_p": 0.1});
            let reply = server.ok(path, with(&body, &more)).await;
            reply.pointer(cached).and_then(Value::as_u64).expect("a count")
        };
        assert_eq!(cached_with("a").await, 0, "{path}");
        assert!(cached_with("a").await > 0, "{path}");
        assert_eq!(cached_with("b").await, 0, "{path}");
        for (more, expected) in [
            (json!({"priority": "high"}), "priority"),
            (json!({"min_p": "low"}), "min_p"),
            (json!({"cache_salt": 1}), "cache_salt"),
            (json!({"session_id": "none"}), "session `none`"),
            (json!({"guided_regex": "("}), "invalid regex"),
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
    let server = Server::start(SCRIPTED, &[]);
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
