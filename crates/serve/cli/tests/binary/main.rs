//! Tests of the `stolon` binary: its commands as run from a shell, and what a server does as a
//! process: its flags, files, signals and limits, the page in a browser, and hostile clients. What it
//! answers is tested in `crates/serve/http/tests/it`.

mod access_api;
mod adapter_flags;
#[path = "../../../http/tests/it/support/adapters.rs"]
mod adapters;
mod attacks;
mod bench;
mod bench_serve;
mod browser;
mod cache_commands;
mod commands;
mod config;
mod connections;
#[path = "../../../../models/checkpoint/tests/it/support/gguf_writer.rs"]
#[allow(dead_code, reason = "shared with the tests of stolon-checkpoint")]
mod gguf_writer;
#[cfg(feature = "candle")]
mod gpu_check;
mod health;
#[cfg(unix)]
mod hung_backend;
mod inspect;
mod key_limits;
#[cfg(unix)]
mod launch;
mod limits;
mod log;
mod model_swaps;
mod page;
mod page_chat;
mod page_images;
mod page_newcomers;
mod readme;
mod root_path;
mod serve_flags;
mod several_models;
mod support;
mod tls;
#[cfg(feature = "otel")]
mod traces;
#[cfg(unix)]
mod unix_socket;
mod verify;
mod warm;
