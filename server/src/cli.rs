//! The command line: parsing it and running the chosen command.

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::bench::BenchCommand;
use crate::chat::ChatArgs;
#[cfg(feature = "demo-model")]
use crate::demo::DemoArgs;
use crate::generate::GenerateArgs;
use crate::inspect::ModelCommand;
use crate::serve::ServeArgs;

/// An LLM inference engine with a shared prefix cache
///
/// The log goes to standard error. Set RUST_LOG (for example RUST_LOG=info) to see more than
/// warnings.
#[derive(Debug, Parser)]
#[command(name = "stolon", version, about)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the prefix cache at work with a small built-in model; needs no network
    ///
    /// Asks several questions about a long handbook. The first answer computes the handbook, the
    /// others read it from the prefix cache. Then asks the same questions with an empty cache and
    /// compares times and answers.
    #[cfg(feature = "demo-model")]
    Demo(DemoArgs),
    /// Generate text from one or several prompts
    Generate(GenerateArgs),
    /// Chat with a model in the terminal
    Chat(ChatArgs),
    /// Serve a model over HTTP with an OpenAI-compatible API
    Serve(ServeArgs),
    /// Look at a model without loading it
    #[command(subcommand)]
    Model(ModelCommand),
    /// Benchmark the engine
    #[command(subcommand)]
    Bench(BenchCommand),
}

impl Cli {
    /// Runs the chosen command. Returns the exit status of a command that has not failed.
    ///
    /// # Errors
    /// Any error that stops it, with a message for the user.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            #[cfg(feature = "demo-model")]
            Command::Demo(args) => args.run().await,
            Command::Generate(args) => args.run().await,
            Command::Chat(args) => args.run().await,
            Command::Serve(args) => args.run().await,
            Command::Bench(command) => command.run().await,
            Command::Model(command) => return command.run(),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Whether the error is a closed output pipe, as in `stolon generate ... | head`. That is not a
/// failure.
#[must_use]
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// An error and its causes on one line. Some messages end with their cause already; it is then not
/// repeated.
#[must_use]
pub fn one_line(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |line, cause| {
        let cause = cause.to_string();
        match line.as_str() {
            "" => cause,
            text if text.ends_with(&cause) => line,
            _ => format!("{line}: {cause}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use clap::CommandFactory;

    use super::*;

    /// Goal: causes are listed in order, and none twice.
    #[test]
    fn causes_are_listed_once() {
        let error = anyhow!("no such file").context("cannot read x: no such file").context("stop");
        assert_eq!(one_line(&error), "stop: cannot read x: no such file");
        assert_eq!(one_line(&anyhow!("b").context("a")), "a: b");
    }

    /// Goal: the definition of the command line passes clap's checks (ids, conflicts, defaults).
    #[test]
    fn the_command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }
}
