//! Compressed replies, and requests that are compressed although they must not be.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use reqwest::Response;
use serde_json::{Value, json};

use crate::support::{Server, TINY};

fn encoding(reply: &Response) -> &str {
    let header = reply.headers().get("content-encoding");
    header.map_or("", |value| value.to_str().expect("ASCII"))
}

fn gunzip(bytes: &[u8]) -> String {
    let mut text = String::new();
    GzDecoder::new(bytes).read_to_string(&mut text).expect("gzip of UTF-8");
    text
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).expect("compressed");
    encoder.finish().expect("compressed")
}

/// A request of a client that accepts these encodings.
async fn ask(server: &Server, path: &str, body: Option<&Value>, accepted: &str) -> Response {
    let client = reqwest::Client::new();
    let request = match body {
        Some(body) => client.post(server.url(path)).json(body),
        None => client.get(server.url(path)),
    };
    let request =
        if accepted.is_empty() { request } else { request.header("accept-encoding", accepted) };
    request.send().await.expect("a reply")
}

/// Goal: long texts and JSON of all routes are compressed for clients that accept gzip, have the
/// same content, and say that the encoding depends on the request; for other clients nothing is
/// compressed.
#[tokio::test]
async fn long_replies_are_compressed_for_those_who_accept_it() {
    let server = Server::with(TINY, |engine, options| {
        options.root_path = "/llm".parse().expect("a path");
        engine
    });
    let tokenize = json!({"prompt": "x".repeat(2_000)});
    for (path, body) in [
        ("/tokenize", Some(&tokenize)),
        ("/openapi.json", None),
        ("/docs", None),
        ("/", None),
        ("/page/main.js", None),
        ("/page/style.css", None),
        ("/llm/openapi.json", None),
    ] {
        let plain = ask(&server, path, body, "").await;
        assert_eq!((plain.status().as_u16(), encoding(&plain)), (200, ""), "{path}");
        let plain = plain.text().await.expect("text");
        for accepted in ["gzip", "br;q=1, gzip;q=0.5, *;q=0.1"] {
            let reply = ask(&server, path, body, accepted).await;
            assert_eq!(encoding(&reply), "gzip", "{path}");
            assert_eq!(reply.headers()["vary"], "accept-encoding", "{path}");
            assert!(reply.headers().contains_key("x-request-id"), "{path}");
            let bytes = reply.bytes().await.expect("a body");
            assert!(bytes.len() < plain.len(), "{path}: {} bytes", bytes.len());
            assert_eq!(gunzip(&bytes), plain, "{path}");
        }
        for accepted in ["identity", "gzip;q=0", "br"] {
            assert_eq!(encoding(&ask(&server, path, body, accepted).await), "", "{path}");
        }
    }
    let metrics = ask(&server, "/metrics", None, "gzip").await;
    assert_eq!(encoding(&metrics), "gzip");
    assert!(gunzip(&metrics.bytes().await.expect("a body")).ends_with("# EOF\n"));
}

/// Goal: short replies are not compressed, and streams never, so that their pieces arrive at once.
#[tokio::test]
async fn short_replies_and_streams_are_not_compressed() {
    let server = Server::tiny();
    assert_eq!(encoding(&ask(&server, "/v1/models", None, "gzip").await), "");
    let body = json!({"prompt": "x", "max_tokens": 100, "ignore_eos": true, "stream": true});
    let stream = ask(&server, "/v1/completions", Some(&body), "gzip").await;
    assert_eq!((stream.status().as_u16(), encoding(&stream)), (200, ""));
    let text = stream.text().await.expect("text");
    assert!(text.len() > 1_024 && text.trim_end().ends_with("data: [DONE]"), "{text}");
    let export = json!({"prompt": "x".repeat(200)});
    let file = ask(&server, "/v1/cache/export", Some(&export), "gzip").await;
    assert_eq!((file.status().as_u16(), encoding(&file)), (200, ""));
}

/// Goal: a compressed request is refused with status 415 and what is expected, on every route with
/// a body; `identity` is not a compression.
#[tokio::test]
async fn compressed_requests_are_refused() {
    let server = Server::tiny();
    let client = reqwest::Client::new();
    let text = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let send = async |path: &str, kind: &str, encodings: &[&str], body: Vec<u8>| {
        let mut request = client.post(server.url(path)).header("content-type", kind).body(body);
        for encoding in encodings {
            request = request.header("content-encoding", *encoding);
        }
        let reply = request.send().await.expect("a reply");
        (reply.status().as_u16(), reply.json::<Value>().await.expect("JSON"))
    };
    let kind_of_json = "application/json";
    for encodings in [&["gzip"][..], &["br"], &["identity", "gzip"], &["identity, gzip"], &[""]] {
        let (status, reply) = send("/v1/completions", kind_of_json, encodings, gzip(&text)).await;
        assert_eq!((status, &reply["error"]["type"]), (415, &json!("invalid_request_error")));
        let message = reply["error"]["message"].as_str().expect("a message");
        assert!(message.contains("Content-Encoding") && message.contains("identity"), "{message}");
    }
    let file = "application/octet-stream";
    assert_eq!(send("/v1/cache/import", file, &["gzip"], gzip(&text)).await.0, 415);
    let (status, reply) = send("/v1/messages", kind_of_json, &["gzip"], gzip(&text)).await;
    assert_eq!((status, &reply["type"]), (415, &json!("error")), "Anthropic's form: {reply}");
    for encodings in [&["identity"][..], &["Identity"], &["identity", "identity"]] {
        let (status, reply) =
            send("/v1/completions", kind_of_json, encodings, text.clone().into()).await;
        assert_eq!(status, 200, "{reply}");
    }
}
