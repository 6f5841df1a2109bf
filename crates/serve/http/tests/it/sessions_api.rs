//! `/v1/sessions`, `session_id` in requests, and SGLang's names for them.

use std::time::Duration;

use serde_json::{Value, json};

use stolon_http::Tenants;

use crate::support::{Server, TINY, api_keys, prompt, texts};

/// A conversation of two turns with other requests in between, which use up the KV cache. Returns
/// the texts of the answers and how much of the second prompt was cached.
async fn conversation(server: &Server, session: Option<&str>) -> (Vec<String>, u64) {
    server.ok("/v1/cache/flush", json!({})).await;
    let turn = async |prompt: &[u32]| {
        let mut body = json!({"prompt": prompt, "max_tokens": 8, "return_token_ids": true});
        body["session_id"] = session.map_or(Value::Null, Value::from);
        server.complete(body).await
    };
    let mut tokens = prompt(90, 1);
    let first = turn(&tokens).await;
    // None of them moves the ids by 90, back to the conversation's own.
    for seed in 40..50 {
        server.complete(json!({"prompt": prompt(0, seed), "max_tokens": 1})).await;
        let other: Vec<u32> = prompt(90, 1).iter().map(|id| 32 + (id + seed) % 90).collect();
        server.complete(json!({"prompt": other, "max_tokens": 1})).await;
    }
    let ids = first["choices"][0]["token_ids"].as_array().expect("token ids");
    tokens.extend(ids.iter().map(|id| id.as_u64().expect("an id") as u32));
    tokens.extend(prompt(0, 2));
    let second = turn(&tokens).await;
    let cached = &second["usage"]["prompt_tokens_details"]["cached_tokens"];
    let answers = [&first, &second].map(|reply| texts(reply)[0].to_owned());
    (answers.to_vec(), cached.as_u64().unwrap_or_default())
}

/// Goal: a session keeps its conversation cached while the same conversation without a session is
/// evicted, with the same answers; its statistics report the blocks that it holds.
#[tokio::test]
async fn a_session_keeps_its_conversation_cached() {
    let server = Server::with(TINY, |engine, _| engine.num_blocks(16));
    let opened = server.ok("/v1/sessions", json!({"id": "chat", "ttl_seconds": 600})).await;
    assert_eq!((&opened["tokens"], &opened["ttl_seconds"]), (&json!(0), &json!(600.0)));
    let (cold, none) = conversation(&server, None).await;
    let (warm, cached) = conversation(&server, Some("chat")).await;
    assert_eq!(cold, warm);
    assert!(none == 0 && cached >= 80, "{none} and {cached} tokens were cached");
    let (_, session) = server.get("/v1/sessions/chat").await;
    assert_eq!((&session["turns"], &session["object"]), (&json!(2), &json!("session")));
    assert_eq!(session["cached_tokens"], json!(cached));
    assert!(session["idle_seconds"].is_number() && session["held_tokens"].as_u64() > Some(80));
    let metrics = reqwest::get(server.url("/metrics")).await.expect("a response");
    let metrics = metrics.text().await.expect("text");
    for (name, value) in [("sessions", 1), ("session_turns_total", 2)] {
        let line = format!("stolon:{name}{{model_name=\"{TINY}\"}} {value}");
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    let closed = server.delete("/v1/sessions/chat").await;
    assert_eq!(closed, (200, json!({"id": "chat", "deleted": true})));
    assert_eq!(server.delete("/v1/sessions/chat").await.0, 404);
    let (status, refused) =
        server.post("/v1/completions", json!({"prompt": "x", "session_id": "chat"})).await;
    assert_eq!((status, &refused["error"]["code"]), (404, &json!("session_not_found")));
    assert_eq!(refused["error"]["param"], "session_id");
    server.settled_audit().await;
}

/// Goal: chat requests are turns too, streamed or not, and a turn in progress is the only one.
#[tokio::test]
async fn conversations_are_turns_of_sessions() {
    let server = Server::start("demo");
    let id = server.ok("/v1/sessions", json!({})).await["id"].clone();
    assert!(id.as_str().is_some_and(|id| id.len() == 32), "{id}");
    let mut body = json!({"messages": [{"role": "user", "content": "Who lights the lamp?"}],
                          "max_tokens": 4, "session_id": id});
    server.ok("/v1/chat/completions", body.clone()).await;
    server.events("/v1/chat/completions", body.clone()).await;
    let path = format!("/v1/sessions/{}", id.as_str().expect("a string"));
    assert_eq!(server.get(&path).await.1["turns"], json!(2));
    body["session_params"] = json!({"id": id, "rid": null, "replace": false});
    server.ok("/v1/chat/completions", body.clone()).await;
    for (params, param) in [
        (json!({"id": "another"}), "session_params.id"),
        (json!({"id": id, "replace": true}), "session_params.replace"),
        (json!({"id": id, "rid": "1"}), "session_params.rid"),
    ] {
        body["session_params"] = params;
        let (status, refused) = server.post("/v1/chat/completions", body.clone()).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!(param)));
    }
    for (member, value) in [("n", json!(2)), ("best_of", json!(2)), ("prompt", json!(["a", "b"]))] {
        let mut body = json!({"prompt": "x", "max_tokens": 2, "session_id": id});
        body[member] = value;
        let (status, refused) = server.post("/v1/completions", body).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!("session_id")), "{member}");
    }
    let echo = json!({"prompt": "x", "echo": true, "session_id": id});
    assert_eq!(server.post("/v1/completions", echo).await.1["error"]["param"], "echo");
    assert_eq!(server.get(&path).await.1["turns"], json!(3));
}

/// Goal: two turns of one session at once: one is answered, the other is refused with a code, and a
/// client that disconnects leaves its session idle.
#[tokio::test]
async fn a_session_has_one_turn_at_a_time() {
    let server = Server::tiny();
    server.ok("/v1/sessions", json!({"id": "a"})).await;
    let body = json!({"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true,
                      "session_id": "a"});
    let client = reqwest::Client::new();
    let first = client.post(server.url("/v1/completions")).json(&body).send().await;
    let first = first.expect("a response");
    assert_eq!(first.status(), 200);
    assert_eq!(server.get("/v1/sessions/a").await.1["idle_seconds"], json!(null));
    let short = json!({"prompt": "x", "max_tokens": 1, "session_id": "a"});
    let (status, refused) = server.post("/v1/completions", short.clone()).await;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("session_busy")));
    drop(first);
    while server.get("/v1/sessions/a").await.1["idle_seconds"].is_null() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(server.get("/v1/sessions/a").await.1["turns"], json!(0));
    server.complete(short).await;
    server.settled_audit().await;
}

/// Goal: SGLang's names work, and bodies are checked: ids, times and unknown members.
#[tokio::test]
async fn sglangs_names_work_and_bodies_are_checked() {
    let server = Server::with(TINY, |engine, _| {
        engine.max_sessions(2).session_ttl(Duration::from_secs(600))
    });
    let body = json!({"capacity_of_str_len": 1000, "session_id": "s", "streaming": false,
                      "timeout": 1.5});
    assert_eq!(server.ok("/open_session", body.clone()).await, json!("s"));
    let (status, refused) = server.post("/open_session", body).await;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("session_exists")));
    assert_eq!(server.ok("/close_session", json!({"session_id": "s"})).await["deleted"], true);
    assert_eq!(server.post("/close_session", json!({"session_id": "s"})).await.0, 404);
    let long = "x".repeat(100_000);
    for (path, body, param) in [
        ("/v1/sessions", json!({"id": "a b"}), "session_id"),
        ("/v1/sessions", json!({"id": long}), "session_id"),
        ("/v1/sessions", json!({"id": 7}), "id"),
        ("/v1/sessions", json!({"ttl_seconds": 0}), "ttl_seconds"),
        ("/v1/sessions", json!({"ttl_seconds": 86_401}), "ttl_seconds"),
        ("/v1/sessions", json!({"cache_salt": long}), "cache_salt"),
        ("/v1/sessions", json!({"capacity": 1}), "capacity"),
        ("/open_session", json!({"streaming": true}), "streaming"),
        ("/open_session", json!({"timeout": -1}), "timeout"),
        ("/open_session", json!({"timeout": 1e30}), "timeout"),
    ] {
        let (status, refused) = server.post(path, body).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!(param)), "{refused}");
        assert!(refused.to_string().len() < 3000);
    }
    for _ in 0..5 {
        server.ok("/v1/sessions", json!({})).await;
    }
    let (_, all) = server.get("/v1/cache/sessions").await;
    assert_eq!(all["data"].as_array().map(Vec::len), Some(2));
    assert_eq!(all["data"][0]["ttl_seconds"], json!(600.0));
    let (status, refused) = server.get("/v1/sessions").await;
    assert_eq!(status, 403, "all clients are one: {refused}");
}

/// Goal: clients with different keys have different sessions: they can neither see nor use each
/// other's, even under the same id. Operators see all.
#[tokio::test]
async fn clients_have_sessions_of_their_own() {
    for tenants in [Tenants::One, Tenants::ByKey] {
        let server = Server::with(TINY, |engine, options| {
            let keys = [("ada", "key-1"), ("ada", "key-2"), ("bob", "key-3")];
            options.access.api_keys = api_keys(&keys);
            options.access.tenants = tenants;
            engine
        });
        let client = reqwest::Client::new();
        let send = async |method: reqwest::Method, path: &str, key: &str, body: Value| {
            let request = client.request(method, server.url(path)).bearer_auth(key).json(&body);
            let reply = request.send().await.expect("a reply");
            (reply.status().as_u16(), reply.json::<Value>().await.expect("JSON"))
        };
        let (get, post, delete) =
            (reqwest::Method::GET, reqwest::Method::POST, reqwest::Method::DELETE);
        let open = json!({"id": "chat"});
        assert_eq!(send(post.clone(), "/v1/sessions", "key-1", open.clone()).await.0, 200);
        assert_eq!(send(get.clone(), "/v1/sessions/chat", "key-2", json!({})).await.0, 200);
        assert_eq!(send(get.clone(), "/v1/sessions/chat", "key-3", json!({})).await.0, 404);
        assert_eq!(send(delete.clone(), "/v1/sessions/chat", "key-3", json!({})).await.0, 404);
        assert_eq!(send(post.clone(), "/v1/sessions", "key-3", open).await.0, 200);
        let turn = json!({"prompt": "x", "max_tokens": 1, "session_id": "chat"});
        assert_eq!(send(post.clone(), "/v1/completions", "key-3", turn.clone()).await.0, 200);
        let salted = json!({"prompt": "x", "session_id": "chat", "cache_salt": "s"});
        assert_eq!(send(post.clone(), "/v1/completions", "key-3", salted).await.0, 400);
        for (key, turns) in [("key-2", 0), ("key-3", 1)] {
            let (_, list) = send(get.clone(), "/v1/sessions", key, json!({})).await;
            assert_eq!(list["data"].as_array().map(Vec::len), Some(1), "{list}");
            assert_eq!(list["data"][0]["turns"], json!(turns));
            assert!(list["data"][0]["owner"].is_null());
        }
        let (_, all) = server.get("/v1/cache/sessions").await;
        assert_eq!(all["data"].as_array().map(Vec::len), Some(2));
        assert_eq!(all["data"][1]["owner"], "bob");
    }
}

/// Goal: a conversation is forked and rewound, and both continue.
#[tokio::test]
async fn sessions_are_forked_and_rewound() {
    let server = Server::tiny();
    server.ok("/v1/sessions", json!({"id": "a"})).await;
    let turn = json!({"prompt": prompt(40, 1), "max_tokens": 4, "session_id": "a"});
    server.complete(turn.clone()).await;
    let fork = server.ok("/v1/sessions/a/fork", json!({"id": "b"})).await;
    assert_eq!((&fork["id"], &fork["tokens"]), (&json!("b"), &json!(52)));
    assert_eq!(fork["held_tokens"], json!(48));
    let random = server.ok("/v1/sessions/a/fork", json!({"tokens": 20})).await;
    assert_eq!((&random["tokens"], &random["held_tokens"]), (&json!(20), &json!(16)));
    let rewound = server.ok("/v1/sessions/a/rewind", json!({"tokens": 33})).await;
    assert_eq!((&rewound["tokens"], &rewound["held_blocks"]), (&json!(33), &json!(2)));
    server.complete(turn).await;
    for (path, body, status, param) in [
        ("/v1/sessions/a/fork", json!({"id": "b"}), 409, "session_id"),
        ("/v1/sessions/x/fork", json!({}), 404, "session_id"),
        ("/v1/sessions/a/fork", json!({"tokens": 53}), 400, "tokens"),
        ("/v1/sessions/a/rewind", json!({"tokens": 53}), 400, "tokens"),
        ("/v1/sessions/a/rewind", json!({"tokens": -1}), 400, "tokens"),
        ("/v1/sessions/a/rewind", json!({}), 400, "tokens"),
    ] {
        let (got, refused) = server.post(path, body).await;
        assert_eq!((got, &refused["error"]["param"]), (status, &json!(param)), "{refused}");
    }
    server.settled_audit().await;
}

/// Goal: a completion can send only the new part of its session.
#[tokio::test]
async fn completions_are_appended_to_a_session() {
    let server = Server::start(TINY);
    for id in ["whole", "new"] {
        server.ok("/v1/sessions", json!({"id": id})).await;
    }
    let ask = async |session: &str, prompt: Value, append: bool| {
        let body = json!({
            "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": true,
            "session_id": session, "append_to_session": append, "return_token_ids": true,
        });
        server.ok("/v1/completions", body).await
    };
    let first = ask("whole", json!("The keeper lights"), false).await;
    let same = ask("new", json!("The keeper lights"), true).await;
    assert_eq!(texts(&first), texts(&same));
    let ids = |name: &str| first["choices"][0][name].as_array().expect("ids").clone();
    // Each byte of a text is a token of this model.
    let added = " the lamp".bytes().map(Value::from).collect();
    let whole = [ids("prompt_token_ids"), ids("token_ids"), added].concat();
    let second = ask("whole", json!(whole), false).await;
    let same = ask("new", json!(" the lamp"), true).await;
    assert_eq!(second["usage"]["prompt_tokens"], same["usage"]["prompt_tokens"]);
    assert_eq!(second["choices"][0]["prompt_token_ids"], same["choices"][0]["prompt_token_ids"]);
    assert_eq!(texts(&second), texts(&same));
    let body = json!({"prompt": "x", "append_to_session": true});
    let (status, refused) = server.post("/v1/completions", body).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("append_to_session")));
}
