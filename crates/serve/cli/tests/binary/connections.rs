//! The end of a server with slow, idle and deaf clients, and a server whose output is not read.

use std::io::Read;

use serde_json::json;

use crate::support::{GUARD, Server, TINY, begin, connect, head};

async fn ended(server: Server) -> std::process::ExitStatus {
    let waiting = tokio::task::spawn_blocking(|| server.wait());
    tokio::time::timeout(GUARD, waiting).await.expect("the server ends").expect("waited")
}

/// Goal: SIGTERM waits neither for idle connections nor for requests that have not arrived, and
/// requests that come meanwhile are refused with `Retry-After`.
#[tokio::test]
async fn sigterm_waits_for_answers_only() {
    let server = Server::start(TINY, &["--shutdown-timeout", "3000", "--body-timeout", "3000"]);
    let _lazy = [
        connect(&server),
        begin(&server, "GET /health HTTP/1.1\r\nhost: "),
        begin(&server, &(head(1_000) + "{\"prompt\": ")),
    ];
    let body = json!({"prompt": "last words", "max_tokens": 2000, "ignore_eos": true,
                      "temperature": 0, "stream": true});
    let mut response = server.send("/v1/completions", body.to_string()).await;
    let first = response.chunk().await.expect("a stream").expect("a piece");
    server.terminate();
    let late = loop {
        let (status, reply) = server.get("/ready").await;
        if status != 200 {
            break reply;
        }
    };
    assert_eq!(late["status"], "stopping", "{late}");
    let text = String::from_utf8_lossy(&first).into_owned() + &response.text().await.expect("text");
    assert!(text.trim_end().ends_with("data: [DONE]"), "the stream was cut: {text}");
    assert!(ended(server).await.success());
}

/// Goal: a client that does not read its reply is disconnected, so that it does not hold memory for
/// ever, and the server can stop.
#[tokio::test]
async fn a_client_that_does_not_read_is_disconnected() {
    let server = Server::start(TINY, &["--write-timeout", "1", "--shutdown-timeout", "3000"]);
    let body = json!({"prompt": vec![97; 4_000], "n": 120, "echo": true, "logprobs": 0,
                      "max_tokens": 0, "temperature": 0})
    .to_string();
    let deaf = begin(&server, &(head(body.len()) + &body));
    let mut first = [0; 12];
    (&deaf).read_exact(&mut first).expect("the beginning of a reply");
    assert_eq!(&first, b"HTTP/1.1 200");
    server.terminate();
    assert!(ended(server).await.success());
}

/// Goal: a server whose standard output and standard error were closed by their reader serves on,
/// and finishes its streams on SIGTERM.
#[tokio::test]
async fn a_closed_output_does_not_end_the_server() {
    let server = Server::without_readers(TINY, &[]);
    let body = json!({"prompt": "last words", "max_tokens": 1000, "ignore_eos": true,
                      "temperature": 0, "stream": true});
    let mut response = server.send("/v1/completions", body.to_string()).await;
    let first = response.chunk().await.expect("a stream").expect("a piece");
    server.terminate();
    let text = String::from_utf8_lossy(&first).into_owned() + &response.text().await.expect("text");
    assert!(text.trim_end().ends_with("data: [DONE]"), "the stream was cut: {text}");
    assert!(ended(server).await.success());
}
