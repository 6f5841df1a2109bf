//! Images in files.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};

use crate::text_file::{MAX_BYTES, regular};

/// Reads a file of at most [`MAX_BYTES`]. The engine decodes it.
pub(crate) fn read(path: &Path) -> anyhow::Result<Arc<[u8]>> {
    let (shown, size) = (path.display(), regular(path)?.len());
    ensure!(size <= MAX_BYTES, "{shown}: expected at most {MAX_BYTES} bytes, got {size}");
    Ok(fs::read(path).with_context(|| format!("cannot read {shown}"))?.into())
}
