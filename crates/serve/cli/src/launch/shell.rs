//! A command and its environment as lines of a POSIX shell.

use std::borrow::Cow;
use std::ffi::OsString;

use super::agent::Setup;

/// The lines that set the environment and run the program. The value of `secret` is not shown: the
/// lines read it from the environment variable next to it.
pub(super) fn lines(
    setup: &Setup,
    secret: Option<(&str, &str)>,
    program: &str,
    arguments: impl Iterator<Item = OsString>,
) -> Vec<String> {
    let mut lines = Vec::new();
    if !setup.removed.is_empty() {
        lines.push(format!("unset {}", setup.removed.join(" ")));
    }
    for (name, value) in &setup.variables {
        let value = match secret {
            Some((secret, variable)) if value == secret => format!("\"${variable}\"").into(),
            _ => quoted(value),
        };
        lines.push(format!("export {name}={value}"));
    }
    if let Some((name, settings)) = &setup.settings {
        lines.push(format!("# {name} can name a file with these settings: {settings}"));
    }
    let arguments: Vec<OsString> = arguments.collect();
    let words = arguments.iter().map(|argument| argument.to_string_lossy());
    let words = words.map(|word| quoted(&word).into_owned());
    lines.push([program.to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" "));
    lines
}

/// A word as a shell reads it.
fn quoted(word: &str) -> Cow<'_, str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")).into(),
    }
}
