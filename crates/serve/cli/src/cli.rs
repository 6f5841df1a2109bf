//! The command line: parsing it and running the chosen command.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::bench::BenchCommand;
use crate::cache::CacheArgs;
use crate::chat::ChatArgs;
#[cfg(feature = "demo-model")]
use crate::demo::DemoArgs;
use crate::doctor::DoctorArgs;
use crate::generate::GenerateArgs;
use crate::health::HealthArgs;
use crate::inspect::ModelCommand;
use crate::launch::LaunchArgs;
use crate::log::LogArgs;
use crate::serve::ServeArgs;
use crate::serve::models::NamedModel;
use crate::verify::VerifyArgs;
#[cfg(feature = "candle")]
use stolon_gpu_check::GpuCheckArgs;

/// What the command prints without arguments.
pub const FIRST_STEPS: &str = "\
Stolon runs language models on this computer, and computes what prompts have in common once.

  stolon demo                     see the prefix cache at work; needs no network
  stolon doctor                   which models can this machine run?
  stolon run Qwen/Qwen3-0.6B      download a model and chat with it here
  stolon serve Qwen/Qwen3-0.6B    serve it to programs, agents and browsers on this machine
  stolon help                     all commands
";

/// An LLM inference engine with a shared prefix cache
///
/// The log goes to standard error. With --log-level info, it has more than warnings.
///
/// Exit status: 0 for success, 1 for a failure, which standard error explains, 2 for a wrong
/// command line, environment or configuration file, and 3 from `model inspect` for a model that
/// this engine would refuse. `verify` has 1 for a difference, and 2 if it could not compare.
#[derive(Debug, Parser)]
#[command(name = "stolon", version, about)]
pub struct Cli {
    /// TOML file with settings: flags of `stolon serve` without the dashes in front
    ///
    /// Each can also be an environment variable, such as STOLON_MAX_MODEL_LEN for --max-model-len.
    /// Flags take precedence over the environment, and the environment over the file. Other
    /// commands read the settings of the engine from both, too.
    #[arg(long, global = true, value_name = "FILE", env = "STOLON_CONFIG")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the prefix cache at work with a small built-in model; needs no network
    ///
    /// Asks several questions about a long handbook. The first answer computes the handbook, the
    /// others read it from the prefix cache. Then asks the same questions with an empty cache and
    /// compares times and answers. With --picture, the questions are about a picture, which is
    /// encoded once.
    #[cfg(feature = "demo-model")]
    Demo(DemoArgs),
    /// Generate text from one or several prompts
    Generate(GenerateArgs),
    /// Chat with a model in the terminal
    #[command(visible_alias = "run")]
    Chat(ChatArgs),
    /// Serve one or several models over HTTP with an OpenAI-compatible API
    ///
    /// With --model NAME=SOURCE, repeated, each model is served under its name: a request is
    /// answered by the model that it names, which is loaded if it is not loaded.
    Serve(ServeArgs),
    /// Run a coding agent that uses Stolon: claude, codex, opencode or qwen
    ///
    /// The agent uses the server at --url. If there is none, one is started with the flags of
    /// `stolon serve`, and stopped when the agent ends. Nothing is written to the agent's own
    /// settings.
    ///
    /// Arguments of the agent come after two dashes:
    /// stolon launch claude --model Qwen/Qwen3-8B -- -p "Read notes.txt"
    Launch(LaunchArgs),
    /// Say what this machine offers and which models it can run
    ///
    /// Prints the processor's instruction sets, the number of threads, the free memory within the
    /// limits of the process, and the rate at which memory is read, which bounds the speed of one
    /// answer; and for well-known models the memory that they need.
    Doctor(DoctorArgs),
    /// Ask a server whether it is ready: the health check of a container without a shell
    ///
    /// Prints the reply of /ready. Exit status: 0 if the server is ready, and 1 if it is not or
    /// cannot be reached.
    Health(HealthArgs),
    /// Look at a model without loading it
    #[command(subcommand)]
    Model(ModelCommand),
    /// Benchmark the engine
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Check that the answers of a server depend neither on its cache nor on other requests
    ///
    /// Works with any server that has OpenAI's API (--url), and without --url with an engine in
    /// this process. Sends the same prompts, with temperature 0, in different states of the server:
    /// with nothing of them in the cache and cached, in different orders after a shared beginning,
    /// alone and many at once, as a conversation that grows and as a whole, next to requests that
    /// are canceled, and after other prompts have pushed them out of the cache. All answers to a
    /// prompt have to be equal: the text, and the token ids and log-probabilities if the server
    /// sends them. Each prompt has a secret word, which no answer to another prompt may contain.
    ///
    /// Exit status: 0 if all answers are equal, 1 if any differs or has the secret word of another
    /// prompt, and 2 if not everything could be compared, because a request failed.
    Verify(Box<VerifyArgs>),
    /// Check that a GPU computes what the CPU computes, and measure its speed
    ///
    /// Compares small models of all architectures with the CPU, answers from a warm cache with
    /// those from a cold one, and answers with a KV cache that is too small with those with a large
    /// one. Then measures prefill, decode and time to first token. Takes a few minutes. The exit
    /// status is 1 if anything failed.
    #[cfg(feature = "candle")]
    GpuCheck(GpuCheckArgs),
    /// Look at and change the prefix cache of a running server
    Cache(CacheArgs),
    /// Print the settings of `stolon serve`, merged from flags, the environment and a file
    ///
    /// The output is a file for --config. Keys are not shown.
    Config(ConfigArgs),
    /// Print a script that completes commands and flags in a shell
    ///
    /// For bash, for example: stolon completions bash >
    /// ~/.local/share/bash-completion/completions/stolon
    Completions {
        /// The shell: bash, elvish, fish, powershell or zsh
        shell: Shell,
    },
    /// Write manual pages of all commands
    Man {
        /// Existing folder in which the pages are written
        folder: PathBuf,
    },
}

/// Arguments of `stolon config`.
#[derive(Debug, Args)]
struct ConfigArgs {
    #[command(flatten)]
    _serve: ServeArgs,
    /// The text to print.
    #[arg(skip)]
    merged: String,
}

/// The log of this process.
#[derive(Debug, Default)]
pub struct Logging {
    #[cfg(feature = "otel")]
    export: Option<stolon_http::traces::Export>,
}

impl Logging {
    /// Sends the spans that are still waiting. Takes a few seconds at most.
    pub fn finish(self) {
        #[cfg(feature = "otel")]
        if let Some(export) = self.export {
            export.finish();
        }
    }
}

impl Cli {
    /// Begins the log of this process and, for `stolon serve` with a collector, the export of
    /// traces.
    ///
    /// # Errors
    /// If the flag that names the collector is wrong.
    pub fn start_log(&self) -> anyhow::Result<Logging> {
        #[cfg(feature = "otel")]
        if let Command::Serve(args) = &self.command
            && let Some((layer, export)) = args.traces().start()?
        {
            self.log.init_with_traces(layer);
            return Ok(Logging { export: Some(export) });
        }
        #[cfg(not(feature = "otel"))]
        if let Command::Serve(args) = &self.command {
            args.traces().start()?;
        }
        self.log.init();
        Ok(Logging::default())
    }

    /// The file with settings.
    pub(crate) fn config_file(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// Sets the models of `stolon serve`, if it serves several.
    pub(crate) fn set_models(&mut self, models: Vec<NamedModel>) {
        if let Command::Serve(args) = &mut self.command {
            args.set_models(models);
        }
    }

    /// Sets the text that `stolon config` prints.
    pub(crate) fn set_merged_settings(&mut self, text: String) {
        if let Command::Config(args) = &mut self.command {
            args.merged = text;
        }
    }

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
            Command::Launch(args) => return args.run().await,
            Command::Doctor(args) => args.run(),
            Command::Health(args) => return args.run().await,
            Command::Model(command) => return command.run(),
            #[cfg(feature = "candle")]
            Command::GpuCheck(args) => return args.run(|line| crate::terminal::line(line)).await,
            Command::Verify(args) => return args.run().await,
            Command::Cache(args) => args.run().await,
            Command::Config(args) => {
                std::io::stdout().lock().write_all(args.merged.as_bytes()).map_err(Into::into)
            }
            Command::Completions { shell } => completions(shell),
            Command::Man { folder } => manual_pages(&folder),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}

fn completions(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    let mut command = Cli::command();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut script);
    // The generator panics if it cannot write, so it writes to memory.
    Ok(std::io::stdout().lock().write_all(&script)?)
}

fn manual_pages(folder: &Path) -> anyhow::Result<()> {
    let written = clap_mangen::generate_to(Cli::command(), folder);
    written.with_context(|| format!("cannot write manual pages to {}", folder.display()))
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
