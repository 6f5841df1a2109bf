//! The next turn of a conversation is computed in advance.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::Server;

const CHAT: &str = "/v1/chat/completions";

async fn metric(server: &Server, name: &str) -> u64 {
    let reply = reqwest::get(server.url("/metrics")).await.expect("a reply");
    let text = reply.text().await.expect("a text");
    let mut samples = text.lines().filter(|line| line.starts_with(&format!("stolon:{name}{{")));
    let sample = samples.next().unwrap_or_else(|| panic!("no {name}: {text}"));
    sample.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

/// Goal: with the setting, the second turn of a chat finds its beginning cached up to the text of the
/// user, and the metrics have the work. Without it, it computes everything after the answer. The
/// answers are the same.
#[tokio::test]
async fn a_chat_finds_its_next_turn_computed() {
    let mut results = Vec::new();
    for is_on in [true, false] {
        let server = Server::with("demo", |engine, _| engine.next_turn_prefill(is_on));
        let mut messages = vec![json!({"role": "user", "content": "Where is the lighthouse?"})];
        let ask = async |messages: &[Value]| {
            let body = json!({"messages": messages, "temperature": 0, "max_tokens": 40});
            server.ok(CHAT, body).await
        };
        let first = ask(&messages).await;
        if is_on {
            let mut waits = 0;
            while metric(&server, "background_tokens_total").await == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
                waits += 1;
                assert!(waits < 1000, "nothing is computed");
            }
        }
        messages.push(first["choices"][0]["message"].clone());
        messages.push(json!({"role": "user", "content": "And the harbor?"}));
        let second = ask(&messages).await;
        let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        let known = first["usage"]["total_tokens"].as_u64().expect("a number");
        let cached = cached.expect("a number");
        // The last token of the answer is computed in advance.
        assert_eq!(cached >= known, is_on, "{cached} of {known}: {second}");
        assert_eq!(metric(&server, "prompt_tokens_cached_total").await, cached);
        results.push([first, second].map(|reply| reply["choices"][0]["message"].clone()));
    }
    assert_eq!(results[0], results[1]);
}
