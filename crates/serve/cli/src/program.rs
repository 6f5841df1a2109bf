//! The whole program: log, tokio runtime and command line. The command `stolon` and the Python
//! package run it.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

/// Exit status for a wrong command line, environment or configuration file.
const WRONG_USAGE: u8 = 2;

/// Runs the command line `arguments`, the first of which is the name of the program, and reports
/// errors on standard error. Returns the exit status. Ends the process by itself after a wrong
/// command line and a request for help.
#[must_use]
pub fn run(arguments: &[OsString]) -> ExitCode {
    if arguments.len() < 2 {
        // If standard output is closed, there is nobody to read it.
        let _ = std::io::stdout().write_all(crate::cli::FIRST_STEPS.as_bytes());
        return ExitCode::SUCCESS;
    }
    let cli = match crate::config::parse(arguments) {
        Ok(cli) => cli,
        Err(error) => match error.downcast::<clap::Error>() {
            Ok(error) => error.exit(),
            Err(error) => {
                report(&error);
                return ExitCode::from(WRONG_USAGE);
            }
        },
    };
    ignore_caught_panics();
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
            let result = runtime.block_on(async {
                #[cfg(unix)]
                survive_size_limit();
                cli.run().await
            });
            // A blocking read of standard input that is no longer awaited must not delay the exit.
            runtime.shutdown_background();
            result
        });
    log.finish();
    match result {
        Ok(status) => status,
        Err(error) if crate::cli::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

/// Suppresses the message of a panic that becomes an error of a request or of a file, because that
/// error describes the problem.
fn ignore_caught_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !stolon::panics_become_errors() {
            print(panic);
        }
    }));
}

/// Lets a write beyond the limit on the size of files (`ulimit -f`) fail. Without a handler of the
/// signal it would end the process.
#[cfg(unix)]
fn survive_size_limit() {
    use rustix::process::Signal;
    use tokio::signal::unix::{SignalKind, signal};
    // The handler stays when the result is dropped. If it cannot be installed, nothing is lost.
    drop(signal(SignalKind::from_raw(Signal::XFSZ.as_raw())));
}

fn report(error: &anyhow::Error) {
    // If standard error is closed as well, the message cannot be shown anywhere.
    let _ = writeln!(std::io::stderr(), "error: {}", crate::cli::one_line(error));
}
