//! Clients that keep their streams open and wait, and clients that disconnect.

use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use super::client::open_stream;
use super::server::Server;

/// Connections that are opened at the same time.
const AT_ONCE: usize = 64;

/// Tokens of an answer: few enough that the KV pool has room for all streams at once.
const ANSWER_TOKENS: usize = 200;

fn body(index: usize) -> String {
    let prompt: Vec<usize> = (0..16).map(|position| 10 + (index + position * 7) % 90).collect();
    let answer = ANSWER_TOKENS;
    json!({"prompt": prompt, "max_tokens": answer, "ignore_eos": true, "stream": true}).to_string()
}

/// Opens streams whose requests all run but get no tokens for a while, and prints the server's
/// memory.
pub(crate) async fn idle(count: usize) -> anyhow::Result<()> {
    // Steps are so long that nothing is sent while memory is measured.
    let server = Server::start(&["--step-ms", "4000"])?;
    let before = server.resident_bytes()?;
    let bodies: Vec<String> = (0..count).map(body).collect();
    let opened = bodies.iter().map(|body| open_stream(&server.address, body));
    let streams: Vec<_> = stream::iter(opened).buffer_unordered(AT_ONCE).collect().await;
    let streams: Vec<TcpStream> = streams.into_iter().collect::<anyhow::Result<_>>()?;
    let deadline = Instant::now() + Duration::from_secs(60);
    while server.running().await? < count {
        anyhow::ensure!(Instant::now() < deadline, "not all requests run");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let resident = server.resident_bytes()?;
    println!(
        "{count} idle streams: {:.1} MB resident, {:.1} MB of it before the streams, {:.1} KB each",
        resident as f64 / 1e6,
        before as f64 / 1e6,
        (resident - before) as f64 / 1e3 / count as f64
    );
    drop(streams);
    server.check_idle().await
}

/// Disconnects clients in the middle of their streams and checks that the server keeps nothing of
/// them.
pub(crate) async fn vanishing(count: usize) -> anyhow::Result<()> {
    let server = Server::start(&["--step-ms", "1"])?;
    vanish(&server, count).await?;
    settle(&server).await?;
    let (files, resident) = (server.open_files()?, server.resident_bytes()?);
    let begin = Instant::now();
    vanish(&server, count).await?;
    server.check_idle().await?;
    let seconds = begin.elapsed().as_secs_f64();
    settle(&server).await?;
    let now = server.open_files()?;
    anyhow::ensure!(now <= files, "expected at most {files} open files as before, got {now}");
    println!(
        "{count} clients that disconnect in mid-stream: {seconds:.1} s until the last request has \
         ended; no block and no file is left; resident {:.1} MB, {:.1} MB after as many before",
        server.resident_bytes()? as f64 / 1e6,
        resident as f64 / 1e6,
    );
    Ok(())
}

async fn vanish(server: &Server, count: usize) -> anyhow::Result<()> {
    let clients = (0..count).map(async |index| {
        let mut stream = open_stream(&server.address, &body(index)).await?;
        let mut piece = [0; 512];
        // Every other client reads a part of the answer.
        if index.is_multiple_of(2) {
            anyhow::ensure!(stream.read(&mut piece).await? > 0, "the stream ended");
        }
        anyhow::Ok(())
    });
    let ended: Vec<_> = stream::iter(clients).buffer_unordered(AT_ONCE).collect().await;
    ended.into_iter().collect()
}

/// Waits until all connections have been closed.
pub(crate) async fn settle(server: &Server) -> anyhow::Result<()> {
    server.check_idle().await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    Ok(())
}
