//! The `stolon` command line and its OpenAI-compatible HTTP server.
pub mod bench;
pub mod random;
pub mod random_model;
pub mod serve;
