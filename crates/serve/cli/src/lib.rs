//! The command `stolon`: its command line and its subcommands.
//!
//! The HTTP API is in `stolon-http`, the load generator of `stolon bench` in `stolon-loadgen`, the
//! checks of a GPU in `stolon-gpu-check`. This crate parses arguments, runs them, and prints.

#![forbid(unsafe_code)]

pub mod args;
pub mod bench;
pub mod cache;
pub mod chat;
pub mod cli;
pub mod config;
#[cfg(feature = "demo-model")]
pub mod demo;
pub mod doctor;
mod download;
pub mod generate;
pub mod health;
mod image_file;
pub mod inspect;
pub mod launch;
pub mod log;
pub mod memory;
pub mod program;
pub mod serve;
mod terminal;
mod text_file;
mod tips;
mod traces;
pub mod verify;
