//! The commands of a conversation: lines that begin with a slash.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Arg, Args, FromArgMatches};

use crate::args::SamplingArgs;

pub(super) const HELP: &str = "\
/help              shows this
/image FILE        adds an image to the next message
/system [TEXT]     shows the system prompt, or replaces it; `/system -` removes it
/set [NAME VALUE]  shows what sampling flags are set, or sets one: /set temperature 0.7
/save FILE         writes the conversation: as JSON if FILE ends with .json, else as Markdown
/reset             starts a new conversation
/cache             shows what of the conversation is cached
/stats             shows the prefix cache
/quit              exits, as Ctrl-D and Ctrl-C twice do
Ctrl-C stops an answer. A line goes on after \\ at its end; \"\"\" begins and ends a message of several
lines.";

/// The meaning of a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command<'a> {
    Help,
    Quit,
    Reset,
    Cache,
    Stats,
    /// Show the system prompt, or replace it.
    System(Option<&'a str>),
    /// Show the sampling flags, or set one to a value, which is empty for a switch.
    Set(Option<(&'a str, &'a str)>),
    Save(PathBuf),
    /// Add an image to the next message.
    Image(PathBuf),
    /// The text of a message for the model.
    Say(&'a str),
    Unknown(&'a str),
}

impl<'a> Command<'a> {
    pub(super) fn parse(line: &'a str) -> Self {
        let line = line.trim();
        if !line.starts_with('/') {
            return Self::Say(line);
        }
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = Some(rest.trim()).filter(|rest| !rest.is_empty());
        match (name, rest) {
            ("/help" | "/?", None) => Self::Help,
            ("/quit" | "/exit" | "/bye", None) => Self::Quit,
            ("/reset" | "/clear", None) => Self::Reset,
            ("/cache", None) => Self::Cache,
            ("/stats", None) => Self::Stats,
            ("/system", text) => Self::System(text),
            ("/set", None) => Self::Set(None),
            ("/set", Some(pair)) => {
                let (name, value) = pair.split_once([' ', '=']).unwrap_or((pair, ""));
                Self::Set(Some((name, value.trim())))
            }
            ("/save", Some(file)) => Self::Save(file.into()),
            ("/image", Some(file)) => Self::Image(file.into()),
            _ => Self::Unknown(line),
        }
    }
}

/// The sampling flags as a separate clap command.
fn flags() -> clap::Command {
    let command = clap::Command::new("set").no_binary_name(true).disable_help_flag(true);
    SamplingArgs::augment_args(command)
}

/// Sets one sampling flag, with the checks of the command line.
///
/// # Errors
/// An unknown name or a wrong value, with what was expected.
pub(super) fn set(sampling: &mut SamplingArgs, name: &str, value: &str) -> anyhow::Result<()> {
    let name = name.trim_start_matches('-').replace('_', "-");
    let command = flags();
    let names: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
    if !names.contains(&name.as_str()) {
        anyhow::bail!("expected one of {}; got `{name}`", names.join(", "));
    }
    let flag = format!("--{name}");
    let words = if value.is_empty() { vec![flag] } else { vec![format!("{flag}={value}")] };
    let matches = command.try_get_matches_from(words);
    let matches = matches.map_err(|error| anyhow::anyhow!(first_line(&error)))?;
    // If a switch is absent, the matches say that it is off.
    let ignore_eos = sampling.ignore_eos;
    if ["json-schema", "regex", "grammar"].contains(&name.as_str()) {
        // They exclude each other, and the last one wins.
        sampling.json_schema = None;
        sampling.regex = None;
        sampling.grammar = None;
    }
    sampling.update_from_arg_matches(&matches).context("cannot set it")?;
    sampling.ignore_eos |= ignore_eos;
    Ok(())
}

/// The error without clap's hints about a command line.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// The sampling flags that are set, as `name value`.
pub(super) fn shown(sampling: &SamplingArgs) -> Vec<String> {
    let SamplingArgs {
        max_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        seed,
        logit_bias,
        stop,
        stop_id,
        ignore_eos,
        end_repetition,
        json_schema,
        regex,
        grammar,
        lora,
    } = sampling;
    let entry = |name: &str, value: Option<String>| value.map(|value| format!("{name} {value}"));
    let text = |value: &Option<f32>| value.map(|value| value.to_string());
    [
        entry("max-tokens", max_tokens.map(|value| value.to_string())),
        entry("temperature", text(temperature)),
        entry("top-k", top_k.map(|value| value.to_string())),
        entry("top-p", text(top_p)),
        entry("min-p", text(min_p)),
        entry("repetition-penalty", text(repetition_penalty)),
        entry("presence-penalty", text(presence_penalty)),
        entry("frequency-penalty", text(frequency_penalty)),
        entry("seed", seed.map(|value| value.to_string())),
        (!logit_bias.is_empty()).then(|| format!("logit-bias {logit_bias:?}")),
        (!stop.is_empty()).then(|| format!("stop {stop:?}")),
        (!stop_id.is_empty()).then(|| format!("stop-id {stop_id:?}")),
        ignore_eos.then(|| "ignore-eos".to_owned()),
        entry("end-repetition", end_repetition.map(|value| value.to_string())),
        (json_schema.is_some() || regex.is_some() || grammar.is_some())
            .then(|| "a grammar".to_owned()),
        entry("lora", lora.clone()),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: lines are taken apart; a message that only contains a slash is one.
    #[test]
    fn lines_are_parsed() {
        for (line, expected) in [
            (" hello /help ", Command::Say("hello /help")),
            ("/help", Command::Help),
            ("/help me", Command::Unknown("/help me")),
            ("/system", Command::System(None)),
            ("/system Be\nbrief.", Command::System(Some("Be\nbrief."))),
            ("/set top_p=0.9", Command::Set(Some(("top_p", "0.9")))),
            ("/set ignore-eos", Command::Set(Some(("ignore-eos", "")))),
            ("/save a b.md", Command::Save("a b.md".into())),
            ("/save", Command::Unknown("/save")),
        ] {
            assert_eq!(Command::parse(line), expected, "{line:?}");
        }
    }

    /// Goal: `/set` takes the names of the flags and checks as they do; other flags stay as they
    /// are.
    #[test]
    fn flags_are_set_one_by_one() {
        let matches = flags().try_get_matches_from(["--seed", "7"]).expect("valid");
        let mut sampling = SamplingArgs::from_arg_matches(&matches).expect("valid");
        set(&mut sampling, "temperature", "0.5").expect("valid");
        set(&mut sampling, "top_k", "40").expect("valid");
        assert_eq!(shown(&sampling), ["temperature 0.5", "top-k 40", "seed 7"]);
        for (name, value, expected) in [
            ("temprature", "1", "expected one of max-tokens, temperature"),
            ("temperature", "hot", "invalid value 'hot'"),
            ("top-k", "", "value"),
        ] {
            let error = set(&mut sampling, name, value).expect_err(name).to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(shown(&sampling), ["temperature 0.5", "top-k 40", "seed 7"]);
    }

    /// Goal: of the flags that restrict the answer, the last one that was set applies; a wrong value
    /// leaves the one before.
    #[test]
    fn the_last_grammar_applies() {
        let matches = flags().try_get_matches_from(["--seed", "7"]).expect("valid");
        let mut sampling = SamplingArgs::from_arg_matches(&matches).expect("valid");
        let has = |it: &SamplingArgs| [it.json_schema.is_some(), it.regex.is_some()];
        set(&mut sampling, "json-schema", r#"{"type": "object"}"#).expect("valid");
        assert_eq!(has(&sampling), [true, false]);
        set(&mut sampling, "regex", "[a-z]+").expect("valid");
        assert_eq!(has(&sampling), [false, true]);
        set(&mut sampling, "json-schema", "{").expect_err("refused");
        assert_eq!(has(&sampling), [false, true]);
        assert_eq!(shown(&sampling), ["seed 7", "a grammar"]);
    }
}
