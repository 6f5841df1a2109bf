//! The models of a server of several, each with settings of its own on top of those of all.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, anyhow, bail, ensure};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use toml::{Table, Value};

use super::{ENGINE, flags_of, has, is_setting};
use crate::args::EngineArgs;
use crate::memory::parse_bytes;
use crate::serve::models::{NamedModel, check_name, named};

/// The key of the file for the list of models.
pub(super) const KEY: &str = "models";
/// Clap's id of the flag for a model.
const MODEL: &str = "model";
/// Clap's id of the flag for the directory of KV, in which each model has a folder.
const KV_CACHE_DIR: &str = "kv_cache_dir";
/// Flags that belong to one model.
const OF_ONE_MODEL: [&str; 4] = ["lora_modules", "mmproj", "draft_model", "mtp"];

/// Lets `--model` be repeated.
pub(super) fn repeated(command: Command) -> Command {
    command.mut_arg(MODEL, |arg| arg.action(ArgAction::Append))
}

/// The models that the command line or the file names; none if there is one without a name.
pub(super) fn models(
    serve: &Command,
    matches: &ArgMatches,
    settings: &Table,
    model_in_file: bool,
) -> anyhow::Result<Vec<NamedModel>> {
    let listed = listed(settings)?;
    let is_given = !matches!(matches.value_source(MODEL), None | Some(ValueSource::DefaultValue));
    let texts: Vec<&String> =
        matches.get_many::<String>(MODEL).into_iter().flatten().filter(|_| is_given).collect();
    ensure!(
        listed.is_empty() || !model_in_file,
        "expected one of `model` and `[[{KEY}]]` in the file, got both"
    );
    if texts.is_empty() {
        let models = listed.iter().map(|own| named_model(serve, matches, None, own));
        return models.collect();
    }
    let names: Vec<_> = texts.iter().filter_map(|text| named(text)).collect();
    if names.is_empty() && texts.len() == 1 {
        return Ok(Vec::new());
    }
    ensure!(
        names.len() == texts.len(),
        "--model: expected NAME=SOURCE for each of several models, got `{}`",
        texts.iter().find(|text| named(text).is_none()).map_or("", |text| text.as_str())
    );
    let models = names.into_iter().map(|(name, source)| {
        let has_name = |own: &&Table| own.get("name").and_then(Value::as_str) == Some(name);
        let mut own = listed.iter().find(has_name).cloned().unwrap_or_default();
        own.insert("name".to_owned(), Value::String(name.to_owned()));
        named_model(serve, matches, Some(source), &own)
    });
    models.collect()
}

/// The tables of `[[models]]`.
fn listed(settings: &Table) -> anyhow::Result<Vec<Table>> {
    let table = |value: &Value| match value {
        Value::Table(table) => Ok(table.clone()),
        other => bail!("`{KEY}`: expected tables ([[{KEY}]]), got {other}"),
    };
    match settings.get(KEY) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(table).collect(),
        Some(other) => bail!("`{KEY}`: expected a list of tables ([[{KEY}]]), got {other}"),
    }
}

/// The tables of `[[models]]` as TOML; empty if there are none.
pub(super) fn render(settings: &Table) -> anyhow::Result<String> {
    let listed = listed(settings)?;
    if listed.is_empty() {
        return Ok(String::new());
    }
    let models = listed.into_iter().map(Value::Table).collect();
    let table = Table::from_iter([(KEY.to_owned(), Value::Array(models))]);
    Ok(format!("\n{}", toml::to_string(&table)?))
}

/// One model: the settings of all, and its own, which take precedence.
fn named_model(
    serve: &Command,
    matches: &ArgMatches,
    source: Option<&str>,
    own: &Table,
) -> anyhow::Result<NamedModel> {
    let text = |key: &str| own.get(key).and_then(Value::as_str);
    let name = text("name").with_context(|| format!("[[{KEY}]]: expected a `name`"))?.to_owned();
    check_name(&name)?;
    let of_model = || format!("the model `{name}`");
    let source =
        source.or(text(MODEL)).with_context(|| format!("{}: expected `model`", of_model()));
    let switch = |key: &str| match own.get(key) {
        None => Ok(false),
        Some(Value::Boolean(on)) => Ok(*on),
        Some(other) => bail!("{}: `{key}`: expected true or false, got {other}", of_model()),
    };
    let memory = match own.get("memory") {
        None => None,
        Some(Value::String(text)) => Some(parse_bytes(text)),
        Some(other) => Some(parse_bytes(&other.to_string())),
    };
    let memory = memory.transpose().map_err(|error| anyhow!("{}: {error}", of_model()))?;

    let mut flags: Vec<OsString> = vec![format!("--model={}", source?).into()];
    let mut own_args = Vec::new();
    for (key, value) in own {
        if ["name", MODEL, "pinned", "at-start", "memory"].contains(&key.as_str()) {
            continue;
        }
        let arg = engine_settings(serve).find(|arg| has(arg, key));
        let arg = arg.with_context(|| format!("{}: there is no setting `{key}`", of_model()))?;
        flags.extend(flags_of(key, value, arg).with_context(of_model)?);
        own_args.push(arg);
    }
    let mut directory = None;
    for arg in engine_settings(serve).filter(|arg| is_set(matches, arg)) {
        let id = arg.get_id();
        let is_own = |own: &&Arg| own.get_id() == id || excludes(serve, own, arg);
        if id.as_str() == MODEL || own_args.iter().any(is_own) {
            continue;
        }
        let flag = arg.get_long().unwrap_or_default();
        ensure!(
            !OF_ONE_MODEL.contains(&id.as_str()),
            "--{flag} belongs to one model: set `{flag}` in its [[{KEY}]]"
        );
        if id.as_str() == KV_CACHE_DIR {
            directory = matches.get_one::<PathBuf>(KV_CACHE_DIR).map(|all| all.join(&name));
            continue;
        }
        let values = matches.get_raw(id.as_str()).into_iter().flatten();
        flags.extend(values.map(|value| {
            let mut text = OsString::from(format!("--{flag}"));
            if !matches!(arg.get_action(), ArgAction::SetTrue) {
                text.push("=");
                text.push(value);
            }
            text
        }));
    }
    if let Some(directory) = directory {
        let mut text = OsString::from("--kv-cache-dir=");
        text.push(directory);
        flags.push(text);
    }
    let command = EngineArgs::augment_args(Command::new(KEY).no_binary_name(true));
    let parsed = command.try_get_matches_from(flags);
    let parsed = parsed.map_err(|error| anyhow!("{}: {}", of_model(), error.render()))?;
    let engine = EngineArgs::from_arg_matches(&parsed)?;
    let (pinned, at_start) = (switch("pinned")?, switch("at-start")?);
    Ok(NamedModel { engine, pinned, at_start, memory, name })
}

/// The settings of an engine.
fn engine_settings(serve: &Command) -> impl Iterator<Item = &Arg> {
    let args = serve.get_arguments();
    args.filter(|arg| arg.get_help_heading() == Some(ENGINE) && is_setting(&[super::SERVE], arg))
}

/// Whether the command line, the environment or the file sets it.
fn is_set(matches: &ArgMatches, arg: &Arg) -> bool {
    let source = matches.value_source(arg.get_id().as_str());
    matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
}

fn excludes(serve: &Command, one: &Arg, other: &Arg) -> bool {
    serve.get_arg_conflicts_with(one).iter().any(|it| it.get_id() == other.get_id())
        || serve.get_arg_conflicts_with(other).iter().any(|it| it.get_id() == one.get_id())
}
