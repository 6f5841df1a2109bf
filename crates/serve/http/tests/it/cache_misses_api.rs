//! Why a prompt was not cached, as agents see it: requests in the forms of their APIs with one
//! planted cause each, and the reasons in `x-stolon-cache` and below `/v1/cache`; and conversations whose answers come back as the tokens that were sampled.

use axum::http::HeaderName;
use serde_json::{Value, json};
use stolon::EngineBuilder;
use stolon_http::{RouterOptions, Tenants};

use crate::support::Server;

/// A server with room for all conversations of a test.
fn demo(set: impl FnOnce(EngineBuilder, &mut RouterOptions) -> EngineBuilder) -> Server {
    Server::with("demo", |engine, options| set(engine.num_blocks(1024), options))
}

/// A page of text that differs by `number`.
fn page(number: usize) -> String {
    (0..6).map(|line| format!("The room {line} of house {number} is on the left. ")).collect()
}

/// A conversation of an agent, before it takes the form of an API: instructions, tools and texts of
/// the user and the assistant in turn.
#[derive(Clone)]
struct Agent {
    system: String,
    tools: Vec<&'static str>,
    texts: Vec<(&'static str, String)>,
}

impl Agent {
    fn new() -> Self {
        let texts = [("user", 1), ("assistant", 2), ("user", 3), ("assistant", 4), ("user", 5)];
        let texts = texts.map(|(role, number)| (role, page(number)));
        Self { system: page(0), tools: vec!["look"], texts: texts.into() }
    }
}

/// An API: the path of its route, its path below `/v1/cache`, and the body of a request.
struct Api {
    path: &'static str,
    explain: &'static str,
    /// Index of the first message after the instructions, as the server counts.
    first: usize,
    body: fn(&Agent) -> Value,
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"page": {"type": "integer"}}})
}

/// Cline, OpenCode and qwen-code.
fn chat(agent: &Agent) -> Value {
    let mut messages = vec![json!({"role": "system", "content": agent.system})];
    messages.extend(agent.texts.iter().map(|(role, text)| json!({"role": role, "content": text})));
    let tools = agent.tools.iter().map(
        |name| json!({"type": "function", "function": {"name": name, "parameters": schema()}}),
    );
    json!({"messages": messages, "tools": tools.collect::<Vec<_>>(), "max_tokens": 2})
}

/// Claude Code.
fn messages(agent: &Agent) -> Value {
    let messages = agent
        .texts
        .iter()
        .map(|(role, text)| json!({"role": role, "content": [{"type": "text", "text": text}]}));
    let tools = agent.tools.iter().map(|name| json!({"name": name, "input_schema": schema()}));
    json!({"system": [{"type": "text", "text": agent.system}],
           "messages": messages.collect::<Vec<_>>(), "tools": tools.collect::<Vec<_>>(),
           "max_tokens": 2})
}

/// Codex.
fn responses(agent: &Agent) -> Value {
    let input = agent.texts.iter().map(|(role, text)| {
        let kind = if *role == "user" { "input_text" } else { "output_text" };
        json!({"type": "message", "role": role, "content": [{"type": kind, "text": text}]})
    });
    let tools = agent.tools.iter().map(
        |name| json!({"type": "function", "name": name, "parameters": schema(), "strict": false}),
    );
    json!({"instructions": agent.system, "input": input.collect::<Vec<_>>(),
           "tools": tools.collect::<Vec<_>>(), "max_output_tokens": 16, "store": false})
}

const APIS: [Api; 3] = [
    Api { path: "/v1/chat/completions", explain: "explain", first: 1, body: chat },
    Api { path: "/v1/messages", explain: "explain/messages", first: 1, body: messages },
    Api { path: "/v1/responses", explain: "explain/responses", first: 1, body: responses },
];

/// A cause: how it changes the conversation, its reason, and the message that it is about.
type Planted = (fn(&mut Agent), &'static str, Option<usize>);

/// The causes. Messages are counted from the first one after the instructions.
const PLANTED: [Planted; 6] = [
    (|agent| agent.system.insert_str(0, "It is noon. "), "message_changed", None),
    (|agent| agent.tools.push("write"), "tools_changed", None),
    (|agent| agent.texts[2].1 = page(9), "message_changed", Some(2)),
    (|agent| agent.texts[1].1 = page(9), "answer_changed", Some(1)),
    (
        |agent| {
            agent.texts.insert(2, ("user", page(8)));
            agent.texts.insert(3, ("assistant", page(7)));
        },
        "message_inserted",
        Some(2),
    ),
    (|agent| drop(agent.texts.drain(..2)), "message_removed", Some(0)),
];

/// The members of the header, by name.
fn header(reply: &reqwest::Response) -> Option<Vec<(String, String)>> {
    let value = reply.headers().get("x-stolon-cache")?.to_str().expect("ASCII");
    let member = |member: &str| {
        let (name, value) = member.split_once('=').expect("a value");
        (name.to_owned(), value.to_owned())
    };
    Some(value.split(", ").map(member).collect())
}

/// Goal: in each API, each planted cause is named: by the route that explains requests, which
/// computes nothing, and by the reply to the request itself.
#[tokio::test]
async fn planted_causes_are_named_in_each_api() {
    let mut named = 0;
    for api in APIS {
        for (plant, reason, message) in PLANTED {
            let server = demo(|engine, _| engine);
            let first = server.send(api.path, (api.body)(&Agent::new()).to_string()).await;
            assert!(first.status().is_success(), "{}", first.text().await.expect("a text"));
            assert_eq!(header(&first), None, "the first prompt is new");
            // The reply is sent before the prompt's last blocks are committed.
            server.settled_audit().await;
            let mut agent = Agent::new();
            plant(&mut agent);
            let body = (api.body)(&agent);
            let explained = server.ok(&format!("/v1/cache/{}", api.explain), body.clone()).await;
            let result = &explained["results"][0];
            let miss = &result["miss"];
            assert_eq!(miss["reason"], reason, "{} {explained}", api.path);
            if let Some(index) = message {
                assert_eq!(miss["message"], index + api.first, "{} {explained}", api.path);
            }
            let lost = miss["lost_tokens"].as_u64().expect("a number");
            assert!(lost > 40, "{} {explained}", api.path);
            assert_ne!(miss["prompt_text"], miss["earlier_text"]);
            let reply = server.send(api.path, body.to_string()).await;
            let members = header(&reply).expect("the header");
            let expected = [("reason", reason), ("lost", &lost.to_string())];
            let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
            assert_eq!(members[..2], expected, "{members:?}");
            named += 1;
        }
    }
    assert_eq!(named, 18);
}

/// Goal: operators see the most expensive requests with their clients, and counters by reason; a
/// request that is only explained is neither run nor counted.
#[tokio::test]
async fn operators_see_what_was_lost() {
    let server = demo(|engine, _| engine);
    let first = chat(&Agent::new());
    server.ok("/v1/chat/completions", first.clone()).await;
    server.settled_audit().await;
    let (_, before) = server.get("/v1/cache/misses").await;
    assert_eq!(before["misses"], json!([]));
    let mut salted = first.clone();
    salted["cache_salt"] = json!("other");
    server.ok("/v1/cache/explain", salted.clone()).await;
    let (_, unchanged) = server.get("/v1/cache/misses").await;
    assert_eq!(unchanged, before);
    server.ok("/v1/chat/completions", salted).await;
    let (_, after) = server.get("/v1/cache/misses").await;
    let miss = &after["misses"][0];
    assert_eq!((&miss["reason"], &miss["cached_tokens"]), (&json!("other_salt"), &json!(0)));
    assert_eq!(miss["client"], "127.0.0.1");
    let metrics = reqwest::get(server.url("/metrics")).await.expect("a reply");
    let metrics = metrics.text().await.expect("a text");
    let lost = format!(
        "stolon:prefix_cache_lost_tokens_total{{model_name=\"stolon-demo\",reason=\"other_salt\"}} {}",
        miss["lost_tokens"]
    );
    assert!(metrics.contains(&lost), "{lost}\n{metrics}");
}

/// Goal: a client is told nothing of another one's prompts, and nothing at all if the operator does
/// not report cached tokens.
#[tokio::test]
async fn clients_are_told_of_their_own_prompts_only() {
    let server = demo(|engine, options| {
        options.access.tenants = Tenants::ByHeader(HeaderName::from_static("x-tenant"));
        engine
    });
    let secret = json!({"messages": [{"role": "user", "content": format!("{}secret", page(1))}],
                        "max_tokens": 2});
    let other = json!({"messages": [{"role": "user", "content": format!("{}other", page(1))}],
                       "max_tokens": 2});
    let send = async |path: &str, tenant: &str, body: &Value| {
        let request = reqwest::Client::new().post(server.url(path)).header("x-tenant", tenant);
        let request = request.header("content-type", "application/json").body(body.to_string());
        let reply = request.send().await.expect("a reply").text().await.expect("a text");
        serde_json::from_str::<Value>(&reply).expect("JSON")
    };
    send("/v1/chat/completions", "a", &secret).await;
    let own = send("/v1/cache/explain", "a", &other).await;
    assert!(own["results"][0]["miss"]["common_tokens"].as_u64() > Some(20), "{own}");
    let others = send("/v1/cache/explain", "b", &other).await;
    let miss = &others["results"][0]["miss"];
    assert_eq!((&miss["reason"], &miss["common_tokens"]), (&json!("new"), &json!(0)), "{others}");
    assert!(!others.to_string().contains("secret"), "{others}");
    let server = demo(|engine, options| {
        options.hide_cached_tokens = true;
        engine
    });
    let (status, refused) = server.post("/v1/cache/explain", other.clone()).await;
    assert_eq!(status, 403, "{refused}");
    let mut changed = other.clone();
    changed["messages"][0]["content"] = json!(page(2));
    server.ok("/v1/chat/completions", other).await;
    let reply = server.send("/v1/chat/completions", changed.to_string()).await;
    assert_eq!(header(&reply), None);
}

/// Tokens of the prompt and cached ones, and the text of the answer, by the form of the API.
fn usage(path: &str, reply: &Value) -> (u64, u64, u64, String) {
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let usage = &reply["usage"];
    match path {
        "/v1/messages" => {
            let cached = number(&usage["cache_read_input_tokens"]);
            let prompt = number(&usage["input_tokens"]) + cached;
            let prompt = prompt + number(&usage["cache_creation_input_tokens"]);
            let blocks = reply["content"].as_array().expect("a list");
            let text = blocks.iter().filter_map(|block| block["text"].as_str()).collect();
            (prompt, cached, number(&usage["output_tokens"]), text)
        }
        "/v1/responses" => {
            let cached = number(&usage["input_tokens_details"]["cached_tokens"]);
            let items = reply["output"].as_array().expect("a list");
            let parts = items.iter().filter_map(|item| item["content"].as_array()).flatten();
            let text = parts.filter_map(|part| part["text"].as_str()).collect();
            (number(&usage["input_tokens"]), cached, number(&usage["output_tokens"]), text)
        }
        _ => {
            let cached = number(&usage["prompt_tokens_details"]["cached_tokens"]);
            let text = reply["choices"][0]["message"]["content"].as_str().unwrap_or_default();
            let completion = number(&usage["completion_tokens"]);
            (number(&usage["prompt_tokens"]), cached, completion, text.to_owned())
        }
    }
}

/// Goal: in each API, the next turn of a conversation computes only what is new, within a block,
/// although its answers were sampled in unusual tokens. Tokenized again, they are not the same.
#[tokio::test]
async fn the_next_turn_computes_only_what_is_new() {
    let mut retokenized = 0;
    for is_exact in [true, false] {
        for api in APIS {
            let server = demo(|engine, _| if is_exact { engine } else { engine.history_bytes(0) });
            let mut agent = Agent { tools: Vec::new(), ..Agent::new() };
            let mut known = 0;
            for turn in 0..12 {
                let mut body = (api.body)(&agent);
                body["temperature"] = json!(2.0);
                body["seed"] = json!(turn);
                for name in ["max_tokens", "max_output_tokens"] {
                    if let Some(limit) = body.get_mut(name) {
                        *limit = json!(40);
                    }
                }
                let reply = server.ok(api.path, body).await;
                let (prompt, cached, completion, text) = usage(api.path, &reply);
                if is_exact {
                    assert!(cached + 4 > known, "{} turn {turn}: {cached} {known}", api.path);
                } else {
                    retokenized += u32::from(cached + 4 <= known);
                }
                // The KV of the last token is computed with the next one.
                known = prompt + completion - 1;
                agent.texts.extend([("assistant", text), ("user", page(turn))]);
                server.settled_audit().await;
            }
        }
    }
    // How many depends on the tokens, which differ between processors at this temperature.
    assert!(retokenized > 5, "{retokenized} turns were computed again in part");
}
