//! The demonstration as a program that compiles in half the time of the whole command `stolon`.

#![forbid(unsafe_code)]

use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};
use std::process::ExitCode;

use stolon::Engine;
use stolon_demo::Output;

const USAGE: &str = "\
Shows the prefix cache at work with a small built-in model; needs no network.

Usage: cargo run --release -- demo [--show-handbook]
       cargo run --release --features images -- demo --picture

  --show-handbook  print the whole handbook instead of its beginning
  --picture        ask about a picture instead of a handbook

This program has only the demonstration. `cargo install --path cli` installs the command `stolon`,
which serves, generates, chats and measures.
";

/// Exit status for wrong arguments.
const WRONG_USAGE: u8 = 2;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let (mut show_handbook, mut with_picture) = (false, false);
    for (index, argument) in arguments.iter().enumerate() {
        match argument.to_str() {
            Some("demo") if index == 0 => {}
            Some("--show-handbook") => show_handbook = true,
            Some("--picture") if cfg!(feature = "images") => with_picture = true,
            Some("--help" | "-h") => return shown(write!(stdout(), "{USAGE}").map_err(Into::into)),
            _ => {
                let got = argument.to_string_lossy();
                // Nothing is left to do if standard error is closed.
                let _ = write!(stderr(), "error: unexpected argument `{got}`\n\n{USAGE}");
                return ExitCode::from(WRONG_USAGE);
            }
        }
    }
    shown(run(show_handbook, with_picture))
}

fn run(show_handbook: bool, with_picture: bool) -> anyhow::Result<()> {
    // The engine has its own threads; this one only shows the answers.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        let model = if with_picture { "demo-vision" } else { "demo" };
        let engine = Engine::builder().model(model).build().await?;
        let mut stdout = stdout();
        let is_styled = stdout.is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let mut output = Output { writer: &mut stdout, is_styled };
        match with_picture {
            #[cfg(feature = "images")]
            true => stolon_demo::run_picture(&engine, &mut output).await?,
            _ => stolon_demo::run(&engine, show_handbook, &mut output).await?,
        }
        engine.shutdown().await;
        Ok(())
    })
}

/// The exit status. A closed output pipe, as in `demo | head`, is not a failure.
fn shown(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let output = error.downcast_ref::<std::io::Error>();
    if output.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    // Nothing is left to do if standard error is closed.
    let _ = writeln!(stderr(), "error: {error:#}");
    ExitCode::FAILURE
}
