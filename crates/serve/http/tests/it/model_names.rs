//! The names by which requests choose the model.

use serde_json::{Value, json};

use crate::support::adapters::write_adapter;
use crate::support::{Server, TINY};

/// Requests of all APIs that name this model.
fn requests(model: &str) -> [(&'static str, Value); 6] {
    let messages = json!([{"role": "user", "content": "x"}]);
    [
        ("/v1/completions", json!({"model": model, "prompt": "x", "max_tokens": 1})),
        ("/v1/chat/completions", json!({"model": model, "messages": messages, "max_tokens": 1})),
        ("/v1/messages", json!({"model": model, "messages": messages, "max_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"model": model, "messages": messages})),
        ("/v1/responses", json!({"model": model, "input": "x", "max_output_tokens": 1})),
        ("/tokenize", json!({"model": model, "prompt": "x"})),
    ]
}

/// A server of the demo model under these names.
fn named(names: &[&str]) -> Server {
    Server::with("demo", |engine, options| {
        options.served_names = names.iter().map(|&name| name.to_owned()).collect();
        engine
    })
}

/// The status of a request, the header that names the model, and the reply.
async fn ask(server: &Server, path: &str, body: &Value) -> (u16, Option<String>, Value) {
    let reply = server.send(path, body.to_string()).await;
    let name =
        reply.headers().get("x-stolon-model").map(|name| name.to_str().expect("text").to_owned());
    (reply.status().as_u16(), name, reply.json().await.expect("JSON"))
}

/// Goal: requests with the default names of clients are answered by the only model, and a header
/// tells its own name. Requests with its own names get no such header.
#[tokio::test]
async fn any_name_stands_for_the_only_model() {
    for (names, name) in [
        (&[][..], "stolon-demo"),
        (&["tower"], "tower"),
        (&["a", "b", "*"], "a"),
        (&["*"], "stolon-demo"),
    ] {
        let server = named(names);
        for (path, body) in requests("claude-opus-4-8") {
            let (status, header, reply) = ask(&server, path, &body).await;
            assert_eq!((status, header.as_deref()), (200, Some(name)), "{path}: {reply}");
            if let Some(model) = reply["model"].as_str() {
                assert_eq!(model, "claude-opus-4-8", "the name of the request");
            }
        }
        let (path, body) = &requests(name)[0];
        assert_eq!(ask(&server, path, body).await.1, None);
        let (_, list) = server.get("/v1/models").await;
        let ids: Vec<&str> = list["data"]
            .as_array()
            .expect("models")
            .iter()
            .filter_map(|model| model["id"].as_str())
            .collect();
        assert!(ids[0] == name && !ids.contains(&"*"), "{ids:?}");
        // Names are repeated in each piece of a reply.
        for name in ["x".repeat(257), "a\nb".to_owned()] {
            assert_eq!(ask(&server, path, &requests(&name)[0].1).await.0, 404, "{name}");
        }
        // A client that asks whether there is such a model gets the truth.
        assert_eq!(server.get("/v1/models/claude-opus-4-8").await.0, 404);
    }
}

/// Goal: with several names, or with adapters, another name is refused, because it could mean one
/// of them; also after an adapter was unloaded.
#[tokio::test]
async fn a_name_that_may_be_meant_for_another_model_is_refused() {
    let server = named(&["a", "b"]);
    for (path, body) in requests("c") {
        let (status, _, reply) = ask(&server, path, &body).await;
        assert_eq!(status, 404, "{path}: {reply}");
        let message = reply["error"]["message"].as_str().expect("a message");
        assert!(message.contains("this server has `a`") && message.contains("'*'"), "{message}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    write_adapter(dir.path(), 1);
    for (names, after) in [(&[][..], 404), (&["*"], 200)] {
        let server = named(names);
        let (path, body) = &requests("onne")[0];
        assert_eq!(ask(&server, path, body).await.0, 200);
        let load = json!({"lora_name": "one", "lora_path": dir.path()});
        assert_eq!(server.send("/v1/load_lora_adapter", load.to_string()).await.status(), 200);
        assert_eq!(ask(&server, path, body).await.0, after);
        assert_eq!(ask(&server, path, &requests("one")[0].1).await.1, None);
        let unload = json!({"lora_name": "one"}).to_string();
        assert_eq!(server.send("/v1/unload_lora_adapter", unload).await.status(), 200);
        assert_eq!(ask(&server, path, body).await.0, after);
    }
}

/// Goal: the Codex CLI, which sends its version, finds the member `models` that it reads, without
/// entries that would replace its own instructions; other clients get the list alone.
#[tokio::test]
async fn codex_reads_the_list_of_models() {
    let server = Server::start(TINY);
    let (status, list) = server.get("/v1/models?client_version=0.145.0").await;
    assert_eq!((status, &list["models"]), (200, &json!([])), "{list}");
    assert_eq!(list["data"].as_array().map(Vec::len), Some(1), "{list}");
    let (_, list) = server.get("/v1/models?version=1").await;
    assert!(list.get("models").is_none(), "{list}");
}
