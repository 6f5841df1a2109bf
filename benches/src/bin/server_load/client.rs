//! Single requests over TCP connections of their own.

use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A reply that takes longer is a failure of the server.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// The beginning of a POST request, without its body.
pub(crate) fn post_head(path: &str, body_bytes: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {body_bytes}\r\nconnection: close\r\n\r\n"
    )
}

/// Gets JSON.
pub(crate) async fn get(address: &str, path: &str) -> anyhow::Result<Value> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let reply = exchange(address, request.as_bytes(), true).await?;
    let text = String::from_utf8(reply)?;
    let (_, body) = text.split_once("\r\n\r\n").context("expected a reply with a body")?;
    Ok(serde_json::from_str(body)?)
}

/// Sends bytes and returns all that the server replies. A client that does not `wait` ends its side
/// of the connection at once, which may end its request.
pub(crate) async fn exchange(address: &str, request: &[u8], wait: bool) -> anyhow::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address).await?;
    let mut reply = Vec::new();
    let talk = async {
        // A server may close its side before it has read everything.
        let _ = stream.write_all(request).await;
        if !wait {
            let _ = stream.shutdown().await;
        }
        let _ = stream.read_to_end(&mut reply).await;
    };
    let in_time = tokio::time::timeout(REPLY_TIMEOUT, talk).await;
    in_time.context("the server neither replied nor closed the connection")?;
    Ok(reply)
}

/// Sends a request and waits for the first bytes of the reply's body. The connection stays open.
pub(crate) async fn open_stream(address: &str, body: &str) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all((post_head("/v1/completions", body.len()) + body).as_bytes()).await?;
    let mut reply = Vec::new();
    while !reply.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        anyhow::ensure!(stream.read_buf(&mut reply).await? > 0, "the connection was closed");
    }
    anyhow::ensure!(
        reply.starts_with(b"HTTP/1.1 200 "),
        "expected a stream, got {}",
        String::from_utf8_lossy(&reply)
    );
    Ok(stream)
}
