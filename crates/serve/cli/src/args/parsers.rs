//! Parsers of the values of flags.

use stolon::EmbeddingSizes;

/// Parses `any` or a list of sizes.
pub(super) fn parse_embedding_sizes(text: &str) -> Result<EmbeddingSizes, String> {
    if text == "any" {
        return Ok(EmbeddingSizes::Any);
    }
    let size = |size: &str| size.trim().parse().ok().filter(|&size: &usize| size > 0);
    let sizes: Option<Vec<usize>> = text.split(',').map(size).collect();
    let sizes = sizes.ok_or_else(|| "expected `any` or whole numbers with commas".to_owned())?;
    Ok(EmbeddingSizes::Listed(sizes))
}

pub(super) fn parse_json(text: &str) -> Result<serde_json::Value, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object, got {error}"))
}
