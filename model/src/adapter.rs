//! LoRA adapters: for some projections of a model, two small matrices `A` and `B`, whose product
//! with a row is added to that of the model's own matrix: `y = W x + scale * B (A x)` (Hu et al.,
//! 2021).
//!
//! 1. [`AdapterFiles`] reads the files of PEFT, or a GGUF file, and gives the matrices the names of
//!    the model's own.
//! 2. [`LoraWeights`] has them in the form that the forward pass needs: the matrices `A` of all
//!    projections of the same rows as one matrix, and the rows of each `B` in the order of the rows
//!    in memory.
//! 3. The pass (`decoder/adapters.rs`) computes `A x` for the rows of each adapter of a step, and
//!    adds `B (A x)` in the epilogues of the products with the model's own matrices.
//!
//! What would change answers and is not implemented is refused by the name of its tensor or key:
//! DoRA, trained biases, whole modules, experts, and layers that have something else in place of
//! attention.

mod files;
mod peft;
mod sites;

use std::borrow::Cow;
use std::path::Path as FilePath;
use std::sync::Arc;

use stolon_backend::{Adapter, AdapterLoadError, AdapterLoader};
use stolon_kernels::{LowRank, Matrix, Path, TensorType, widen};

use crate::config::{DecoderConfig, TensorSpec};
use crate::error::ModelError;
use crate::weights::{Tensor, Weights};
use files::AdapterFiles;

/// Maximum rank of an adapter's matrices. Adapters have ranks up to 512.
pub(crate) const RANK_MAX: usize = 1024;

/// The ending of the name of a matrix `A`. The matrix `B` has the name of the model's matrix.
const FIRST: &str = ".lora_a";

/// Reads adapters for a model.
#[derive(Debug)]
pub(crate) struct LoraLoader {
    model: Arc<DecoderConfig>,
    path: Path,
}

impl LoraLoader {
    /// A loader for a model that is computed with the instruction set `path`.
    pub(crate) fn new(config: &DecoderConfig, path: Path) -> Self {
        Self { model: Arc::new(config.clone()), path }
    }

    /// The weights of an adapter that this loader has returned; `None` for one of another model.
    pub(crate) fn own<'a>(&self, adapter: &'a Adapter) -> Option<&'a LoraWeights> {
        adapter.weights::<LoraWeights>().filter(|weights| Arc::ptr_eq(&weights.model, &self.model))
    }
}

impl AdapterLoader for LoraLoader {
    fn load(&self, path: &FilePath, bytes_max: u64) -> Result<Adapter, AdapterLoadError> {
        let files = AdapterFiles::open(path, &self.model, bytes_max)?;
        let fingerprint = files.fingerprint();
        let mut packer = Packer { files: &files, path: self.path, bytes: 0, bytes_max, rank: 0 };
        let layers = packer.layers()?;
        let embedding = packer.embedding()?;
        let (bytes, rank) = (packer.bytes, packer.rank);
        let weights = LoraWeights { model: Arc::clone(&self.model), layers, embedding };
        Ok(Adapter::new(fingerprint, bytes, rank, weights))
    }
}

impl From<ModelError> for AdapterLoadError {
    fn from(error: ModelError) -> Self {
        let text = error.to_string();
        match error {
            ModelError::TooLarge { .. } => Self::TooLarge(text),
            ModelError::MissingFile { .. } => Self::NotFound(text),
            ModelError::Io { error, .. } if error.kind() == std::io::ErrorKind::NotFound => {
                Self::NotFound(text)
            }
            _ => Self::Invalid(text),
        }
    }
}

/// The projections of a layer that read the same rows. The output matrix is at [`Site::Inputs`] of the
/// layer after the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    /// Of attention: queries, keys, values, and the gates of its output, in this order. Of latent
    /// attention: queries, or the vector that they are projections of, and what is kept of a
    /// position. Of a convolution, Gated DeltaNet or Kimi Delta Attention: the parts of their
    /// weights, in their order.
    Inputs,
    /// The same of Mamba-2, which may be next to attention.
    MambaInputs,
    /// The queries of latent attention, if they are projections of another vector.
    Queries,
    /// The time steps of Kimi Delta Attention.
    Steps,
    /// The gates of the outputs of Kimi Delta Attention.
    Gates,
    /// The projection of the output of attention, or of what the layer has in its place.
    Output,
    /// The same of Mamba-2.
    MambaOutput,
    /// Gate and up of a dense MLP, in this order.
    GateUp,
    /// The projection of a dense MLP's output.
    Down,
}

impl Site {
    /// Number of sites.
    pub(crate) const COUNT: usize = Self::Down as usize + 1;
}

/// The weights of a layer at each site.
type LayerWeights = [Option<SiteWeights>; Site::COUNT];

/// The weights of an adapter.
#[derive(Debug)]
pub(crate) struct LoraWeights {
    /// The configuration of the model that it belongs to.
    model: Arc<DecoderConfig>,
    /// For each layer, and for the output matrix, the weights of each site.
    layers: Vec<LayerWeights>,
    embedding: Option<EmbeddingWeights>,
}

impl LoraWeights {
    /// The weights of a site, if the adapter changes a projection there.
    pub(crate) fn site(&self, layer: usize, site: Site) -> Option<&SiteWeights> {
        self.layers[layer][site as usize].as_ref()
    }

    /// The weights of the embedding, if the adapter changes it.
    pub(crate) fn embedding(&self) -> Option<&EmbeddingWeights> {
        self.embedding.as_ref()
    }
}

/// The weights of an adapter for the embedding. The input of `A` is a token, so `A x` is a column of
/// `A`.
#[derive(Debug)]
pub(crate) struct EmbeddingWeights {
    /// `[vocab_size, rank]`: the columns of `A`.
    pub(crate) first: Matrix,
    pub(crate) scale: f32,
    /// `[hidden_size, rank]`.
    pub(crate) second: LowRank,
}

/// The weights of an adapter for the projections of the same rows.
#[derive(Debug)]
pub(crate) struct SiteWeights {
    /// `[width, in]`: the rows of `A` of all projections.
    pub(crate) first: Matrix,
    /// `[width]`: the scale of each row of `first`.
    pub(crate) scales: Vec<f32>,
    /// For each projection of the site its matrix `B`, if the adapter changes it.
    pub(crate) second: Vec<Option<Second>>,
}

/// The matrix `B` of a projection.
#[derive(Debug)]
pub(crate) struct Second {
    /// Index of the first row of [`SiteWeights::first`] that belongs to it.
    pub(crate) start: usize,
    /// `[out, rank]`.
    pub(crate) matrix: LowRank,
}

/// Packs the matrices of an adapter.
struct Packer<'a> {
    files: &'a AdapterFiles,
    path: Path,
    /// Number of bytes that are packed.
    bytes: u64,
    /// Maximum number of bytes.
    bytes_max: u64,
    /// The largest rank.
    rank: usize,
}

/// A matrix `A` that is not packed yet.
struct First {
    /// The name of the matrix of the file that it belongs to.
    source: String,
    /// Index of its first row among those of its site.
    start: usize,
    rank: usize,
    dtype: TensorType,
    bytes: Vec<u8>,
}

impl Packer<'_> {
    /// Packs all sites of an adapter.
    fn layers(&mut self) -> Result<Vec<LayerWeights>, ModelError> {
        let mut layers = Vec::with_capacity(self.files.sites().layers.len());
        for sites in &self.files.sites().layers {
            let mut packed = [const { None }; Site::COUNT];
            for (packed, parts) in packed.iter_mut().zip(sites) {
                *packed = self.site(parts)?;
            }
            layers.push(packed);
        }
        Ok(layers)
    }

    /// Packs the matrices of the embedding; `None` if the adapter does not change it.
    fn embedding(&mut self) -> Result<Option<EmbeddingWeights>, ModelError> {
        let Some(spec) = &self.files.sites().embedding else { return Ok(None) };
        let (name, tokens) = (&spec.name, spec.shape[1]);
        let Some(rank) = self.files.rank(spec)? else { return Ok(None) };
        self.rank = self.rank.max(rank);
        let by_token = self.files.has_columns();
        let shape = if by_token { [tokens, rank] } else { [rank, tokens] };
        let tensor = self.files.weights().tensor(&format!("{name}{FIRST}"), &shape)?;
        let dtype = float_type(tensor.dtype);
        self.take(tokens.next_multiple_of(Matrix::ROWS_STEP), rank, dtype)?;
        let bytes = floats(&tensor);
        let bytes =
            if by_token { bytes } else { transposed(&bytes, rank, dtype.block_bytes()).into() };
        let first = Matrix::pack(dtype, tokens, rank, &bytes, self.path)
            .map_err(|error| ModelError::Unpackable { tensor: name.clone(), error })?;
        let scale = self.files.scale(name, rank)?;
        Ok(Some(EmbeddingWeights { first, scale, second: self.second(spec, rank)? }))
    }

    /// Packs the projections `parts` of the same rows; `None` if the adapter changes none of them.
    fn site(&mut self, parts: &[TensorSpec]) -> Result<Option<SiteWeights>, ModelError> {
        let mut firsts: Vec<First> = Vec::new();
        let mut second = Vec::with_capacity(parts.len());
        for spec in parts {
            let Some(rank) = self.files.rank(spec)? else {
                second.push(None);
                continue;
            };
            self.rank = self.rank.max(rank);
            let source = self.files.source(spec);
            let known = firsts.iter().position(|first| first.source == source);
            let index = match known {
                Some(index) => index,
                None => {
                    let start = firsts.last().map_or(0, |first| first.start + first.rank);
                    firsts.push(self.first(source, spec, rank, start)?);
                    firsts.len() - 1
                }
            };
            let matrix = self.second(spec, rank)?;
            second.push(Some(Second { start: firsts[index].start, matrix }));
        }
        if firsts.is_empty() {
            return Ok(None);
        }
        let mut scales = Vec::new();
        for First { source, rank, .. } in &firsts {
            let scale = self.files.scale(source, *rank)?;
            scales.resize(scales.len() + rank, scale);
        }
        let first = self.stack(firsts, scales.len(), parts[0].shape[1])?;
        Ok(Some(SiteWeights { first, scales, second }))
    }

    /// Reads the matrix `A` `[rank, in]` of the projection `spec`.
    fn first(
        &self,
        source: String,
        spec: &TensorSpec,
        rank: usize,
        start: usize,
    ) -> Result<First, ModelError> {
        let tensor = self.weights().tensor(&format!("{source}{FIRST}"), &[rank, spec.shape[1]])?;
        Ok(First { source, start, rank, dtype: tensor.dtype, bytes: tensor.bytes.into_owned() })
    }

    /// Packs the matrices `A` of a site as one of `rows` rows and `columns` columns. Types that
    /// differ, and quantised ones, become f32.
    fn stack(
        &mut self,
        firsts: Vec<First>,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix, ModelError> {
        let dtype = firsts[0].dtype;
        let is_same = firsts.iter().all(|first| first.dtype == dtype) && dtype.block_len() == 1;
        let dtype = if is_same { dtype } else { TensorType::F32 };
        let padded = rows.next_multiple_of(Matrix::ROWS_STEP);
        let source = firsts[0].source.clone();
        self.take(padded, columns, dtype)?;
        let mut bytes = Vec::with_capacity(rows * columns * dtype.block_bytes());
        for first in firsts {
            match is_same {
                true => bytes.extend_from_slice(&first.bytes),
                false => bytes.extend(widened(first.dtype, &first.bytes, first.rank * columns)),
            }
        }
        let unpackable = |error| ModelError::Unpackable { tensor: source, error };
        Matrix::pack(dtype, rows, columns, &bytes, self.path).map_err(unpackable)
    }

    /// Packs the matrix `B` `[out, rank]` of the projection `spec`.
    fn second(&mut self, spec: &TensorSpec, rank: usize) -> Result<LowRank, ModelError> {
        let (name, out) = (&spec.name, spec.shape[0]);
        let tensor = self.files.weights().tensor(name, &[out, rank])?;
        let dtype = float_type(tensor.dtype);
        self.take(out.next_multiple_of(Matrix::ROWS_STEP), rank, dtype)?;
        LowRank::pack(dtype, out, rank, &floats(&tensor), self.path)
            .map_err(|error| ModelError::Unpackable { tensor: name.clone(), error })
    }

    /// Counts the bytes of a matrix before they are allocated.
    fn take(&mut self, rows: usize, columns: usize, dtype: TensorType) -> Result<(), ModelError> {
        let elements = rows.checked_mul(columns);
        let bytes = elements.and_then(|count| dtype.bytes_of(count)).unwrap_or(usize::MAX);
        self.bytes = self.bytes.saturating_add(bytes as u64);
        match self.bytes > self.bytes_max {
            true => Err(ModelError::TooLarge {
                file: format!("the matrices of {}", self.files.file()),
                bytes_max: self.bytes_max,
            }),
            false => Ok(()),
        }
    }

    fn weights(&self) -> &Weights {
        self.files.weights()
    }
}

/// The type in which values of the type `dtype` are packed: itself if it is not quantised, or f32.
fn float_type(dtype: TensorType) -> TensorType {
    if dtype.block_len() == 1 { dtype } else { TensorType::F32 }
}

/// The values of a tensor in its [`float_type`].
fn floats<'a>(tensor: &'a Tensor<'_>) -> Cow<'a, [u8]> {
    match tensor.dtype.block_len() {
        1 => Cow::Borrowed(&tensor.bytes),
        _ => widened(tensor.dtype, &tensor.bytes, tensor.shape.iter().product()).into(),
    }
}

/// The values of a matrix with `rows` rows of values that are not quantised, by columns.
fn transposed(bytes: &[u8], rows: usize, width: usize) -> Vec<u8> {
    let row_bytes = bytes.len() / rows;
    let column = |at: usize| bytes.chunks_exact(row_bytes).map(move |row| &row[at..][..width]);
    (0..row_bytes).step_by(width).flat_map(column).flatten().copied().collect()
}

/// The `count` values in `bytes` as bytes of f32.
fn widened(dtype: TensorType, bytes: &[u8], count: usize) -> Vec<u8> {
    let mut values = vec![0.0; count];
    widen(dtype, bytes, &mut values);
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
