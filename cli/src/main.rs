//! The `stolon` command: sets up the log and the tokio runtime and runs the command line.

#![forbid(unsafe_code)]

use std::process::ExitCode;

/// mimalloc returns the memory of large requests to the operating system. glibc's allocator keeps
/// most of it.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit status for a wrong command line, environment or configuration file.
const WRONG_USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match stolon_cli::config::parse(&std::env::args_os().collect::<Vec<_>>()) {
        Ok(cli) => cli,
        Err(error) => match error.downcast::<clap::Error>() {
            Ok(error) => error.exit(),
            Err(error) => {
                report(&error);
                return ExitCode::from(WRONG_USAGE);
            }
        },
    };
    let log = match cli.start_log() {
        Ok(log) => log,
        Err(error) => {
            report(&error);
            return ExitCode::from(WRONG_USAGE);
        }
    };
    let result = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // The engine has its own threads; these only forward events.
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| {
            let result = runtime.block_on(cli.run());
            // A blocking read of standard input that is no longer awaited must not delay the exit.
            runtime.shutdown_background();
            result
        });
    log.finish();
    match result {
        Ok(status) => status,
        Err(error) if stolon_cli::cli::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

fn report(error: &anyhow::Error) {
    use std::io::Write;
    // If standard error is closed as well, the message cannot be shown anywhere.
    let _ = writeln!(std::io::stderr(), "error: {}", stolon_cli::cli::one_line(error));
}
