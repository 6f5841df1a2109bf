//! The description of the API: it agrees with the requests that the server accepts and with its
//! replies.

use serde_json::{Value, json};

use crate::json_schema::violation;
use crate::support::{EMBEDDING, Server, TINY, encoder};

/// Checks that a reply has the form that the description gives for its status.
fn check_reply(description: &Value, method: &str, path: &str, status: u16, reply: &Value) {
    let responses = &description["paths"][path][method]["responses"];
    let schema = &responses[status.to_string()]["content"]["application/json"]["schema"];
    assert!(schema.is_object(), "{method} {path}: status {status} is not described: {reply}");
    assert_eq!(violation(description, schema, reply), None, "{method} {path}: {reply}");
}

/// Goal: replies of all operations, and their errors, have the form that is described.
#[tokio::test]
async fn replies_are_as_described() {
    let server = Server::with("demo", |engine, _| engine.pin_budget(16));
    let (status, description) = server.get("/openapi.json").await;
    assert_eq!((status, &description["openapi"]), (200, &json!("3.1.0")));
    let text = "The keeper of the tower walks up the stairs every evening and lights the lamp.";
    let messages = json!([{"role": "user", "content": text}]);
    let chat = json!({"messages": messages, "logprobs": true, "top_logprobs": 2,
                      "max_tokens": 3, "return_token_ids": true});
    let completion = json!({"prompt": text, "max_tokens": 3, "logprobs": 1, "echo": true, "n": 2});
    let mut checked = Vec::new();
    for (path, body) in [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 0})),
        ("/v1/chat/completions", json!({"messages": messages, "model": "other"})),
        ("/v1/completions", completion),
        ("/v1/completions", json!({"prompt": []})),
        ("/v1/responses", json!({"input": text, "max_output_tokens": 3})),
        ("/v1/responses", json!({"input": 7})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 3})),
        ("/v1/messages", json!({"messages": messages})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/completion", json!({"prompt": text, "n_predict": 3})),
        ("/completion", json!({"prompt": [text, text]})),
        ("/infill", json!({"input_prefix": text})),
        ("/infill", json!({"n_predict": -2})),
        ("/apply-template", json!({"messages": messages})),
        (
            "/api/chat",
            json!({"messages": messages, "stream": false, "options": {"num_predict": 3}}),
        ),
        ("/api/chat", json!({"messages": []})),
        ("/api/chat", json!({"messages": messages, "format": "xml"})),
        ("/api/generate", json!({"prompt": text, "stream": false, "options": {"num_predict": 3}})),
        ("/api/generate", json!({"prompt": text, "suffix": "x"})),
        ("/api/embed", json!({"input": text})),
        ("/api/embeddings", json!({"prompt": text})),
        ("/api/show", json!({"model": "stolon-demo:latest"})),
        ("/api/show", json!({"model": "other"})),
        ("/api/pull", json!({"name": "stolon-demo"})),
        ("/tokenize", json!({"prompt": text, "return_token_strs": true})),
        ("/detokenize", json!({"tokens": [97, 98]})),
        ("/detokenize", json!({"tokens": [u32::MAX]})),
        ("/v1/embeddings", json!({"input": text})),
        // A successful reply is compared below, with a model for embeddings.
        ("/pooling", json!({"input": text})),
        // Successful replies are compared below, with models for scores.
        ("/v1/rerank", json!({"query": text, "documents": [text]})),
        ("/v2/rerank", json!({"query": text, "documents": [text]})),
        ("/rerank", json!({"query": text, "documents": [text]})),
        ("/v1/score", json!({"text_1": text, "text_2": text})),
        ("/score", json!({"text_1": text, "text_2": text})),
        ("/v1/classify", json!({"input": text})),
        ("/classify", json!({"input": text})),
        ("/generative_scoring", json!({"query": text, "items": [text], "label_token_ids": [1]})),
        // Successful replies are compared in `skills_api.rs`.
        ("/v1/query", json!({"question": text})),
        ("/v1/caption", json!({"image_url": "data:image/png;base64,"})),
        ("/v1/point", json!({"image_url": "data:image/png;base64,", "object": "x"})),
        ("/v1/detect", json!({"image_url": "data:image/png;base64,", "object": "x"})),
        ("/v1/cache/explain", json!({"messages": messages})),
        ("/v1/cache/explain/completions", json!({"prompt": [text, "another"]})),
        ("/v1/cache/explain/infill", json!({"input_prefix": text})),
        ("/v1/cache/explain/ollama/chat", json!({"messages": messages})),
        ("/v1/cache/explain/ollama/generate", json!({"prompt": text})),
        ("/v1/cache/explain/messages", json!({"messages": messages, "max_tokens": 3})),
        ("/v1/cache/explain/responses", json!({"input": text})),
        ("/v1/cache/query", json!({"prompt": text})),
        ("/v1/cache/warm", json!({"prompt": [text, "another"]})),
        ("/v1/cache/pin", json!({"prompt": text, "ttl_seconds": 60, "reason": "test"})),
        ("/v1/cache/unpin", json!({"id": 4000})),
        ("/v1/cache/evict", json!({"prompt": text})),
        ("/v1/cache/evict", json!({})),
        // It takes a file and not JSON.
        ("/v1/cache/import", json!({})),
        ("/v1/cache/policy", json!({"eviction": "lfu"})),
        ("/v1/cache/flush", json!({})),
        ("/v1/sessions", json!({"id": "a", "ttl_seconds": 60})),
        ("/v1/sessions", json!({"id": "a"})),
        ("/v1/sessions", json!({"id": ""})),
        ("/v1/completions", json!({"prompt": text, "max_tokens": 3, "session_id": "a"})),
        ("/v1/completions", json!({"prompt": text, "session_id": "b"})),
        ("/models/load", json!({"model": "stolon-demo"})),
        ("/models/load", json!({"model": "other"})),
        ("/models/unload", json!({"model": "stolon-demo"})),
        ("/open_session", json!({"capacity_of_str_len": 1000, "session_id": "c"})),
        ("/close_session", json!({"session_id": "c"})),
        ("/close_session", json!({"session_id": "c"})),
    ] {
        let (status, reply) = server.post(path, body).await;
        check_reply(&description, "post", path, status, &reply);
        checked.push(("post", path));
        if path == "/v1/responses" && status == 200 {
            let one = format!("{path}/{}", reply["id"].as_str().expect("an id"));
            let (status, kept) = server.get(&one).await;
            check_reply(&description, "get", "/v1/responses/{id}", status, &kept);
            let (status, deleted) = server.delete(&one).await;
            check_reply(&description, "delete", "/v1/responses/{id}", status, &deleted);
            checked.extend(["get", "delete"].map(|method| (method, "/v1/responses/{id}")));
        }
        if path == "/v1/cache/pin" {
            let (status, pins) = server.get("/v1/cache/pins?tokens=true").await;
            assert_eq!(pins["pins"][0]["reason"], "test", "{pins}");
            check_reply(&description, "get", "/v1/cache/pins", status, &pins);
            let (_, outline) = server.get("/v1/cache/outline").await;
            let prefix =
                format!("/v1/cache/prefix/{}", outline["nodes"][0]["id"].as_str().expect("an id"));
            let (status, found) = server.get(&prefix).await;
            assert_eq!(status, 200, "{found}");
            check_reply(&description, "get", "/v1/cache/prefix/{id}", status, &found);
            let id = json!({"id": reply["id"]});
            let (status, reply) = server.post("/v1/cache/unpin", id).await;
            check_reply(&description, "post", "/v1/cache/unpin", status, &reply);
        }
    }
    for (path, described) in [
        ("/v1/models/stolon-demo", "/v1/models/{id}"),
        ("/v1/models/org/other", "/v1/models/{id}"),
        ("/v1/cache/prefix/0123456789abcdef", "/v1/cache/prefix/{id}"),
        ("/v1/cache/prefix/none", "/v1/cache/prefix/{id}"),
        ("/v1/cache/tree?tokens=true", "/v1/cache/tree"),
        ("/v1/cache/tree?tokens=7", "/v1/cache/tree"),
        ("/v1/sessions", "/v1/sessions"),
        ("/v1/sessions/a", "/v1/sessions/{id}"),
        ("/v1/sessions/b", "/v1/sessions/{id}"),
    ] {
        let (status, reply) = server.get(path).await;
        check_reply(&description, "get", described, status, &reply);
        checked.push(("get", described));
    }
    for (action, body) in [("fork", json!({"tokens": 2})), ("rewind", json!({"tokens": 1}))] {
        let (path, described) =
            (format!("/v1/sessions/a/{action}"), format!("/v1/sessions/{{id}}/{action}"));
        let (status, reply) = server.post(&path, body).await;
        assert_eq!(status, 200, "{reply}");
        check_reply(&description, "post", &described, status, &reply);
        let (status, reply) = server.post(&path, json!({"tokens": 100_000})).await;
        check_reply(&description, "post", &described, status, &reply);
    }
    let (status, closed) = server.delete("/v1/sessions/a").await;
    check_reply(&description, "delete", "/v1/sessions/{id}", status, &closed);
    checked.push(("delete", "/v1/sessions/{id}"));
    // Every other operation takes nothing.
    let paths = description["paths"].as_object().expect("paths");
    for (path, item) in paths {
        for (method, operation) in item.as_object().expect("operations") {
            let replies = &operation["responses"]["200"]["content"];
            let is_done = checked.contains(&(method.as_str(), path.as_str()));
            if is_done || replies["application/json"].is_null() {
                continue;
            }
            if path.ends_with("/fork") || path.ends_with("/rewind") {
                continue;
            }
            assert_eq!(method, "get", "{path} is not tested");
            let (status, reply) = server.get(path).await;
            assert_eq!(status, 200, "{path}");
            check_reply(&description, method, path, status, &reply);
        }
    }
}

/// Goal: scores, ranked documents and labels have the form that is described.
#[tokio::test]
async fn scores_are_as_described() {
    let reranker = Server::start(&encoder("bert_reranker"));
    let classifier = Server::start(&encoder("mpnet_classifier"));
    let judge = Server::start("demo");
    let (_, description) = reranker.get("/openapi.json").await;
    let documents = json!(["the stem", {"text": "the ground"}]);
    for (server, path, body) in [
        (&reranker, "/v1/rerank", json!({"query": "a stem", "documents": documents})),
        (&reranker, "/score", json!({"text_1": "a stem", "text_2": ["the stem", "x"]})),
        (&classifier, "/classify", json!({"input": ["the stem", "the ground"]})),
        (&judge, "/classify", json!({"input": "the stem", "labels": ["Yes", "No"]})),
        (
            &judge,
            "/generative_scoring",
            json!({"query": "a", "items": ["b"], "label_token_ids": [1]}),
        ),
    ] {
        let (status, reply) = server.post(path, body).await;
        assert_eq!(status, 200, "{reply}");
        check_reply(&description, "post", path, status, &reply);
    }
}

/// Goal: vectors have the form that is described, in both formats, and so have their refusals.
#[tokio::test]
async fn vectors_are_as_described() {
    let server = Server::start(EMBEDDING);
    let (_, description) = server.get("/openapi.json").await;
    for (body, expected) in [
        (json!({"input": "x"}), 200),
        (json!({"input": [[1, 256], [2, 3, 256]], "encoding_format": "base64"}), 200),
        (json!({"input": ["x", ""]}), 400),
    ] {
        for path in ["/v1/embeddings", "/pooling"] {
            let (status, reply) = server.post(path, body.clone()).await;
            assert_eq!(status, expected, "{reply}");
            check_reply(&description, "post", path, status, &reply);
        }
    }
    let (status, reply) = server.get("/v1/models").await;
    check_reply(&description, "get", "/v1/models", status, &reply);
}

/// Goal: pieces of streamed replies have the form that is described.
#[tokio::test]
async fn events_are_as_described() {
    let server = Server::tiny();
    let (_, description) = server.get("/openapi.json").await;
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 4, "logprobs": 1})),
        (
            "/v1/completions",
            json!({"prompt": "x", "max_tokens": 2, "return_token_ids": true,
                                   "stream_options": {"include_usage": true}}),
        ),
    ] {
        let replies = &description["paths"][path]["post"]["responses"]["200"]["content"];
        let schema = &replies["text/event-stream"]["schema"];
        for event in server.events(path, body).await {
            assert_eq!(violation(&description, schema, &event), None, "{event}");
        }
    }
}

/// Goal: a number is described with the bounds that the parser has: the description accepts and
/// refuses the same values as the server, at each bound of each number of each request.
#[tokio::test]
async fn bounds_of_numbers_are_the_parsers() {
    // With two names, others do not name the model.
    let server = Server::with(TINY, |engine, options| {
        options.served_names = ["one", "two"].map(String::from).to_vec();
        engine.pin_budget(4)
    });
    let (_, description) = server.get("/openapi.json").await;
    let messages = json!([{"role": "user", "content": "x"}]);
    let mut compared = 0;
    for (path, base) in [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/completions", json!({"prompt": "x"})),
        ("/v1/responses", json!({"input": "x"})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/v1/cache/pin", json!({"prompt": "x", "compute": false})),
    ] {
        let request = &description["paths"][path]["post"]["requestBody"]["content"];
        let schema = &request["application/json"]["schema"];
        let name = schema["$ref"].as_str().expect("a reference").rsplit('/').next();
        let schema = &description["components"]["schemas"][name.expect("a name")];
        for (member, property) in schema["properties"].as_object().expect("members") {
            let is = |kind: &str| {
                property["type"] == kind
                    || property["type"].as_array().is_some_and(|it| it.contains(&json!(kind)))
            };
            if !is("integer") && !is("number") {
                continue;
            }
            let mut values = vec![json!("text"), json!(-1), json!(0), json!(1)];
            for bound in ["minimum", "maximum"].map(|name| &property[name]) {
                let near = bound.as_i64().filter(|_| is("integer")).into_iter();
                values.extend(
                    near.flat_map(|it| [it.checked_sub(1), Some(it), it.checked_add(1)])
                        .flatten()
                        .map(Value::from),
                );
            }
            for value in values {
                let mut body = base.clone();
                body[member] = value.clone();
                let described = violation(&description, schema, &body).is_none();
                // A request for a model that does not exist is parsed, but not run.
                body["model"] = json!("none");
                let (status, reply) = server.post(path, body).await;
                let refused = status == 400
                    && reply["error"]["code"] == "invalid_value"
                    && reply["error"]["param"] == *member
                    || status == 400 && reply["type"] == "error";
                // Rules between members are not in the schema: `top_logprobs` needs `logprobs`.
                let parses = !refused;
                assert_eq!(described, parses, "{path}: {member} = {value}: {status} {reply}");
                compared += 1;
            }
        }
    }
    assert!(compared > 100, "{compared}");
}

/// Goal: the page for people has every operation and loads nothing from elsewhere.
#[tokio::test]
async fn the_page_loads_nothing() {
    let server = Server::tiny();
    let (_, description) = server.get("/openapi.json").await;
    let reply = reqwest::get(server.url("/docs")).await.expect("a reply");
    assert_eq!(reply.headers()["content-type"], "text/html; charset=utf-8");
    let policy = reply.headers()["content-security-policy"].to_str().expect("ASCII").to_owned();
    assert!(policy.starts_with("default-src 'none'") && !policy.contains('*'), "{policy}");
    let page = reply.text().await.expect("a page");
    for path in description["paths"].as_object().expect("paths").keys() {
        assert!(page.contains(&format!("<code>{path}</code>")), "{path}");
    }
    let script = "<script type=\"module\" src=\"docs/search.js\"></script>";
    let rest = page.replacen(script, "", 1);
    assert_ne!(rest, page);
    for foreign in ["http:", "https:", "src=", "<script", "@import", "url("] {
        assert!(!rest.contains(foreign), "{foreign}");
    }
}
