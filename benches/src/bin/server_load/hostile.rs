//! Requests that are malformed, too large or cut off.

use std::collections::BTreeMap;
use std::time::Instant;

use futures::{StreamExt, stream};
use stolon_loadgen::rng::SeededRng;

use super::client::{exchange, post_head};
use super::server::Server;
use super::streams::settle;

/// Connections at the same time.
const AT_ONCE: usize = 32;

/// Bodies that are valid before they are changed, and their paths.
const VALID: [(&str, &str); 5] = [
    ("/v1/completions", r#"{"prompt": ["ab", "c"], "max_tokens": 2, "n": 2, "stop": ["x", "yz"]}"#),
    ("/v1/completions", r#"{"prompt": [50, 51, 52], "logit_bias": {"5": 1.5}, "max_tokens": 3}"#),
    (
        "/v1/chat/completions",
        r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 2, "stream": true, "stream_options": {"include_usage": true}}"#,
    ),
    ("/v1/responses", r#"{"input": [{"role": "user", "content": "a"}], "max_output_tokens": 2}"#),
    (
        "/v1/messages",
        r#"{"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}"#,
    ),
];

/// Byte strings that replace a few bytes of a body.
const PIECES: [&str; 14] = [
    "\"", "{", "}", "[", "]", ",", ":", "0", "-1", "1e999", "null", "\\ud800", "\u{0}", "\u{202e}",
];

/// One request, as the bytes that a client sends before it ends its side of the connection.
fn hostile(index: usize, rng: &mut SeededRng) -> Vec<u8> {
    let (path, body) = VALID[index % VALID.len()];
    let whole = |body: &str| (post_head(path, body.len()) + body).into_bytes();
    match (index / VALID.len()) % 10 {
        0..=2 => whole(&mutated(body, rng)),
        3 => {
            let mut request = whole(body);
            request.truncate(rng.between(0, request.len() - 1));
            request
        }
        4 => post_head(path, 1 << 40).into_bytes(),
        5 => whole(&format!(r#"{{"prompt": "{}"}}"#, "long ".repeat(rng.between(300, 900) << 10))),
        6 => whole(&format!(r#"{{"prompt": {}1"#, "[".repeat(rng.between(1_000, 200_000)))),
        7 => {
            let name = "h".repeat(rng.between(1, 200_000));
            format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{name}: x\r\n\r\n").into_bytes()
        }
        8 => (0..rng.between(1, 20_000)).map(|_| rng.between(0, 255) as u8).collect(),
        _ => format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}",
            rng.between(0, 1 << 30)
        )
        .into_bytes(),
    }
}

/// Cuts, repeats and exchanges bytes.
fn mutated(body: &str, rng: &mut SeededRng) -> String {
    let mut body = body.to_owned();
    for _ in 0..=rng.between(0, 4) {
        let mut at = rng.between(0, body.len());
        let mut end = (at + rng.between(0, 6)).min(body.len());
        while !body.is_char_boundary(at) {
            at -= 1;
        }
        while !body.is_char_boundary(end) {
            end += 1;
        }
        body.replace_range(at..end, PIECES[rng.between(0, PIECES.len() - 1)]);
    }
    body
}

/// Sends hostile requests. No reply may report a failure of the server, and afterward the server
/// must hold no open files, blocks or memory because of them.
pub(crate) async fn requests(count: usize) -> anyhow::Result<()> {
    let server = Server::start(&[])?;
    send(&server, count / 5, 1).await?;
    settle(&server).await?;
    let (files, before) = (server.open_files()?, server.resident_bytes()?);
    let begin = Instant::now();
    let replies = send(&server, count, 2).await?;
    let seconds = begin.elapsed().as_secs_f64();
    settle(&server).await?;
    let (now, after) = (server.open_files()?, server.resident_bytes()?);
    anyhow::ensure!(now <= files, "expected at most {files} open files as before, got {now}");
    let replies: Vec<String> =
        replies.iter().map(|(status, count)| format!("{count} x {status}")).collect();
    println!(
        "{count} hostile requests in {seconds:.1} s: no panic, every block accounted for; resident {:.1} \
         MB before and {:.1} MB after; replies {}",
        before as f64 / 1e6,
        after as f64 / 1e6,
        replies.join(", "),
    );
    Ok(())
}

/// Sends requests and returns how often each status was replied.
async fn send(server: &Server, count: usize, seed: u64) -> anyhow::Result<BTreeMap<String, usize>> {
    let mut rng = SeededRng::new(seed);
    let exchanges = (0..count).map(|index| {
        let request = hostile(index, &mut rng);
        async move {
            let reply = exchange(&server.address, &request, false).await?;
            let status =
                reply.get(9..12).map(|status| String::from_utf8_lossy(status).into_owned());
            let status = status.unwrap_or_else(|| "closed".to_owned());
            let start = String::from_utf8_lossy(&request[..request.len().min(400)]).into_owned();
            anyhow::ensure!(!matches!(status.as_str(), "500" | "502"), "{status} for {start}");
            Ok(status)
        }
    });
    let mut replies = BTreeMap::new();
    let mut exchanges = stream::iter(exchanges).buffer_unordered(AT_ONCE);
    while let Some(status) = exchanges.next().await {
        *replies.entry(status?).or_default() += 1;
    }
    Ok(replies)
}
