//! Reads API keys from a file.

use std::io::Read;
use std::path::Path;

use anyhow::Context;

use super::{ApiKey, KeyLimits, Secret};

/// Largest accepted file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads the keys of a file: on each line a client's name, its key, and limits that replace
/// `limits`.
///
/// # Errors
/// If the file cannot be read, has more than 1 MiB, or has a malformed line, which is named by its
/// number.
pub fn read(path: &Path, limits: KeyLimits) -> anyhow::Result<Vec<ApiKey>> {
    let cannot = || format!("cannot read the API keys in {}", path.display());
    let mut text = String::new();
    let file = std::fs::File::open(path).with_context(cannot)?;
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).with_context(cannot)?;
    anyhow::ensure!(
        text.len() as u64 <= MAX_FILE_BYTES,
        "{}: expected at most {MAX_FILE_BYTES} bytes",
        cannot()
    );
    parse(&text, limits).map_err(anyhow::Error::msg).with_context(cannot)
}

/// Checks that a key can be sent in a header.
///
/// # Errors
/// What is expected of a key.
pub fn check(key: &str) -> Result<(), String> {
    if !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err("expected a key of at least one letter, digit or sign of ASCII, without spaces".to_owned())
}

/// Errors name the line, but do not show it: it may contain a key.
fn parse(text: &str, limits: KeyLimits) -> Result<Vec<ApiKey>, String> {
    let mut keys = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        let in_line = |message: String| format!("line {}: {message}", index + 1);
        let (Some(name), Some(key)) = (words.next(), words.next()) else {
            return Err(in_line("expected a name and a key".to_owned()));
        };
        check(key).map_err(in_line)?;
        let limits = words.try_fold(limits, parse_limit).map_err(in_line)?;
        check_limits(limits).map_err(in_line)?;
        keys.push(ApiKey { name: name.to_owned(), key: Secret::from(key.to_owned()), limits });
    }
    if keys.is_empty() { Err("expected at least one key, got none".to_owned()) } else { Ok(keys) }
}

/// Adds a limit such as `max-running-tokens=8192`. Errors do not show the text: it may be a key.
fn parse_limit(limits: KeyLimits, text: &str) -> Result<KeyLimits, String> {
    let expected = "expected a name and a key, and then only max-running-tokens=N and \
                    max-queued-tokens=N, where N is a whole number, 1 or above";
    let number = text.split_once('=').and_then(|(_, number)| number.parse().ok());
    let number = number.filter(|&number: &usize| number > 0).ok_or(expected)?;
    match text.split_once('=') {
        Some(("max-running-tokens", _)) => Ok(KeyLimits { running_tokens: Some(number), ..limits }),
        Some(("max-queued-tokens", _)) => Ok(KeyLimits { queued_tokens: Some(number), ..limits }),
        _ => Err(expected.to_owned()),
    }
}

/// Requests wait only if those that run are limited.
fn check_limits(limits: KeyLimits) -> Result<(), String> {
    if limits.queued_tokens.is_some() && limits.running_tokens.is_none() {
        return Err("max-queued-tokens: expected max-running-tokens as well".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names and keys are read; a line that has another form is refused without showing it.
    #[test]
    fn keys_are_parsed() {
        let text = "# clients\n\nada  key-1\nbob\tkey-2 max-running-tokens=7\n";
        let keys = parse(text, KeyLimits::default()).expect("two keys");
        assert_eq!(keys[0].limits, KeyLimits::default());
        assert_eq!(keys[1].limits.running_tokens, Some(7));
        let names: Vec<&str> = keys.iter().map(|key| key.name.as_str()).collect();
        assert_eq!(names, ["ada", "bob"]);
        for bad in ["", "# none", "secret", "ada secret more", "ada s\u{e9}cret"] {
            let message = parse(bad, KeyLimits::default()).expect_err("not keys");
            assert!(message.contains("expected") && !message.contains("cret"), "{message}");
        }
        assert!(!format!("{keys:?}").contains("key-1"), "keys are not printed");
    }
}
