//! GGUF: the container's header (metadata and tensor list), read from mapped bytes.
//!
//! Written against the format's description: little-endian, versions 2 and 3. Every length is
//! checked against the bytes that are left before anything is allocated for it, so a header of
//! `n` bytes never makes more than a small multiple of `n`.

mod cursor;
mod value;

use std::collections::BTreeMap;

use cursor::Cursor;
pub(crate) use value::Value;

use super::{Bytes, Stored, TensorType, Weights};
use crate::error::ModelError;

/// Alignment of the data where `general.alignment` says nothing.
const ALIGNMENT: u64 = 32;
/// More dimensions than any tensor has.
const DIMENSIONS_MAX: u32 = 4;

/// A file's header.
#[derive(Debug)]
pub(crate) struct Header {
    /// The file's name, for messages.
    pub(crate) file: String,
    /// Metadata by key.
    pub(crate) metadata: BTreeMap<String, Value>,
    /// The tensors, by their GGUF names; in order, so that the same error comes every time.
    pub(crate) tensors: BTreeMap<String, TensorInfo>,
}

/// One tensor's place. The range is inside the file and fits type and shape.
#[derive(Clone, Debug)]
pub(crate) struct TensorInfo {
    /// The type; an unsupported one by its name.
    pub(crate) dtype: Result<TensorType, String>,
    /// Sizes, outermost first (the file has them the other way round).
    pub(crate) shape: Vec<usize>,
    /// Bytes within the file.
    pub(crate) range: std::ops::Range<usize>,
}

/// Reads the header of the file in `bytes`.
pub(crate) fn read(file: &str, bytes: &[u8]) -> Result<Header, ModelError> {
    let mut cursor = Cursor::new(file, bytes);
    let magic = cursor.array::<4>("the magic number")?;
    if &magic != b"GGUF" {
        let expected = "no GGUF file: expected it to start with `GGUF`";
        return Err(ModelError::malformed(file, format!("{expected}, got {magic:02x?}")));
    }
    let version = cursor.u32("the version")?;
    if !matches!(version, 2 | 3) {
        let what = if version.swap_bytes() < 0x100 { "a big-endian file" } else { "it" };
        return Err(ModelError::unsupported(
            file,
            "version",
            "2 or 3",
            format!("{version} ({what})"),
        ));
    }
    let tensor_count = cursor.u64("the number of tensors")?;
    let value_count = cursor.u64("the number of metadata entries")?;
    let metadata = read_metadata(&mut cursor, value_count)?;
    let infos = read_infos(&mut cursor, tensor_count)?;
    let alignment = match metadata.get("general.alignment") {
        None => ALIGNMENT,
        Some(value) => match value.as_u64() {
            Some(n) if n.is_power_of_two() && n <= 1 << 20 => n,
            _ => {
                let got = value.shown();
                return Err(ModelError::key(file, "general.alignment", "a power of two", got));
            }
        },
    };
    let data_start = cursor.position().next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    for info in infos {
        let name = info.name.clone();
        let place = info.place(file, data_start, alignment, bytes.len() as u64)?;
        if tensors.insert(name.clone(), place).is_some() {
            return Err(ModelError::malformed(file, format!("tensor `{name}` is there twice")));
        }
    }
    Ok(Header { file: file.into(), metadata, tensors })
}

fn read_metadata(
    cursor: &mut Cursor<'_>,
    count: u64,
) -> Result<BTreeMap<String, Value>, ModelError> {
    // A key's length, a type and a value take at least 13 bytes.
    cursor.check_count("metadata entries", count, 13)?;
    let mut metadata = BTreeMap::new();
    for _ in 0..count {
        let key = cursor.string("a metadata key")?;
        let value = Value::read(cursor, &key)?;
        if metadata.contains_key(&key) {
            let reason = format!("metadata key `{key}` is there twice");
            return Err(ModelError::malformed(cursor.file(), reason));
        }
        metadata.insert(key, value);
    }
    Ok(metadata)
}

/// A tensor's entry as it stands in the header.
struct RawInfo {
    name: String,
    /// Innermost first.
    sizes: Vec<u64>,
    type_id: u32,
    /// From the start of the data.
    offset: u64,
}

fn read_infos(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<RawInfo>, ModelError> {
    // A name's length, the number of dimensions, the type and the offset.
    cursor.check_count("tensors", count, 24)?;
    let mut infos = Vec::new();
    for _ in 0..count {
        let name = cursor.string("a tensor's name")?;
        let dimensions = cursor.u32("a tensor's number of dimensions")?;
        if dimensions > DIMENSIONS_MAX {
            let expected = format!("expected at most {DIMENSIONS_MAX} dimensions");
            let reason = format!("tensor `{name}`: {expected}, got {dimensions}");
            return Err(ModelError::malformed(cursor.file(), reason));
        }
        let sizes =
            (0..dimensions).map(|_| cursor.u64("a tensor's shape")).collect::<Result<_, _>>()?;
        let type_id = cursor.u32("a tensor's type")?;
        let offset = cursor.u64("a tensor's offset")?;
        infos.push(RawInfo { name, sizes, type_id, offset });
    }
    Ok(infos)
}

impl RawInfo {
    /// Where the tensor's bytes are, checked.
    fn place(
        &self,
        file: &str,
        data_start: u64,
        alignment: u64,
        file_bytes: u64,
    ) -> Result<TensorInfo, ModelError> {
        let malformed = |reason: String| {
            ModelError::malformed(file, format!("tensor `{}`: {reason}", self.name))
        };
        let shape: Vec<usize> =
            self.sizes.iter().rev().map(|n| usize::try_from(*n).unwrap_or(usize::MAX)).collect();
        if !self.offset.is_multiple_of(alignment) {
            return Err(malformed(format!("offset {} is no multiple of {alignment}", self.offset)));
        }
        let overflow = || malformed(format!("the size of {shape:?} overflows"));
        let elements =
            shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d)).ok_or_else(overflow)?;
        let start = data_start.checked_add(self.offset).ok_or_else(overflow)?;
        let dtype = tensor_type(self.type_id);
        let size = match &dtype {
            Ok(dtype) => {
                let row = shape.last().copied().unwrap_or(1);
                if !row.is_multiple_of(dtype.block_len()) {
                    let blocks = dtype.block_len();
                    let reason = format!("rows of {row} are no whole blocks of {blocks}");
                    return Err(malformed(format!("{}: {reason}", dtype.name())));
                }
                dtype.bytes_of(elements).ok_or_else(overflow)? as u64
            }
            Err(_) => 0,
        };
        let end = start.checked_add(size).ok_or_else(overflow)?;
        if end > file_bytes {
            return Err(ModelError::Truncated {
                file: file.into(),
                what: format!("tensor `{}`", self.name),
                expected: end,
                got: file_bytes,
            });
        }
        Ok(TensorInfo { dtype, shape, range: start as usize..end as usize })
    }
}

/// The tensor type of a number in the file; the name of one that is not supported.
fn tensor_type(id: u32) -> Result<TensorType, String> {
    let name = match id {
        0 => return Ok(TensorType::F32),
        1 => return Ok(TensorType::F16),
        8 => return Ok(TensorType::Q8_0),
        12 => return Ok(TensorType::Q4K),
        13 => return Ok(TensorType::Q5K),
        14 => return Ok(TensorType::Q6K),
        30 => return Ok(TensorType::Bf16),
        2 => "Q4_0",
        3 => "Q4_1",
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return Err(format!("type number {id}")),
    };
    Err(name.to_owned())
}

impl Header {
    /// The tensors under the names that `rename` gives them; those it gives no name are left
    /// out. `paired_heads` says in how many heads a tensor's rows are interleaved.
    pub(crate) fn weights(
        &self,
        bytes: Bytes,
        rename: impl Fn(&str) -> Option<String>,
        paired_heads: impl Fn(&str) -> Option<usize>,
    ) -> Result<Weights, ModelError> {
        let mut weights = Weights::empty(&self.file);
        let region = weights.add_region(&self.file, bytes);
        for (name, info) in &self.tensors {
            let Some(name) = rename(name) else { continue };
            let stored = Stored {
                region,
                dtype: info.dtype.clone(),
                shape: info.shape.clone(),
                range: info.range.clone(),
                paired_heads: paired_heads(&name),
            };
            weights.insert(name, stored)?;
        }
        Ok(weights)
    }
}

#[cfg(test)]
mod tests;
