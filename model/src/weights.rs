//! A model's weights: named tensors in memory that outlive every step, found by the names that
//! Hugging Face gives them, whatever file they came from.
//!
//! Opened once by the loader. The bytes stay where they are (a memory map, the binary, a
//! buffer); a [`Tensor`] borrows them, except where the file's layout has to be undone.

pub(crate) mod gguf;
mod mmap;
pub(crate) mod safetensors;

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::config::DecoderConfig;
use crate::error::ModelError;
pub(crate) use mmap::Bytes;
pub use stolon_kernels::TensorType;

/// One tensor, row-major (last dimension contiguous), little-endian.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Its Hugging Face name.
    pub name: String,
    /// Element type.
    pub dtype: TensorType,
    /// Sizes, outermost first: `[out, in]` of a projection.
    pub shape: Vec<usize>,
    /// The elements. Alignment is not promised: safetensors headers have any length.
    pub bytes: Cow<'a, [u8]>,
}

/// All tensors of a model.
#[derive(Debug)]
pub struct Weights {
    /// Where they came from, for errors about what is not there.
    origin: String,
    regions: Vec<Region>,
    tensors: HashMap<String, Stored>,
}

/// One file's bytes.
#[derive(Debug)]
struct Region {
    file: String,
    bytes: Bytes,
}

/// Where a tensor's bytes are. Its range is inside its region and fits its shape and type:
/// whoever makes one has checked that.
#[derive(Clone, Debug)]
struct Stored {
    /// Index into [`Weights::regions`].
    region: usize,
    /// The name of the type where it is none that the kernels read.
    dtype: Result<TensorType, String>,
    shape: Vec<usize>,
    range: Range<usize>,
    /// The rows of each of so many heads are stored as GGUF stores them for `llama`; see
    /// [`split_halves`].
    paired_heads: Option<usize>,
}

impl Weights {
    /// No tensors yet; `origin` is named in errors about missing ones.
    pub(crate) fn empty(origin: impl Into<String>) -> Self {
        Self { origin: origin.into(), regions: Vec::new(), tensors: HashMap::new() }
    }

    /// Maps the safetensors files of a model directory: `model.safetensors`, or those that
    /// `model.safetensors.index.json` lists.
    pub(crate) fn open_directory(directory: &Path) -> Result<Self, ModelError> {
        let mut weights = Self::empty(directory.display().to_string());
        let single = directory.join(safetensors::SINGLE);
        let index_path = directory.join(safetensors::INDEX);
        if single.exists() {
            weights.add_safetensors(&single)?;
        } else if index_path.exists() {
            let index = read_json(&index_path)?;
            for shard in safetensors::shards(&index_path.display().to_string(), &index)? {
                weights.add_safetensors(&directory.join(shard))?;
            }
            safetensors::check_index(&weights, &index, directory)?;
        } else {
            let mut expected = format!("{} or {}", safetensors::SINGLE, safetensors::INDEX);
            if ["pytorch_model.bin", "pytorch_model.bin.index.json"]
                .iter()
                .any(|name| directory.join(name).exists())
            {
                expected += " (pytorch_model.bin is not read: save the model as safetensors)";
            }
            return Err(ModelError::MissingFile { directory: directory.to_owned(), expected });
        }
        Ok(weights)
    }

    fn add_safetensors(&mut self, path: &Path) -> Result<(), ModelError> {
        safetensors::add(self, &path.display().to_string(), Bytes::map(path)?)
    }

    /// Reads one safetensors file that is in memory already; `file` is its name for messages.
    #[cfg(any(test, feature = "demo-model"))]
    pub(crate) fn from_safetensors(file: &str, bytes: Bytes) -> Result<Self, ModelError> {
        let mut weights = Self::empty(file);
        safetensors::add(&mut weights, file, bytes)?;
        Ok(weights)
    }

    /// Takes tensors made in memory, each with its Hugging Face name.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] when a tensor's bytes are not as many as its shape and type ask
    /// for, or a name comes twice.
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
                        "tensor `{}`: {} bytes are not what {} {:?} takes",
                        tensor.name,
                        bytes.len(),
                        tensor.dtype.name(),
                        tensor.shape
                    ),
                ));
            }
            let stored = Stored {
                range: 0..bytes.len(),
                region: weights.add_region(origin, Bytes::Owned(bytes)),
                dtype: Ok(tensor.dtype),
                shape: tensor.shape,
                paired_heads: None,
            };
            weights.insert(tensor.name, stored)?;
        }
        Ok(weights)
    }

    fn add_region(&mut self, file: &str, bytes: Bytes) -> usize {
        self.regions.push(Region { file: file.into(), bytes });
        self.regions.len() - 1
    }

    fn insert(&mut self, name: String, stored: Stored) -> Result<(), ModelError> {
        debug_assert!(stored.range.end <= self.regions[stored.region].bytes.len());
        let file = self.regions[stored.region].file.clone();
        match self.tensors.entry(name) {
            Entry::Vacant(place) => {
                place.insert(stored);
                Ok(())
            }
            Entry::Occupied(there) => {
                Err(ModelError::malformed(file, format!("tensor `{}` is there twice", there.key())))
            }
        }
    }

    /// The tensor called `name` by Hugging Face (`model.layers.0.self_attn.q_proj.weight`,
    /// `model.embed_tokens.weight`, `model.norm.weight`, `lm_head.weight`), with exactly `shape`.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::WrongShape`], [`ModelError::WrongType`] when
    /// the kernels cannot read its type; each names the file and the tensor.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let stored = self.stored(name, shape)?;
        let dtype = self.checked(name, stored, shape)?;
        let bytes = &self.regions[stored.region].bytes[stored.range.clone()];
        let bytes = match stored.paired_heads {
            Some(heads) => Cow::Owned(split_halves(bytes, stored.shape[0], heads)),
            None => Cow::Borrowed(bytes),
        };
        Ok(Tensor { name: name.into(), dtype, shape: stored.shape.clone(), bytes })
    }

    /// Gives back the memory of a part of a mapped tensor's bytes. They stay readable: the system
    /// reads them from the file again.
    pub(crate) fn release(&self, bytes: &[u8]) {
        self.regions.iter().for_each(|region| region.bytes.release(bytes));
    }

    /// Forgets a tensor and gives its memory back.
    pub(crate) fn remove(&mut self, name: &str) {
        let Some(Stored { region, range, .. }) = self.tensors.remove(name) else { return };
        let alone = self.tensors.values().all(|other| other.region != region);
        match &mut self.regions[region].bytes {
            bytes @ Bytes::Owned(_) if alone => *bytes = Bytes::Owned(Vec::new()),
            bytes => bytes.release(&bytes[range]),
        }
    }

    /// The type of a stored tensor, if it and the shape are what is asked for.
    fn checked(
        &self,
        name: &str,
        stored: &Stored,
        shape: &[usize],
    ) -> Result<TensorType, ModelError> {
        let file = &self.regions[stored.region].file;
        let dtype = match &stored.dtype {
            Ok(dtype) => *dtype,
            Err(other) => {
                return Err(ModelError::WrongType {
                    file: file.clone(),
                    tensor: name.into(),
                    expected: TensorType::ALL.map(TensorType::name).join(", "),
                    got: other.clone(),
                });
            }
        };
        if stored.shape != shape {
            return Err(ModelError::WrongShape {
                file: file.clone(),
                tensor: name.into(),
                expected: shape.to_vec(),
                got: stored.shape.clone(),
            });
        }
        Ok(dtype)
    }

    /// Checks that every tensor that `config` asks for is there, without touching the data.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor), for the first that is not as it should be.
    pub fn check(&self, config: &DecoderConfig) -> Result<(), ModelError> {
        for spec in config.tensors() {
            let stored = self.stored(&spec.name, &spec.shape)?;
            self.checked(&spec.name, stored, &spec.shape)?;
        }
        Ok(())
    }

    /// The entry of that name.
    fn stored(&self, name: &str, shape: &[usize]) -> Result<&Stored, ModelError> {
        self.tensors.get(name).ok_or_else(|| ModelError::MissingTensor {
            file: self.origin.clone(),
            tensor: name.into(),
            expected: shape.to_vec(),
        })
    }

    /// Whether a tensor of that name is there.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The shape of a tensor, if it is there.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|stored| stored.shape.as_slice())
    }

    /// The names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors as they are stored.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|stored| stored.range.len() as u64).sum()
    }
}

/// Undoes the order in which GGUF stores the rows of llama's `q_proj` and `k_proj`: there, the
/// two halves of each head are interleaved, row `2 i + j` being row `i` of half `j`. Rows are
/// moved whole, so quantised ones stay as they are.
fn split_halves(bytes: &[u8], rows: usize, heads: usize) -> Vec<u8> {
    let row_bytes = bytes.len() / rows;
    let head_rows = rows / heads;
    let half = head_rows / 2;
    let mut out = Vec::with_capacity(bytes.len());
    for head in 0..heads {
        for half_index in 0..2 {
            for i in 0..half {
                let row = head * head_rows + 2 * i + half_index;
                out.extend_from_slice(&bytes[row * row_bytes..(row + 1) * row_bytes]);
            }
        }
    }
    debug_assert_eq!(out.len(), bytes.len());
    out
}

/// Reads a JSON file.
pub(crate) fn read_json(path: &Path) -> Result<Value, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let bytes = std::fs::read(path).map_err(io)?;
    serde_json::from_slice(&bytes).map_err(|e| ModelError::malformed(path.display().to_string(), e))
}

#[cfg(test)]
mod tests;
