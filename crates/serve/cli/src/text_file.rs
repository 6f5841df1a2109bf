//! Texts in files and from standard input.

use std::fmt::Display;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::terminal;

/// Largest text that a command works on, such as a prompt, in bytes.
pub(crate) const MAX_BYTES: u64 = 64 << 20;
/// Time after which a command reports what it is waiting for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Reads a text of at most `bytes_max` bytes from a file.
pub(crate) fn read(path: &Path, bytes_max: u64) -> anyhow::Result<String> {
    let shown = path.display();
    ensure!(!path.is_dir(), "{shown}: expected a file, got a directory");
    let text = announced(&shown, || take(File::open(path)?, bytes_max));
    checked(text, &shown, bytes_max)
}

/// As [`read`], or from standard input if the path is `-`, up to [`MAX_BYTES`].
pub(crate) fn read_or_stdin(path: &Path) -> anyhow::Result<String> {
    if path != Path::new("-") {
        return read(path, MAX_BYTES);
    }
    let shown = "standard input";
    checked(announced(shown, || take(io::stdin(), MAX_BYTES)), shown, MAX_BYTES)
}

/// Refuses everything but a regular file: opening a pipe would wait for its other end.
pub(crate) fn regular(path: &Path) -> anyhow::Result<Metadata> {
    let metadata = path.metadata().with_context(|| format!("cannot open {}", path.display()))?;
    ensure!(metadata.is_file(), "{}: expected a regular file", path.display());
    Ok(metadata)
}

/// Runs `read`. If that takes longer than a second, for example because the file `name` is a pipe to
/// which nothing is written, standard error says what it is waiting for.
pub(crate) fn announced<T>(name: impl Display, read: impl FnOnce() -> T) -> T {
    let (reading, has_ended) = mpsc::channel::<()>();
    let name = name.to_string();
    let announce = move || {
        if has_ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            terminal::warn(format!("waiting for {name}"));
        }
    };
    // If no thread can be started, no message is printed.
    let _ = thread::Builder::new().spawn(announce);
    let result = read();
    drop(reading);
    result
}

/// Reads one byte more than allowed, so that a longer text is noticed.
fn take(source: impl Read, bytes_max: u64) -> io::Result<String> {
    let mut text = String::new();
    source.take(bytes_max + 1).read_to_string(&mut text)?;
    Ok(text)
}

fn checked(text: io::Result<String>, name: impl Display, bytes_max: u64) -> anyhow::Result<String> {
    let text = text.with_context(|| format!("cannot read {name}"))?;
    ensure!(text.len() as u64 <= bytes_max, "{name}: expected at most {bytes_max} bytes");
    Ok(text)
}
