//! What clients say about the further use of their prompts: `cache_control` and its like.

use serde_json::{Value, json};
use stolon::EvictionPolicy;

use crate::support::{SCRIPTED, Server};

const PATH: &str = "/v1/messages";

/// A server whose pool has 512 tokens, of which 256 may be marked.
fn server() -> Server {
    Server::with(SCRIPTED, |engine, _| {
        let engine = engine.block_size(4).num_blocks(128).pin_budget(64).max_positions(256);
        engine.eviction_policy(EvictionPolicy::Lru)
    })
}

/// A document of about 100 tokens, with `control`, and a question.
fn ask(control: &Value, question: &str) -> Value {
    let document = "The violet tent costs 45 crowns. ".repeat(3);
    let mut block = json!({"type": "text", "text": document});
    if !control.is_null() {
        block["cache_control"] = control.clone();
    }
    let question = json!({"type": "text", "text": format!("{question} script:plain")});
    json!({"max_tokens": 16, "messages": [{"role": "user", "content": [block, question]}]})
}

/// Fills the pool with other prompts.
async fn press(server: &Server) {
    for index in 0..10 {
        let text = format!("{index} ").repeat(50);
        let body = json!({"max_tokens": 4, "messages": [{"role": "user", "content": text}]});
        server.ok(PATH, body).await;
    }
}

fn count(reply: &Value, path: &str) -> u64 {
    reply["usage"].pointer(path).and_then(Value::as_u64).expect("a count")
}

async fn pins(server: &Server) -> Vec<Value> {
    let (_, reply) = server.get("/v1/cache/pins").await;
    reply["pins"].as_array().expect("a list").clone()
}

/// Goal: a document with `cache_control` stays cached while other prompts fill the pool, and one
/// without does not. The answers are the same. The usage tells what was created and read.
#[tokio::test]
async fn marked_blocks_stay_cached() {
    let mut answers = Vec::new();
    for (control, name) in [
        (Value::Null, None),
        (json!({"type": "ephemeral"}), Some("ephemeral_5m_input_tokens")),
        (json!({"type": "ephemeral", "ttl": "1h"}), Some("ephemeral_1h_input_tokens")),
    ] {
        let server = server();
        let first = server.ok(PATH, ask(&control, "How much?")).await;
        let created = count(&first, "/cache_creation_input_tokens");
        let by_ttl = |name: &str| count(&first, &format!("/cache_creation/{name}"));
        let both = by_ttl("ephemeral_5m_input_tokens") + by_ttl("ephemeral_1h_input_tokens");
        assert_eq!(both, created);
        assert_eq!(name.map_or(0, by_ttl), created, "{first}");
        assert!(count(&first, "/input_tokens") > 0, "the question is not marked: {first}");
        press(&server).await;
        let second = server.ok(PATH, ask(&control, "Which color?")).await;
        let read = count(&second, "/cache_read_input_tokens");
        match name {
            Some(_) => assert!(created >= 80 && read >= created, "{first} {second}"),
            None => assert!(created == 0 && read < 40, "{first} {second}"),
        }
        assert_eq!(count(&second, "/cache_creation_input_tokens"), 0, "{second}");
        answers.push((first["content"].clone(), second["content"].clone()));
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}

/// Goal: a mark on tools, on the system message, on a call, on its result and on the whole request
/// each makes one mark of what precedes it, also in streams; thousands of marks make one.
#[tokio::test]
async fn every_place_can_be_marked() {
    let control = json!({"type": "ephemeral"});
    let long = "Be brief and kind to everyone. ".repeat(2);
    let body = json!({
        "max_tokens": 16,
        "system": [{"type": "text", "text": long}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "seen"},
                {"type": "text", "text": "script:plain"}]},
        ],
    });
    let mut lens = Vec::new();
    for place in [
        "/system/0",
        "/tools/0",
        "/messages/0/content/0",
        "/messages/1/content/0",
        "/messages/2/content/0",
        "/messages/2/content/1",
        "",
    ] {
        let server = server();
        let mut body = body.clone();
        let block = body.pointer_mut(place).expect("a block");
        block["cache_control"] = control.clone();
        let reply = server.ok(PATH, body.clone()).await;
        let pins = pins(&server).await;
        assert_eq!(pins.len(), 1, "{place}: {pins:?}");
        assert_eq!(pins[0]["is_mark"], true);
        let created = count(&reply, "/cache_creation_input_tokens");
        assert_eq!(pins[0]["tokens"], created, "{place}: {reply}");
        lens.push(created);
    }
    assert_eq!(lens[0], lens[1], "{lens:?}");
    assert!(lens[1..6].is_sorted_by(|a, b| a < b) && lens[5] == lens[6], "{lens:?}");
    let server = server();
    let block = json!({"type": "text", "text": "a", "cache_control": control});
    let mut many = body;
    many["messages"] = json!([{"role": "user", "content": vec![block; 20]}]);
    server.ok(PATH, many).await;
    assert_eq!(pins(&server).await.len(), 1);
}

/// Goal: OpenAI's and Dynamo's hints mark the prompt in each of OpenAI's APIs, for their times.
#[tokio::test]
async fn hints_of_other_apis_mark_the_prompt() {
    let text = "script:plain and some more words to fill a block";
    for (path, body) in [
        ("/v1/completions", json!({"prompt": text, "max_tokens": 2})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text}]})),
        ("/v1/responses", json!({"input": text})),
    ] {
        for (hint, seconds) in [
            (json!({"prompt_cache_key": "a"}), 300.0),
            (json!({"prompt_cache_retention": "24h"}), 86400.0),
            (
                json!({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"},
                              "agent_hints": {"priority": 3, "osl": 9}}}),
                3600.0,
            ),
        ] {
            let server = server();
            let mut body = body.clone();
            for (name, value) in hint.as_object().expect("an object") {
                body[name] = value.clone();
            }
            server.ok(path, body).await;
            let pins = pins(&server).await;
            assert_eq!(pins.len(), 1, "{path} {hint}");
            let left = pins[0]["ends_in_seconds"].as_f64().expect("a time to live");
            assert!(left <= seconds && left > seconds - 100.0, "{path} {hint}: {left}");
        }
    }
}

/// Goal: `cache_control` in a part of a message of OpenAI's chat API marks the prompt up to that
/// part. Clients mark the last part of each request, so the same part without the mark is the same.
#[tokio::test]
async fn parts_of_chats_can_be_marked() {
    let server = server();
    let path = "/v1/chat/completions";
    let control = json!({"type": "ephemeral", "ttl": "1h"});
    let mut body = ask(&control, "How much?");
    let first = server.ok(path, body.clone()).await;
    let made = pins(&server).await;
    assert_eq!(made.len(), 1, "{made:?}");
    let tokens = made[0]["tokens"].as_u64().expect("a number");
    let prompt = first["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert!(tokens >= 80 && tokens + 8 < prompt, "{tokens} of {prompt}");
    let left = made[0]["ends_in_seconds"].as_f64().expect("a time to live");
    assert!((3500.0..=3600.0).contains(&left), "{left}");
    press(&server).await;
    body["messages"][0]["content"][0].as_object_mut().expect("a part").remove("cache_control");
    body["messages"][0]["content"][1]["cache_control"] = json!({"type": "ephemeral"});
    let second = server.ok(path, body).await;
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached.expect("a number") >= tokens, "{second}");
    assert_eq!(first["choices"][0]["message"], second["choices"][0]["message"]);
}
