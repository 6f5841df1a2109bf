//! Reads the files that flags of the engine name.

use std::path::Path;

use anyhow::Context;

use crate::text_file;

/// Largest chat template, in bytes.
const MAX_TEMPLATE_BYTES: u64 = 256 << 10;
/// Largest file with the key of namespaces, in bytes.
const MAX_KEY_BYTES: u64 = 1024;

/// Reads a chat template.
pub(super) fn read_template(path: &Path) -> anyhow::Result<String> {
    text_file::read(path, MAX_TEMPLATE_BYTES).context("--chat-template")
}

/// Reads the key of namespaces.
pub(super) fn read_namespace_key(path: &Path) -> anyhow::Result<[u8; 32]> {
    let shown = path.display();
    let text = text_file::read(path, MAX_KEY_BYTES).context("--namespace-key-file")?;
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
