//! Packs the matrices of an adapter for the forward pass. The bytes of a packed matrix are counted
//! before they are allocated.

use std::borrow::Cow;
use std::sync::Arc;

use stolon_kernels::{LowRank, Matrix, Path, TensorType, widen};

use super::files::AdapterFiles;
use super::{EmbeddingWeights, ExpertWeights, FIRST, LayerWeights, Second, Site, SiteWeights};
use crate::config::TensorSpec;
use crate::error::ModelError;
use crate::weights::{Tensor, Weights};

/// Packs the matrices of an adapter.
pub(super) struct Packer<'a> {
    files: &'a AdapterFiles,
    path: Path,
    /// Number of bytes that have been packed.
    pub(super) bytes: u64,
    /// Maximum number of bytes.
    bytes_max: u64,
    /// The largest rank of the packed matrices.
    pub(super) rank: usize,
}

/// A matrix `A` that has not been packed yet.
struct First {
    /// The name of the matrix in the file that it belongs to.
    source: String,
    /// Index of its first row among the rows of its site.
    start: usize,
    rank: usize,
    dtype: TensorType,
    bytes: Vec<u8>,
}

impl<'a> Packer<'a> {
    /// Packs the matrices of `files` for the instruction set `path`, at most `bytes_max` bytes.
    pub(super) fn new(files: &'a AdapterFiles, path: Path, bytes_max: u64) -> Self {
        Self { files, path, bytes: 0, bytes_max, rank: 0 }
    }

    /// Packs all sites of an adapter.
    pub(super) fn layers(&mut self) -> Result<Vec<LayerWeights>, ModelError> {
        let mut layers = Vec::with_capacity(self.files.sites().layers.len());
        for sites in &self.files.sites().layers {
            let mut packed = [const { None }; Site::COUNT];
            for (site, parts) in sites.iter().enumerate() {
                packed[site] = match sites[Site::Values as usize].first() {
                    Some(value) if site == Site::Keys as usize => self.keys(parts, value)?,
                    _ => self.site(parts)?,
                };
            }
            layers.push(packed);
        }
        Ok(layers)
    }

    /// Packs the experts of all layers.
    pub(super) fn experts(&mut self) -> Result<Vec<ExpertWeights>, ModelError> {
        let mut layers = Vec::with_capacity(self.files.sites().experts.len());
        for experts in &self.files.sites().experts {
            let mut packed = ExpertWeights::new();
            for (index, [gate_up, down]) in experts.iter().enumerate() {
                let sites = [self.site(gate_up)?, self.site(down)?];
                if sites.iter().any(Option::is_some) {
                    packed.insert(index, sites);
                }
            }
            layers.push(packed);
        }
        Ok(layers)
    }

    /// Packs the matrices of the embedding; `None` if the adapter does not change it.
    pub(super) fn embedding(&mut self) -> Result<Option<EmbeddingWeights>, ModelError> {
        let Some(spec) = &self.files.sites().embedding else { return Ok(None) };
        let (name, tokens) = (&spec.name, spec.shape[1]);
        let Some(rank) = self.files.rank(spec)? else { return Ok(None) };
        self.rank = self.rank.max(rank);
        let by_token = self.files.has_columns();
        let shape = if by_token { [tokens, rank] } else { [rank, tokens] };
        let tensor = self.files.weights().tensor(&format!("{name}{FIRST}"), &shape)?;
        let dtype = float_type(tensor.dtype);
        self.take(tokens, rank, dtype)?;
        let values = floats(&tensor);
        let columns = match by_token {
            true => values.into_owned(),
            false => transposed(&values, rank, dtype.block_bytes()),
        };
        let (scale, second) = (self.files.scale(name, rank)?, self.second(spec, rank)?);
        Ok(Some(EmbeddingWeights { columns, dtype, scale, second }))
    }

    /// Packs the projections `parts` with the same input; `None` if the adapter changes none of
    /// them.
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
            let matrix = Arc::new(self.second(spec, rank)?);
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
        Ok(Some(SiteWeights { first: vec![first], scales, second }))
    }

    /// Packs the adapter of the projections to the keys of all heads of latent attention. `keys`
    /// are the transposed matrices of the heads, so the file's `B` is applied first and its `A`
    /// second. `value` is the projection to values of one of the heads, which has the same `A` in
    /// the file.
    fn keys(
        &mut self,
        keys: &[TensorSpec],
        value: &TensorSpec,
    ) -> Result<Option<SiteWeights>, ModelError> {
        let Some(rank) = self.files.rank(value)? else { return Ok(None) };
        let (source, width) = (self.files.source(value), value.shape[1]);
        let mut first = Vec::with_capacity(keys.len());
        for key in keys {
            let tensor = self.files.weights().tensor(&key.name, &[rank, key.shape[1]])?;
            let (dtype, bytes) = (tensor.dtype, tensor.bytes.into_owned());
            let own = First { source: key.name.clone(), start: 0, rank, dtype, bytes };
            first.push(self.stack(vec![own], rank, key.shape[1])?);
        }
        let name = format!("{source}{FIRST}");
        let tensor = self.files.weights().tensor(&name, &[rank, width])?;
        let dtype = float_type(tensor.dtype);
        let bytes = transposed(&floats(&tensor), rank, dtype.block_bytes());
        let matrix = self.low_rank(&name, [width, rank], (dtype, &bytes))?;
        let (matrix, scales) = (Arc::new(matrix), vec![self.files.scale(&source, rank)?; rank]);
        let second = || Some(Second { start: 0, matrix: Arc::clone(&matrix) });
        Ok(Some(SiteWeights { first, scales, second: keys.iter().map(|_| second()).collect() }))
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

    /// Packs the matrices `A` of a site as one matrix with `rows` rows and `columns` columns. It is
    /// f32 if their types differ or are quantized.
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
        self.low_rank(name, [out, rank], (float_type(tensor.dtype), &floats(&tensor)))
    }

    /// Packs a matrix `[out, rank]`, with the values of the file's tensor `name`.
    fn low_rank(
        &mut self,
        name: &str,
        [out, rank]: [usize; 2],
        (dtype, values): (TensorType, &[u8]),
    ) -> Result<LowRank, ModelError> {
        self.take(out.next_multiple_of(Matrix::ROWS_STEP), rank, dtype)?;
        LowRank::pack(dtype, out, rank, values, self.path)
            .map_err(|error| ModelError::Unpackable { tensor: name.to_owned(), error })
    }

    /// Counts the bytes of a matrix before they are allocated, and refuses them beyond the maximum.
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

/// The type in which values of the type `dtype` are packed: the same type, or f32 if it is
/// quantized.
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

/// Transposes a matrix with `rows` rows. Its values are not quantized and have `width` bytes each.
fn transposed(bytes: &[u8], rows: usize, width: usize) -> Vec<u8> {
    let row_bytes = bytes.len() / rows;
    let column = |at: usize| bytes.chunks_exact(row_bytes).map(move |row| &row[at..][..width]);
    (0..row_bytes).step_by(width).flat_map(column).flatten().copied().collect()
}

/// Converts the `count` values in `bytes` to the bytes of f32 values.
fn widened(dtype: TensorType, bytes: &[u8], count: usize) -> Vec<u8> {
    let mut values = vec![0.0; count];
    widen(dtype, bytes, &mut values);
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
