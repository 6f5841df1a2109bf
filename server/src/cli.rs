//! The command line: its commands, and the way from one to its file.

use std::io::ErrorKind;

use clap::{Parser, Subcommand};

use crate::bench::BenchCommand;
use crate::chat::ChatArgs;
#[cfg(feature = "demo-model")]
use crate::demo::DemoArgs;
use crate::generate::GenerateArgs;
use crate::serve::ServeArgs;

/// An LLM inference engine with a shared prefix cache.
#[derive(Debug, Parser)]
#[command(name = "stolon", version, about)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Ask a small built-in model about a long handbook and watch the cache at work; no network.
    #[cfg(feature = "demo-model")]
    Demo(DemoArgs),
    /// Continue one or several prompts.
    Generate(GenerateArgs),
    /// Talk to a model.
    Chat(ChatArgs),
    /// Serve a model over HTTP, compatible with OpenAI's API.
    Serve(ServeArgs),
    /// Measure the engine.
    #[command(subcommand)]
    Bench(BenchCommand),
}

impl Cli {
    /// Runs the command that was given.
    ///
    /// # Errors
    /// Whatever stops it, in words for the person at the terminal.
    pub async fn run(self) -> anyhow::Result<()> {
        match self.command {
            #[cfg(feature = "demo-model")]
            Command::Demo(args) => args.run().await,
            Command::Generate(args) => args.run().await,
            Command::Chat(args) => args.run().await,
            Command::Serve(args) => args.run().await,
            Command::Bench(command) => command.run().await,
        }
    }
}

/// Whether the reader of our output went away (`stolon generate ... | head`): no failure of ours.
#[must_use]
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// An error and its causes on one line. Some messages repeat their cause already; a cause that
/// the line ends with is not said twice.
#[must_use]
pub fn in_words(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |line, cause| {
        let cause = cause.to_string();
        match line.as_str() {
            "" => cause,
            said if said.ends_with(&cause) => line,
            _ => format!("{line}: {cause}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use clap::CommandFactory;

    use super::*;

    /// Goal: causes are told in order, and none twice.
    #[test]
    fn causes_are_told_once() {
        let error = anyhow!("no such file").context("cannot read x: no such file").context("stop");
        assert_eq!(in_words(&error), "stop: cannot read x: no such file");
        assert_eq!(in_words(&anyhow!("b").context("a")), "a: b");
    }

    /// Goal: the command line is well-formed (clap checks ids, conflicts and defaults).
    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
