//! Refused options, and the behavior of a server that is shut down or has limits of the system.

use std::time::Duration;

use serde_json::json;

use crate::support::{Server, TINY, fail};

/// Goal: impossible values of options are refused before a model is loaded, with the accepted
/// range.
#[test]
fn impossible_options_are_refused() {
    for (option, value, range) in [
        ("--step-timeout", "0", "1..=1000000"),
        ("--threads", "0", "1..=1024"),
        ("--threads", "1000000", "1..=1024"),
        ("--body-timeout", "0", "1..=1000000"),
        ("--header-timeout", "0", "1..=1000000"),
        ("--max-connections", "0", "1..=1000000"),
        ("--body-limit", "0", "a size"),
    ] {
        let message = fail(&["serve", "--model", TINY, option, value]);
        assert!(message.contains(option) && message.contains(range), "{message}");
    }
    for option in
        ["--max-running", "--max-queued", "--max-batched-tokens", "--num-blocks", "--block-size"]
    {
        let message = fail(&["generate", "--prompt", "x", "--model", TINY, option, "0"]);
        assert!(message.contains("got 0") || message.contains("is not in"), "{option}: {message}");
    }
}

/// Goal: after SIGTERM the server finishes running requests, accepts no new ones, and exits with
/// success.
#[tokio::test]
async fn sigterm_lets_running_requests_finish() {
    let server = Server::tiny();
    let body = json!({"prompt": "last words", "max_tokens": 300, "ignore_eos": true,
                      "temperature": 0, "stream": true});
    let response = server.send("/v1/completions", body.to_string()).await;
    server.terminate();
    let text = response.text().await.expect("the whole stream");
    assert!(text.trim_end().ends_with("data: [DONE]"), "the stream was cut: {text}");
    let url = server.url("/health");
    let status = tokio::task::spawn_blocking(|| server.wait()).await.expect("waited");
    assert!(status.success(), "{status}");
    let refused = reqwest::Client::builder().timeout(Duration::from_secs(5)).build();
    assert!(refused.expect("a client").get(url).send().await.is_err());
}

/// Goal: KV that exceeds the limit on the size of files (`ulimit -f`) is not stored, and ends
/// neither the server nor a request.
#[cfg(unix)]
#[tokio::test]
async fn a_limit_on_the_size_of_files_does_not_end_the_server() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("UTF-8");
    let server = Server::start_limited(TINY, &["--kv-cache-dir", path], "-f 1");
    let body = json!({"prompt": vec![97; 200], "max_tokens": 2});
    server.complete(body.clone()).await;
    let failed = async || server.get("/v1/cache/tiers").await.1["disk"]["writes_failed"].clone();
    while failed().await == json!(0) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.complete(body).await;
    server.settled_audit().await;
}
