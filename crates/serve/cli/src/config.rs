//! Settings from a file and from the environment, and `stolon config`, which shows the result.
//!
//! Every flag of `stolon serve` can also be given as a key of a TOML file (`--config FILE`) and as
//! an environment variable: `--max-model-len 4096`, `max-model-len = 4096` and
//! `STOLON_MAX_MODEL_LEN=4096`. Flags take precedence over the environment, and the environment
//! over the file. Other commands read the settings of the engine, such as the model, and of the log
//! from both, too, and `stolon launch` those of the server that it starts.
//!
//! The settings of the file become flags in front of those that the user gave, so that they are
//! checked in the same way.

mod models;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Context, anyhow, bail, ensure};
use clap::builder::BoolishValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use toml::{Table, Value};

use crate::cli::Cli;
use crate::{launch, log, terminal, text_file, tips};

/// Largest accepted file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Prefix of the names of environment variables.
const PREFIX: &str = "STOLON_";
/// The command whose flags are the settings.
const SERVE: &str = "serve";
/// Clap's id of the argument of `serve` that names the model without a flag.
const MODEL_ARGUMENT: &str = "model_argument";
/// Help heading of the flags that other commands have, too.
const ENGINE: &str = "Engine";
/// Schemes of the addresses that Kubernetes sets as NAME_PORT for each service of a pod's
/// namespace.
const SERVICE_SCHEMES: [&str; 3] = ["tcp://", "udp://", "sctp://"];

/// Parses a command line, whose first argument is the name of the program, together with the
/// environment and the file that it names.
///
/// # Errors
/// A [`clap::Error`], which may also be a request for help, or an error in the file or in the name
/// of a variable.
pub fn parse(args: &[OsString]) -> anyhow::Result<Cli> {
    let command = with_environment(Cli::command(), &[]);
    let command = command.mut_subcommand(SERVE, models::repeated);
    // Requests for help return here, so that help is shown in any environment.
    let unknown = |error| tips::settled(error, args);
    let mut matches = command.clone().try_get_matches_from(args).map_err(unknown)?;
    check_variables(&command, std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))?;
    let with_model = with_model_flag(args, &matches);
    if let Some(args) = &with_model {
        matches = command.clone().try_get_matches_from(args)?;
    }
    let args = with_model.as_deref().unwrap_or(args);
    let cli = Cli::from_arg_matches(&matches)?;
    let (path, leaf) = chosen(&matches);
    if path == [SERVE] {
        warn_of_service_links(leaf);
    }
    let Some(file) = cli.config_file() else {
        return finish(cli, &command, &path, leaf, &Table::new(), &[]);
    };
    let in_file = || format!("the settings in {}", file.display());
    let settings = read(file).with_context(in_file)?;
    check_names(&settings, &command).with_context(in_file)?;
    let (flags, ids) = missing(&settings, &command, &path, leaf).with_context(in_file)?;
    let matches = command.clone().try_get_matches_from(insert(args, &path, flags));
    let matches = matches.map_err(|error| anyhow!("{}: {}", in_file(), error.render()))?;
    let cli = Cli::from_arg_matches(&matches)?;
    let (path, leaf) = chosen(&matches);
    finish(cli, &command, &path, leaf, &settings, &ids)
}

/// If the model was given without a flag, returns the arguments with the flag `--model` instead,
/// which is a setting.
fn with_model_flag(args: &[OsString], matches: &ArgMatches) -> Option<Vec<OsString>> {
    let (path, leaf) = chosen(matches);
    let model = leaf.try_get_one::<String>(MODEL_ARGUMENT).ok().flatten()?;
    Some(insert(args, &path, vec![format!("--model={model}").into()]))
}

/// Completes a parsed command line: gives `stolon config` the text that it prints, and `stolon
/// serve` its models if it has several.
fn finish(
    mut cli: Cli,
    command: &Command,
    path: &[&str],
    leaf: &ArgMatches,
    settings: &Table,
    from_file: &[String],
) -> anyhow::Result<Cli> {
    if path == [SERVE] {
        let serve = find(command, path).context("the chosen command exists")?;
        let has_model = settings.contains_key("model");
        cli.set_models(models::models(serve, leaf, settings, has_model)?);
    }
    if path == ["config"] {
        let models = models::render(settings)?;
        // A file has one model or a list of them.
        let args =
            settings_of(command, path)?.filter(|arg| models.is_empty() || !has(arg, "model"));
        cli.set_merged_settings(render(args, leaf, from_file) + &models);
    }
    Ok(cli)
}

/// Lets the settings of a command and of those below it come from the environment. `path` has the
/// names of the command and of those above it, without the program.
fn with_environment(command: Command, path: &[&str]) -> Command {
    let command = command.mut_args(|arg| {
        let Some(name) = arg.get_long().filter(|_| is_setting(path, &arg)) else { return arg };
        if arg.get_env().is_some() {
            return arg;
        }
        let variable = variable_of(name);
        if service_link(&variable).is_some() {
            return arg;
        }
        let arg = arg.env(variable).hide_env(true);
        match arg.get_action() {
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            _ => arg,
        }
    });
    command.mut_subcommands(|command| {
        let name = command.get_name().to_owned();
        let path: Vec<&str> = path.iter().copied().chain([name.as_str()]).collect();
        with_environment(command, &path)
    })
}

/// Variables with the prefix that are read elsewhere and are not settings.
const OTHER_VARIABLES: [&str; 1] = ["STOLON_CPU_PATH"];

/// Whether an environment variable is a setting by its name.
pub(crate) fn is_setting_variable(name: &str) -> bool {
    name.starts_with(PREFIX) && !OTHER_VARIABLES.contains(&name)
}

/// Refuses variables that look like settings but are not, because a misspelled one would be
/// ignored.
fn check_variables(command: &Command, names: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let mut known = HashSet::new();
    let mut pending = vec![command];
    while let Some(command) = pending.pop() {
        known.extend(command.get_arguments().filter_map(Arg::get_env));
        pending.extend(command.get_subcommands());
    }
    for name in names.filter(|name| is_setting_variable(name)) {
        let is_known = known.contains(OsStr::new(&name));
        ensure!(
            is_known || is_of_service(&name),
            "there is no setting for the environment variable {name}: `stolon config` prints all \
             settings, of which max-model-len, for example, is {PREFIX}MAX_MODEL_LEN"
        );
    }
    Ok(())
}

/// Whether Kubernetes sets a variable of this name for a service whose name begins with stolon:
/// STOLON_SERVICE_HOST, STOLON_PORT_8080_TCP_ADDR, and the like.
fn is_of_service(name: &str) -> bool {
    let has_number = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
    name.contains("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
        || name.split("_PORT_").skip(1).any(has_number)
}

/// The environment variable of a flag.
fn variable_of(name: &str) -> String {
    format!("{PREFIX}{}", name.to_uppercase().replace('-', "_"))
}

/// The value of a variable if it is not a setting but was set by Kubernetes for a service:
/// `STOLON_PORT` is `tcp://10.0.0.1:8080` in each pod next to a service named `stolon`.
fn service_link(variable: &str) -> Option<String> {
    let value = std::env::var(variable).ok()?;
    SERVICE_SCHEMES.iter().any(|scheme| value.starts_with(scheme)).then_some(value)
}

/// Warns that such a variable was ignored, unless a flag overrides it.
fn warn_of_service_links(serve: &ArgMatches) {
    let variable = variable_of("port");
    let is_given = serve.value_source("port") == Some(ValueSource::CommandLine);
    if let Some(value) = service_link(&variable).filter(|_| !is_given) {
        terminal::warn(format!(
            "WARNING: {variable} is ignored. Its value {value} is what Kubernetes sets for a service \
             of this name, and not a port. Set the port with --port or in the file of --config; \
             `enableServiceLinks: false` in the pod's specification removes the variable."
        ));
    }
}

/// Whether a flag of the command at `path` is a setting.
fn is_setting(path: &[&str], arg: &Arg) -> bool {
    let is_of_server = path == ["launch"] && arg.get_help_heading() != Some(launch::HEADING);
    let takes_all = path == [SERVE] || path == ["config"] || is_of_server;
    let sets = matches!(
        arg.get_action(),
        ArgAction::Set | ArgAction::Append | ArgAction::SetTrue | ArgAction::SetFalse
    );
    let is_shared = [ENGINE, log::HEADING].map(Some).contains(&arg.get_help_heading());
    let is_own = takes_all || is_shared;
    sets && is_own && arg.get_long().is_some_and(|name| name != "config")
}

/// The names of the chosen command and the matches of its arguments.
fn chosen(matches: &ArgMatches) -> (Vec<&str>, &ArgMatches) {
    let (mut path, mut leaf) = (Vec::new(), matches);
    while let Some((name, inner)) = leaf.subcommand() {
        path.push(name);
        leaf = inner;
    }
    (path, leaf)
}

/// The settings of the command at `path`, the global ones included.
fn settings_of<'a>(
    root: &'a Command,
    path: &'a [&str],
) -> anyhow::Result<impl Iterator<Item = &'a Arg>> {
    let command = find(root, path).context("the chosen command exists")?;
    let all = command.get_arguments().chain(root.get_arguments());
    Ok(all.filter(|arg| is_setting(path, arg)))
}

fn find<'a>(command: &'a Command, path: &[&str]) -> Option<&'a Command> {
    path.iter().try_fold(command, |command, name| command.find_subcommand(name))
}

fn read(path: &Path) -> anyhow::Result<Table> {
    let text = text_file::read(path, MAX_FILE_BYTES)?;
    text.parse().map_err(|error: toml::de::Error| anyhow!("expected TOML: {}", error.message()))
}

/// Refuses keys that are not settings.
fn check_names(settings: &Table, command: &Command) -> anyhow::Result<()> {
    for key in settings.keys().filter(|&key| key != models::KEY) {
        let known = settings_of(command, &[SERVE])?.any(|arg| has(arg, key));
        ensure!(known, "there is no setting `{key}`: `stolon config` prints all settings");
    }
    Ok(())
}

fn has(arg: &Arg, name: &str) -> bool {
    arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|all| all.contains(&name))
}

/// The settings of the file that apply to the command, as flags, and their ids. A setting is left
/// out if a flag or the environment gives it, or gives one that excludes it.
fn missing(
    settings: &Table,
    command: &Command,
    path: &[&str],
    leaf: &ArgMatches,
) -> anyhow::Result<(Vec<OsString>, Vec<String>)> {
    let chosen = find(command, path).context("the chosen command exists")?;
    let is_given = |arg: &Arg| {
        let source = leaf.value_source(arg.get_id().as_str());
        matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    };
    let (mut flags, mut ids) = (Vec::new(), Vec::new());
    for (key, value) in settings {
        let Some(arg) = settings_of(command, path)?.find(|arg| has(arg, key)) else { continue };
        let given = flags_of(key, value, arg)?;
        let excluded = chosen.get_arg_conflicts_with(arg).into_iter().any(is_given);
        if !excluded && !is_given(arg) {
            flags.extend(given);
            ids.push(arg.get_id().to_string());
        }
    }
    Ok((flags, ids))
}

/// A setting as flags.
fn flags_of(key: &str, value: &Value, arg: &Arg) -> anyhow::Result<Vec<OsString>> {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return match value {
            Value::Boolean(true) => Ok(vec![format!("--{key}").into()]),
            Value::Boolean(false) => Ok(Vec::new()),
            other => bail!("`{key}`: expected true or false, got {other}"),
        };
    }
    let text = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Ok(value.to_string()),
        other => bail!("`{key}`: expected a text or a number, got {other}"),
    };
    let texts = match (value, arg.get_action()) {
        (Value::Array(list), ArgAction::Append) => list.iter().map(text).collect(),
        (value, _) => text(value).map(|text| vec![text]),
    };
    Ok(texts?.into_iter().map(|text| format!("--{key}={text}").into()).collect())
}

/// Inserts flags behind the names of the chosen command.
fn insert(args: &[OsString], path: &[&str], flags: Vec<OsString>) -> Vec<OsString> {
    let mut names = path.iter();
    let mut at = 1;
    let mut name = names.next();
    while let Some(expected) = name
        && let Some(arg) = args.get(at)
    {
        if arg == expected {
            name = names.next();
        } else if ["--config", "--log-level", "--log-format"].iter().any(|flag| arg == flag) {
            at += 1; // Its value is the next argument, and may look like a command's name.
        }
        at += 1;
    }
    let (before, after) = args.split_at(at.min(args.len()));
    [before, &flags, after].concat()
}

/// The merged settings as TOML, with comments that name the source of each.
fn render<'a>(
    settings: impl Iterator<Item = &'a Arg>,
    matches: &ArgMatches,
    from_file: &[String],
) -> String {
    let mut text = String::new();
    for arg in settings {
        let id = arg.get_id().as_str();
        let name = arg.get_long().unwrap_or(id);
        let source = match matches.value_source(id) {
            _ if from_file.iter().any(|from_file| from_file == id) => "file",
            Some(ValueSource::CommandLine) => "flag",
            Some(ValueSource::EnvVariable) => "environment",
            _ => "default",
        };
        let line = match matches.get_raw(id) {
            None => format!("# {name} is not set"),
            Some(_) if arg.is_hide_env_values_set() => format!("# {name} is set, by {source}"),
            Some(values) => {
                let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
                format!("{name} = {} # {source}", value_of(arg, &values))
            }
        };
        text.push_str(&line);
        text.push('\n');
    }
    text
}

/// A value as it is written in a file.
fn value_of(arg: &Arg, values: &[std::borrow::Cow<'_, str>]) -> Value {
    let one = |text: &str| match text.parse::<i64>() {
        Ok(number) if number.to_string() == text => Value::Integer(number),
        _ => Value::String(text.to_owned()),
    };
    match (arg.get_action(), values) {
        (ArgAction::SetTrue, [value, ..]) => Value::Boolean(matches!(
            &*value.to_lowercase(),
            "true" | "1" | "yes" | "on" | "y" | "t"
        )),
        (ArgAction::Append, values) => {
            Value::Array(values.iter().map(|value| one(value)).collect())
        }
        (_, values) => one(values.last().map_or("", |value| value)),
    }
}
