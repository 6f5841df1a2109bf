//! Reads API keys from a file.

use std::io::Read;
use std::path::Path;

use anyhow::Context;

use super::{ApiKey, Secret};

/// Largest accepted file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads the keys of a file: a client's name and its key on each line.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<ApiKey>> {
    let cannot = || format!("cannot read the API keys in {}", path.display());
    let mut text = String::new();
    let file = std::fs::File::open(path).with_context(cannot)?;
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).with_context(cannot)?;
    anyhow::ensure!(
        text.len() as u64 <= MAX_FILE_BYTES,
        "{}: expected at most {MAX_FILE_BYTES} bytes",
        cannot()
    );
    parse(&text).map_err(anyhow::Error::msg).with_context(cannot)
}

/// Checks that a key can be sent in a header.
pub(super) fn check(key: &str) -> Result<(), String> {
    if !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err("expected a key of at least one letter, digit or sign of ASCII, without spaces".to_owned())
}

/// Errors name the line, but do not show it: it may contain a key.
fn parse(text: &str) -> Result<Vec<ApiKey>, String> {
    let mut keys = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        let (Some(name), Some(key), None) = (words.next(), words.next(), words.next()) else {
            return Err(format!("line {}: expected a name and a key", index + 1));
        };
        check(key).map_err(|message| format!("line {}: {message}", index + 1))?;
        keys.push(ApiKey { name: name.to_owned(), key: Secret::from(key.to_owned()) });
    }
    if keys.is_empty() { Err("expected at least one key, got none".to_owned()) } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: names and keys are read; a line that has another form is refused without showing it.
    #[test]
    fn keys_are_parsed() {
        let keys = parse("# clients\n\nada  key-1\nbob\tkey-2\n").expect("two keys");
        let names: Vec<&str> = keys.iter().map(|key| key.name.as_str()).collect();
        assert_eq!(names, ["ada", "bob"]);
        for bad in ["", "# none", "secret", "ada secret more", "ada s\u{e9}cret"] {
            let message = parse(bad).expect_err("not keys");
            assert!(message.contains("expected") && !message.contains("cret"), "{message}");
        }
        assert!(!format!("{keys:?}").contains("key-1"), "keys are not printed");
    }
}
