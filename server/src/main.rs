//! The `stolon` command: sets up the log and the tokio runtime and runs the command line.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use stolon_server::cli::Cli;

/// Returns the memory of large requests to the operating system. glibc's allocator keeps most of
/// it.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.log().init();
    let result = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // The engine computes on threads of its own; these only forward events.
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| {
            let result = runtime.block_on(cli.run());
            // A blocking read of standard input that is no longer awaited must not delay the exit.
            runtime.shutdown_background();
            result
        });
    match result {
        Ok(status) => status,
        Err(error) if stolon_server::cli::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write;
            // If standard error is closed as well, the message cannot be shown anywhere.
            let _ = writeln!(std::io::stderr(), "error: {}", stolon_server::cli::one_line(&error));
            ExitCode::FAILURE
        }
    }
}
