//! Opens and reads the files of a model. Only regular files are opened, and small files are read
//! up to a maximum size, so that no file can block the loader or fill the memory.

use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::path::Path;

use serde_json::Value;

use crate::error::ModelError;

/// Maximum size in bytes of a JSON file other than `tokenizer.json`. The largest known one, the
/// index of a model in 163 files, has 9 MB.
pub(crate) const JSON_BYTES_MAX: u64 = 16 << 20;
/// Maximum size in bytes of `tokenizer.json`. The largest known ones have 35 MB.
pub(crate) const TOKENIZER_BYTES_MAX: u64 = 128 << 20;
/// Maximum size in bytes of a chat template. Known ones have up to 20 kB.
pub(crate) const TEMPLATE_BYTES_MAX: u64 = 1 << 20;

/// Opens the file `path` for reading. Symbolic links are followed, because the hub's cache consists
/// of them.
///
/// # Errors
/// [`ModelError::Io`] if the file cannot be opened or is not a regular file.
pub(crate) fn open(path: &Path) -> Result<File, ModelError> {
    let io = |error| ModelError::Io { path: path.to_owned(), error };
    let check = |metadata: std::fs::Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(Error::other("expected a regular file")),
    };
    // Opening a pipe blocks until there is a writer, so the type is checked before.
    std::fs::metadata(path).and_then(check).map_err(io)?;
    let file = File::open(path).map_err(io)?;
    file.metadata().and_then(check).map_err(io)?;
    Ok(file)
}

/// Reads the file `path` of at most `bytes_max` bytes.
///
/// # Errors
/// [`ModelError::Io`], and [`ModelError::TooLarge`] for a larger file.
pub(crate) fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>, ModelError> {
    let io = |error| ModelError::Io { path: path.to_owned(), error };
    let too_large = || ModelError::TooLarge { file: path.display().to_string(), bytes_max };
    let file = open(path)?;
    let size = file.metadata().map_err(io)?.len();
    if size > bytes_max {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(size as usize);
    // The file may grow while it is read.
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > bytes_max {
        return Err(too_large());
    }
    Ok(bytes)
}

/// Reads and parses a JSON file of at most [`JSON_BYTES_MAX`] bytes. The numbers `Infinity`,
/// `-Infinity` and `NaN`, which Python writes but JSON does not have, become strings.
pub(crate) fn read_json(path: &Path) -> Result<Value, ModelError> {
    let bytes = read(path, JSON_BYTES_MAX)?;
    let parsed = match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(value),
        // This is done only after an error, because few files have such numbers.
        Err(error) => serde_json::from_slice(&with_strings(&bytes)).map_err(|_| error),
    };
    parsed.map_err(|e| ModelError::malformed(path.display().to_string(), e))
}

/// Replaces numbers that JSON does not have in `bytes` with strings. Where a number is expected, a
/// string is refused with the name of its key. Null would count as a missing key instead.
fn with_strings(bytes: &[u8]) -> Vec<u8> {
    let numbers: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let mut out = Vec::with_capacity(bytes.len());
    let (mut rest, mut in_string) = (bytes, false);
    while let [first, after @ ..] = rest {
        if let Some(number) = numbers.iter().find(|number| !in_string && rest.starts_with(number)) {
            out.push(b'"');
            out.extend_from_slice(number);
            out.push(b'"');
            rest = &rest[number.len()..];
            continue;
        }
        out.push(*first);
        rest = after;
        match (first, in_string, after) {
            (b'"', ..) => in_string = !in_string,
            (b'\\', true, [escaped, after @ ..]) => {
                out.push(*escaped);
                rest = after;
            }
            _ => {}
        }
    }
    out
}

/// Converts the result of reading a file: `None` if the file does not exist.
pub(crate) fn optional<T>(result: Result<T, ModelError>) -> Result<Option<T>, ModelError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ModelError::Io { error, .. }) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Goal: numbers that JSON does not have become strings, except inside strings, and the error
    /// about any other file is the error about its original content.
    #[test]
    fn numbers_of_python_are_strings() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.json");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("a file");
            read_json(&path)
        };
        let text = r#"{"limit": [0.0, Infinity, -Infinity,NaN], "NaN": "a \" NaN \\", "b": NaN}"#;
        let expected = json!({
            "limit": [0.0, "Infinity", "-Infinity", "NaN"], "NaN": "a \" NaN \\", "b": "NaN",
        });
        assert_eq!(read(text).expect("JSON"), expected);
        for (text, place) in [("{\"a\": NaN, ]", "column 7"), ("", "line 1"), ("\"\\", "line 1")] {
            let error = read(text).expect_err("not JSON").to_string();
            assert!(error.contains("config.json") && error.contains(place), "{error}");
        }
    }
}
