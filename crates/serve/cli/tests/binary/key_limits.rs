//! The flags that limit the tokens of API keys, and limits in files of keys.

use serde_json::json;

use crate::support::{Server, fail};

/// Goal: the flags limit each key that has no limits of its own, in all APIs.
#[tokio::test]
async fn flags_limit_every_key() {
    let args = ["--api-key", "k", "--key-max-running-tokens", "24016", "--num-blocks", "4096"];
    let server = Server::start("demo", &[&args[..], &["--key-max-queued-tokens", "1"]].concat());
    let body = json!({"prompt": vec![65; 16], "max_tokens": 1500, "n": 16, "logprobs": 5,
                      "ignore_eos": true, "stream": true});
    let request = reqwest::Client::new().post(server.url("/v1/completions")).bearer_auth("k");
    let mut running = request.json(&body).send().await.expect("a reply");
    running.chunk().await.expect("a stream").expect("a piece");
    let messages = json!([{"role": "user", "content": "x"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "x", "echo": true, "logprobs": 1})),
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/responses", json!({"input": "x"})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 9})),
    ] {
        let request = reqwest::Client::new().post(server.url(path)).bearer_auth("k");
        let request = request.header("x-request-timeout", "0.2").json(&body);
        let status = loop {
            let again = request.try_clone().expect("a body in memory");
            let status = again.send().await.expect("a reply").status();
            if status != 429 {
                break status;
            }
        };
        assert_eq!(status, 504, "{path} waits");
    }
    drop(running);
}

/// Goal: wrong limits are refused at the start, without showing keys.
#[test]
fn wrong_limits_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("keys");
    for (line, word) in [
        ("ada sekret max-running-tokens=0", "1 or above"),
        ("ada sekret max-running-tokens=many", "1 or above"),
        ("ada sekret max-queued-tokens=5", "max-running-tokens"),
        ("ada sekret max-waiting=5", "max-running-tokens=N"),
    ] {
        std::fs::write(&file, line).expect("written");
        let error = fail(&["serve", "--api-key-file", file.to_str().expect("UTF-8")]);
        assert!(error.contains("line 1") && error.contains(word), "{line}: {error}");
        assert!(!error.contains("sekret"), "{error}");
    }
    let error = fail(&["serve", "--key-max-queued-tokens", "5"]);
    assert!(error.contains("--key-max-running-tokens"), "{error}");
}
