//! The `stolon` command line and its OpenAI-compatible HTTP server.
//!
//! Everything is built on the `stolon` facade, as an embedding program would do it: each command
//! is a file of its own, and [`serve::router`] can be mounted in any axum application.

pub mod api;
pub mod args;
pub mod bench;
pub mod chat;
pub mod cli;
#[cfg(feature = "demo-model")]
pub mod demo;
pub mod generate;
pub mod memory;
pub mod serve;
mod terminal;
