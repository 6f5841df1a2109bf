//! The flags of the server that `stolon launch` may start: those of `stolon serve`, except its
//! address, its certificate and its keys, which `stolon launch` chooses.
//!
//! They are defined by `stolon serve` and parsed by the same rules, and reach the server as
//! arguments. They include what a file or the environment sets.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::log::LogArgs;
use crate::serve::ServeArgs;
use crate::terminal;

/// Ids of the arguments of `stolon serve` that `stolon launch` does not have.
const CHOSEN_HERE: [&str; 7] =
    ["host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile", "admin_key"];
/// The argument of `stolon serve` that `stolon launch` defines itself.
const API_KEY: &str = "api_key";
/// Clap's id of `--model`.
const MODEL: &str = "model";

/// The flags that were given.
#[derive(Debug)]
pub(super) struct ServerFlags {
    /// The flags as arguments of `stolon serve`.
    arguments: Vec<OsString>,
    /// The value of `--model`.
    model: Option<String>,
    /// The flags that are not from the environment, without the dashes and without the model.
    names: Vec<String>,
}

impl ServerFlags {
    /// The flags as arguments of `stolon serve`.
    pub(super) fn arguments(&self) -> &[OsString] {
        &self.arguments
    }

    /// The model that was asked for, if one was.
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Warns about flags that a server that runs already does not read.
    pub(super) fn warn_if_ignored(&self, url: &str) {
        if !self.names.is_empty() {
            let names = self.names.join(" --");
            terminal::warn(format!(
                "WARNING: the server at {url} runs already, so these have no effect: --{names}"
            ));
        }
    }
}

/// The arguments of `stolon serve` that are passed on, and the options of the log, which all
/// commands have.
fn definitions() -> impl Iterator<Item = Arg> {
    let command = LogArgs::augment_args(ServeArgs::augment_args(Command::new("serve")));
    let all: Vec<Arg> = command.get_arguments().cloned().collect();
    all.into_iter().filter(|arg| {
        let id = arg.get_id().as_str();
        id != API_KEY && !CHOSEN_HERE.contains(&id)
    })
}

impl Args for ServerFlags {
    fn augment_args(command: Command) -> Command {
        command.args(definitions().filter(|arg| !arg.is_global_set()))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ServerFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self { arguments: Vec::new(), model: None, names: Vec::new() };
        for arg in definitions() {
            flags.add(&arg, matches);
        }
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl ServerFlags {
    /// Adds a flag if it was given.
    fn add(&mut self, arg: &Arg, matches: &ArgMatches) {
        let id = arg.get_id().as_str();
        // The model without a flag is given as --model, too.
        let Some(name) = arg.get_long() else { return };
        let source = matches.value_source(id);
        if !matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
            return;
        }
        match arg.get_action() {
            ArgAction::SetTrue if !matches.get_flag(id) => return,
            ArgAction::SetTrue => self.arguments.push(format!("--{name}").into()),
            _ => self.arguments.extend(matches.get_raw(id).into_iter().flatten().map(|value| {
                let mut argument = OsString::from(format!("--{name}="));
                argument.push(value);
                argument
            })),
        }
        if id == MODEL {
            self.model = matches.get_one::<String>(id).cloned();
        } else if source == Some(ValueSource::CommandLine) {
            self.names.push(name.to_owned());
        }
    }
}
