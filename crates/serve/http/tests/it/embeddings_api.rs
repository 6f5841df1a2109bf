//! `POST /v1/embeddings`, with the model of sentence-transformers in `crates/models/checkpoint/tests/fixtures`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use stolon::EmbeddingSizes;
use stolon_http::Tenants;

use crate::support::{EMBEDDING, Server, api_keys};

/// The token that the tokenizer of the fixture puts after every text.
const END: u32 = 256;

fn expected() -> Vec<Value> {
    let text = std::fs::read_to_string(format!("{EMBEDDING}/expected.json")).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

fn numbers(value: &Value) -> Vec<f32> {
    let numbers = value.as_array().expect("a list").iter();
    numbers.map(|number| number.as_f64().expect("a number") as f32).collect()
}

fn decoded(value: &Value) -> Vec<f32> {
    let bytes = STANDARD.decode(value.as_str().expect("a string")).expect("base64");
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[track_caller]
fn assert_close(values: &[f32], expected: &Value) {
    let expected = numbers(expected);
    assert_eq!(values.len(), expected.len());
    let difference = values.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference < 2e-6, "{difference}");
}

/// Goal: every form of the input and of the vectors has the embeddings of sentence-transformers, in
/// order, and the tokens are counted.
#[tokio::test]
async fn embeddings_have_openais_form() {
    let server = Server::with(EMBEDDING, |engine, _| {
        engine.embedding_sizes(EmbeddingSizes::Listed(vec![12, 16]))
    });
    let cases = expected();
    let texts: Vec<&Value> = cases.iter().map(|case| &case["text"]).collect();
    let tokens: Vec<&Value> = cases.iter().map(|case| &case["tokens"]).collect();
    let count: usize = tokens.iter().map(|list| list.as_array().expect("a list").len()).sum();
    for input in [json!(texts), json!(tokens)] {
        for format in [None, Some("float"), Some("base64")] {
            let body = json!({"input": input, "encoding_format": format, "user": "u"});
            let reply = server.ok("/v1/embeddings", body).await;
            assert_eq!((&reply["object"], &reply["model"]), (&json!("list"), &json!("embedding")));
            assert_eq!(reply["usage"]["prompt_tokens"], count);
            assert_eq!(reply["usage"]["total_tokens"], count);
            assert!(reply["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
            let data = reply["data"].as_array().expect("a list");
            assert_eq!(data.len(), cases.len());
            for (index, (entry, case)) in data.iter().zip(&cases).enumerate() {
                assert_eq!(
                    (&entry["object"], &entry["index"]),
                    (&json!("embedding"), &json!(index))
                );
                let vector = &entry["embedding"];
                let is_base64 = format == Some("base64");
                let values = if is_base64 { decoded(vector) } else { numbers(vector) };
                assert_close(&values, &case["last"]);
            }
        }
    }
    let last = cases.last().expect("a case");
    for input in [&last["text"], &last["tokens"]] {
        let body = json!({"model": "embedding", "input": input, "dimensions": 12});
        let reply = server.ok("/v1/embeddings", body).await;
        assert_close(&numbers(&reply["data"][0]["embedding"]), &last["short"]);
        let cached = &reply["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert!(cached.as_u64() >= Some(64), "{cached} of a repeated input");
    }
    let body = json!({"input": "x", "dimensions": 13});
    let (status, reply) = server.post("/v1/embeddings", body).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("dimensions")));
    assert_eq!(server.get("/v1/models/embedding").await.1["embedding_size"], 32);
    server.settled_audit().await;
}

/// Goal: as many inputs as a request may have are computed, although the queue holds fewer, and
/// each is the same as alone.
#[tokio::test]
async fn many_inputs_need_no_room_in_the_queue() {
    let server = Server::with(EMBEDDING, |engine, _| engine.max_queued_requests(3).max_running(2));
    let input: Vec<String> = (0..2048).map(|n| format!("{}", n % 50)).collect();
    let body = json!({"input": input, "encoding_format": "base64"});
    let reply = server.ok("/v1/embeddings", body).await;
    let data = reply["data"].as_array().expect("a list");
    assert_eq!(data.len(), 2048);
    for n in [0, 7, 49] {
        let body = json!({"input": format!("{n}"), "encoding_format": "base64"});
        let alone = server.ok("/v1/embeddings", body).await;
        for index in (n..2048).step_by(50) {
            assert_eq!(data[index]["embedding"], alone["data"][0]["embedding"], "{index}");
        }
    }
    let body = json!({"input": vec!["x"; 2049]});
    let (status, reply) = server.post("/v1/embeddings", body).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("input")));
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(message.contains("2048") && message.contains("2049"), "{message}");
    server.settled_audit().await;
}

/// Goal: a wrong input is refused with its index, before anything is computed.
#[tokio::test]
async fn wrong_inputs_are_refused_by_their_index() {
    let server = Server::with(EMBEDDING, |engine, options| {
        options.served_names = ["one", "two"].map(String::from).to_vec();
        engine
    });
    let long = "x".repeat(300);
    for (body, param, part) in [
        (json!({}), "input", "required"),
        (json!({"input": []}), "input", "1 to 2048"),
        (json!({"input": null}), "input", "a string"),
        (json!({"input": ""}), "input", "empty"),
        (json!({"input": ["a", ""]}), "input[1]", "empty"),
        (json!({"input": [[1, END], []]}), "input[1]", "empty"),
        (json!({"input": ["a", 1]}), "input", "a string"),
        (json!({"input": long}), "input", "301"),
        (json!({"input": ["a", "b", long]}), "input[2]", "256"),
        (json!({"input": [[1, END], [300, END]]}), "input[1]", "300"),
        (json!({"input": [[1, END], [1, 2]]}), "input[1]", "check_embedding_ctx_length"),
        (json!({"input": [1, 2]}), "input", "own tokenizer"),
        (json!({"input": [-1]}), "input", "a string"),
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format", "base64"),
        (json!({"input": "a", "dimensions": 0}), "dimensions", "1"),
        (json!({"input": "a", "dimensions": 16}), "dimensions", "is_matryoshka"),
        (json!({"input": "a", "input_type": "query"}), "input_type", "no prompts"),
        (json!({"input": "a", "prompt_name": "query"}), "prompt_name", "no prompts"),
        (json!({"input": "a", "truncate": true}), "truncate", "support"),
    ] {
        let (status, reply) = server.post("/v1/embeddings", body.clone()).await;
        let error = &reply["error"];
        assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{body}");
        assert_eq!(error["param"], param, "{body}: {reply}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(part), "{body}: {message}");
    }
    let (status, _) = server.post("/v1/embeddings", json!({"input": "a", "model": "b"})).await;
    assert_eq!(status, 404);
    let stats = server.get("/admin/stats").await.1;
    assert_eq!(stats["stats"]["computed_tokens"], 0, "{stats}");
}

/// Goal: a prompt for queries alone is put before queries, under each name that clients have for them,
/// and nothing before documents, as in sentence-transformers.
#[tokio::test]
async fn documents_need_no_prompt_next_to_one_for_queries() {
    let copy = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(copy.path().join("1_Pooling")).expect("a folder");
    let pooling = "1_Pooling/config.json";
    for name in ["config.json", "model.safetensors", "modules.json", "tokenizer.json", pooling] {
        std::fs::copy(format!("{EMBEDDING}/{name}"), copy.path().join(name)).expect(name);
    }
    let prompts = r#"{"prompts": {"query": "find: "}}"#;
    std::fs::write(copy.path().join("config_sentence_transformers.json"), prompts).expect("a file");
    let server = Server::start(copy.path().to_str().expect("a path"));
    let embed = async |text: &str, kind: Option<&str>| {
        let body = json!({"input": text, "input_type": kind});
        server.ok("/v1/embeddings", body).await["data"][0]["embedding"].clone()
    };
    let (plain, asked) = (embed("x", None).await, embed("find: x", None).await);
    assert_ne!(plain, asked);
    for (kind, expected) in [
        ("query", &asked),
        ("search_query", &asked),
        ("document", &plain),
        ("passage", &plain),
        ("search_document", &plain),
    ] {
        assert_eq!(&embed("x", Some(kind)).await, expected, "{kind}");
    }
    let body = json!({"input": "x", "input_type": "clustering"});
    assert_eq!(server.post("/v1/embeddings", body).await.0, 400);
}

/// Goal: each kind of model refuses requests that it is not meant for, and says what was expected.
#[tokio::test]
async fn models_refuse_what_they_are_not_meant_for() {
    let server = Server::start(EMBEDDING);
    let (status, reply) = server.post("/v1/completions", json!({"prompt": "a"})).await;
    assert_eq!((status, &reply["error"]["code"]), (400, &json!("unsupported_endpoint")));
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(message.contains("output matrix"), "{message}");
    let server = Server::tiny();
    let (status, reply) = server.post("/v1/embeddings", json!({"input": "a"})).await;
    assert_eq!((status, &reply["error"]["code"]), (400, &json!("unsupported_endpoint")));
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(message.contains("1_Pooling/config.json"), "{message}");
    assert!(server.get("/v1/models").await.1["data"][0].get("embedding_size").is_none());
}

/// Goal: a key is needed, and tenants share no cache.
#[tokio::test]
async fn keys_and_tenants_hold_for_embeddings() {
    let server = Server::with(EMBEDDING, |engine, options| {
        options.access.api_keys = api_keys(&[("ada", "secret-a"), ("bob", "secret-b")]);
        options.access.tenants = Tenants::ByKey;
        engine
    });
    let body = json!({"input": "A stolon is a stem that grows along the ground."});
    let (status, _) = server.post("/v1/embeddings", body.clone()).await;
    assert_eq!(status, 401);
    for (key, is_cached) in [("secret-a", false), ("secret-a", true), ("secret-b", false)] {
        let bearer = format!("Bearer {key}");
        let header = ("authorization", bearer.as_str());
        let (status, reply) = server.post_with("/v1/embeddings", header, body.clone()).await;
        assert_eq!(status, 200, "{reply}");
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(cached > Some(0), is_cached, "{key}: {reply}");
    }
}
