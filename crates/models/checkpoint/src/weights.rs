//! The weights of a model: tensors by their Hugging Face names, from safetensors or GGUF files or
//! from memory.
//!
//! The loader opens the files once. The bytes stay in a memory map, in the binary or in a buffer. A
//! [`Tensor`] borrows them, unless the file has the rows of q and k in another order, or a
//! quantized matrix has to be converted (`quantized.rs`).

mod check;
mod contents;
mod encoder;
mod expert_matrices;
mod gguf;
mod interleaved;
mod latent;
mod moondream;
mod mtp;
mod quantized;
mod qwen3_vl;
mod rows;
pub(crate) mod safetensors;
mod stored;
mod table;

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;
use std::sync::Arc;

use stolon_kernels::Matrix;
pub use stolon_kernels::TensorType;

use crate::config::{
    AdjacentPairs, AttentionWeights, DecoderConfig, LatentWeights, LinearWeights, MixerWeights,
    QkvWeights, TensorSpec,
};
use crate::error::ModelError;
use crate::files;
use crate::mmap::Bytes;
pub use contents::Contents;
pub(crate) use encoder::in_block;
pub(crate) use expert_matrices::ExpertMatrices;
use stored::Stored;
pub use table::FileTable;

/// One tensor, row-major (last dimension contiguous), little-endian.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// The Hugging Face name.
    pub name: String,
    /// The element type.
    pub dtype: TensorType,
    /// The sizes of the dimensions, outermost first: `[out, in]` for a projection.
    pub shape: Vec<usize>,
    /// The elements. They may be unaligned, because safetensors headers have any length.
    pub bytes: Cow<'a, [u8]>,
}

/// All tensors of a model.
#[derive(Debug)]
pub struct Weights {
    /// The file or directory of the weights, used in errors about missing tensors.
    origin: String,
    regions: Vec<Region>,
    tensors: HashMap<String, Stored>,
}

/// The bytes of one file.
#[derive(Clone, Debug)]
struct Region {
    file: String,
    /// Shared with the tables that stay in the file.
    bytes: Arc<Bytes>,
}

impl Weights {
    /// Creates weights without tensors. `origin` is used in errors about missing tensors.
    pub(crate) fn empty(origin: impl Into<String>) -> Self {
        Self { origin: origin.into(), regions: Vec::new(), tensors: HashMap::new() }
    }

    /// The file or directory of the weights, for errors.
    pub(crate) fn origin(&self) -> &str {
        &self.origin
    }

    /// Maps the safetensors files of a model directory: `model.safetensors`, or the files that
    /// `model.safetensors.index.json` lists.
    pub(crate) fn open_directory(directory: &Path) -> Result<Self, ModelError> {
        let mut weights = Self::open_named(directory, safetensors::canonical_name)?;
        interleaved::divide(&mut weights)?;
        Ok(weights)
    }

    /// Maps the safetensors files of a model directory. `rename` returns the name of a tensor.
    pub(crate) fn open_named(
        directory: &Path,
        rename: fn(&str) -> String,
    ) -> Result<Self, ModelError> {
        let mut weights = Self::empty(directory.display().to_string());
        let single = directory.join(safetensors::SINGLE);
        let index_path = directory.join(safetensors::INDEX);
        if single.exists() {
            weights.add_safetensors(&single, rename)?;
        } else if index_path.exists() {
            let index = files::read_json(&index_path)?;
            for shard in safetensors::shards(&index_path.display().to_string(), &index)? {
                weights.add_safetensors(&directory.join(shard), rename)?;
            }
            safetensors::check_index(&weights, &index, directory, rename)?;
        } else {
            let mut expected = format!("{} or {}", safetensors::SINGLE, safetensors::INDEX);
            if ["pytorch_model.bin", "pytorch_model.bin.index.json"]
                .iter()
                .any(|name| directory.join(name).exists())
            {
                expected += " (pytorch_model.bin is not supported: save the model as safetensors)";
            }
            return Err(ModelError::MissingFile { directory: directory.to_owned(), expected });
        }
        Ok(weights)
    }

    fn add_safetensors(
        &mut self,
        path: &Path,
        rename: fn(&str) -> String,
    ) -> Result<(), ModelError> {
        let file = path.display().to_string();
        safetensors::add_renamed(self, &file, Bytes::map(path)?, |name| Ok(rename(name)))
    }

    /// Maps the safetensors file of a module. The names of its tensors begin with `module.`.
    pub(crate) fn add_module(&mut self, path: &Path, module: &str) -> Result<(), ModelError> {
        let mut own = Self::empty(path.display().to_string());
        own.add_safetensors(path, str::to_owned)?;
        let first = self.regions.len();
        self.regions.append(&mut own.regions);
        for (name, mut stored) in own.tensors {
            stored.region += first;
            self.insert(format!("{module}.{name}"), stored)?;
        }
        Ok(())
    }

    /// Reads a safetensors file that is in memory already. `file` is its name in error messages.
    #[cfg(any(test, fuzzing, feature = "demo-model"))]
    pub(crate) fn from_safetensors(file: &str, bytes: Bytes) -> Result<Self, ModelError> {
        let mut weights = Self::empty(file);
        safetensors::add(&mut weights, file, bytes)?;
        interleaved::divide(&mut weights)?;
        Ok(weights)
    }

    /// Creates weights from tensors in memory with Hugging Face names. `origin` is used in error
    /// messages.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if the number of bytes of a tensor does not match its shape and
    /// type, or if two tensors have the same name.
    pub fn from_tensors(
        origin: &str,
        tensors: impl IntoIterator<Item = Tensor<'static>>,
    ) -> Result<Self, ModelError> {
        let mut weights = Self::empty(origin);
        for tensor in tensors {
            let elements = tensor.shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d));
            let bytes = tensor.bytes.into_owned();
            if elements.and_then(|n| tensor.dtype.bytes_of(n)) != Some(bytes.len()) {
                return Err(ModelError::malformed(
                    origin,
                    format!(
                        "tensor `{}`: {} bytes do not match {} {:?}",
                        tensor.name,
                        bytes.len(),
                        tensor.dtype.name(),
                        tensor.shape
                    ),
                ));
            }
            let range = 0..bytes.len();
            let region = weights.add_region(origin, Bytes::Owned(bytes));
            let stored = Stored::whole(region, Ok(tensor.dtype), tensor.shape, range);
            weights.insert(tensor.name, stored)?;
        }
        Ok(weights)
    }

    fn add_region(&mut self, file: &str, bytes: Bytes) -> usize {
        self.regions.push(Region { file: file.into(), bytes: Arc::new(bytes) });
        self.regions.len() - 1
    }

    fn insert(&mut self, name: String, stored: Stored) -> Result<(), ModelError> {
        debug_assert!(stored.range.end as u64 <= self.regions[stored.region].bytes.file_bytes());
        let file = self.regions[stored.region].file.clone();
        match self.tensors.entry(name) {
            Entry::Vacant(entry) => {
                entry.insert(stored);
                Ok(())
            }
            Entry::Occupied(entry) => {
                Err(ModelError::malformed(file, format!("duplicate tensor `{}`", entry.key())))
            }
        }
    }

    /// The tensor with the Hugging Face name `name`, such as
    /// `model.layers.0.self_attn.q_proj.weight`, `model.embed_tokens.weight`, `model.norm.weight`
    /// or `lm_head.weight`. It must have exactly `shape`.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::WrongShape`], or [`ModelError::WrongType`] if
    /// the kernels do not support its type. Each names the file and the tensor.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let stored = self.stored(name, shape)?;
        let dtype = self.checked(name, stored, shape)?;
        let mut bytes = self.bytes(name, stored, dtype)?;
        stored.runs.iter().for_each(|runs| bytes = Cow::Owned(runs.select(&bytes)));
        stored.pairs.iter().for_each(|pairs| bytes = Cow::Owned(pairs.separate(&bytes)));
        Ok(Tensor { name: name.into(), dtype, shape: stored.shape.clone(), bytes })
    }

    /// The bytes of a tensor of the type `dtype`, with the rows in the order of the file.
    fn bytes(
        &self,
        name: &str,
        stored: &Stored,
        dtype: TensorType,
    ) -> Result<Cow<'_, [u8]>, ModelError> {
        let region = &self.regions[stored.region];
        let truncated = || ModelError::Truncated {
            file: region.file.clone(),
            what: format!("tensor `{name}`"),
            expected: stored.range.end as u64,
            got: region.bytes.len() as u64,
        };
        let bytes = match &stored.converted {
            Some(converted) => Cow::Owned(converted.bytes(self)?),
            None => {
                let bytes = region.bytes.get(stored.range.clone()).ok_or_else(truncated)?;
                Cow::Borrowed(bytes)
            }
        };
        Ok(match &stored.interleaved {
            Some(interleaved) => {
                let (rows, width) = (stored.shape[0], dtype.block_bytes());
                Cow::Owned(interleaved.read(self, &bytes, rows, width).ok_or_else(truncated)?)
            }
            None => bytes,
        })
    }

    /// Gives the tensors of files the names and the form that `config` requires. Tensors that
    /// combine several of the model's are divided, and the order of rows is recorded. `adjacent`
    /// says whether adjacent rows of q and k form the pairs that are rotated.
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] for another number of rows, and the errors of
    /// [`Weights::split_latent`].
    pub(crate) fn arrange(
        &mut self,
        config: &DecoderConfig,
        adjacent: bool,
    ) -> Result<(), ModelError> {
        self.split_fused(config)?;
        self.split_rows(config)?;
        self.split_latent(config, false)?;
        if adjacent { self.pair_adjacent_rows(config) } else { Ok(()) }
    }

    /// Records that adjacent rows of q and k form the pairs that are rotated.
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] if there is another number of rows.
    pub(crate) fn pair_adjacent_rows(&mut self, config: &DecoderConfig) -> Result<(), ModelError> {
        for mixer in config.weights().layers.into_iter().flat_map(|layer| layer.mixers) {
            for (part, pairs) in paired(mixer) {
                for spec in part.bias.into_iter().chain([part.weight]) {
                    // `check` reports missing tensors.
                    let Some(stored) = self.tensors.get_mut(&spec.name) else { continue };
                    if stored.shape.first() != Some(&pairs.rows()) {
                        return Err(ModelError::WrongShape {
                            file: self.regions[stored.region].file.clone(),
                            tensor: spec.name,
                            expected: spec.shape,
                            got: stored.shape.clone(),
                        });
                    }
                    stored.pairs = Some(pairs);
                }
            }
        }
        Ok(())
    }

    /// The values of the vector `spec`, a norm or a bias, in f32.
    ///
    /// # Errors
    /// The errors of [`tensor`](Self::tensor), and [`ModelError::WrongType`] if it is quantized.
    pub fn floats(&self, spec: &TensorSpec) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(&spec.name, &spec.shape)?;
        if tensor.dtype.block_len() > 1 {
            return Err(ModelError::WrongType {
                file: self.origin.clone(),
                tensor: tensor.name,
                expected: "F32, F16 or BF16".to_owned(),
                got: tensor.dtype.name().to_owned(),
            });
        }
        let mut values = vec![0.0; spec.shape.iter().product()];
        stolon_kernels::widen(tensor.dtype, &tensor.bytes, &mut values);
        Ok(values)
    }

    /// The rows `indices` of the matrix `spec`, which may have any type, in f32.
    ///
    /// # Errors
    /// The errors of [`tensor`](Self::tensor).
    ///
    /// # Panics
    /// If an index is not below the number of rows.
    pub fn rows(&self, spec: &TensorSpec, indices: &[usize]) -> Result<Vec<Vec<f32>>, ModelError> {
        let tensor = self.tensor(&spec.name, &spec.shape)?;
        let (count, width) = (spec.shape[0], spec.shape[1]);
        assert!(indices.iter().all(|&index| index < count), "rows of {count}: {indices:?}");
        let row_bytes = tensor.bytes.len() / count;
        let unpackable = |error| ModelError::Unpackable { tensor: spec.name.clone(), error };
        let path = stolon_kernels::Path::detect().map_err(unpackable)?;
        let row = |&index: &usize| {
            let bytes = &tensor.bytes[index * row_bytes..][..row_bytes];
            let matrix = Matrix::pack(tensor.dtype, 1, width, bytes, path).map_err(unpackable)?;
            let mut values = vec![0.0; width];
            matrix.row(0, &mut values);
            Ok(values)
        };
        indices.iter().map(row).collect()
    }

    /// The `count` integers of the tensor `name`, of the type I32 or I64; `None` if there is no such
    /// tensor.
    ///
    /// # Errors
    /// [`ModelError::WrongType`], [`ModelError::WrongShape`], and [`ModelError::Malformed`] if the
    /// bytes do not match the type.
    pub(crate) fn integers(
        &self,
        name: &str,
        count: usize,
    ) -> Result<Option<Vec<i64>>, ModelError> {
        let Some(stored) = self.tensors.get(name) else { return Ok(None) };
        let region = &self.regions[stored.region];
        let (file, tensor) = (region.file.clone(), name.to_owned());
        let width = match stored.dtype.as_ref().map_err(String::as_str) {
            Err("I64") => 8,
            Err("I32") => 4,
            other => {
                let got = other.map_or_else(str::to_owned, |dtype| dtype.name().to_owned());
                let expected = "I64 or I32".to_owned();
                return Err(ModelError::WrongType { file, tensor, expected, got });
            }
        };
        if stored.shape != [count] {
            let (expected, got) = (vec![count], stored.shape.clone());
            return Err(ModelError::WrongShape { file, tensor, expected, got });
        }
        let Some(bytes) = self.stored_bytes(stored).filter(|bytes| bytes.len() == count * width)
        else {
            let reason = format!("tensor `{name}`: expected {} bytes", count * width);
            return Err(ModelError::malformed(file, reason));
        };
        // The values are sign-extended.
        let integer = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
            _ => bytes.iter().rev().fold(0, |value, byte| value << 8 | i64::from(*byte)),
        };
        Ok(Some(bytes.chunks_exact(width).map(integer).collect()))
    }

    /// Adds the tensor `spec` with these values, in f32.
    pub(crate) fn add_floats(
        &mut self,
        spec: &TensorSpec,
        values: &[f32],
    ) -> Result<(), ModelError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let range = 0..bytes.len();
        let region = self.add_region(&self.origin.clone(), Bytes::Owned(bytes));
        let stored = Stored::whole(region, Ok(TensorType::F32), spec.shape.clone(), range);
        self.insert(spec.name.clone(), stored)
    }

    /// The contents of all files, for a hash of them that is computed later, if at all. What is not
    /// in files is hashed now, on `threads` threads.
    #[must_use]
    pub fn contents(&self, threads: usize) -> Contents {
        Contents::of(self.regions.iter().map(|region| (&*region.file, &region.bytes)), threads)
    }

    /// Releases the memory pages of `bytes` if they are part of a mapped file. The bytes remain
    /// readable: the system reads them from the file again if they are accessed.
    pub fn release(&self, bytes: &[u8]) {
        self.regions.iter().for_each(|region| region.bytes.release(bytes));
    }

    /// Removes a tensor and releases its memory.
    pub fn remove(&mut self, name: &str) {
        let Some(Stored { region, range, .. }) = self.tensors.remove(name) else { return };
        let bytes = &mut self.regions[region].bytes;
        match **bytes {
            Bytes::Owned(_) => {
                if self.tensors.values().all(|other| other.region != region) {
                    *bytes = Arc::new(Bytes::Owned(Vec::new()));
                }
            }
            _ => bytes.release(&bytes[range]),
        }
    }

    /// Renames the tensor `name`, if there is one, to `other`, which must not exist.
    pub(crate) fn rename(&mut self, name: &str, other: &str) {
        if let Some(stored) = self.tensors.remove(name) {
            self.tensors.insert(other.to_owned(), stored);
        }
    }

    /// Whether there is a tensor with this name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Whether the tensor `first` and the tensor `second` of `other` have the same type, shape and
    /// bytes; `None` if only the header of a file is known. Tensors that are converted when they are
    /// read count as different.
    pub(crate) fn have_equal_bytes(
        &self,
        first: &str,
        (other, second): (&Self, &str),
    ) -> Option<bool> {
        let (Some(first), Some(second)) = (self.tensors.get(first), other.tensors.get(second))
        else {
            return Some(false);
        };
        let is_same_kind = first.is_plain()
            && second.is_plain()
            && (&first.dtype, &first.shape) == (&second.dtype, &second.shape);
        if !is_same_kind {
            return Some(false);
        }
        let (first, second) = (self.stored_bytes(first)?, other.stored_bytes(second)?);
        const PIECE_BYTES: usize = 16 << 20;
        let mut pieces = first.chunks(PIECE_BYTES).zip(second.chunks(PIECE_BYTES));
        Some(pieces.all(|(first, second)| {
            let are_equal = first == second;
            self.release(first);
            other.release(second);
            are_equal
        }))
    }

    /// The bytes of a tensor in its file, if they are known.
    fn stored_bytes(&self, stored: &Stored) -> Option<&[u8]> {
        self.regions[stored.region].bytes.get(stored.range.clone())
    }

    /// The shape of the tensor with this name, if there is one.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|stored| stored.shape.as_slice())
    }

    /// The names of all tensors, in arbitrary order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The element type of the tensor with this name, if there is one and its type is supported.
    #[must_use]
    pub fn dtype(&self, name: &str) -> Option<TensorType> {
        self.tensors.get(name)?.dtype.as_ref().ok().copied()
    }

    /// Total size in bytes of the tensors in buffers instead of files.
    pub fn buffered_bytes(&self) -> u64 {
        let owned = self.regions.iter().map(|region| match &*region.bytes {
            Bytes::Owned(bytes) => bytes.len() as u64,
            _ => 0,
        });
        owned.sum()
    }

    /// The stored tensors in arbitrary order: the name, the type (or the name of an unsupported
    /// type), the shape, and the number of bytes.
    pub(crate) fn list(&self) -> impl Iterator<Item = (&str, String, &[usize], u64)> {
        self.tensors.iter().map(|(name, stored)| {
            let dtype = match &stored.dtype {
                Ok(dtype) => dtype.name().to_owned(),
                Err(other) => other.clone(),
            };
            let converted = stored.converted.as_ref();
            let bytes = converted.map_or_else(|| stored.byte_len(), |converted| converted.bytes);
            let dtype = converted.map_or(dtype, |converted| converted.format.to_owned());
            (name.as_str(), dtype, stored.shape.as_slice(), bytes)
        })
    }

    /// The names and sizes in bytes of the files.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.regions.iter().map(|region| (region.file.as_str(), region.bytes.file_bytes()))
    }

    /// Total size of all tensors in bytes, as stored.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(Stored::byte_len).sum()
    }
}

/// The projections of a mixer with rotated rows, and the order of these rows.
fn paired(mixer: MixerWeights) -> Vec<(LinearWeights, AdjacentPairs)> {
    match mixer {
        MixerWeights::Attention(AttentionWeights { config, qkv, .. }) => {
            let QkvWeights { query, key, .. } = qkv;
            let keys = key.map(|key| (key, config.kv_heads));
            let parts = keys.into_iter().chain([(query, config.heads)]);
            parts.map(|(part, heads)| (part, AdjacentPairs::of(&config, heads))).collect()
        }
        MixerWeights::Latent(LatentWeights { config, query, latent, .. }) => {
            let queries = AdjacentPairs::of_latent_queries(config.sizes, config.heads);
            vec![(query, queries), (latent, AdjacentPairs::of_latent(config.sizes))]
        }
        MixerWeights::Convolution(_) | MixerWeights::DeltaNet(_) | MixerWeights::Mamba2(_) => {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests;
