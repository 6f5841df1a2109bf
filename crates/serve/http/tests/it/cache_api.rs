//! `/v1/cache`, and the older names of its routes below `/admin`.

use futures::StreamExt;
use serde_json::{Value, json};
use stolon::EvictionPolicy;

use crate::support::{Server, TINY, api_key, prompt};

/// Goal: the prefix tree is shown as JSON and as a graph, with the blocks of an answered prompt.
#[tokio::test]
async fn the_prefix_tree_is_shown_as_json_and_graphviz() {
    let server = Server::tiny();
    let (status, empty) = server.get("/admin/tree").await;
    assert_eq!((status, &empty["nodes"]), (200, &json!([])));
    let body = json!({"prompt": prompt(40, 1), "max_tokens": 1, "cache_salt": "tenant"});
    server.complete(body).await;
    // The reply is sent before the request releases its lock on the tree.
    server.settled_audit().await;
    let (_, tree) = server.get("/admin/tree").await;
    let node = &tree["nodes"][0];
    assert_eq!(
        (&node["blocks"], &node["tokens"], &node["locks"]),
        (&json!(3), &json!(48), &json!(0))
    );
    assert!(node["first_tokens"].is_null(), "prompts are not shown unasked: {tree}");
    let (_, with_tokens) = server.get("/admin/tree?tokens=true").await;
    assert_eq!(with_tokens["nodes"][0]["first_tokens"], json!(prompt(40, 1)[..8]));
    let namespace = node["namespace"].as_str().expect("a namespace");
    assert!(namespace.starts_with("Namespace(") && !namespace.contains("tenant"), "{namespace}");
    assert_eq!((&tree["stats"]["blocks"], &tree["stats"]["namespaces"]), (&json!(3), &json!(1)));
    let drawing = reqwest::get(server.url("/admin/tree?format=dot")).await.expect("a response");
    assert_eq!(drawing.headers()["content-type"], "text/vnd.graphviz; charset=utf-8");
    let drawing = drawing.text().await.expect("text");
    assert!(drawing.starts_with("digraph") && drawing.contains("3 blocks"), "{drawing}");
    let first = prompt(40, 1)[..3].iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    assert!(!drawing.contains(&first), "{drawing}");
    let drawing = reqwest::get(server.url("/admin/tree?format=dot&tokens=true")).await;
    assert!(drawing.expect("a response").text().await.expect("text").contains(&first));
}

/// Goal: pins are created, listed and deleted; a prompt that cannot be pinned is refused with the
/// reason.
#[tokio::test]
async fn pins_are_created_listed_and_deleted() {
    let server =
        Server::with(TINY, |engine, _| engine.pin_budget(3).eviction_policy(EvictionPolicy::Slru));
    let pin = json!({"prompt": prompt(40, 1), "ttl_seconds": 3600, "compute": false});
    let (status, refused) = server.post("/admin/pins", pin.clone()).await;
    assert_eq!(status, 409, "nothing of it is cached: {refused}");
    server.complete(json!({"prompt": prompt(40, 1), "max_tokens": 1})).await;
    let id = server.ok("/admin/pins", pin.clone()).await["id"].clone();
    let (status, refused) = server.post("/admin/pins", pin).await;
    assert_eq!(status, 409);
    assert!(refused["error"]["message"].as_str().is_some_and(|m| m.contains("at most 3")));
    let (_, listed) = server.get("/admin/pins").await;
    let listed = &listed["pins"][0];
    assert_eq!((&listed["id"], &listed["tokens"], &listed["blocks"]), (&id, &json!(48), &json!(3)));
    assert!(listed["ends_in_seconds"].as_f64().is_some_and(|left| left > 3500.0));
    let delete = async || {
        let url = server.url(&format!("/admin/pins/{id}"));
        reqwest::Client::new().delete(url).send().await.expect("a response").status().as_u16()
    };
    assert_eq!((delete().await, delete().await), (200, 404));
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": "x", "ttl_seconds": 0}), "ttl_seconds"),
        (json!({"prompt": "x", "forever": true}), "forever"),
    ] {
        let (status, refused) = server.post("/admin/pins", body).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!(param)));
    }
}

/// Goal: queries say how much of each prompt is cached, in every form of a prompt and for every
/// salt, and compute nothing; warming computes the missing part.
#[tokio::test]
async fn prompts_are_queried_and_warmed() {
    let server = Server::with("demo", |engine, _| engine.block_size(16));
    let text = "The keeper of the tower lights the lamp every evening when the sun goes down, \
                and puts it out every morning when the sun comes up again over the wide sea.";
    let tokens = server.ok("/tokenize", json!({"prompt": text})).await["tokens"].clone();
    let length = tokens.as_array().expect("tokens").len();
    let messages = json!([{"role": "user", "content": text}]);
    let whole = length / 16 * 16;
    let query = async |body: Value| {
        let reply = server.ok("/v1/cache/query", body).await;
        let results = reply["results"].as_array().expect("results").clone();
        results.iter().map(|r| r["cached_tokens"].as_u64().expect("a count") as usize).collect()
    };
    let cached: Vec<usize> = query(json!({"prompt": [text, text]})).await;
    assert_eq!(cached, [0, 0]);
    let warmed = server.ok("/v1/cache/warm", json!({"prompt": text, "cache_salt": "a"})).await;
    let expected = json!({"prompt_tokens": length, "cached_tokens": whole, "resume_tokens": whole});
    assert_eq!(warmed["results"][0], expected);
    let salted: Vec<usize> = query(json!({"prompt": [tokens], "cache_salt": "a"})).await;
    let plain: Vec<usize> = query(json!({"prompt": text})).await;
    let other: Vec<usize> = query(json!({"prompt": text, "tenant": "a"})).await;
    assert_eq!((salted, plain, other), (vec![whole], vec![0], vec![0]));
    let chat = json!({"messages": messages, "max_completion_tokens": 1});
    let usage = server.ok("/v1/chat/completions", chat).await["usage"].clone();
    let count = usage["prompt_tokens"].as_u64().expect("a count") as usize;
    let cached: Vec<usize> = query(json!({"messages": messages})).await;
    assert_eq!(cached, [count / 16 * 16], "the tokens are those of the chat request");
    let (_, stats) = server.get("/v1/cache/stats").await;
    assert_eq!(stats["stats"]["requests"], 2, "queries are not requests: {stats}");
    // Nothing is computed again.
    server.ok("/v1/cache/warm", json!({"messages": messages})).await;
    assert_eq!(server.get("/v1/cache/stats").await.1["stats"]["requests"], 2);
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": vec!["x"; 129]}), "prompt"),
        (json!({"prompt": "x", "messages": messages}), "messages"),
        (json!({"prompt": "x", "add_generation_prompt": false}), "add_generation_prompt"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (json!({"prompt": "x", "depth": 3}), "depth"),
    ] {
        for path in ["/v1/cache/query", "/v1/cache/warm", "/v1/cache/evict", "/v1/cache/pin"] {
            let (status, refused) = server.post(path, body.clone()).await;
            let got = (status, &refused["error"]["param"]);
            assert_eq!(got, (400, &json!(param)), "{path} {body}: {refused}");
        }
    }
}

/// Goal: a pin computes its prompt, reports the prefix that it holds and its reason, and ends by
/// its id or its prompt.
#[tokio::test]
async fn pins_compute_and_describe_what_they_hold() {
    let server = Server::with(TINY, |engine, _| engine.pin_budget(4));
    let pin = json!({"prompt": prompt(40, 1), "ttl_seconds": 3600, "refresh_on_hit": true,
                     "reason": "release", "description": "system prompt of the helper"});
    let created = server.ok("/v1/cache/pin", pin).await;
    assert_eq!(created["tokens"], 48);
    let (_, listed) = server.get("/v1/cache/pins").await;
    let listed = &listed["pins"][0];
    assert_eq!((&listed["id"], &listed["blocks"]), (&created["id"], &json!(3)));
    assert_eq!((&listed["reason"], &listed["refresh_on_hit"]), (&json!("release"), &json!(true)));
    assert_eq!(listed["description"], "system prompt of the helper");
    assert!(listed["token_ids"].is_null() && listed["text"].is_null(), "not shown unasked");
    let (_, with_tokens) = server.get("/v1/cache/pins?tokens=true").await;
    assert_eq!(with_tokens["pins"][0]["token_ids"], json!(prompt(40, 1)));
    let bytes: Vec<u8> = prompt(40, 1).iter().map(|&token| token as u8).collect();
    assert_eq!(with_tokens["pins"][0]["text"], String::from_utf8(bytes).expect("ASCII"));
    let evicted = server.ok("/v1/cache/evict", json!({"prompt": prompt(40, 1)})).await;
    assert_eq!(evicted["blocks"], 0, "it is pinned");
    let end = json!({"id": created["id"]});
    assert_eq!(
        server.ok("/v1/cache/unpin", end.clone()).await,
        json!({"deleted": true, "pins": 1})
    );
    assert_eq!(server.post("/v1/cache/unpin", end).await.0, 404);
    let whole = json!({"prompt": prompt(40, 1)});
    server.ok("/v1/cache/pin", whole.clone()).await;
    let other = json!({"prompt": prompt(20, 1)});
    assert_eq!(server.post("/v1/cache/unpin", other).await.0, 404);
    let ended = server.ok("/v1/cache/unpin", whole.clone()).await;
    assert_eq!(ended, json!({"deleted": true, "pins": 1}));
    let mut both = whole;
    both["id"] = json!(1);
    assert_eq!(server.post("/v1/cache/unpin", both).await.1["error"]["param"], "id");
    let (_, stats) = server.get("/v1/cache/stats").await;
    let bytes = |name: &str| stats[name].as_u64().expect("a number");
    assert!(0 < bytes("cached_kv_bytes") && bytes("cached_kv_bytes") < bytes("kv_bytes"));
    for (body, param) in [
        (json!({"prompt": ["a", "b"]}), "prompt"),
        (json!({"prompt": "x", "refresh_on_hit": true}), "refresh_on_hit"),
        (json!({"prompt": "x", "reason": "x".repeat(513)}), "reason"),
    ] {
        let (status, refused) = server.post("/v1/cache/pin", body).await;
        assert_eq!((status, &refused["error"]["param"]), (400, &json!(param)), "{refused}");
    }
    let (status, _) = server.post("/v1/cache/pin", json!({"prompt": "short"})).await;
    assert_eq!(status, 409, "shorter than a block");
}

/// Goal: prompts, salts and everything can be evicted, and the accounting stays consistent.
#[tokio::test]
async fn parts_of_the_cache_are_evicted() {
    let server = Server::tiny();
    for (seed, salt) in [(1, None), (2, None), (3, Some("a"))] {
        let body = json!({"prompt": prompt(40, seed), "max_tokens": 1, "cache_salt": salt});
        server.complete(body).await;
    }
    server.settled_audit().await;
    let blocks = async || server.get("/v1/cache/stats").await.1["cache"]["blocks"].clone();
    // Two prompts share two blocks and have one of their own; the third shares none.
    assert_eq!(blocks().await, 7);
    let evicted = server.ok("/v1/cache/evict", json!({"prompt": prompt(40, 1)})).await;
    assert_eq!((&evicted["blocks"], blocks().await), (&json!(1), json!(6)));
    let evicted = server.ok("/v1/cache/evict", json!({"cache_salt": "a"})).await;
    assert_eq!((&evicted["blocks"], blocks().await), (&json!(3), json!(3)));
    assert_eq!(server.ok("/v1/cache/flush", json!({})).await, json!({"flushed": true}));
    assert_eq!(blocks().await, 0);
    let (status, audit) = server.get("/v1/cache/audit").await;
    assert_eq!((status, &audit["audit"]["blocks_free"]), (200, &json!(512)));
}

/// Goal: both policies can be read and switched while the server runs, and a wrong name changes
/// nothing.
#[tokio::test]
async fn policies_are_switched_at_run_time() {
    let server = Server::tiny();
    let policy = async || server.get("/v1/cache/policy").await.1;
    assert_eq!(policy().await, json!({"eviction": "lru", "admission": "cost"}));
    let reply = server.ok("/v1/cache/policy", json!({"eviction": "slru"})).await;
    assert_eq!(reply, json!({"eviction": "slru", "admission": "cost"}));
    server.ok("/v1/cache/policy", json!({"admission": "fcfs"})).await;
    let wrong = json!({"eviction": "lru", "admission": "newest"});
    let (status, refused) = server.post("/v1/cache/policy", wrong).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("admission")));
    assert_eq!(policy().await, json!({"eviction": "slru", "admission": "fcfs"}));
    server.complete(json!({"prompt": prompt(40, 1), "max_tokens": 1})).await;
    server.settled_audit().await;
}

/// Reads the next event of a stream: its name and its data.
async fn next_event(
    stream: &mut (impl futures::Stream<Item = reqwest::Result<impl AsRef<[u8]>>> + Unpin),
    text: &mut String,
) -> Option<(String, Value)> {
    loop {
        if let Some((event, rest)) = text.split_once("\n\n") {
            let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
            let parsed = field("event: ")
                .zip(field("data: "))
                .map(|(name, data)| (name.to_owned(), serde_json::from_str(data).expect("JSON")));
            let rest = rest.to_owned();
            *text = rest;
            if parsed.is_some() {
                return parsed;
            }
            continue;
        }
        let bytes = stream.next().await?.expect("bytes");
        text.push_str(std::str::from_utf8(bytes.as_ref()).expect("UTF-8"));
    }
}

/// Goal: the events begin with the content of the cache and continue with each change, with token
/// ids only if they are requested. The number of streams is bounded, and they end when the server
/// stops.
#[tokio::test]
async fn changes_of_the_cache_are_streamed_after_a_snapshot() {
    let server = Server::tiny();
    server.complete(json!({"prompt": prompt(40, 1), "max_tokens": 1})).await;
    server.settled_audit().await;
    let open = async |query: &str| {
        let url = server.url(&format!("/v1/cache/events{query}"));
        reqwest::get(url).await.expect("a response")
    };
    let response = open("?tokens=true").await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let (mut stream, mut text) = (response.bytes_stream(), String::new());
    let (name, data) = next_event(&mut stream, &mut text).await.expect("an event");
    assert_eq!((name.as_str(), &data["runs"]), ("snapshot", &json!(1)));
    let number = data["number"].as_u64().expect("a number");
    let (name, data) = next_event(&mut stream, &mut text).await.expect("an event");
    assert_eq!((name.as_str(), &data["token_ids"]), ("stored", &json!(prompt(40, 1))));
    let last = data["hashes"][1].clone();
    server.complete(json!({"prompt": prompt(40, 2), "max_tokens": 1})).await;
    let (name, data) = next_event(&mut stream, &mut text).await.expect("an event");
    assert_eq!((name.as_str(), &data["number"]), ("stored", &json!(number + 1)));
    assert_eq!((&data["parent"], data["hashes"].as_array().map(Vec::len)), (&last, Some(1)));
    server.settled_audit().await;
    server.ok("/v1/cache/evict", json!({"prompt": prompt(40, 2)})).await;
    let (name, removed) = next_event(&mut stream, &mut text).await.expect("an event");
    assert_eq!((name.as_str(), &removed["hashes"]), ("removed", &data["hashes"]));
    server.ok("/v1/cache/flush", json!({})).await;
    assert_eq!(next_event(&mut stream, &mut text).await.expect("an event").0, "cleared");

    server.complete(json!({"prompt": prompt(40, 3), "max_tokens": 1})).await;
    let mut others = Vec::new();
    for _ in 0..7 {
        others.push(open("").await);
    }
    assert_eq!(open("").await.status(), 503, "too many streams");
    let (mut other, mut other_text) = (others.remove(0).bytes_stream(), String::new());
    next_event(&mut other, &mut other_text).await.expect("the snapshot");
    let (_, stored) = next_event(&mut other, &mut other_text).await.expect("an event");
    assert!(stored["token_ids"].is_null(), "prompts are not shown unasked: {stored}");
    drop((others, other));
    // The stream does not delay the end of the server.
    let begun = std::time::Instant::now();
    server.stop().await;
    assert!(begun.elapsed() < std::time::Duration::from_secs(30), "it waited for the stream");
    while next_event(&mut stream, &mut text).await.is_some() {}
}

/// Goal: all routes of `/v1/cache` are for operators, and an API key does not open them.
#[tokio::test]
async fn the_cache_is_for_operators() {
    let server = Server::with(TINY, |engine, options| {
        options.access.api_keys = api_key("client");
        options.access.admin_key = Some("root".to_owned().into());
        engine
    });
    let client = reqwest::Client::new();
    let routes = [
        ("GET", "stats"),
        ("GET", "tree"),
        ("POST", "query"),
        ("POST", "warm"),
        ("POST", "pin"),
        ("POST", "unpin"),
        ("GET", "pins"),
        ("POST", "evict"),
        ("POST", "flush"),
        ("GET", "audit"),
        ("GET", "policy"),
        ("POST", "policy"),
        ("GET", "events"),
    ];
    for (method, name) in routes {
        let url = server.url(&format!("/v1/cache/{name}"));
        for (key, expected) in [(None, true), (Some("client"), true), (Some("root"), false)] {
            let method = reqwest::Method::from_bytes(method.as_bytes()).expect("a method");
            let mut request = client.request(method, &url);
            if let Some(key) = key {
                request = request.bearer_auth(key);
            }
            let status = request.send().await.expect("a response").status();
            assert_eq!(status == 401, expected, "{name} {key:?}: {status}");
        }
    }
}
