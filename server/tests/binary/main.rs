//! The `stolon` binary from outside: its commands as a person or a script runs them, and its
//! HTTP server over real sockets. Models are random ones made on the spot, or the demo model.

mod bench;
mod cache_api;
mod chat_api;
mod commands;
mod completions_api;
mod limits;
mod support;
