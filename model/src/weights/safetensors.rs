//! Safetensors: one file's header, and the index of a model that is split over several.
//!
//! The header's JSON is read by the `safetensors` crate; every range is checked here against
//! the file, so that no later access can be out of bounds.

use std::collections::BTreeSet;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata};
use serde_json::Value;

use super::{Bytes, Stored, TensorType, Weights};
use crate::error::ModelError;

/// Bytes before the header: its length.
const PREFIX: u64 = 8;
/// Longest header, as in the format's own implementation.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The name of the index of a split model.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The name of a model in one file.
pub(crate) const SINGLE: &str = "model.safetensors";

/// Adds one file's tensors to `weights`.
pub(super) fn add(weights: &mut Weights, file: &str, bytes: Bytes) -> Result<(), ModelError> {
    let (data_start, metadata) = header(file, &bytes)?;
    let file_bytes = bytes.len() as u64;
    let region = weights.add_region(file, bytes);
    // In the order of the data, so that what is wrong first is named first.
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let what = || format!("tensor `{name}`");
        let (start, end) = info.data_offsets;
        let overflow = || ModelError::malformed(file, format!("{}: size overflows", what()));
        let start = data_start.checked_add(start as u64).ok_or_else(overflow)?;
        let end = data_start.checked_add(end as u64).ok_or_else(overflow)?;
        if end > file_bytes {
            return Err(ModelError::Truncated {
                file: file.into(),
                what: what(),
                expected: end,
                got: file_bytes,
            });
        }
        let dtype = match info.dtype {
            Dtype::F32 => Ok(TensorType::F32),
            Dtype::F16 => Ok(TensorType::F16),
            Dtype::BF16 => Ok(TensorType::Bf16),
            other => Err(format!("{other:?}")),
        };
        let elements =
            info.shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d)).ok_or_else(overflow)?;
        if let Ok(dtype) = dtype {
            let expected = dtype.bytes_of(elements).ok_or_else(overflow)? as u64;
            if start > end || expected != end - start {
                return Err(ModelError::malformed(
                    file,
                    format!(
                        "{}: {} {:?} takes {expected} bytes, its range is {start}..{end}",
                        what(),
                        dtype.name(),
                        info.shape
                    ),
                ));
            }
        } else if start > end {
            return Err(ModelError::malformed(file, format!("{}: negative size", what())));
        }
        weights.insert(
            canonical_name(&name),
            Stored {
                region,
                dtype,
                shape: info.shape.clone(),
                range: start as usize..end as usize,
                paired_heads: None,
            },
        )?;
    }
    let data_end = data_start.saturating_add(metadata.data_len() as u64);
    if data_end != file_bytes {
        return Err(ModelError::malformed(
            file,
            format!("expected the tensors to end with the file at {file_bytes}, got {data_end}"),
        ));
    }
    Ok(())
}

/// Where the data starts, and the header.
fn header(file: &str, bytes: &[u8]) -> Result<(u64, Metadata), ModelError> {
    let got = bytes.len() as u64;
    let truncated = |what: &str, expected| ModelError::Truncated {
        file: file.into(),
        what: what.into(),
        expected,
        got,
    };
    let Some(prefix) = bytes.first_chunk::<8>() else {
        return Err(truncated("the header's length", PREFIX));
    };
    let header_bytes = u64::from_le_bytes(*prefix);
    if header_bytes > HEADER_BYTES_MAX {
        let expected = format!("expected a header of at most {HEADER_BYTES_MAX} bytes");
        return Err(ModelError::malformed(
            file,
            format!("no safetensors file: {expected}, got {header_bytes}"),
        ));
    }
    let data_start = PREFIX + header_bytes;
    let Some(header) = bytes.get(PREFIX as usize..data_start as usize) else {
        return Err(truncated("the header", data_start));
    };
    let metadata = serde_json::from_slice(header)
        .map_err(|e| ModelError::malformed(file, format!("header: {e}")))?;
    Ok((data_start, metadata))
}

/// The file names an index lists, sorted.
///
/// # Errors
/// [`ModelError::Malformed`] when it is no index, or lists a name that is no plain file name.
pub(crate) fn shards(file: &str, index: &Value) -> Result<Vec<String>, ModelError> {
    let map = index.get("weight_map").and_then(Value::as_object).ok_or_else(|| {
        ModelError::malformed(file, "expected an object `weight_map` of tensor name to file name")
    })?;
    let mut names = BTreeSet::new();
    for (tensor, shard) in map {
        let plain = shard.as_str().filter(|name| {
            let mut parts = Path::new(name).components();
            matches!(parts.next(), Some(std::path::Component::Normal(_)))
                && parts.next().is_none()
                && !name.contains(['\\', '/', ':'])
        });
        let Some(name) = plain else {
            return Err(ModelError::malformed(
                file,
                format!("`weight_map`, `{tensor}`: expected a file name, got {shard}"),
            ));
        };
        names.insert(name.to_owned());
    }
    if names.is_empty() {
        return Err(ModelError::malformed(file, "`weight_map`: expected entries, got none"));
    }
    Ok(names.into_iter().collect())
}

/// Checks that every tensor of the index came from the file that it names.
pub(super) fn check_index(weights: &Weights, index: &Value, dir: &Path) -> Result<(), ModelError> {
    let map = index.get("weight_map").and_then(Value::as_object);
    for (tensor, shard) in map.into_iter().flatten() {
        if !weights.contains(&canonical_name(tensor)) {
            let shard = dir.join(shard.as_str().unwrap_or_default());
            return Err(ModelError::malformed(
                shard.display().to_string(),
                format!("tensor `{tensor}`: the index says it is in this file, it is not"),
            ));
        }
    }
    Ok(())
}

/// The name under which the decoder asks for a tensor: models saved without their head lack the
/// `model.` in front, multimodal ones have more in front.
fn canonical_name(name: &str) -> String {
    if let Some(rest) = name.strip_prefix("model.language_model.") {
        return format!("model.{rest}");
    }
    let name = name.strip_prefix("language_model.").unwrap_or(name);
    if ["layers.", "embed_tokens.", "norm."].iter().any(|start| name.starts_with(start)) {
        return format!("model.{name}");
    }
    name.to_owned()
}
