//! Parses the header of a GGUF file (metadata and tensor list) from mapped bytes.
//!
//! Little-endian files of the versions 2 and 3 are supported. Every length is compared with the
//! remaining bytes and with a maximum before memory is allocated for it, so parsing a header of `n`
//! bytes never allocates more than a small multiple of `n`.

mod cursor;
pub(crate) mod split;
mod value;

use std::collections::BTreeMap;

use stolon_kernels::TensorType;

use crate::error::ModelError;
use cursor::Cursor;
pub(crate) use value::Value;

/// Alignment in bytes of the tensors' data if `general.alignment` is missing.
const ALIGNMENT: u64 = 32;
/// Maximum number of metadata entries. Known files have up to 100.
const ENTRIES_MAX: u64 = 1 << 16;
/// Maximum number of tensors. A model with [`LAYERS_MAX`](crate::config::LAYERS_MAX) layers has
/// fewer.
const TENSORS_MAX: u64 = 1 << 17;
/// Maximum number of dimensions of a tensor.
const DIMENSIONS_MAX: u32 = 4;

/// The header of a GGUF file, or of all parts of a split model.
#[derive(Debug, Default)]
pub(crate) struct Header {
    /// Name of the file with the metadata, used in error messages.
    pub(crate) file: String,
    /// Names of the files with the tensors.
    pub(crate) files: Vec<String>,
    /// Metadata by key.
    pub(crate) metadata: BTreeMap<String, Value>,
    /// The tensors by their GGUF names, sorted so that errors are deterministic.
    pub(crate) tensors: BTreeMap<String, TensorInfo>,
}

/// Type, shape and location of a tensor. The range is inside the file, and has the length that
/// follows from the type and the shape.
#[derive(Clone, Debug)]
pub(crate) struct TensorInfo {
    /// The element type, or the name of an unsupported type.
    pub(crate) dtype: Result<TensorType, String>,
    /// The sizes of the dimensions, outermost first. The file has them in reverse order.
    pub(crate) shape: Vec<usize>,
    /// Index into [`Header::files`].
    pub(crate) part: usize,
    /// Byte range of the tensor's data in its file.
    pub(crate) range: std::ops::Range<usize>,
}

/// Parses the header of the file with the content `bytes`. `file` is its name in error messages.
pub(crate) fn read(file: &str, bytes: &[u8]) -> Result<Header, ModelError> {
    read_head(file, bytes, bytes.len() as u64)
}

/// Whether `head`, the beginning of a file of `file_bytes` bytes, contains the whole header. This
/// is also true if the header has an error that the rest of the file would not fix.
#[cfg(feature = "hub")]
pub(crate) fn has_header(head: &[u8], file_bytes: u64) -> bool {
    // The maximum size avoids errors about tensors outside the file. Any error except `Truncated`
    // remains with more bytes.
    let truncated = matches!(read_head("", head, u64::MAX), Err(ModelError::Truncated { .. }));
    !truncated || head.len() as u64 >= file_bytes
}

/// Parses the header of a file of `file_bytes` bytes that begins with `bytes`.
fn read_head(file: &str, bytes: &[u8], file_bytes: u64) -> Result<Header, ModelError> {
    let mut cursor = Cursor::new(file, bytes);
    let magic = cursor.array::<4>("the magic number")?;
    if &magic != b"GGUF" {
        let expected = "not a GGUF file: expected it to start with `GGUF`";
        return Err(ModelError::malformed(file, format!("{expected}, got {magic:02x?}")));
    }
    let version = cursor.u32("the version")?;
    if !matches!(version, 2 | 3) {
        let note = if version.swap_bytes() < 0x100 { " (a big-endian file)" } else { "" };
        let got = format!("{version}{note}");
        return Err(ModelError::unsupported(file, "version", "2 or 3", got));
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
        let info = info.locate(file, data_start, alignment, file_bytes)?;
        if tensors.insert(name.clone(), info).is_some() {
            return Err(ModelError::malformed(file, format!("duplicate tensor `{name}`")));
        }
    }
    Ok(Header { file: file.into(), files: vec![file.into()], metadata, tensors })
}

fn read_metadata(
    cursor: &mut Cursor<'_>,
    count: u64,
) -> Result<BTreeMap<String, Value>, ModelError> {
    // An entry has a length of the key, a type and a value, which are at least 13 bytes.
    cursor.check_count("metadata entries", count, 13, ENTRIES_MAX)?;
    let mut metadata = BTreeMap::new();
    for _ in 0..count {
        let key = cursor.name("a metadata key")?;
        let value = Value::read(cursor, &key)?;
        if metadata.contains_key(&key) {
            let reason = format!("duplicate metadata key `{key}`");
            return Err(ModelError::malformed(cursor.file(), reason));
        }
        metadata.insert(key, value);
    }
    Ok(metadata)
}

/// A tensor's entry in the header.
struct RawInfo {
    name: String,
    /// The sizes of the dimensions, innermost first.
    sizes: Vec<u64>,
    type_id: u32,
    /// Offset in bytes from the start of the data.
    offset: u64,
}

fn read_infos(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<RawInfo>, ModelError> {
    // An entry has a length of the name, a number of dimensions, a type and an offset, which are at
    // least 24 bytes.
    cursor.check_count("tensors", count, 24, TENSORS_MAX)?;
    let mut infos = Vec::new();
    for _ in 0..count {
        let name = cursor.name("a tensor's name")?;
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
    /// Computes the range of the tensor's bytes and checks that it is inside the file.
    fn locate(
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
            let reason = format!("offset {} is not a multiple of {alignment}", self.offset);
            return Err(malformed(reason));
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
                    let reason = format!("row length {row} is not a multiple of {blocks}");
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
        Ok(TensorInfo { dtype, shape, part: 0, range: start as usize..end as usize })
    }
}

/// The element type with the number `id` in the file, or the name of an unsupported type.
fn tensor_type(id: u32) -> Result<TensorType, String> {
    if let Some(dtype) = TensorType::from_gguf_id(id) {
        return Ok(dtype);
    }
    let name = match id {
        9 => "Q8_1",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return Err(format!("unknown type {id}")),
    };
    Err(name.to_owned())
}

impl Header {
    /// The name of the file that contains a tensor.
    pub(crate) fn file_of(&self, info: &TensorInfo) -> &str {
        &self.files[info.part]
    }
}

#[cfg(test)]
mod tests;
