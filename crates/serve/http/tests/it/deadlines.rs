//! Deadlines of requests, from the header `x-request-timeout`.

use serde_json::{Value, json};

use crate::support::{Server, TINY};

/// A body that is answered only after a long time.
fn endless(path: &str) -> Value {
    let messages = json!([{"role": "user", "content": "x"}]);
    match path {
        "/v1/completions" => json!({"prompt": "x", "max_tokens": 1_000_000, "ignore_eos": true}),
        "/v1/responses" => json!({"input": "x", "max_output_tokens": 1_000_000}),
        _ => json!({"messages": messages, "max_tokens": 1_000_000}),
    }
}

/// Goal: a request that runs past its deadline ends with status 504 and frees its resources; a
/// deadline that leaves time enough changes nothing.
#[tokio::test]
async fn a_request_ends_at_its_deadline() {
    let server = Server::with(TINY, |engine, _| engine.num_blocks(4096));
    let (path, header) = ("/v1/completions", ("x-request-timeout", "0.2"));
    let (status, reply) = server.post_with(path, header, endless(path)).await;
    assert_eq!((status, &reply["error"]["code"]), (504, &json!("timeout")), "{reply}");
    let body = json!({"prompt": "x", "max_tokens": 4, "temperature": 0});
    let header = ("x-request-timeout", "600");
    let (status, timed) = server.post_with("/v1/completions", header, body.clone()).await;
    assert_eq!(status, 200, "{timed}");
    assert_eq!(timed["choices"], server.complete(body).await["choices"]);
    server.settled_audit().await;
}

/// Goal: a stream that runs past its deadline ends with an error event.
#[tokio::test]
async fn a_stream_ends_at_its_deadline() {
    let server = Server::with(TINY, |engine, _| engine.num_blocks(4096));
    let mut body = endless("/v1/completions");
    body["stream"] = json!(true);
    let request = reqwest::Client::new().post(server.url("/v1/completions")).json(&body);
    let reply = request.header("x-request-timeout", "0.3").send().await.expect("a reply");
    assert_eq!(reply.status(), 200, "the stream has begun");
    let text = reply.text().await.expect("a body");
    let last = text.lines().rev().find_map(|line| line.strip_prefix("data: {")).expect("an event");
    let last: Value = serde_json::from_str(&format!("{{{last}")).expect("JSON");
    assert_eq!(last["error"]["code"], "timeout", "{last}");
    server.settled_audit().await;
}

/// Goal: a request whose deadline passes while it waits for another one ends, too, and the other
/// one continues.
#[tokio::test]
async fn a_queued_request_ends_at_its_deadline() {
    let server = Server::with(TINY, |engine, _| engine.max_running(1).num_blocks(4096));
    let mut body = endless("/v1/completions");
    body["stream"] = json!(true);
    let mut first = server.send("/v1/completions", body.to_string()).await;
    first.chunk().await.expect("a stream").expect("a piece");
    let header = ("x-request-timeout", "0.2");
    let (status, reply) =
        server.post_with("/v1/completions", header, json!({"prompt": "y", "max_tokens": 1})).await;
    assert_eq!((status, &reply["error"]["code"]), (504, &json!("timeout")), "{reply}");
    assert!(first.chunk().await.expect("the first one goes on").is_some());
}

/// Goal: a header that is not a time is refused by every API, in its own form of errors.
#[tokio::test]
async fn a_wrong_deadline_is_refused() {
    let server = Server::tiny();
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"] {
        for value in ["0", "-3", "soon", "nan"] {
            let header = ("x-request-timeout", value);
            let (status, reply) = server.post_with(path, header, endless(path)).await;
            assert_eq!(status, 400, "{path}: {reply}");
            let message = reply["error"]["message"].as_str().expect("a message");
            let expected = format!("expected seconds above 0, got `{value}`");
            assert!(message.contains(&expected), "{path}: {message}");
        }
    }
}
