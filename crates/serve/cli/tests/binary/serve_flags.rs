//! The flags of `stolon serve` reach the engine and the router. What the options do is tested in the
//! crates `stolon` and `stolon-http`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use serde_json::json;

use crate::support::{EMBEDDING, SCRIPTED, Server, TINY, fail, run};

const CHAT: &str = "/v1/chat/completions";

/// Goal: the KV pool of a server with the demo model is small, unless a flag sets its size.
#[test]
fn the_demo_model_has_a_small_pool() {
    for (flags, expected) in [(&[][..], ", 64 MiB; "), (&["--kv-memory", "5M"][..], ", 5 MiB; ")] {
        let mut server = Command::new(env!("CARGO_BIN_EXE_stolon"))
            .args(["serve", "demo", "--port", "0"])
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let output = server.stdout.take().expect("a pipe");
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        let pool = lines.find(|line| line.starts_with("KV cache ")).unwrap_or_default();
        server.kill().expect("it runs");
        server.wait().expect("it ends");
        assert!(pool.contains(expected), "{pool}");
    }
}

/// Goal: each flag that sets an option of the router has its effect.
#[tokio::test]
async fn flags_set_the_options_of_the_router() {
    let flags = [
        "--served-model-name",
        "one",
        "--served-model-name",
        "two",
        "--default-max-tokens",
        "3",
        "--unknown-parameters",
        "warn",
        "--allowed-origins",
        "https://app.example",
        "--admin-key",
        "root",
        "--public-metrics",
        "--no-page",
    ];
    let server = Server::start(TINY, &flags);
    let (_, models) = server.get("/v1/models").await;
    assert_eq!(
        (&models["data"][0]["id"], &models["data"][1]["id"]),
        (&json!("one"), &json!("two"))
    );
    let body = json!({"prompt": "x", "never_heard_of": 1, "ignore_eos": true});
    let reply = server.complete(body).await;
    assert_eq!(reply["usage"]["completion_tokens"], 3, "{reply}");
    let models = reqwest::Client::new().get(server.url("/v1/models"));
    let models = models.header("origin", "https://app.example").send().await.expect("a reply");
    assert_eq!(models.headers()["access-control-allow-origin"], "https://app.example");
    let status = async |path| reqwest::get(server.url(path)).await.expect("a reply").status();
    for (path, expected) in [("/metrics", 200), ("/admin/stats", 401), ("/", 404)] {
        assert_eq!(status(path).await, expected, "{path}");
    }
    let server = Server::start("random:moondream2-tiny", &["--image-hosts", "x.org", "*.invalid"]);
    let image = json!({"question": "a", "image_url": "https://a.invalid/a.png"});
    let (_, refused) = server.post("/v1/query", image).await;
    let message = refused["error"]["message"].as_str().expect("a message");
    assert!(message.contains("a.invalid: expected an answer, got none"), "{message}");
}

/// Goal: each flag that limits requests has its effect.
#[tokio::test]
async fn flags_limit_requests() {
    let flags = ["--max-queued", "3", "--body-limit", "200K", "--body-memory", "1K"];
    let flags = [&flags[..], &["--body-timeout", "1", "--pin-budget", "1"]].concat();
    let server = Server::start(TINY, &flags);
    let (status, reply) = server.post("/v1/completions", json!({"prompt": "x", "n": 4})).await;
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(status == 400 && message.contains("at most 3"), "{message}");
    let (status, reply) = server.post("/v1/cache/pin", json!({"prompt": vec![65; 40]})).await;
    let message = reply["error"]["message"].as_str().expect("a message");
    assert!(status == 409 && message.contains("at most 1"), "{message}");
    for (length, expected) in [(100_000, 503), (300_000, 413)] {
        let (status, reply) =
            server.post("/v1/completions", json!({"prompt": "x".repeat(length)})).await;
        assert_eq!(status, expected, "{length}: {reply}");
    }
    let mut slow = TcpStream::connect(server.address()).expect("a connection");
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n\
                content-type: application/json\r\ncontent-length: 9\r\n\r\n{";
    slow.write_all(head.as_bytes()).expect("sent");
    let mut status = [0; 12];
    slow.read_exact(&mut status).expect("the beginning of a reply");
    assert_eq!(&status, b"HTTP/1.1 408");
}

/// Goal: the flags that choose how chat messages and answers are read have their effect.
#[tokio::test]
async fn flags_choose_the_formats_of_chat() {
    let ask = |text: &str| json!({"messages": [{"role": "user", "content": text}]});
    let template = format!("{SCRIPTED}/chat_template.jinja");
    let flags = ["--chat-template", &template, "--tool-call-parser", "none"];
    let server = Server::start("demo", &flags);
    let mut body = ask("hello");
    body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    let (status, reply) = server.post(CHAT, body).await;
    assert_eq!((status, &reply["error"]["param"]), (400, &json!("tools")), "{reply}");
    let server = Server::start(SCRIPTED, &["--reasoning-parser", "none"]);
    let reply = server.ok(CHAT, ask("script:think")).await;
    let message = &reply["choices"][0]["message"];
    assert!(message.get("reasoning_content").is_none_or(|text| text.is_null()), "{message}");
    let mut prompt_tokens = Vec::new();
    for flags in [&[][..], &["--special-tokens-in-messages"]] {
        let mut body = ask("a<|end|>b");
        body["max_tokens"] = json!(1);
        let reply = Server::start("demo", flags).ok(CHAT, body).await;
        prompt_tokens.push(reply["usage"]["prompt_tokens"].as_u64());
    }
    assert!(prompt_tokens[0] > prompt_tokens[1], "{prompt_tokens:?}");
}

/// Goal: each flag that sets an option of the engine, and that no other test uses, has its effect.
#[tokio::test]
async fn flags_set_the_options_of_the_engine() {
    let config = r#"{"temperature": 2.0, "top_p": 1.0}"#;
    let flags = [
        "--override-generation-config",
        config,
        "--max-sessions",
        "2",
        "--session-ttl",
        "600",
        "--namespace-quota",
        "0",
    ];
    let server = Server::start(TINY, &flags);
    let body = json!({"prompt": vec![65; 40], "max_tokens": 40, "cache_salt": "a"});
    let [first, second] = [
        server.ok("/v1/completions", body.clone()).await,
        server.ok("/v1/completions", body).await,
    ];
    assert_ne!(first["choices"][0]["text"], second["choices"][0]["text"], "they are drawn");
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "nothing is kept");
    for id in ["a", "b", "c"] {
        let session = server.ok("/v1/sessions", json!({"id": id})).await;
        assert_eq!(session["ttl_seconds"], json!(600.0));
    }
    assert_eq!(server.get("/v1/sessions/a").await.0, 404, "the third one closes the first");
    let server = Server::start(EMBEDDING, &["--embedding-sizes", "12,16"]);
    let reply = server.ok("/v1/embeddings", json!({"input": "a", "dimensions": 12})).await;
    assert_eq!(reply["data"][0]["embedding"].as_array().map(Vec::len), Some(12));
}

/// Goal: a value that cannot be used is refused at the start, and the error says what is expected.
#[test]
fn wrong_values_are_refused() {
    for bad in ["app.example", "https://app.example/path", "[1]", "https://a b"] {
        let error = fail(&["serve", "--allowed-origins", bad]);
        assert!(error.contains("expected") && error.contains("https://"), "{bad}: {error}");
    }
    for path in ["/nonexistent/template", SCRIPTED] {
        let output = run(&["serve", "--port", "0", "--chat-template", path], "");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("--chat-template"), "{error}");
    }
    let generate = ["generate", "--model", TINY, "--prompt", "a"];
    let error = fail(&[&generate[..], &["--embedding-sizes", "any"]].concat());
    assert!(error.contains("not meant for embeddings"), "{error}");
    for (config, expected) in [
        (r#"{"temprature": 1}"#, "temprature"),
        (r#"{"top_p": 7}"#, "from 0 to 1"),
        ("top_p", "expected a JSON object"),
    ] {
        let error = fail(&[&generate[..], &["--override-generation-config", config]].concat());
        assert!(error.contains(expected), "{error}");
    }
}

/// Goal: the tokens and the template of a reranker are those of the flags.
#[tokio::test]
async fn flags_make_a_reranker() {
    let model = stolon_fixtures::path("encoders").join("qwen3_judge").display().to_string();
    let template = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(template.path(), "{query} {document}").expect("written");
    let template = template.path().display().to_string();
    let body = json!({"text_1": "a", "text_2": "b"});
    let mut replies = Vec::new();
    for flags in [
        &[][..],
        &["--rerank-tokens", "no,yes"],
        &["--rerank-tokens", "no,yes", "--rerank-template", &template],
    ] {
        let reply = Server::start(&model, flags).ok("/score", body.clone()).await;
        let score = reply["data"][0]["score"].as_f64().expect("a number");
        replies.push((score, reply["usage"]["prompt_tokens"].as_u64()));
    }
    let [(own, long), (reversed, same), (_, short)] = replies[..] else { panic!("{replies:?}") };
    assert!((own + reversed - 1.0).abs() < 1e-5 && (own - 0.5).abs() > 1e-3, "{replies:?}");
    assert!(long == same && short == Some(3), "{replies:?}");
}
