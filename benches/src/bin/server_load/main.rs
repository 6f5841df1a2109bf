//! Loads `stolon serve` from a second process over loopback. The server's backend computes nothing,
//! so that only the server, the engine and the client are measured.
//!
//! ```sh
//! cargo run --release -p stolon-benches --bin server_load
//! ```
//!
//! The server is this program with the argument `serve`: the router and the connections of
//! `stolon serve`, on a free port.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "the figures are printed")]

use clap::{Parser, Subcommand};

mod client;
mod hostile;
mod server;
mod streams;
mod throughput;

/// The allocator of the command `stolon`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Load `stolon serve` from a second process over loopback.
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Number of requests of the measurement of throughput
    #[arg(long, default_value_t = 50_000)]
    requests: usize,
    /// Number of clients of the measurement of throughput
    #[arg(long, default_value_t = 64)]
    clients: usize,
    /// Number of idle streams
    #[arg(long, default_value_t = 2_000)]
    idle: usize,
    /// Number of hostile requests
    #[arg(long, default_value_t = 5_000)]
    hostile: usize,
    /// Number of clients that disconnect in the middle of their stream
    #[arg(long, default_value_t = 1_000)]
    vanishing: usize,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a backend that computes nothing
    Serve {
        /// Duration of a step, in milliseconds
        #[arg(long, default_value_t = 0)]
        step_ms: u64,
    },
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // The same runtime as in the command `stolon`.
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(run(args));
    runtime.shutdown_background();
    result
}

async fn run(args: Args) -> anyhow::Result<()> {
    // Connections are files. If the limit is too low, opening one of them fails with an error.
    let _ = rlimit::increase_nofile_limit(u64::MAX);
    if let Some(Command::Serve { step_ms }) = args.command {
        return server::serve(step_ms).await;
    }
    throughput::overhead().await?;
    throughput::throughput(args.requests, args.clients).await?;
    streams::idle(args.idle).await?;
    streams::vanishing(args.vanishing).await?;
    hostile::requests(args.hostile).await
}
