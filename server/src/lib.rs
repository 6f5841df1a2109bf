//! The `stolon` command line and its OpenAI-compatible HTTP server.
//!
//! [`serve::router`] can be mounted in any axum application; [`api`] has the types of its requests
//! and replies. [`bench`](mod@bench) has a load generator for engines. Everything is built on the
//! `stolon` crate's public API.

#![forbid(unsafe_code)]

pub mod api;
pub mod args;
pub mod bench;
pub mod cache;
pub mod chat;
pub mod cli;
pub mod config;
#[cfg(feature = "demo-model")]
pub mod demo;
mod download;
pub mod generate;
pub mod inspect;
pub mod log;
pub mod memory;
pub mod serve;
mod terminal;
