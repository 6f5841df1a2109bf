//! LoRA adapters: the routes that load and unload them, and requests that choose one.

use serde_json::{Value, json};

use crate::support::adapters::write_adapter;
use crate::support::{Server, api_key, texts};

/// The status and the text of a reply.
async fn post(server: &Server, path: &str, body: Value) -> (u16, String) {
    let reply = reqwest::Client::new().post(server.url(path)).json(&body).send().await;
    let reply = reply.expect("a reply");
    (reply.status().as_u16(), reply.text().await.expect("text"))
}

/// The text of an answer, and how many prompt tokens came from the cache.
async fn ask(server: &Server, model: Option<&str>) -> (String, u64) {
    let prompt = "The violet tent costs 45 crowns. The iron lighthouse has 214 steps. The quiet";
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 12, "ignore_eos": true});
    let reply = server.complete(body).await;
    if let Some(model) = model {
        assert_eq!(reply["model"], model);
    }
    let cached = &reply["usage"]["prompt_tokens_details"]["cached_tokens"];
    (texts(&reply)[0].to_owned(), cached.as_u64().unwrap_or_default())
}

/// Goal: adapters of the start and of the route are listed with their parent, chosen by the name of the
/// model in requests, have cached prefixes of their own, are counted, and can be replaced and
/// unloaded with the statuses and messages of vLLM.
#[tokio::test]
async fn adapters_are_loaded_chosen_and_unloaded() {
    let dirs = [tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("one")];
    let [first, second] = [0, 1].map(|index| dirs[index].path().to_str().expect("UTF-8"));
    write_adapter(dirs[0].path(), 1);
    write_adapter(dirs[1].path(), 2);
    let server =
        Server::with("demo", |engine, _| engine.adapter("one", first).adapter_memory(64 << 20));
    let load = json!({"lora_name": "two", "lora_path": second});
    let (status, text) = post(&server, "/v1/load_lora_adapter", load.clone()).await;
    assert_eq!((status, text.as_str()), (200, "Success: LoRA adapter 'two' added successfully."));

    let (_, models) = server.get("/v1/models").await;
    let entry =
        |model: &Value| (model["id"].clone(), model["root"].clone(), model["parent"].clone());
    let entries: Vec<_> = models["data"].as_array().expect("a list").iter().map(entry).collect();
    assert_eq!(entries[0], (json!("stolon-demo"), json!("stolon-demo"), Value::Null));
    assert_eq!(entries[1], (json!("one"), json!(first), json!("stolon-demo")));
    assert_eq!(entries[2], (json!("two"), json!(second), json!("stolon-demo")));
    assert_eq!(server.get("/v1/models/two").await.1["parent"], "stolon-demo");

    let names = [None, Some("one"), Some("two")];
    let mut answers = Vec::new();
    for name in names {
        let (cold, none) = ask(&server, name).await;
        let (warm, cached) = ask(&server, name).await;
        assert!(cold == warm && none == 0 && cached > 0, "{name:?}: {none}, {cached}");
        answers.push(cold);
    }
    assert!(answers[0] != answers[1] && answers[1] != answers[2], "{answers:?}");
    let chat = json!({"model": "two", "messages": [{"role": "user", "content": "Hi"}]});
    assert_eq!(server.ok("/v1/chat/completions", chat).await["model"], "two");

    let metrics = reqwest::get(server.url("/metrics")).await.expect("a response");
    let metrics = metrics.text().await.expect("text");
    let line = "stolon:lora_requests_total{model_name=\"stolon-demo\",adapter=\"one\"} 2";
    assert!(metrics.contains(line), "{metrics}");
    assert!(metrics.contains("vllm:lora_requests_info{") && metrics.contains("max_lora=\"2\""));

    let (status, text) = post(&server, "/v1/load_lora_adapter", load).await;
    assert!(status == 400 && text.contains("has already been loaded"), "{status}: {text}");
    let inplace = json!({"lora_name": "two", "lora_path": first, "load_inplace": true});
    assert_eq!(post(&server, "/v1/load_lora_adapter", inplace).await.0, 200);
    let (replaced, cached) = ask(&server, Some("two")).await;
    assert_eq!((replaced.as_str(), cached), (answers[1].as_str(), 0));

    let unload = json!({"lora_name": "two"});
    let (status, text) = post(&server, "/v1/unload_lora_adapter", unload.clone()).await;
    assert_eq!((status, text.as_str()), (200, "Success: LoRA adapter 'two' removed successfully."));
    let (status, text) = post(&server, "/v1/unload_lora_adapter", unload).await;
    assert!(status == 404 && text.contains("cannot be found"), "{status}: {text}");
    let body = json!({"model": "two", "prompt": "x"});
    let (status, refused) = server.post("/v1/completions", body).await;
    assert_eq!((status, &refused["error"]["code"]), (404, &json!("model_not_found")));
    let (_, list) = server.get("/v1/lora_adapters").await;
    assert_eq!((&list["data"][0]["name"], &list["data"][0]["rank"]), (&json!("one"), &json!(8)));
    server.settled_audit().await;
}

/// Goal: an adapter that cannot be loaded is refused with a status and a message that names the
/// problem, and only the operator may load.
#[tokio::test]
async fn unusable_adapters_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("UTF-8");
    let server = Server::with("demo", |engine, options| {
        options.access.admin_key = Some("secret".to_owned().into());
        options.access.api_keys = api_key("client");
        engine
    });
    let client = reqwest::Client::new();
    let load = async |key: &str, body: Value| {
        let request = client.post(server.url("/v1/load_lora_adapter")).bearer_auth(key);
        let reply = request.json(&body).send().await.expect("a reply");
        (reply.status().as_u16(), reply.text().await.expect("text"))
    };
    let body = |name: &str| json!({"lora_name": name, "lora_path": path});
    assert_eq!(load("client", body("x")).await.0, 401);
    let (status, text) = load("secret", body("x")).await;
    assert!(status == 404 && text.contains("adapter_config.json"), "{status}: {text}");
    write_adapter(dir.path(), 1);
    let (status, text) = load("secret", body("demo")).await;
    assert!(status == 400 && text.contains("name of the model"), "{status}: {text}");
    let (status, text) = load("secret", json!({"lora_name": "x"})).await;
    assert!(status == 400 && text.contains("lora_path"), "{status}: {text}");
    let settings = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "use_dora": true});
    std::fs::write(dir.path().join("adapter_config.json"), settings.to_string()).expect("a file");
    let (status, text) = load("secret", body("x")).await;
    assert!(status == 400 && text.contains("use_dora"), "{status}: {text}");
}
