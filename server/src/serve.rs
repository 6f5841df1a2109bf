//! `stolon serve`, and the router behind it: an OpenAI-compatible HTTP API over one engine.
//!
//! [`router`] holds only a clone of the engine, so an embedding program can mount it in an axum
//! application of its own. When a client disconnects, axum drops its handler and with it the token
//! streams, which cancels the client's requests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{delete, get, post};
use clap::Args;
use stolon::Engine;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower_http::trace::TraceLayer;

use crate::args::EngineArgs;
use crate::memory::{format_bytes, parse_bytes};
use crate::terminal;

mod admin;
mod body;
mod cache;
mod chat;
mod completions;
mod error;
mod generation;
mod logprobs;
mod options;
mod reply;

/// Arguments of `stolon serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// IP address or host name to listen on
    ///
    /// The server has no authentication. Use 0.0.0.0 to listen on all interfaces.
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// TCP port to listen on. 0 chooses a free port, which is printed
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Additional name that clients may use as `model` in requests. Can be repeated
    #[arg(long, value_name = "NAME")]
    served_name: Vec<String>,
    /// Maximum size of a request body, in bytes or with a unit K, M or G (powers of 1024)
    ///
    /// Larger requests are refused with status 413.
    #[arg(long, default_value = "16M", value_parser = parse_bytes, value_name = "BYTES")]
    body_limit: u64,
    /// Seconds that running requests have to finish after SIGINT or SIGTERM
    ///
    /// New connections are refused meanwhile. A second signal stops the server immediately.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    shutdown_timeout: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Settings of a [`router`].
#[derive(Clone, Debug)]
pub struct RouterOptions {
    /// Names that clients may use for the model, in addition to its id.
    pub served_names: Vec<String>,
    /// Maximum size of a request body, in bytes.
    pub body_limit: usize,
}

impl Default for RouterOptions {
    /// No additional names, bodies up to 16 MiB.
    fn default() -> Self {
        Self { served_names: Vec::new(), body_limit: 16 << 20 }
    }
}

/// State that the handlers share.
#[derive(Debug)]
struct App {
    engine: Engine,
    served_names: Vec<String>,
    /// When the router was made, in seconds since 1970-01-01 UTC: the model's `created`.
    started: u64,
}

/// The HTTP API of an engine: `/v1/completions`, `/v1/chat/completions` and `/v1/models` as
/// OpenAI's, and `/health`, `/admin/stats`, `/admin/audit`, `/admin/tree` and `/admin/pins` for
/// operators.
pub fn router(engine: Engine, options: RouterOptions) -> Router {
    let app = Arc::new(App { engine, served_names: options.served_names, started: unix_seconds() });
    Router::new()
        .route("/v1/completions", post(completions::create))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/models", get(admin::models))
        .route("/v1/models/{*id}", get(admin::model))
        .route("/health", get(admin::health))
        .route("/admin/stats", get(admin::stats))
        .route("/admin/audit", get(admin::audit))
        .route("/admin/tree", get(cache::tree))
        .route("/admin/pins", get(cache::pins).post(cache::pin))
        .route("/admin/pins/{id}", delete(cache::unpin))
        .fallback(admin::not_found)
        .method_not_allowed_fallback(admin::method_not_allowed)
        .layer(DefaultBodyLimit::max(options.body_limit))
        .layer(TraceLayer::new_for_http())
        .with_state(app)
}

/// Seconds since 1970-01-01 UTC.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl ServeArgs {
    /// Serves until SIGINT or SIGTERM, then lets running requests finish.
    ///
    /// # Errors
    /// If the address cannot be bound or the engine cannot be started.
    pub async fn run(self) -> anyhow::Result<()> {
        // Bound first, so that a port in use is reported before the model is loaded.
        let listener = TcpListener::bind((self.host.as_str(), self.port))
            .await
            .with_context(|| format!("cannot listen on {}:{}", self.host, self.port))?;
        let engine = self.engine.start().await?;
        announce(&engine, listener.local_addr()?)?;
        let options = RouterOptions {
            served_names: self.served_name,
            body_limit: usize::try_from(self.body_limit).unwrap_or(usize::MAX),
        };
        let (stopping, mut stop) = watch::channel(false);
        let serving = axum::serve(listener, router(engine.clone(), options))
            .with_graceful_shutdown(async move {
                // An error means that the sender was dropped, and with it the whole server.
                let _ = stop.wait_for(|&stop| stop).await;
            })
            .into_future();
        tokio::pin!(serving);
        tokio::select! {
            result = &mut serving => result?,
            () = interrupt() => {
                stopping.send_replace(true);
                terminal::line("stopping; waiting for running requests to finish")?;
                let limit = Duration::from_secs(self.shutdown_timeout);
                tokio::select! {
                    result = &mut serving => result?,
                    () = tokio::time::sleep(limit) => {}
                    () = interrupt() => {}
                }
            }
        }
        engine.shutdown().await;
        Ok(())
    }
}

fn announce(engine: &Engine, address: SocketAddr) -> anyhow::Result<()> {
    let info = engine.model_info();
    terminal::line(format!("model    {} ({} tokens of context)", info.id, info.max_positions))?;
    terminal::line(format!(
        "KV cache {} tokens in {} blocks of {}, {}; prefix caching {}",
        info.num_blocks * info.block_size,
        info.num_blocks,
        info.block_size,
        format_bytes(info.kv_bytes as u64),
        if info.prefix_caching { "on" } else { "off" },
    ))?;
    terminal::line(format!("listening on http://{address}"))?;
    Ok(())
}

/// Waits for SIGINT (Ctrl-C) or SIGTERM.
async fn interrupt() {
    let keyboard = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await; // No handler could be installed.
        }
    };
    #[cfg(unix)]
    let terminate = async {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut signal) => {
                signal.recv().await;
            }
            Err(_) => std::future::pending::<()>().await,
        }
    };
    #[cfg(not(unix))]
    let terminate = std::future::pending::<()>();
    tokio::select! {
        () = keyboard => {}
        () = terminate => {}
    }
}
