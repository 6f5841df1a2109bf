//! Ollama's API, with a model that recites scripts.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::infill::write_model;
use crate::support::{EMBEDDING, SCRIPTED, Server, TINY, api_key};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn weather() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"type": "function", "function": {"name": "get_weather", "parameters": city}})
}

/// Asks as clients do, without `stream`, and returns the lines.
async fn lines(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let reply = server.send(path, body.to_string()).await;
    assert_eq!(reply.status(), 200, "{body}");
    assert_eq!(reply.headers()["content-type"], "application/x-ndjson");
    let text = reply.text().await.expect("a body");
    assert!(text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Asks whole and streamed. The pieces must add up to the whole reply, which is returned.
async fn answer(server: &Server, path: &str, body: Value) -> Value {
    let lines = lines(server, path, &body).await;
    let mut whole = body.clone();
    whole["stream"] = json!(false);
    let whole = server.ok(path, whole).await;
    let (last, others) = lines.split_last().expect("a line");
    assert!(others.iter().all(|line| line["done"] == false && line["done_reason"].is_null()));
    assert_eq!((&last["done"], &whole["done"]), (&json!(true), &json!(true)));
    assert_eq!(last["done_reason"], whole["done_reason"]);
    assert_eq!(last["eval_count"], whole["eval_count"]);
    let message =
        |reply: &Value| if path == CHAT { reply["message"].clone() } else { reply.clone() };
    for name in ["content", "response", "thinking"] {
        let texts = lines.iter().filter_map(|line| message(line)[name].as_str().map(str::to_owned));
        let joined: String = texts.collect();
        assert_eq!(joined, message(&whole)[name].as_str().unwrap_or_default(), "{name}: {lines:?}");
    }
    let functions = |reply: &Value| {
        let calls = message(reply)["tool_calls"].as_array().cloned().unwrap_or_default();
        calls.into_iter().map(|call| call["function"].clone()).collect::<Vec<_>>()
    };
    let streamed: Vec<Value> = lines.iter().flat_map(functions).collect();
    assert_eq!(streamed, functions(&whole));
    whole
}

/// Goal: text, reasoning and calls have their members, whole and in lines, with the reason of the
/// end and times that fit each other.
#[tokio::test]
async fn answers_have_ollamas_form() {
    let server = Server::start(SCRIPTED);
    let ask = |script: &str| {
        json!({"model": "scripted:latest", "messages": [user(&format!("Now {script}"))],
               "tools": [weather()], "keep_alive": "5m", "options": {"temperature": 0}})
    };
    let begin = Instant::now();
    let reply = answer(&server, CHAT, ask("script:plain")).await;
    let message = json!({"role": "assistant", "content": "Hello, world."});
    assert_eq!((&reply["message"], &reply["done_reason"]), (&message, &json!("stop")));
    assert_eq!((&reply["model"], &reply["load_duration"]), (&json!("scripted:latest"), &json!(0)));
    assert!(reply["created_at"].as_str().is_some_and(|time| time.ends_with('Z')));
    let number = |name: &str| reply[name].as_u64().expect("a number");
    assert_eq!(number("eval_count"), 4);
    assert!(number("prompt_eval_count") > 10);
    let (total, prompt, answer_time) =
        (number("total_duration"), number("prompt_eval_duration"), number("eval_duration"));
    assert!(answer_time > 0 && prompt + answer_time <= total, "{reply}");
    assert!(Duration::from_nanos(total) < begin.elapsed());

    let reply = answer(&server, CHAT, ask("script:call")).await;
    let call = &reply["message"]["tool_calls"][0];
    let arguments = json!({"city": "Paris", "days": 2});
    assert_eq!(
        call["function"],
        json!({"index": 0, "name": "get_weather", "arguments": arguments})
    );
    assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call_")));
    let text = reply["message"]["content"].as_str().expect("a text");
    assert!(text.starts_with("I look it up."), "{text}");

    let reply = answer(&server, CHAT, ask("script:think")).await;
    assert_eq!(reply["message"]["thinking"], "Let me think about it.");
    assert_eq!(reply["message"]["content"], "It is sunny.");

    let mut short = ask("script:plain");
    short["options"] = json!({"num_predict": 2, "num_ctx": 4096, "mirostat": 0});
    let reply = server.send(CHAT, short.to_string()).await;
    assert_eq!(reply.headers()["x-stolon-ignored"], "options.mirostat, options.num_ctx");
    let reply = answer(&server, CHAT, short).await;
    assert_eq!((&reply["done_reason"], &reply["eval_count"]), (&json!("length"), &json!(2)));
    let mut stopped = ask("script:plain");
    stopped["options"] = json!({"stop": ["wor"], "num_predict": -1, "seed": -1});
    assert_eq!(answer(&server, CHAT, stopped).await["message"]["content"], "Hello, ");
    server.settled_audit().await;
}

/// Goal: calls and results come back without ids, as clients send them, and the conversation goes
/// on behind what is cached; old messages have any shape.
#[tokio::test]
async fn conversations_go_on() {
    let server = Server::with(SCRIPTED, |engine, _| engine.block_size(4));
    let system = json!({"role": "system", "content": "The keeper collects keys. ".repeat(20)});
    let mut messages = vec![system, user("Now script:call")];
    let ask = |messages: &[Value]| {
        json!({"messages": messages, "tools": [weather()],
                                          "stream": false, "options": {"temperature": 0}})
    };
    let first = server.ok(CHAT, ask(&messages)).await;
    let mut message = first["message"].clone();
    // Ollama's Python client keeps only the name and the arguments.
    let call = &message["tool_calls"][0]["function"];
    message["tool_calls"] =
        json!([{"function": {"name": call["name"], "arguments": call["arguments"]}}]);
    messages.push(message);
    messages
        .push(json!({"role": "tool", "tool_name": "get_weather", "content": "18 script:plain"}));
    let explained = server.ok("/v1/cache/explain/ollama/chat", ask(&messages)).await;
    let second = server.ok(CHAT, ask(&messages)).await;
    assert_eq!(second["message"]["content"], "Hello, world.");
    let before = first["prompt_eval_count"].as_u64().expect("a count");
    let cached = explained["results"][0]["cached_tokens"].as_u64();
    assert!(cached >= Some(before - before % 4), "{before}: {explained}");

    // Old messages have any shape.
    let old = [
        json!("x"),
        json!({"role": "robot", "content": 7, "images": "none"}),
        json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}, 1]}),
        json!({"role": "tool", "content": {"text": "result"}, "name": null}),
        json!({"role": "user", "content": "see", "images": ["AA"]}),
    ];
    let messages: Vec<Value> = old.into_iter().chain([user("Now script:plain")]).collect();
    assert_eq!(server.ok(CHAT, ask(&messages)).await["message"]["content"], "Hello, world.");
    let image = json!({"role": "user", "content": "see", "images": ["AA"]});
    let (status, reply) = server.post(CHAT, ask(&[image])).await;
    assert_eq!((status, reply["error"].is_string()), (400, true), "{reply}");
}

/// Goal: `think` sets the variables of the chat template, `format` the form of the answer.
#[tokio::test]
async fn reasoning_and_formats_are_chosen() {
    let server = Server::start(SCRIPTED);
    let ask = |think: Value| {
        json!({"messages": [user("Now")], "stream": false, "think": think,
                                    "options": {"num_predict": 6, "temperature": 0}})
    };
    let reply = server.ok(CHAT, ask(json!(true))).await;
    assert_eq!(reply["message"]["thinking"], "Hmm, so.", "{reply}");
    for think in [json!(false), Value::Null] {
        assert!(server.ok(CHAT, ask(think)).await["message"]["thinking"].is_null());
    }
    assert_eq!(server.ok(CHAT, ask(json!("high"))).await["message"]["thinking"], "Hmm, so.");
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]});
    for (format, expected) in [(schema, Some(json!({"a": "b"}))), (json!("json"), None)] {
        let body = json!({"prompt": "Now", "format": format, "stream": false,
                          "options": {"num_predict": 300, "seed": 1}});
        let reply = server.ok(GENERATE, body).await;
        let text = reply["response"].as_str().expect("a text");
        match expected {
            Some(expected) => assert_eq!(serde_json::from_str::<Value>(text).ok(), Some(expected)),
            None => assert!(text.trim_start().starts_with('{'), "{text}"),
        }
    }
    for (body, words) in [
        (json!({"messages": [user("x")], "format": "xml"}), "`format`"),
        (json!({"messages": [user("x")], "options": {"top_k": "x"}}), "options.top_k"),
        (json!({"messages": [user("x")], "options": {"num_predict": 1.5}}), "num_predict"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [user("x")], "logprobs": true}), "logprobs"),
        (json!({"messages": [user("x")], "mood": 1}), "`mood`"),
    ] {
        let reply = server.send(CHAT, body.to_string()).await;
        let (status, reply) = (reply.status(), reply.text().await.expect("a body"));
        assert!(status == 400 && reply.starts_with("{\"error\":\""), "{body}: {status} {reply}");
        assert!(reply.contains(words), "{reply}");
    }
}

/// Goal: `/api/generate` answers with the chat template, continues raw text, fills a gap, and
/// completes text with a model without a template; an empty request only asks for the model.
#[tokio::test]
async fn prompts_are_answered_continued_and_filled() {
    let directory = tempfile::tempdir().expect("a directory");
    write_model(directory.path());
    let server = Server::start(directory.path().to_str().expect("UTF-8"));
    let ask = |more: Value| {
        let mut body = json!({"prompt": "a", "options": {"temperature": 0, "num_predict": 8}});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        body
    };
    let reply = answer(&server, GENERATE, ask(json!({"suffix": "b"}))).await;
    assert_eq!((&reply["response"], &reply["done_reason"]), (&json!("Hello, wor"), &json!("stop")));
    let templated = server.ok(GENERATE, ask(json!({"system": "Be", "stream": false}))).await;
    let raw = server.ok(GENERATE, ask(json!({"raw": true, "stream": false}))).await;
    let count = |reply: &Value| reply["prompt_eval_count"].as_u64().expect("a count");
    assert_eq!((count(&templated), count(&raw)), ("|system|Be|user|a".len() as u64, 1));
    let explained = server.ok("/v1/cache/explain/ollama/generate", ask(json!({}))).await;
    assert_eq!(explained["results"][0]["prompt_tokens"], "|user|a".len());

    let name = server.get("/api/tags").await.1["models"][0]["name"].take();
    let shown = server.ok("/api/show", json!({ "model": name })).await;
    assert!(shown["template"].as_str().expect("a template").ends_with("{# .Suffix #}"));
    let abilities = shown["capabilities"].as_array().expect("a list");
    assert!(abilities.contains(&json!("insert")), "{shown}");

    let tiny = Server::tiny();
    let reply = answer(&tiny, GENERATE, ask(json!({"system": "Be"}))).await;
    assert_eq!((count(&reply), &reply["done_reason"]), (5, &json!("length")));
    for (path, body) in [
        (CHAT, json!({"model": "x", "keep_alive": 0})),
        (CHAT, json!({"model": "x", "messages": []})),
        (GENERATE, json!({"model": "x", "prompt": ""})),
    ] {
        // There is nothing to explain.
        let explain = path.replace("/api/", "/v1/cache/explain/ollama/");
        assert_eq!(tiny.ok(&explain, body.clone()).await, json!({"results": []}));
        let reply = tiny.ok(path, body).await;
        let end = (&reply["done"], &reply["done_reason"], &reply["eval_count"]);
        assert_eq!(end, (&json!(true), &json!("load"), &Value::Null), "{reply}");
    }
    for more in [json!({"suffix": "b"}), json!({"images": ["AA"]}), json!({"template": "{{ . }}"})]
    {
        let (status, reply) = tiny.post(GENERATE, ask(more)).await;
        assert_eq!((status, reply["error"].is_string()), (400, true), "{reply}");
    }
}

/// Goal: clients learn the names, the context length and the abilities of the model.
#[tokio::test]
async fn models_are_described() {
    let server = Server::start(SCRIPTED);
    let (_, tags) = server.get("/api/tags").await;
    let entry = &tags["models"][0];
    assert_eq!((&entry["name"], &entry["model"]), (&json!("scripted:latest"), &entry["name"]));
    assert_eq!(entry["digest"].as_str().map(str::len), Some(64));
    let (_, running) = server.get("/api/ps").await;
    assert_eq!(running["models"][0]["context_length"], 4096);
    assert_eq!(running["models"][0]["digest"], entry["digest"]);
    for body in [json!({"model": "scripted:latest"}), json!({"name": "scripted", "verbose": true})]
    {
        let shown = server.ok("/api/show", body).await;
        let architecture = shown["model_info"]["general.architecture"].as_str().expect("a name");
        assert_eq!(shown["model_info"][format!("{architecture}.context_length")], 4096);
        assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
        assert_eq!(shown["parameters"], "num_ctx 4096");
        let template = shown["template"].as_str().expect("a template");
        assert!(template.contains("message.role") && !template.contains(".Suffix"));
    }
    let (_, version) = server.get("/api/version").await;
    let version = version["version"].as_str().expect("a version").to_owned();
    assert_eq!(version.split('.').filter(|part| part.parse::<u32>().is_ok()).count(), 3);
    let root = reqwest::Client::new().head(server.url("/")).send().await.expect("a reply");
    assert_eq!(root.status(), 200);
    assert_eq!(server.ok("/api/pull", json!({"model": "scripted"})).await["status"], "success");
    for (path, expected) in [("/api/show", 404), ("/api/pull", 404), ("/api/create", 501)] {
        let (status, reply) = server.post(path, json!({"model": "llama3.2"})).await;
        assert_eq!((status, reply["error"].is_string()), (expected, true), "{path}: {reply}");
        let message = reply["error"].as_str().expect("a message");
        assert!(path == "/api/show" || message.contains("stolon serve --model"), "{message}");
    }
    assert_eq!(server.delete("/api/delete").await.0, 501);

    let embedding = Server::start(EMBEDDING);
    let shown = embedding.ok("/api/show", json!({"model": "embedding"})).await;
    assert_eq!(shown["model_info"]["stolon.embedding_length"], 32);
    let abilities = shown["capabilities"].as_array().expect("a list");
    assert!(abilities.contains(&json!("embedding")), "{shown}");
    // The tag is part of the name if the operator has given it.
    let named = Server::with(TINY, |engine, options| {
        options.served_names = ["small:1b", "a:latest"].map(String::from).to_vec();
        engine
    });
    let (_, tags) = named.get("/api/tags").await;
    assert_eq!(tags["models"][0]["name"], "small:1b");
    // Clients take names with one digest for one model.
    assert_eq!(tags["models"][0]["digest"], tags["models"][1]["digest"]);
    assert_ne!(tags["models"][0]["digest"], entry["digest"]);
    for (name, expected) in [("small:1b", 200), ("a:latest", 200), ("a", 200), ("small", 404)] {
        let body = json!({"model": name, "prompt": "x", "stream": false,
                          "options": {"num_predict": 1}});
        assert_eq!(named.post(GENERATE, body).await.0, expected, "{name}");
    }
}

/// Goal: vectors are those of `/v1/embeddings`, and texts that are too long are cut unless the
/// client forbids it.
#[tokio::test]
async fn vectors_have_ollamas_form() {
    let server = Server::start(EMBEDDING);
    let input = json!(["a stolon", "a root"]);
    let expected = server.ok("/v1/embeddings", json!({ "input": input })).await;
    let reply = server.ok("/api/embed", json!({"model": "x", "input": input})).await;
    for (index, vector) in reply["embeddings"].as_array().expect("vectors").iter().enumerate() {
        assert_eq!(*vector, expected["data"][index]["embedding"]);
    }
    assert_eq!(reply["prompt_eval_count"], expected["usage"]["prompt_tokens"]);
    assert!(reply["total_duration"].as_u64() > Some(0));
    let one = server.ok("/api/embeddings", json!({"prompt": "a stolon"})).await;
    assert_eq!(one, json!({"embedding": reply["embeddings"][0]}));
    let (_, model) = server.get("/v1/models/embedding").await;
    let limit = model["max_model_len"].as_u64().expect("a limit") as usize;
    let long = "a stolon ".repeat(limit);
    let reply = server.ok("/api/embed", json!({"input": long})).await;
    assert_eq!(reply["prompt_eval_count"], limit);
    let (status, reply) =
        server.post("/api/embed", json!({"input": long, "truncate": false})).await;
    assert_eq!((status, reply["error"].is_string()), (400, true), "{reply}");
}

/// Goal: keys and limits are those of other APIs, in Ollama's form, and a client that disconnects
/// cancels its request.
#[tokio::test]
async fn requests_are_admitted_like_others() {
    let server = Server::with(TINY, |engine, options| {
        options.access.api_keys = api_key("sesame");
        engine
    });
    let body = json!({"prompt": "x", "stream": false, "options": {"num_predict": 1}});
    let (status, reply) = server.post(GENERATE, body.clone()).await;
    assert_eq!((status, reply["error"].is_string()), (401, true), "{reply}");
    let key = ("authorization", "Bearer sesame");
    assert_eq!(server.post_with(GENERATE, key, body).await.0, 200);
    assert_eq!(server.get("/api/tags").await.0, 401);

    let server = Server::with(TINY, |engine, _| engine.num_blocks(64));
    let long = json!({"prompt": "x".repeat(100_000), "stream": false});
    let (status, reply) = server.post(GENERATE, long).await;
    let message = reply["error"].as_str().expect("a message");
    assert!(status == 400 && message.contains("maximum context length"), "{message}");
    let endless = json!({"prompt": "x", "options": {"num_predict": -1, "temperature": 0}});
    drop(server.send(GENERATE, endless.to_string()).await);
    server.settled_audit().await;
}
