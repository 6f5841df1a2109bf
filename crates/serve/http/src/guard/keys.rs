//! The clients' API keys: the keys and their limits, the set that a server accepts, and the file
//! with keys.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use stolon::Quota;
use subtle::ConstantTimeEq;

/// A key that is never printed.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// Compares in a time that depends on the lengths only.
    pub(crate) fn matches(&self, given: &str) -> bool {
        self.0.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

impl From<String> for Secret {
    fn from(key: String) -> Self {
        Self(key)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Limits of one API key, in tokens of prompts and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Maximum number of tokens of requests that run at the same time, at least 1. Further requests
    /// wait, and requests with other keys are admitted before them. `None` for no limit.
    pub running_tokens: Option<usize>,
    /// Maximum number of tokens of requests that wait for [`KeyLimits::running_tokens`]. Further
    /// requests are refused, unless none waits. `None` for no limit.
    pub queued_tokens: Option<usize>,
}

/// A key of a client.
#[derive(Clone, Debug)]
pub struct ApiKey {
    /// The client's name. Several keys may have the same name.
    pub name: String,
    /// The key that the client sends as `Authorization: Bearer KEY`.
    pub key: Secret,
    /// Limits of the requests with this key together.
    pub limits: KeyLimits,
}

/// The keys that a server accepts. Clones are the same set, which can be replaced while the server
/// runs.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys(Arc<ArcSwap<Vec<Arc<AcceptedKey>>>>);

/// A key in use.
#[derive(Debug)]
pub(crate) struct AcceptedKey {
    key: ApiKey,
    /// The quota that its requests share, if it has limits.
    pub(crate) quota: Option<Quota>,
}

impl AcceptedKey {
    /// The client's name.
    pub(crate) fn name(&self) -> &str {
        &self.key.name
    }
}

impl From<Vec<ApiKey>> for ApiKeys {
    fn from(keys: Vec<ApiKey>) -> Self {
        let new = Self::default();
        new.replace(keys);
        new
    }
}

impl ApiKeys {
    /// Accepts these keys from now on and no others. Running requests continue. They still count
    /// toward their key's quota if the key, its name and its limits stay the same.
    pub fn replace(&self, keys: Vec<ApiKey>) {
        let before = self.0.load();
        let accept = |key: ApiKey| {
            let same = before.iter().find(|old| {
                (&old.key.name, &old.key.key.0, old.key.limits)
                    == (&key.name, &key.key.0, key.limits)
            });
            if let Some(same) = same {
                return Arc::clone(same);
            }
            let KeyLimits { running_tokens, queued_tokens } = key.limits;
            let quota = running_tokens.map(|running| Quota::new(running, queued_tokens));
            Arc::new(AcceptedKey { key, quota })
        };
        self.0.store(Arc::new(keys.into_iter().map(accept).collect()));
    }

    /// Whether there are none, so that everybody may use the model.
    pub fn is_empty(&self) -> bool {
        self.0.load().is_empty()
    }

    /// Whether one of the keys has this name.
    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.0.load().iter().any(|accepted| accepted.name() == name)
    }

    /// Finds the key that a client has sent. All keys are compared, so that the time does not
    /// reveal which one is similar.
    pub(crate) fn find(&self, given: &str) -> Option<Arc<AcceptedKey>> {
        let keys = self.0.load();
        let matching = keys.iter().fold(None, |found, accepted| {
            if accepted.key.key.matches(given) { Some(accepted) } else { found }
        });
        matching.cloned()
    }
}

/// Why a file of API keys cannot be used. The text shows no key.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the API keys in {}: {reason}", path.display())]
pub struct KeyFileError {
    path: PathBuf,
    reason: String,
}

/// Largest accepted file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads the keys of a file: on each line a client's name, its key, and limits that replace
/// `limits`.
///
/// # Errors
/// If the file cannot be read, has more than 1 MiB, or has a malformed line, which is named by its
/// number.
pub fn read(path: &Path, limits: KeyLimits) -> Result<Vec<ApiKey>, KeyFileError> {
    let keys = read_text(path).and_then(|text| parse(&text, limits));
    keys.map_err(|reason| KeyFileError { path: path.to_owned(), reason })
}

fn read_text(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    let read = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text);
    read.map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("expected at most {MAX_FILE_BYTES} bytes"));
    }
    Ok(text)
}

/// Checks that a key can be sent in a header.
///
/// # Errors
/// The form that is expected of a key.
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

/// Checks that a limit of waiting tokens comes with one of running tokens: without the latter, no
/// request waits.
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
