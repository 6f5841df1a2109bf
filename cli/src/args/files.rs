//! Reads the files that flags of the engine name.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use anyhow::Context;

/// Largest chat template, in bytes.
const MAX_TEMPLATE_BYTES: u64 = 256 << 10;

/// Reads a chat template.
pub(super) fn read_template(path: &Path) -> anyhow::Result<String> {
    let read = || {
        let mut text = String::new();
        // One byte more than allowed, so that the engine refuses a file that is too long.
        let file = File::open(path)?.take(MAX_TEMPLATE_BYTES + 1);
        BufReader::new(file).read_to_string(&mut text)?;
        std::io::Result::Ok(text)
    };
    let shown = path.display();
    anyhow::ensure!(!path.is_dir(), "--chat-template: expected a file, got the directory {shown}");
    read().with_context(|| format!("--chat-template: cannot read {shown}"))
}

/// Reads the key of namespaces.
pub(super) fn read_namespace_key(path: &Path) -> anyhow::Result<[u8; 32]> {
    let shown = path.display();
    let read = || {
        let mut text = String::new();
        File::open(path)?.take(1024).read_to_string(&mut text)?;
        std::io::Result::Ok(text)
    };
    let text = read().with_context(|| format!("--namespace-key-file: cannot read {shown}"))?;
    let digits = text.trim();
    let is_key = digits.len() == 64 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    // The content of the file is not shown: it may be a key.
    anyhow::ensure!(
        is_key,
        "--namespace-key-file: expected 64 hexadecimal digits in {shown}, got something else"
    );
    let mut key = [0; 32];
    for (byte, pair) in key.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair)?, 16)?;
    }
    Ok(key)
}
