//! Reads safetensors files: the header of a file, and the index of a model that is split into
//! several files.
//!
//! The crate `safetensors` parses the JSON of the header. This file checks that every range is
//! inside the file, so no later access is out of bounds.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde_json::Value;

use super::{Stored, TensorType, Weights};
use crate::error::ModelError;
use crate::mmap::Bytes;

/// Size in bytes of the header's length, which precedes the header.
const PREFIX: u64 = 8;
/// Maximum length of a header in bytes. A header has about 100 bytes per tensor, and the largest
/// known models have 100,000 tensors.
const HEADER_BYTES_MAX: u64 = 32 << 20;
/// Maximum length of a tensor's name in bytes.
const NAME_BYTES_MAX: usize = 1024;
/// Maximum number of dimensions of a tensor.
const DIMENSIONS_MAX: usize = 8;

/// File name of the index of a model that is split into several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// File name of a model in a single file.
pub(crate) const SINGLE: &str = "model.safetensors";

/// Adds the tensors of one file to `weights`. `file` is its name in error messages.
#[cfg(any(test, fuzzing, feature = "demo-model", feature = "hub"))]
pub(crate) fn add(weights: &mut Weights, file: &str, bytes: Bytes) -> Result<(), ModelError> {
    add_renamed(weights, file, bytes, |name| Ok(canonical_name(name)))
}

/// Adds the tensors of one file to `weights`, with the names that `rename` returns.
pub(crate) fn add_renamed(
    weights: &mut Weights,
    file: &str,
    bytes: Bytes,
    mut rename: impl FnMut(&str) -> Result<String, ModelError>,
) -> Result<(), ModelError> {
    let (data_start, metadata) = header(file, &bytes)?;
    let file_bytes = bytes.file_bytes();
    let region = weights.add_region(file, bytes);
    // Tensors are added in the order of the data, so that the error is about the first invalid one.
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let (dtype, range) = locate(file, &name, info, data_start, file_bytes)?;
        let stored = Stored::whole(region, dtype, info.shape.clone(), range);
        weights.insert(rename(&name)?, stored)?;
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

/// The type of the tensor `name` (or the name of an unsupported type) and the range of its bytes in
/// the file. The range is inside the file, and has the length that follows from the type and the
/// shape.
fn locate(
    file: &str,
    name: &str,
    info: &TensorInfo,
    data_start: u64,
    file_bytes: u64,
) -> Result<(Result<TensorType, String>, Range<usize>), ModelError> {
    let what = || format!("tensor `{name}`");
    let malformed = |reason: String| ModelError::malformed(file, reason);
    if name.len() > NAME_BYTES_MAX || info.shape.len() > DIMENSIONS_MAX {
        return Err(malformed(format!(
            "a tensor: expected a name of at most {NAME_BYTES_MAX} bytes and at most \
             {DIMENSIONS_MAX} dimensions, got {} and {}",
            name.len(),
            info.shape.len()
        )));
    }
    let (start, end) = info.data_offsets;
    let overflow = || malformed(format!("{}: its size overflows", what()));
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
            return Err(malformed(format!(
                "{}: {} {:?} has {expected} bytes, but its range is {start}..{end}",
                what(),
                dtype.name(),
                info.shape
            )));
        }
    } else if start > end {
        return Err(malformed(format!("{}: its size is negative", what())));
    }
    Ok((dtype, start as usize..end as usize))
}

/// Whether `head`, the beginning of a file of `file_bytes` bytes, contains the whole header. This
/// is also true if the header has an error that the rest of the file would not fix.
#[cfg(feature = "hub")]
pub(crate) fn has_header(head: &[u8], file_bytes: u64) -> bool {
    let truncated = matches!(header("", head), Err(ModelError::Truncated { .. }));
    !truncated || head.len() as u64 >= file_bytes
}

/// Parses the header. Returns the offset of the data in the file and the header.
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
            format!("not a safetensors file: {expected}, got {header_bytes}"),
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

/// The names of the files in an index, sorted and without duplicates.
///
/// # Errors
/// [`ModelError::Malformed`] if `index` is not an index, or contains a path instead of a file name.
pub(crate) fn shards(file: &str, index: &Value) -> Result<Vec<String>, ModelError> {
    let map = index.get("weight_map").and_then(Value::as_object).ok_or_else(|| {
        ModelError::malformed(file, "expected an object `weight_map` from tensor to file names")
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

/// Checks that `weights` has every tensor in the index.
pub(crate) fn check_index(
    weights: &Weights,
    index: &Value,
    dir: &Path,
    rename: fn(&str) -> String,
) -> Result<(), ModelError> {
    let map = index.get("weight_map").and_then(Value::as_object);
    for (tensor, shard) in map.into_iter().flatten() {
        if !weights.contains(&rename(tensor)) {
            let shard = dir.join(shard.as_str().unwrap_or_default());
            return Err(ModelError::malformed(
                shard.display().to_string(),
                format!("tensor `{tensor}`: missing, although the index says it is in this file"),
            ));
        }
    }
    Ok(())
}

/// Parts of names in files of LFM2, Granite, GLM-4.5, StarCoder 2, gpt-oss, Nemotron-H, Falcon-H1
/// and Kimi Linear, each with the part that replaces it.
const OTHER_NAMES: [(&str, &str); 31] = [
    (".mlp.router.", ".mlp.gate."),
    (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
    (".mlp.shared_experts.", ".mlp."),
    (".block_sparse_moe.gate.e_score_correction_bias", ".mlp.expert_bias"),
    (".block_sparse_moe.shared_experts.", ".mlp."),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
    (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.down_proj."),
    (".embedding_norm.", ".norm."),
    // transformers has this name, and therefore adapters have it, too.
    (".self_attn.forget_gate.", ".self_attn."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".mixer.q_proj.", ".self_attn.q_proj."),
    (".mixer.k_proj.", ".self_attn.k_proj."),
    (".mixer.v_proj.", ".self_attn.v_proj."),
    (".mixer.o_proj.", ".self_attn.o_proj."),
    (".mixer.up_proj.", ".mlp.up_proj."),
    (".mixer.down_proj.", ".mlp.down_proj."),
    (".mixer.shared_experts.", ".mlp."),
    (".mixer.experts.", ".mlp.experts."),
    (".mixer.gate.e_score_correction_bias", ".mlp.expert_bias"),
    (".mixer.gate.", ".mlp.gate."),
    (".mixer.", ".mamba."),
];

/// The name that this crate uses for a tensor of an image encoder, which is the name in newer
/// versions of transformers; `None` if the tensor does not belong to an image encoder.
fn encoder_name(name: &str) -> Option<String> {
    let inner = name.strip_prefix("model.").unwrap_or(name);
    if let Some(rest) = inner.strip_prefix("vision_tower.") {
        let rest = rest.strip_prefix("vision_model.").unwrap_or(rest);
        return Some(format!("model.vision_tower.{rest}"));
    }
    let modules = ["vision_model.", "connector.", "multi_modal_projector."];
    modules.iter().any(|module| inner.starts_with(module)).then(|| format!("model.{inner}"))
}

/// The name that the decoder uses for a tensor. Models that were saved without their output matrix
/// lack the prefix `model.`, multimodal models have longer prefixes, and some models have other
/// names for routers and experts.
pub(crate) fn canonical_name(name: &str) -> String {
    for prefix in ["model.language_model.", "model.text_model."] {
        if let Some(rest) = name.strip_prefix(prefix) {
            let is_head = rest.starts_with("lm_head.");
            return if is_head { rest.to_owned() } else { format!("model.{rest}") };
        }
    }
    if let Some(name) = encoder_name(name) {
        return name;
    }
    // These are names outside the mixers of Nemotron-H, and of Falcon-H1's last norm.
    if let Some(rest) = name.strip_prefix("backbone.") {
        return canonical_name(&format!("model.{rest}"));
    }
    let outer = [
        ("model.embeddings.", "model.embed_tokens."),
        ("model.norm_f.", "model.norm."),
        ("model.final_layernorm.", "model.norm."),
    ];
    for (other, own) in outer {
        if let Some(rest) = name.strip_prefix(other) {
            return format!("{own}{rest}");
        }
    }
    if let Some((layer, kind)) = name.split_once(".norm.")
        && layer.rsplit_once(".layers.").is_some_and(|(_, index)| index.parse::<usize>().is_ok())
    {
        return format!("{layer}.input_layernorm.{kind}");
    }
    let name = name.strip_prefix("language_model.").unwrap_or(name);
    if name.starts_with("model.lm_head.") {
        return name["model.".len()..].to_owned();
    }
    if ["layers.", "embed_tokens.", "norm.", "embedding_norm."]
        .iter()
        .any(|start| name.starts_with(start))
    {
        return canonical_name(&format!("model.{name}"));
    }
    if let Some((other, own)) = OTHER_NAMES.into_iter().find(|(other, _)| name.contains(other)) {
        return name.replace(other, own);
    }
    let mlp = [".block_sparse_moe.", ".feed_forward."].into_iter();
    if let Some((layer, module)) = mlp.filter_map(|module| name.split_once(module)).next() {
        let module = module
            .replace("w1.", "gate_proj.")
            .replace("w2.", "down_proj.")
            .replace("w3.", "up_proj.");
        return format!("{layer}.mlp.{module}");
    }
    name.to_owned()
}
