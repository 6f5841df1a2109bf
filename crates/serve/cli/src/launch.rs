//! `stolon launch`: runs a coding agent that uses a Stolon server, and writes nothing permanent.
//!
//! 1. The server at `--url` is used if it is a Stolon and has the model that was asked for.
//!    Otherwise a server of its own is started.
//! 2. The agent gets its settings as environment variables, as arguments, and in a temporary
//!    folder.
//! 3. The agent runs in the foreground. When it has ended, the server that was started is stopped,
//!    the folder is deleted, and the exit status is that of the agent.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::Args;

use crate::terminal;

mod agent;
mod flags;
mod foreground;
mod server;
mod shell;

use agent::{Agent, Setup};
use flags::ServerFlags;
use foreground::Signals;
use server::{Server, Started};

/// Help heading of the flags that are not those of the server.
pub(crate) const HEADING: &str = "Launch";
/// The environment variable of `--api-key`.
const KEY_VARIABLE: &str = "STOLON_API_KEY";
/// The key that the agent sends to a server without keys. Agents refuse to start without any.
const DUMMY_KEY: &str = "dummy";
/// Context length in tokens below which coding agents hardly work: the instructions and tools that
/// they send with each request have about 10,000 tokens.
const SMALL_CONTEXT: usize = 16_384;

/// Arguments of `stolon launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// The coding agent to run
    agent: Agent,
    /// Address of the server to use. If none answers there, one is started
    ///
    /// A server of its own is also started if another program answers at the address, or if the
    /// server there does not have the model of --model. A server is started on this machine only:
    /// if the address is one of another machine, a server has to answer there.
    #[arg(long, default_value = "http://127.0.0.1:8080", env = "STOLON_URL", help_heading = HEADING)]
    url: String,
    /// Key of the server, if it has keys. A server that is started has this key
    ///
    /// Other programs on this machine can see a process's arguments: prefer the environment
    /// variable.
    #[arg(long, value_name = "KEY", env = KEY_VARIABLE, hide_env_values = true)]
    #[arg(help_heading = HEADING)]
    api_key: Option<String>,
    /// Print the environment and the command line of the agent, as lines for a shell, instead of
    /// running it
    ///
    /// A server has to be running. A key is shown only if it is given with --api-key.
    #[arg(long, help_heading = HEADING)]
    print: bool,
    #[command(flatten)]
    server: ServerFlags,
    /// Arguments of the agent
    #[arg(last = true, value_name = "ARGS")]
    arguments: Vec<OsString>,
}

impl LaunchArgs {
    /// Runs the agent, and returns its exit status.
    ///
    /// # Errors
    /// If the agent is not installed, or there is no server and none can be started.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        if self.print {
            return self.print().await;
        }
        let program = self.agent.find()?;
        let folder = tempfile::Builder::new().prefix("stolon-launch-").tempdir();
        let folder = folder.context("cannot create a temporary folder")?;
        let mut signals = Signals::new().context("cannot receive signals")?;
        let (server, started) = tokio::select! {
            server = self.find_or_start(folder.path()) => server?,
            status = signals.interrupted() => return Ok(status),
        };
        self.describe(&server);
        let setup = self.setup(&server);
        let command = self.command(program, &setup, folder.path())?;
        let status = foreground::run(command, &mut signals).await;
        if let Some(started) = started {
            started.stop();
        }
        status.with_context(|| format!("cannot run `{}`", self.agent.program()))
    }

    /// Prints how the agent would be run.
    async fn print(&self) -> anyhow::Result<ExitCode> {
        let server = match Server::find(&self.url, self.api_key.as_deref(), &self.server).await? {
            Ok(server) => server,
            Err(reason) => anyhow::bail!("{reason}: start `stolon serve` before --print"),
        };
        self.describe(&server);
        let setup = self.setup(&server);
        let is_from_environment = std::env::var(KEY_VARIABLE).ok() == self.api_key;
        let secret = self.api_key.as_deref().filter(|_| is_from_environment);
        let program = self.agent.program();
        let arguments = setup.arguments.iter().map(OsString::from).chain(self.arguments.clone());
        for line in shell::lines(&setup, secret.zip(Some(KEY_VARIABLE)), program, arguments) {
            terminal::line(line)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The server to use, and the process that was started for it, if one was.
    async fn find_or_start(&self, folder: &Path) -> anyhow::Result<(Server, Option<Started>)> {
        let key = self.api_key.as_deref();
        let reason = match Server::find(&self.url, key, &self.server).await? {
            Ok(server) => {
                self.server.warn_if_ignored(&self.url);
                return Ok((server, None));
            }
            Err(reason) => reason,
        };
        let mut started = Started::start(&self.server, key, folder)?;
        let log = started.log().display();
        terminal::warn(format!("{reason}: starting one, whose log is {log}"));
        let server = started.ready(self.server.model(), key).await?;
        Ok((server, Some(started)))
    }

    /// Says which server and model the agent uses.
    fn describe(&self, server: &Server) {
        let (agent, context) = (self.agent.program(), server.context);
        terminal::warn(format!(
            "{agent} uses {} at {} ({context} tokens of context)",
            server.model, server.url
        ));
        if context < SMALL_CONTEXT {
            terminal::warn(format!(
                "WARNING: {context} tokens of context are too few for coding agents, which need at \
                 least {SMALL_CONTEXT}. --max-model-len sets the context of a server."
            ));
        }
    }

    fn setup(&self, server: &Server) -> Setup {
        self.agent.setup(server, self.api_key.as_deref().unwrap_or(DUMMY_KEY))
    }

    /// The command that runs the agent. The file with its settings, if it has one, is written to
    /// the temporary folder.
    fn command(&self, program: PathBuf, setup: &Setup, folder: &Path) -> anyhow::Result<Command> {
        let mut command = Command::new(program);
        for name in setup.removed {
            command.env_remove(name);
        }
        command.envs(setup.variables.iter().map(|(name, value)| (name, value)));
        if let Some((name, settings)) = &setup.settings {
            let path = folder.join("settings.json");
            let written = std::fs::write(&path, settings.to_string());
            written.with_context(|| format!("cannot write {}", path.display()))?;
            command.env(name, path);
        }
        command.args(&setup.arguments).args(&self.arguments);
        Ok(command)
    }
}
