//! Images in files.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::text_file::{MAX_BYTES, regular};

/// The file as a part of a message.
pub(crate) fn part(path: &Path) -> anyhow::Result<Value> {
    // The engine recognizes the type of the file by its content, not by this URL.
    let url = format!("data:image/png;base64,{}", STANDARD.encode(read(path)?));
    Ok(json!({"type": "image_url", "image_url": {"url": url}}))
}

/// Reads a file of at most [`MAX_BYTES`]. The engine decodes it.
pub(crate) fn read(path: &Path) -> anyhow::Result<Arc<[u8]>> {
    let (shown, size) = (path.display(), regular(path)?.len());
    ensure!(size <= MAX_BYTES, "{shown}: expected at most {MAX_BYTES} bytes, got {size}");
    Ok(fs::read(path).with_context(|| format!("cannot read {shown}"))?.into())
}
