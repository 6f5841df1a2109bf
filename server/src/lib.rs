//! The `stolon` command line and its OpenAI-compatible HTTP server.
//!
//! [`router`] can be mounted in any axum application; [`api`] has the types of its requests and
//! replies. [`bench`](mod@bench) has a load generator for engines. Everything is built on the
//! `stolon` crate's public API.
//!
//! ```no_run
//! use std::net::SocketAddr;
//!
//! use axum::Router;
//! use axum::routing::get;
//! use stolon::Engine;
//! use stolon_server::{RouterOptions, router};
//! use tokio::net::TcpListener;
//!
//! #[tokio::main]
//! async fn main() -> anyhow::Result<()> {
//!     let engine = Engine::builder().model("path/to/model").build().await?;
//!     let app = Router::new()
//!         .route("/", get(|| async { "an application" }))
//!         .nest("/llm", router(engine.clone(), RouterOptions::default()));
//!     let listener = TcpListener::bind("127.0.0.1:8080").await?;
//!     // The routes for operators need to know where a connection comes from.
//!     let service = app.into_make_service_with_connect_info::<SocketAddr>();
//!     axum::serve(listener, service).await?;
//!     engine.shutdown().await;
//!     Ok(())
//! }
//! ```
//!
//! The limits of connections (their number, slow headers, clients that read nothing) belong to
//! `stolon serve`, which accepts them; those of requests and their bodies are the router's.

#![forbid(unsafe_code)]

pub mod api;
pub mod args;
pub mod bench;
pub mod cache;
mod certificates;
pub mod chat;
pub mod cli;
pub mod config;
#[cfg(feature = "demo-model")]
pub mod demo;
mod download;
pub mod generate;
#[cfg(feature = "candle")]
pub mod gpu_check;
pub mod inspect;
pub mod log;
pub mod memory;
pub mod serve;
mod terminal;
mod traces;

pub use serve::{RouterOptions, router};
