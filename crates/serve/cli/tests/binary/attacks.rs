//! Hostile HTTP clients. Each attack is a few ordinary requests or connections that once hurt a
//! server of this kind. Whatever they send, the server keeps running, answers others correctly, and
//! accounts for every block.
//!
//! `every_attack_is_survived` runs each attack once. `attacks_are_measured`, on Linux, repeats each
//! of them alongside a normal client with another address, with limited address space. It prints
//! and bounds what that client and `/health` noticed of it:
//!
//! ```sh
//! cargo test --release -p stolon-cli --test binary attacks_are_measured -- --ignored --nocapture
//! ```

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt, join_all};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::support::Server;

#[cfg(target_os = "linux")]
mod measured;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// An attack sends its requests and checks the replies. Its argument is the server.
type Attack = for<'a> fn(&'a Server) -> BoxFuture<'a, ()>;

/// Name and attack. Those on connections are last, because their connections stay open for a while.
const ATTACKS: [(&str, Attack); 20] = [
    ("8 conversations whose template counts to 500,000", |server| {
        let ask = async |_| {
            let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                              "chat_template_kwargs": {"work": 500}});
            server.ok(CHAT, body).await
        };
        async move { drop(join_all((0..8).map(ask)).await) }.boxed()
    }),
    ("128 choices with 16 stop strings of 900,000 characters", |server| {
        let body = json!({"prompt": "hello", "max_tokens": 1, "n": 128,
                          "stop": vec!["z".repeat(900_000); 16]});
        refused(server, COMPLETIONS, body.to_string()).boxed()
    }),
    ("8 million stop token ids", |server| {
        let ids = vec!["7"; 8_000_000].join(",");
        let body = format!(r#"{{"prompt": "hello", "n": 128, "stop_token_ids": [{ids}]}}"#);
        refused(server, COMPLETIONS, body).boxed()
    }),
    ("100,000 spellings of one biased token", |server| {
        let bias = |index: usize| format!(r#""{}7": 1"#, "0".repeat(index % 100));
        let bias: Vec<String> = (0..100_000).map(bias).collect();
        let body = format!(r#"{{"prompt": "x", "logit_bias": {{{}}}}}"#, bias.join(","));
        refused(server, COMPLETIONS, body).boxed()
    }),
    ("two prompts of 15 MB", |server| {
        let body = json!({"prompt": "many words ".repeat(1_400_000)}).to_string();
        both(refused(server, COMPLETIONS, body.clone()), refused(server, COMPLETIONS, body)).boxed()
    }),
    ("a conversation of 300,000 messages", |server| {
        let messages = vec![r#"{"role":"user","content":"x"}"#; 300_000].join(",");
        let body = format!(r#"{{"messages": [{messages}]}}"#);
        refused(server, CHAT, body).boxed()
    }),
    ("a message of 300,000 parts", |server| {
        let parts = vec![r#"{"type":"text","text":"x"}"#; 300_000].join(",");
        let body = format!(r#"{{"messages": [{{"role": "user", "content": [{parts}]}}]}}"#);
        refused(server, CHAT, body).boxed()
    }),
    ("a body nested 1,000,000 deep", |server| {
        let body = format!(r#"{{"prompt": {}1{}}}"#, "[".repeat(1_000_000), "]".repeat(1_000_000));
        refused(server, COMPLETIONS, body).boxed()
    }),
    ("a conversation with a tool nested 100 deep", |server| {
        let tool = format!("{}1{}", r#"{"a":"#.repeat(100), "}".repeat(100));
        let body =
            format!(r#"{{"messages": [{{"role":"user","content":"x"}}], "tools": [{tool}]}}"#);
        refused(server, CHAT, body).boxed()
    }),
    ("20 salts of 10 MB", |server| {
        let salted = async move |index: usize| {
            let salt = format!("{index}{}", "s".repeat(10_000_000));
            let body = json!({"prompt": vec![97; 64], "max_tokens": 1, "cache_salt": salt});
            refused(server, COMPLETIONS, body.to_string()).await;
        };
        async move {
            for index in 0..20 {
                salted(index).await;
            }
        }
        .boxed()
    }),
    ("sampling parameters at the ends of their types", |server| extreme_sampling(server).boxed()),
    ("more choices than the queue can hold, and echo of a long prompt for each", |server| {
        let body = json!({"prompt": vec![97; 2_000], "max_tokens": 1, "n": 128, "echo": true,
                          "logprobs": 5});
        async move {
            let status = status(server, COMPLETIONS, body.to_string()).await;
            assert!(status == 200 || status == 400 || status == 429, "{status}");
        }
        .boxed()
    }),
    ("an administrator's requests from a web page", |server| from_a_web_page(server).boxed()),
    ("audits in a loop by 8 clients", |server| {
        let audits = async move |_| {
            for _ in 0..10 {
                assert_eq!(server.get("/admin/audit").await.0, 200);
            }
        };
        join_all((0..8).map(audits)).map(drop).boxed()
    }),
    ("200 clients that vanish in the middle of their stream", |server| vanish(server).boxed()),
    ("500 requests with mutated JSON", |server| mutated(server).boxed()),
    ("bytes that are not HTTP", |server| not_http(server).boxed()),
    ("headers of 10 MB", |server| {
        let header = format!("GET /health HTTP/1.1\r\nx-long: {}\r\n\r\n", "h".repeat(10_000_000));
        on_a_thread(server, move |address| {
            // The server may close the connection while this is written.
            let mut connection = connect(&address);
            let _ = connection.write_all(header.as_bytes());
        })
        .boxed()
    }),
    ("300 connections that send nothing", |server| hold(server, 300, b"").boxed()),
    ("60 bodies that are never finished", |server| {
        let start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n\
                      content-type: application/json\r\ncontent-length: 15000000\r\n\r\n{";
        hold(server, 60, start).boxed()
    }),
];

/// Goal: after each attack the server still runs, answers a normal client exactly as before, and
/// holds no block for the attacker.
#[tokio::test]
async fn every_attack_is_survived() {
    let template = template();
    let server = Server::start("demo", &arguments(&template));
    let client = Client::from_address(&server, [127, 0, 0, 1]);
    let expected = client.answer().await;
    for (name, attack) in ATTACKS {
        attack(&server).await;
        assert_eq!(client.answer().await, expected, "after {name}");
        server.settled_audit().await;
        assert_eq!(server.get("/health").await.0, 200, "after {name}");
    }
    // Connections that the attacks left open do not delay the end.
    server.terminate();
    let status = tokio::task::spawn_blocking(|| server.wait()).await.expect("waited");
    assert!(status.success(), "{status}");
}

/// A file with the template of the demo model, after a loop that a request chooses the length of.
fn template() -> NamedTempFile {
    let own = include_str!("../../../../models/demo_model/text/tokenizer_config.json");
    let own: Value = serde_json::from_str(own).expect("JSON");
    let own = own["chat_template"].as_str().expect("a template");
    let file = NamedTempFile::new().expect("a file");
    let counts = "{% for i in range(work | default(0)) %}{% for j in range(1000) %}\
                  {% set x = j %}{% endfor %}{% endfor %}";
    std::fs::write(&file, format!("{counts}{own}")).expect("written");
    file
}

fn arguments(template: &NamedTempFile) -> [&str; 4] {
    let path = template.path().to_str().expect("UTF-8");
    ["--num-blocks", "1024", "--chat-template", path]
}

/// A normal client.
struct Client<'a> {
    server: &'a Server,
    http: reqwest::Client,
}

impl<'a> Client<'a> {
    fn from_address(server: &'a Server, address: [u8; 4]) -> Self {
        let http = reqwest::Client::builder().local_address(IpAddr::from(address)).build();
        Self { server, http: http.expect("a client") }
    }

    /// The answer to its request.
    async fn answer(&self) -> Value {
        let body = json!({"messages": [
            {"role": "system", "content": "The violet tent costs 45 crowns."},
            {"role": "user", "content": "How much does the violet tent cost?"},
        ], "max_tokens": 12, "temperature": 0});
        let response = self.http.post(self.server.url(CHAT)).json(&body).send().await;
        let mut reply: Value = response.expect("a response").json().await.expect("JSON");
        assert!(reply["choices"].is_array(), "{reply}");
        reply["choices"].take()
    }
}

async fn status(server: &Server, path: &str, body: String) -> u16 {
    let client = reqwest::Client::new();
    let request = client.post(server.url(path)).header("content-type", "application/json");
    request.body(body).send().await.expect("a reply").status().as_u16()
}

/// Sends a request that must be refused as the client's fault.
async fn refused(server: &Server, path: &str, body: String) {
    let start: String = body.chars().take(80).collect();
    let status = status(server, path, body).await;
    assert!(status == 400 || status == 413, "{start}: expected 400 or 413, got {status}");
}

async fn both(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    futures::join!(one, other);
}

/// None of these may be reported as a failure of the engine.
async fn extreme_sampling(server: &Server) {
    let names = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"];
    let values = ["1e-45", "1e-30", "-0.0", "1e38", "1e300", "-1e300"];
    for (name, value) in names.iter().flat_map(|name| values.map(|value| (name, value))) {
        let body = format!(r#"{{"prompt": [1, 2, 3], "max_tokens": 2, "{name}": {value}}}"#);
        let status = status(server, COMPLETIONS, body).await;
        assert!(status == 200 || status == 400, "{name} {value}: {status}");
    }
}

/// A browser sends these headers for a page of another site, and for a name that was rebound to the
/// loopback address.
async fn from_a_web_page(server: &Server) {
    for header in [("origin", "https://example.com"), ("host", "example.com")] {
        for (path, body) in [("/admin/pins", Some(r#"{"prompt": "x"}"#)), ("/admin/tree", None)] {
            let client = reqwest::Client::new();
            let request = match body {
                Some(body) => client.post(server.url(path)).body(body),
                None => client.get(server.url(path)),
            };
            let request = request.header("content-type", "application/json");
            let response = request.header(header.0, header.1).send().await.expect("a response");
            assert_eq!(response.status(), 403, "{path} with {header:?}");
        }
    }
}

async fn vanish(server: &Server) {
    let vanishing = async |index: usize| {
        let body = json!({"prompt": format!("request {index}"), "max_tokens": 500,
                          "ignore_eos": true, "stream": true});
        let mut response = server.send(COMPLETIONS, body.to_string()).await;
        if index.is_multiple_of(2) {
            response.chunk().await.expect("the beginning of a reply");
        }
    };
    join_all((0..200).map(vanishing)).await;
}

/// Cuts, repeats and exchanges bytes of valid requests, in a fixed order.
async fn mutated(server: &Server) {
    let valid = [
        (COMPLETIONS, r#"{"prompt": ["ab", "c"], "max_tokens": 2, "n": 2, "stop": ["x", "yz"]}"#),
        (COMPLETIONS, r#"{"prompt": [1, 2, 3], "logit_bias": {"5": 1.5}, "logprobs": 2}"#),
        (CHAT, r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}"#),
    ];
    let pieces =
        ["\"", "{", "}", "[", "]", ",", ":", "0", "-1", "1e999", "null", "\\ud800", "\u{0}"];
    let mut state = 1_u64;
    let mut below = move |bound: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % bound
    };
    for round in 0..500 {
        let (path, body) = valid[round % valid.len()];
        let mut body = body.to_owned();
        for _ in 0..=below(4) {
            let at = below(body.len().max(1)).min(body.len());
            let end = (at + below(6)).min(body.len());
            body.replace_range(at..end, pieces[below(pieces.len())]);
        }
        let status = status(server, path, body.clone()).await;
        assert!(matches!(status, 200 | 400 | 404), "{body}: {status}");
    }
}

async fn not_http(server: &Server) {
    let noise: Vec<u8> =
        (0..100_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    on_a_thread(server, move |address| {
        for start in
            [&b"\0\0\0\0"[..], b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
        {
            let mut connection = connect(&address);
            let _ = connection.write_all(start).and_then(|()| connection.write_all(&noise));
            let _ = connection.shutdown(std::net::Shutdown::Write);
            let _ = connection.read_to_end(&mut Vec::new());
        }
    })
    .await;
}

/// Opens connections that send this beginning and nothing after it, and leaves them open for a
/// second.
async fn hold(server: &Server, count: usize, beginning: &'static [u8]) {
    on_a_thread(server, move |address| {
        let open = |_| {
            let mut connection = connect(&address);
            let _ = connection.write_all(beginning);
            connection
        };
        let connections: Vec<TcpStream> = (0..count).map(open).collect();
        std::thread::sleep(Duration::from_secs(1));
        drop(connections);
    })
    .await;
}

async fn on_a_thread(server: &Server, attack: impl FnOnce(String) + Send + 'static) {
    let address = server.url("").trim_start_matches("http://").to_owned();
    tokio::task::spawn_blocking(move || attack(address)).await.expect("the attack ends");
}

fn connect(address: &str) -> TcpStream {
    let connection = TcpStream::connect(address).expect("the server accepts connections");
    let limit = Some(Duration::from_secs(20));
    connection.set_read_timeout(limit).and(connection.set_write_timeout(limit)).expect("limits");
    connection
}
