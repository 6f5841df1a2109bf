//! Several models in one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use serde_json::{Value, json};
use stolon::{Engine, ModelRecipe, ModelSet, PrefetchPolicy, Speculation};
use stolon_backend::fake::{FakeBackend, FakeLatency, FakeOptions};
use stolon_http::{Access, RouterOptions, Secret};

use crate::support::adapters::write_adapter;
use crate::support::several::{SeveralModels, recipe, with};
use crate::support::{Server, TINY, encoder, texts};

const TEXT: &str = "The keeper of the tower walks up the stairs every evening and lights the lamp.";

/// The names and the states of all models.
async fn states(server: &SeveralModels) -> Vec<(String, String)> {
    let (_, models) = server.get("/v1/models").await;
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let models = models["data"].as_array().expect("a list").iter();
    models.map(|model| (text(&model["id"]), text(&model["status"]["value"]))).collect()
}

async fn state(server: &SeveralModels, name: &str) -> String {
    let states = states(server).await.into_iter();
    states.into_iter().find(|(id, _)| id == name).expect("a model").1
}

/// Waits until a model has this state.
async fn until(server: &SeveralModels, name: &str, expected: &str) {
    let reached = async {
        while state(server, name).await != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let reached = tokio::time::timeout(Duration::from_secs(30), reached).await;
    assert!(reached.is_ok(), "{name} is not {expected}");
}

fn message(reply: &Value) -> &str {
    reply["error"]["message"].as_str().expect("a message")
}

/// A chat model, a text encoder and a reranker.
fn three() -> SeveralModels {
    let set = ModelSet::builder()
        .model(recipe("chat", "demo"))
        .model(recipe("embed", &encoder("modernbert")))
        .model(recipe("rerank", &encoder("bert_reranker")));
    SeveralModels::start(set, RouterOptions { page: true, ..RouterOptions::default() })
}

/// Goal: each request is answered by the model that it names in any API, as by a server of that
/// model alone, and by the first model if it names none; models are loaded by their first request.
#[tokio::test]
async fn requests_are_answered_by_the_model_that_they_name() {
    let server = three();
    let all = |state: &str| ["chat", "embed", "rerank"].map(|id| (id.to_owned(), state.to_owned()));
    assert_eq!(states(&server).await, all("sleeping"));

    let embeddings = json!({"input": [TEXT], "model": "embed"});
    let alone = Server::start(&encoder("modernbert"));
    let expected = alone.ok("/v1/embeddings", json!({"input": [TEXT]})).await;
    let reply = server.ok("/v1/embeddings", embeddings).await;
    assert_eq!((&reply["data"], &reply["model"]), (&expected["data"], &json!("embed")));
    assert_eq!(state(&server, "chat").await, "sleeping");

    let rerank = json!({"query": "a stem", "documents": ["the stem", "the ground"],
                        "model": "rerank"});
    let mut alone_rerank = rerank.clone();
    alone_rerank["model"] = json!("bert_reranker");
    let alone = Server::start(&encoder("bert_reranker"));
    let expected = alone.ok("/v1/rerank", alone_rerank).await;
    assert_eq!(server.ok("/v1/rerank", rerank).await["results"], expected["results"]);

    let messages = json!([{"role": "user", "content": TEXT}]);
    let chat = json!({"messages": messages, "max_tokens": 8, "temperature": 0, "model": "chat"});
    let mut alone_chat = chat.clone();
    alone_chat["model"] = json!("stolon-demo");
    let alone = Server::start("demo");
    let expected = alone.ok("/v1/chat/completions", alone_chat).await;
    let expected = &expected["choices"][0]["message"]["content"];
    let reply = server.ok("/v1/chat/completions", chat.clone()).await;
    assert_eq!(
        (&reply["choices"][0]["message"]["content"], &reply["model"]),
        (expected, &json!("chat"))
    );
    assert_eq!(states(&server).await, all("loaded"));
    // Without a name.
    let unnamed = json!({"messages": messages, "max_tokens": 8, "temperature": 0});
    let reply = server.ok("/v1/chat/completions", unnamed.clone()).await;
    assert_eq!(&reply["choices"][0]["message"]["content"], expected);
    let reply = server.ok("/v1/messages", chat.clone()).await;
    assert_eq!(&reply["content"][0]["text"], expected);
    let streamed = server.events("/v1/chat/completions", chat).await;
    let pieces = streamed.iter().filter_map(|it| it["choices"][0]["delta"]["content"].as_str());
    assert_eq!(pieces.collect::<String>(), expected.as_str().expect("a text"));
    let ollama = json!({"messages": messages, "stream": false, "model": "chat:latest",
                        "options": {"num_predict": 8, "temperature": 0}});
    assert_eq!(&server.ok("/api/chat", ollama).await["message"]["content"], expected);
    // A response is kept for all models.
    let response = json!({"input": TEXT, "model": "chat", "max_output_tokens": 4});
    let id = server.ok("/v1/responses", response).await["id"].as_str().expect("an id").to_owned();
    assert_eq!(server.get(&format!("/v1/responses/{id}")).await.1["id"], json!(id));

    // The query names the model where the body has no place for it, and before the body.
    let (status, props) = server.get("/props?model=embed").await;
    assert_eq!(status, 200, "{props}");
    let tokenized = async |path: &str| server.ok(path, json!({"prompt": TEXT})).await;
    let [by_query, of_first] =
        [tokenized("/tokenize?model=embed").await, tokenized("/tokenize").await];
    assert_ne!(by_query["tokens"], of_first["tokens"]);
    let both = json!({"prompt": TEXT, "model": "embed"});
    assert_eq!(server.ok("/tokenize", both).await["tokens"], by_query["tokens"]);

    // What a model cannot do is refused as by itself.
    let (status, reply) =
        server.post("/v1/completions", json!({"prompt": "a", "model": "embed"})).await;
    assert_eq!((status, &reply["error"]["code"]), (400, &json!("unsupported_endpoint")));
}

/// Goal: an unknown name has status 404 with all names, in each API's form, and no model is loaded
/// for it; a body without a readable name goes to the first model, which says what is wrong.
#[tokio::test]
async fn unknown_names_are_refused() {
    let server = three();
    let names = "there is no model `gpt`: expected one of `chat`, `embed`, `rerank`";
    let body =
        json!({"model": "gpt", "prompt": "a", "messages": [], "input": "a", "max_tokens": 1});
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/messages"] {
        let (status, reply) = server.post(path, body.clone()).await;
        assert_eq!((status, message(&reply)), (404, names), "{path}");
    }
    let (status, reply) = server.post("/api/chat", body).await;
    assert_eq!((status, &reply["error"]), (404, &json!(names)));
    for path in ["/props?model=gpt", "/v1/cache/stats?x=1&model=gpt", "/v1/models/gpt"] {
        let (status, reply) = server.get(path).await;
        assert_eq!((status, message(&reply)), (404, names), "{path}");
    }
    assert!(states(&server).await.iter().all(|(_, state)| state == "sleeping"));
    for (body, expected) in [("{\"prompt\": 1", 400), ("[]", 400), ("{\"model\": 7}", 400)] {
        let reply = server.send("/v1/completions", body).await;
        assert_eq!(reply.status(), expected, "{body}");
    }
    let reply = reqwest::Client::new().post(server.url("/v1/completions")).body("{}").send().await;
    assert_eq!(reply.expect("a reply").status(), 415);
    let large = format!(r#"{{"prompt": "{}"}}"#, "x".repeat(17 << 20));
    assert_eq!(server.send("/v1/completions", large).await.status(), 413);
    // Its own limit of the context's size is that of the model.
    let large = format!(r#"{{"prompt": "{}", "model": "chat"}}"#, "x".repeat(2 << 20));
    assert_eq!(server.send("/v1/completions", large).await.status(), 413);
}

/// Goal: a model that left to make room for another one is warm when it returns, with the same
/// answer to the bit, and its adapters and its sessions are there.
#[tokio::test]
async fn a_model_that_returns_is_warm() {
    let kv = tempfile::tempdir().expect("a directory");
    let adapter = tempfile::tempdir().expect("a directory");
    write_adapter(adapter.path(), 1);
    let stored = |name: &str, source| {
        let own = kv.path().join(name);
        with(name, source, move |builder| {
            let builder = builder.kv_cache_dir(&own, 1 << 30);
            builder.prefetch_policy(PrefetchPolicy::WaitComplete)
        })
    };
    let set = ModelSet::builder().model(stored("a", "demo")).model(stored("b", TINY)).memory(1);
    let server = SeveralModels::start(set, RouterOptions::default());
    let prompt = TEXT.repeat(8);
    let ask = async |model: &str| {
        let body = json!({"prompt": prompt, "max_tokens": 8, "logprobs": 1, "ignore_eos": true,
                          "model": model});
        let reply = server.complete(body).await;
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        (
            texts(&reply)[0].to_owned(),
            reply["choices"][0]["logprobs"].clone(),
            cached.expect("a count"),
        )
    };
    let load = json!({"lora_name": "sql", "lora_path": adapter.path()});
    let reply = server.send("/v1/load_lora_adapter?model=a", load.to_string()).await;
    assert_eq!(reply.status(), 200);
    let (text, logprobs, cached) = ask("a").await;
    assert_eq!(cached, 0);
    let adapted = ask("sql").await.0;
    assert_ne!(adapted, text);
    let session = server.ok("/v1/sessions?model=a", json!({})).await;
    ask("b").await;
    assert_eq!(
        (state(&server, "a").await, state(&server, "b").await),
        ("sleeping".into(), "loaded".into())
    );
    // The adapter is listed while its model sleeps, and a request for it loads the model.
    let (_, listed) = server.get("/v1/models/sql").await;
    assert_eq!((&listed["parent"], &listed["status"]["value"]), (&json!("a"), &json!("sleeping")));
    assert_eq!(ask("sql").await.0, adapted);
    let (again, again_logprobs, cached) = ask("a").await;
    assert_eq!((again, again_logprobs), (text, logprobs));
    assert!(cached >= 64, "{cached}");
    let id = session["id"].as_str().expect("an id");
    let (status, reply) = server.get(&format!("/v1/sessions/{id}?model=a")).await;
    assert_eq!(status, 200, "{reply}");
}

/// Goal: operators load and unload models, under the rules of their routes; a look at a model that
/// sleeps does not load it; a model is unloaded only after a reply that is being sent.
#[tokio::test]
async fn operators_load_and_unload() {
    let access = Access { admin_key: Some(Secret::from("root".to_owned())), ..Access::default() };
    let slow = ModelRecipe::new("a", || {
        let per_decode = Duration::from_millis(20);
        let latency = FakeLatency { per_decode, ..FakeLatency::default() };
        let fake = FakeBackend::new(FakeOptions { latency, ..FakeOptions::default() });
        // Each token takes its time.
        Ok(Engine::builder().backend("fake", Box::new(fake)).speculation(Speculation::off()))
    });
    let set = ModelSet::builder().model(slow).model(recipe("b", TINY));
    let server = SeveralModels::start(set, RouterOptions { access, ..RouterOptions::default() });
    let key = ("authorization", "Bearer root");
    for path in ["/models/load", "/models/unload"] {
        let (status, _) = server.post(path, json!({"model": "a"})).await;
        assert_eq!(status, 401, "{path}");
        for (body, expected) in [(json!({"model": "c"}), 404), (json!({"name": "a"}), 400)] {
            assert_eq!(server.post_with(path, key, body).await.0, expected, "{path}");
        }
    }
    let look = async |path: &str| {
        let request = reqwest::Client::new().get(server.url(path)).header(key.0, key.1);
        request.send().await.expect("a reply").status().as_u16()
    };
    assert_eq!(look("/admin/stats?model=a").await, 409);
    assert_eq!(state(&server, "a").await, "sleeping");
    let done = json!({"success": true});
    let (status, reply) = server.post_with("/models/load", key, json!({"model": "a"})).await;
    assert_eq!((status, &reply), (200, &done));
    assert_eq!(state(&server, "a").await, "loaded");
    assert_eq!(look("/admin/stats?model=a").await, 200);

    let body = json!({"prompt": [1, 2], "max_tokens": 100, "ignore_eos": true, "stream": true,
                      "model": "a", "temperature": 0});
    // The reply begins at once. Its first piece comes at its end, because the tokens have no text.
    let mut stream = server.send("/v1/completions", body.to_string()).await;
    let unload = server.post_with("/models/unload", key, json!({"model": "a"}));
    let rest = async {
        until(&server, "a", "unloading").await;
        let mut text = String::new();
        while let Some(chunk) = stream.chunk().await.expect("the reply is not cut off") {
            text.push_str(std::str::from_utf8(&chunk).expect("UTF-8"));
        }
        text
    };
    let ((status, reply), text) = tokio::join!(unload, rest);
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!((status, &reply), (200, &done));
    assert_eq!(state(&server, "a").await, "sleeping");
}

/// Goal: a load that fails is an error that hides paths from clients and not from operators, is
/// shown in the list, and is tried again by the next request.
#[tokio::test]
async fn a_failed_load_is_told_and_tried_again() {
    let works = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&works);
    let broken = ModelRecipe::new("a", move || {
        let source = if flag.load(SeqCst) { TINY } else { "no/such/directory/model.gguf" };
        Ok(Engine::builder().model(source).num_blocks(64))
    });
    let server = SeveralModels::start(ModelSet::builder().model(broken), RouterOptions::default());
    let body = json!({"prompt": "x", "max_tokens": 1});
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = json!(stream);
        let (status, reply) = server.post("/v1/completions", body).await;
        assert_eq!((status, &reply["error"]["code"]), (503, &json!("model_load_failed")));
        assert!(!message(&reply).contains("no/such") && message(&reply).contains("`a`"), "{reply}");
    }
    let (status, reply) = server.post("/models/load", json!({"model": "a"})).await;
    assert!(status == 503 && message(&reply).contains("no/such/directory"), "{reply}");
    let (_, models) = server.get("/v1/models").await;
    assert_eq!(models["data"][0]["status"], json!({"value": "sleeping", "failed": true}));
    works.store(true, SeqCst);
    server.ok("/v1/completions", body).await;
    let (status, health) = server.get("/health").await;
    assert_eq!((status, &health["models"]["a"]), (200, &json!({"value": "loaded"})));
}

/// Goal: idle models are unloaded, Ollama's `keep_alive` says when, and neither `/metrics` nor
/// `/health` nor lists keep a model loaded; the metrics of all loaded models are one valid text.
#[tokio::test]
async fn ollama_and_metrics_know_all_models() {
    let set = ModelSet::builder()
        .model(recipe("chat", "demo"))
        .model(recipe("embed", &encoder("bert")))
        .idle_timeout(Duration::from_secs(3600));
    let server = SeveralModels::start(set, RouterOptions::default());
    let (_, tags) = server.get("/api/tags").await;
    let names = |reply: &Value| -> Vec<String> {
        let models = reply["models"].as_array().expect("a list").iter();
        models.map(|model| model["name"].as_str().expect("a name").to_owned()).collect()
    };
    assert_eq!(names(&tags), ["chat:latest", "embed:latest"]);
    assert!(names(&server.get("/api/ps").await.1).is_empty());
    server.ok("/api/embed", json!({"input": TEXT, "model": "embed"})).await;
    let ask = json!({"model": "chat", "prompt": "Hi", "stream": false, "keep_alive": "2h",
                     "options": {"num_predict": 2}});
    server.ok("/api/generate", ask.clone()).await;
    let (_, ps) = server.get("/api/ps").await;
    assert_eq!(names(&ps), ["chat:latest", "embed:latest"]);
    let [chat, embed] =
        [0, 1].map(|index| ps["models"][index]["expires_at"].as_str().expect("a time"));
    assert!(chat > embed && !chat.starts_with("2318"), "{chat} {embed}");

    let metrics = reqwest::get(server.url("/metrics")).await.expect("a reply");
    assert!(metrics.headers()["content-type"].to_str().is_ok_and(|it| it.contains("openmetrics")));
    let metrics = metrics.text().await.expect("a text");
    for name in ["chat", "embed"] {
        let sample = format!("stolon:prompt_tokens_total{{model_name=\"{name}\"}}");
        assert!(metrics.contains(&sample), "{metrics}");
    }
    let mut seen = std::collections::HashSet::new();
    let mut current = "";
    for line in metrics.lines() {
        match line.strip_prefix("# TYPE ").and_then(|rest| rest.split(' ').next()) {
            Some(name) => {
                assert!(seen.insert(name), "{name} is described twice");
                current = name;
            }
            None if !line.starts_with('#') => {
                assert!(line.starts_with(current), "{current}: {line}")
            }
            None => {}
        }
    }
    assert!(metrics.ends_with("# EOF\n") && metrics.matches("# EOF").count() == 1);

    let mut unload = ask;
    unload["keep_alive"] = json!(0);
    server.ok("/api/generate", unload).await;
    until(&server, "chat", "sleeping").await;
    assert_eq!(state(&server, "embed").await, "loaded");
}
