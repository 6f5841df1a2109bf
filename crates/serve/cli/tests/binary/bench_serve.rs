//! `stolon bench serve` against `stolon serve`, and against servers that misbehave.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Server, TINY, fail, json_lines, run, succeed};

/// The report of a run with these flags.
fn measure(url: &str, flags: &[&str]) -> Value {
    let output = succeed(&[&["bench", "serve", "--json", "--base-url", url], flags].concat());
    let mut objects = json_lines(&output);
    assert_eq!(objects.len(), 1, "one object and nothing else: {output}");
    objects.remove(0)
}

/// Goal: token counts, cached tokens and times match the workload, over completions of token ids,
/// whose lengths are exact.
#[tokio::test(flavor = "multi_thread")]
async fn completions_of_token_ids_are_counted_exactly() {
    let server = Server::start(TINY, &["--num-blocks", "1024"]);
    let flags = "--token-ids 250 --num-prompts 12 --random-prefix-len 64 --random-input-len 20 \
                 --random-output-len 5 --ignore-eos --max-concurrency 1 --extra-body \
                 {\"return_token_ids\":true}";
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let report = measure(&server.url(""), &flags);
    let count = |name: &str| report[name].as_u64().expect(name);
    assert_eq!((count("completed"), count("failed")), (12, 0), "{report}");
    assert_eq!((count("total_input_tokens"), count("total_output_tokens")), (12 * 84, 60));
    assert_eq!(count("total_cached_tokens"), 11 * 64, "all but the first find the prefix");
    let ms = |name: &str| report[name].as_f64().expect(name);
    for name in ["ttft", "tpot", "itl", "e2el"] {
        let median = ms(&format!("median_{name}_ms"));
        assert!(0.0 < median && median <= ms(&format!("p99_{name}_ms")), "{name}: {report}");
        assert!(ms(&format!("p99_{name}_ms")) <= ms(&format!("max_{name}_ms")), "{name}");
    }
    assert!(ms("median_ttft_ms") < ms("median_e2el_ms"));
    let rate = ms("output_throughput") * ms("duration");
    assert!((rate - 60.0).abs() < 1e-6, "{rate}");
    server.settled_audit().await;
}

/// Goal: a conversation's later turns have the earlier ones and their answers as their prefix,
/// which the server finds in its cache.
#[tokio::test(flavor = "multi_thread")]
async fn turns_of_a_chat_continue_their_conversation() {
    let server = Server::start("demo", &["--num-blocks", "1024"]);
    let flags = "--backend openai-chat --num-prompts 3 --turns 4 --random-input-len 40 \
                 --random-output-len 8 --request-rate 20 --seed 5";
    let report = measure(&server.url("/v1/"), &flags.split_whitespace().collect::<Vec<_>>());
    assert_eq!((&report["completed"], &report["failed"]), (&json!(12), &json!(0)), "{report}");
    let count = |name: &str| report[name].as_u64().expect(name) as f64;
    let cached = count("total_cached_tokens") / count("total_input_tokens");
    // Turns have 1 to 4 units of prompt. In them, 0 to 3 units were sent before: 6 of 10 in total.
    assert!(cached > 0.4, "{report}");
    let text = succeed(&["bench", "serve", "--base-url", &server.url(""), "--num-prompts", "2"]);
    for part in
        ["2 requests answered", "time to first token", "p99", "prompt tokens from the cache"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    server.settled_audit().await;
}

/// Goal: keys are sent, and the server's message about a refused request reaches the user before
/// anything is measured.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_request_is_reported_at_once() {
    // With several names, another one is refused.
    let names = ["--served-model-name", "tiny", "--served-model-name", "small"];
    let server =
        Server::start(TINY, &[&["--api-key", "sesame-sesame-sesame"], &names[..]].concat());
    let url = server.url("");
    let base = ["bench", "serve", "--base-url", &url, "--num-prompts", "1"];
    let message = fail(&base);
    assert!(message.contains("/v1/models") && message.contains("status 401"), "{message}");
    let keyed = [&base[..], &["--api-key", "sesame-sesame-sesame"]].concat();
    let message = fail(&[&keyed[..], &["--model", "another"]].concat());
    assert!(message.contains("status 404") && message.contains("another"), "{message}");
    let message = fail(&[&keyed[..], &["--extra-body", r#"{"top_p": 7}"#]].concat());
    assert!(message.contains("status 400") && message.contains("top_p"), "{message}");
    succeed(&keyed);
    let closed =
        TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let message = fail(&["bench", "serve", "--base-url", &format!("http://{closed}")]);
    assert!(message.contains("cannot connect"), "{message}");
    for (flag, value) in [
        ("--base-url", "ftp://x"),
        ("--base-url", "localhost"),
        ("--request-rate", "0"),
        ("--random-range-ratio", "2"),
        ("--extra-body", "[]"),
        ("--header", "a b"),
        ("--random-prefix-len", "18446744073709551615"),
        ("--num-prompts", "0"),
    ] {
        let message = fail(&["bench", "serve", flag, value]);
        assert!(message.contains("expected") || message.contains("not in"), "{flag}: {message}");
    }
}

const HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
const TOKEN: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";

/// A comment in a stream of events.
const WAIT: &[u8] = b": working\n\n";

/// A server that reads a request and replies with these bytes. If there are none, or they end with
/// [`WAIT`], it then holds the connection, otherwise it closes it. It ends with the test.
fn misbehaving(reply: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, reply): (TcpStream, Vec<u8>) =
                (stream.expect("a connection"), reply.clone());
            std::thread::spawn(move || {
                let mut request = [0; 1 << 16];
                let _ = stream.read(&mut request);
                let _ = stream.write_all(&reply);
                if reply.is_empty() || reply.ends_with(WAIT) {
                    std::thread::sleep(Duration::from_secs(60));
                }
                // Unread bytes of the request would reset the connection, and the reply could be
                // lost.
                let _ = stream.shutdown(Shutdown::Write);
                while stream.read(&mut request).is_ok_and(|count| count > 0) {}
            });
        }
    });
    format!("http://{address}")
}

/// Goal: whatever a server replies, its requests are counted as failures of the right kind, with
/// the received reply, and the command neither panics nor hangs.
#[test]
fn servers_that_misbehave_are_reported() {
    let event = |data: &str| format!("{HEAD}{TOKEN}data: {data}\n\n").into_bytes();
    let cases: Vec<(&str, &str, Vec<u8>)> = vec![
        ("timeout", "0.5 s", Vec::new()),
        (
            "timeout",
            "0.5 s",
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
            content-length: 900\r\n\r\n: working\n\n"
                .to_vec(),
        ),
        ("connection lost", "", b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()),
        (
            "connection lost",
            "",
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
            transfer-encoding: chunked\r\n\r\n5\r\ndata"
                .to_vec(),
        ),
        ("cut off", "after 1 events", format!("{HEAD}{TOKEN}").into_bytes()),
        ("cut off", "after 1 events", format!("{HEAD}{TOKEN}data: {{\"choi").into_bytes()),
        ("malformed event", "EOF", event("{\"choices\":[")),
        ("malformed event", "expected a string", event(&"[".repeat(5_000))),
        ("malformed event", "at most", event(&"x".repeat(2_000_000))),
        ("error in the stream", "no memory", event(r#"{"error":{"message":"no memory"}}"#)),
        ("empty answer", "no tokens", format!("{HEAD}data: [DONE]\n\n").into_bytes()),
        (
            "no event stream",
            "text/html",
            b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\
            connection: close\r\n\r\n<html>"
                .to_vec(),
        ),
        (
            "status 500",
            "broken \u{fffd}",
            b"HTTP/1.1 500 Oh\r\nconnection: close\r\n\r\n\
            broken \xff"
                .to_vec(),
        ),
        (
            "status 301",
            "",
            b"HTTP/1.1 301 Moved\r\nlocation: /x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                .to_vec(),
        ),
        (
            "status 429",
            "overloaded",
            b"HTTP/1.1 429 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_vec(),
        ),
    ];
    for (kind, part, reply) in cases {
        let shown = String::from_utf8_lossy(&reply[..reply.len().min(120)]).into_owned();
        let url = misbehaving(reply);
        // All others answer at once, but the machine may be busy.
        let timeout = if kind == "timeout" { "0.5" } else { "60" };
        let flags = ["--model", "m", "--num-prompts", "3", "--timeout", timeout, "--json"];
        let args = ["bench", "serve", "--base-url", &url, "--num-warmups", "0"];
        let output = run(&[&args[..], &flags].concat(), "");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{shown}");
        assert_eq!(errors, "error: no request was answered\n", "{shown}");
        let report = &json_lines(&String::from_utf8_lossy(&output.stdout))[0];
        assert_eq!((&report["completed"], &report["failed"]), (&json!(0), &json!(3)), "{shown}");
        let error = &report["errors"][kind];
        assert_eq!(error["count"], 3, "{shown}: {}", report["errors"]);
        let first = error["first"].as_str().expect("a message");
        assert!(first.contains(part), "{shown}: {first}");
    }
}
