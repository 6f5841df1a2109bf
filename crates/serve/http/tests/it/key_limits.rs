//! Limits on the tokens that all requests with one API key occupy together.

use serde_json::{Value, json};
use stolon_http::{ApiKey, KeyLimits};

use crate::support::{Server, TINY};

/// A streamed request that runs until it is dropped. Its answers are more than the connection
/// buffers.
async fn run_long(server: &Server, key: &str, tokens: usize) -> reqwest::Response {
    let body = json!({"prompt": vec![65; 16], "max_tokens": tokens, "n": 16, "logprobs": 5, "ignore_eos": true,
                      "stream": true, "temperature": 0});
    let request = reqwest::Client::new().post(server.url("/v1/completions")).bearer_auth(key);
    let mut reply = request.json(&body).send().await.expect("a reply");
    assert_eq!(reply.status(), 200);
    reply.chunk().await.expect("a stream").expect("a piece");
    reply
}

/// A short request with a deadline in seconds.
async fn short(server: &Server, key: &str, deadline: &str) -> reqwest::Response {
    let body = json!({"prompt": vec![66; 16], "max_tokens": 4});
    let request = reqwest::Client::new().post(server.url("/v1/completions")).bearer_auth(key);
    request.header("x-request-timeout", deadline).json(&body).send().await.expect("a reply")
}

async fn error(reply: reqwest::Response) -> Value {
    let reply: Value = reply.json().await.expect("JSON");
    reply["error"].clone()
}

/// Goal: a key whose running tokens are used up waits, and is refused when too many wait; another
/// key is answered meanwhile; when a client disconnects, its tokens are free again.
#[tokio::test]
async fn a_key_has_its_own_limits() {
    let limits = KeyLimits { running_tokens: Some(64030), queued_tokens: Some(20) };
    let key = |name: &str, limits| ApiKey {
        name: name.to_owned(),
        key: format!("key-{name}").into(),
        limits,
    };
    let keys = vec![key("ada", limits), key("bob", KeyLimits::default())];
    let server = Server::with(TINY, |engine, options| {
        options.access.api_keys = keys.into();
        engine.num_blocks(4096)
    });
    // 64016 tokens, so that no request of 20 tokens fits next to it.
    let running = run_long(&server, "key-ada", 4000).await;
    // Until all of its choices run, others are refused, because they would wait behind them.
    let waited = loop {
        let reply = short(&server, "key-ada", "0.3").await;
        if reply.status() != 429 {
            break reply;
        }
    };
    assert_eq!(waited.status(), 504, "it waits, until its deadline");
    assert_eq!(error(waited).await["code"], "timeout");
    let other = short(&server, "key-bob", "60").await;
    assert_eq!(other.status(), 200, "another key does not wait");
    // One request waits, and the next one does not fit in the queue.
    let waiting = {
        let url = server.url("/v1/completions");
        let body = json!({"prompt": vec![67; 16], "max_tokens": 4});
        let request = reqwest::Client::new().post(url).bearer_auth("key-ada").json(&body);
        tokio::spawn(async move {
            // One of the short requests below may wait when it arrives.
            loop {
                let again = request.try_clone().expect("a body in memory");
                let status = again.send().await.expect("a reply").status();
                if status != 429 {
                    break status;
                }
            }
        })
    };
    let refused = loop {
        let reply = short(&server, "key-ada", "0.3").await;
        match reply.status().as_u16() {
            429 => break reply,
            status => assert_eq!(status, 504, "the other request has not arrived yet"),
        }
    };
    let wait = refused.headers()["retry-after"].to_str().expect("a number").to_owned();
    let refused = error(refused).await;
    assert_eq!(
        (&refused["type"], &refused["code"]),
        (&json!("rate_limit_error"), &json!("key_limit"))
    );
    let message = refused["message"].as_str().expect("a message");
    assert!(message.contains("max-queued-tokens is 20"), "{message}");
    assert!(message.ends_with(&format!("in {wait} s")), "{message}");
    assert_eq!(short(&server, "key-bob", "60").await.status(), 200);
    drop(running);
    assert_eq!(waiting.await.expect("the task ends"), 200, "it runs when the other one has gone");
    server.settled_audit().await;
}
