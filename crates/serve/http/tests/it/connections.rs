//! Slow, idle and vanished clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stolon_http::ConnectionLimits;

use crate::support::{GUARD, LIMITS, Server, TINY, api_key, begin, connect, head};

const SECOND: Duration = Duration::from_secs(1);

/// A server that takes bodies of up to 10 KiB.
fn small_bodies() -> Server {
    Server::with(TINY, |engine, options| {
        options.body_limit = Some(10 << 10);
        engine
    })
}

/// Everything that the server sends until it closes the connection.
fn read_all(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        // A connection that is closed while data is on its way is reset.
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("{error}"),
        _ => String::from_utf8(bytes).expect("UTF-8"),
    }
}

/// Goal: idle connections, slow headers and slow bodies do not keep others out of a server that has
/// no room for more connections.
#[tokio::test]
async fn connections_that_do_nothing_make_room_for_others() {
    let server = Server::limited(TINY, ConnectionLimits { count: 6, ..LIMITS }, |engine, _| engine);
    let mut lazy = Vec::new();
    for _ in 0..4 {
        lazy.push(connect(&server));
        lazy.push(begin(&server, "POST /v1/comp"));
        lazy.push(begin(&server, &(head(1_000) + "{\"prompt\": ")));
    }
    for _ in 0..3 {
        let client = reqwest::Client::builder().timeout(GUARD).build().expect("a client");
        let reply = client.get(server.url("/health")).send().await.expect("a reply");
        assert_eq!(reply.status(), 200);
    }
}

/// Goal: a client that does not finish its headers, or its body, is disconnected in time, the
/// latter with an explanation.
#[tokio::test]
async fn slow_requests_are_ended() {
    let server = {
        let limits = ConnectionLimits { header_timeout: SECOND, ..LIMITS };
        Server::limited(TINY, limits, |engine, options| {
            options.body_timeout = SECOND;
            engine
        })
    };
    read_all(connect(&server));
    read_all(begin(&server, "GET /health HTTP/1.1\r\nhost: "));
    let reply = read_all(begin(&server, &(head(1_000) + "{\"prompt\": ")));
    assert!(reply.starts_with("HTTP/1.1 408") && reply.contains("invalid_request"), "{reply}");
    let health = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let reply = read_all(begin(&server, health));
    assert!(reply.starts_with("HTTP/1.1 200"), "an idle connection is closed, too: {reply}");
}

/// Goal: bodies that do not end hold a bounded amount of memory together. Large requests are then
/// refused with `Retry-After`, and small ones are answered.
#[tokio::test]
async fn unfinished_bodies_hold_bounded_memory() {
    let server = Server::with(TINY, |engine, options| {
        options.body_memory = 200 << 10;
        engine
    });
    let part = head(900_000) + &" ".repeat(260_000);
    let mut held = Vec::new();
    let deadline = Instant::now() + GUARD;
    let large = json!({"prompt": "x".repeat(200_000)}).to_string();
    loop {
        held.push(begin(&server, &part));
        let refused = server.send("/v1/completions", large.clone()).await;
        if refused.status() == 503 {
            assert_eq!(refused.headers()["retry-after"], "1");
            break;
        }
        assert!(Instant::now() < deadline, "never refused: {}", refused.status());
    }
    server.complete(json!({"prompt": "small", "max_tokens": 1})).await;
    drop(held);
    // The memory comes back when the clients have gone.
    loop {
        let (status, reply) =
            server.post("/v1/completions", serde_json::from_str(&large).expect("JSON")).await;
        if status != 503 {
            assert_eq!(reply["error"]["code"], "context_length_exceeded", "{reply}");
            break;
        }
        assert!(Instant::now() < deadline, "the memory was not returned");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Goal: a client that reads its reply only after it has sent a body of many times the limit sees
/// why the body was refused.
#[test]
fn a_refused_body_is_read_to_its_end() {
    let server = small_bodies();
    let with_key = Server::with(TINY, |engine, options| {
        options.access.api_keys = api_key("secret");
        options.access.admin_key = Some("admin".to_owned().into());
        engine
    });
    let body = " ".repeat(20 << 20);
    let head = head(body.len());
    for (server, head, status) in [
        (&server, head.clone(), "413"),
        (&server, head.replace("json", "xml"), "415"),
        (&server, head.replace("completions", "cache/import"), "415"),
        (&server, head.replace("completions", "nothing"), "404"),
        (&server, head.replace("POST", "PUT"), "405"),
        (&server, head.replace("localhost", "rebound.example"), "403"),
        (&with_key, head.clone(), "401"),
        (&with_key, head.replace("completions", "cache/import"), "401"),
    ] {
        for _ in 0..5 {
            let mut stream = begin(server, &(head.clone() + &body));
            let mut first = [0; 12];
            stream.read_exact(&mut first).expect("the beginning of a reply");
            assert_eq!(String::from_utf8_lossy(&first), format!("HTTP/1.1 {status}"));
        }
    }
}

/// Goal: an import whose bytes arrive one by one is refused, and lets the next one begin.
#[test]
fn a_slow_import_is_refused() {
    let server = Server::with(TINY, |engine, options| {
        options.body_timeout = SECOND;
        engine
    });
    let head = head(100_000).replace("completions", "cache/import");
    let head = head.replace("application/json", "application/octet-stream");
    for _ in 0..2 {
        let mut stream = begin(&server, &head);
        let mut writer = stream.try_clone().expect("a copy");
        let dripping = std::thread::spawn(move || {
            while writer.write_all(b"S").is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let mut reply = [0; 1000];
        let bytes = stream.read(&mut reply).expect("a reply");
        let reply = String::from_utf8_lossy(&reply[..bytes]);
        assert!(reply.starts_with("HTTP/1.1 408") && reply.contains("too slowly"), "{reply}");
        stream.shutdown(std::net::Shutdown::Both).expect("closed");
        dripping.join().expect("ended");
    }
}

/// Goal: errors that are found before a handler runs have OpenAI's form, too.
#[tokio::test]
async fn errors_before_the_handler_have_openais_form() {
    let server = small_bodies();
    let client = reqwest::Client::new();
    let post = |kind: &'static str, body: String| {
        client.post(server.url("/v1/completions")).header("content-type", kind).body(body)
    };
    for (request, status) in [
        (post("text/plain", "{}".to_owned()), 415),
        (client.post(server.url("/v1/completions")).body("{}"), 415),
        (post("application/json", "[".repeat(5_000)), 400),
        (post("application/json; charset=utf-8", "{".to_owned()), 400),
        (post("application/json", " ".repeat(20_000)), 413),
        (client.get(server.url("/admin/tree?format=svg")), 400),
        (client.get(server.url("/admin/tree?tokens=maybe")), 400),
        (client.delete(server.url("/admin/pins/first")), 400),
        (client.get(server.url("/v2")), 404),
        (client.post(server.url("/v1/embeddings")).json(&json!({"input": "x"})), 400),
        (client.put(server.url("/v1/completions")), 405),
    ] {
        let reply = request.send().await.expect("a reply");
        assert_eq!(reply.status(), status, "{reply:?}");
        let reply: Value = reply.json().await.expect("JSON");
        assert!(reply["error"]["message"].is_string(), "{reply}");
    }
}
