//! An engine in an axum application. The engine is part of the application's state.
//!
//! ```sh
//! cargo run --release -p stolon --example embed_axum -- path/to/model
//! curl -N localhost:3000/ask -d 'Once upon a time'
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints its results")]

use std::convert::Infallible;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{self, Sse};
use axum::routing::{get, post};
use stolon::{Engine, EngineError, Error, Event, Request, Stream, StreamExt};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let model = std::env::args().nth(1).unwrap_or_else(|| "random:tiny".to_owned());
    let engine = Engine::builder().model(model).build().await?;
    let app = Router::new()
        .route("/ask", post(ask))
        .route("/stats", get(stats))
        .with_state(engine.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://{}/ask", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(async { ctrl_c().await }).await?;
    engine.shutdown().await;
    Ok(())
}

/// Streams the answer. When the client disconnects, axum drops the stream, which cancels the
/// request and releases its KV blocks.
async fn ask(
    State(engine): State<Engine>,
    prompt: String,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, (StatusCode, String)> {
    let stream =
        engine.generate(Request::text(prompt).max_tokens(64)).await.map_err(error_reply)?;
    Ok(Sse::new(stream.map(|event| {
        Ok(match event {
            Ok(Event::Token(token)) => sse::Event::default().data(token.text),
            Ok(Event::Finished(end)) => sse::Event::default().event("end").data(format!(
                "{} of {} prompt tokens were cached",
                end.usage.cached_tokens, end.usage.prompt_tokens
            )),
            Ok(_) => sse::Event::default().comment(""),
            Err(error) => sse::Event::default().event("error").data(error.to_string()),
        })
    })))
}

async fn stats(State(engine): State<Engine>) -> String {
    format!("{:#?}\n", engine.stats())
}

fn error_reply(error: Error) -> (StatusCode, String) {
    let status = match &error {
        error if error.is_retryable() => StatusCode::SERVICE_UNAVAILABLE,
        Error::Engine(EngineError::StepFailed { .. } | EngineError::InvalidLogits { .. }) => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
        Error::Engine(EngineError::Stopped) => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::BAD_REQUEST,
    };
    (status, error.to_string())
}

async fn ctrl_c() {
    if let Err(error) = tokio::signal::ctrl_c().await {
        eprintln!("cannot listen for ctrl-c: {error}");
    }
}
