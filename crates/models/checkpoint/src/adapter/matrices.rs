//! The matrices of an adapter as its files have them, site by site. A backend converts them to its
//! own form ([`AdapterFormat`](super::AdapterFormat)).
//!
//! Bytes are counted before they are allocated.

use std::borrow::Cow;
use std::sync::Arc;

use stolon_kernels::{TensorType, widen};

use super::FIRST;
use super::files::AdapterFiles;
use crate::config::TensorSpec;
use crate::error::ModelError;
use crate::weights::{Tensor, Weights};

/// The memory that the matrices of an adapter may take.
#[derive(Debug)]
pub struct Budget {
    /// The file with the matrices, used in errors.
    file: String,
    /// Number of bytes that were taken.
    bytes: u64,
    /// Maximum number of bytes.
    bytes_max: u64,
}

impl Budget {
    fn new(file: &str, bytes_max: u64) -> Self {
        Self { file: file.to_owned(), bytes: 0, bytes_max }
    }

    /// Number of bytes that were taken.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts the bytes of a matrix `[rows, columns]` with values of the type `dtype`, which must
    /// not be allocated before.
    ///
    /// # Errors
    /// [`ModelError::TooLarge`] beyond the maximum.
    pub fn take(
        &mut self,
        rows: usize,
        columns: usize,
        dtype: TensorType,
    ) -> Result<(), ModelError> {
        self.check(rows, columns, dtype)?;
        self.bytes = self.bytes.saturating_add(bytes_of(rows, columns, dtype));
        Ok(())
    }

    /// The same as [`Self::take`] for a matrix that is released before the next one is allocated.
    fn check(&self, rows: usize, columns: usize, dtype: TensorType) -> Result<(), ModelError> {
        let bytes = self.bytes.saturating_add(bytes_of(rows, columns, dtype));
        match bytes > self.bytes_max {
            true => Err(ModelError::TooLarge {
                file: format!("the matrices of {}", self.file),
                bytes_max: self.bytes_max,
            }),
            false => Ok(()),
        }
    }
}

/// Number of bytes of a matrix, or the largest number if there is no such matrix.
fn bytes_of(rows: usize, columns: usize, dtype: TensorType) -> u64 {
    let elements = rows.checked_mul(columns);
    elements.and_then(|count| dtype.bytes_of(count)).unwrap_or(usize::MAX) as u64
}

/// A matrix in row-major order.
#[derive(Debug)]
pub struct PlainMatrix {
    /// The name of the tensor that it was read from, used in errors.
    pub name: String,
    /// F32, F16 or BF16.
    pub dtype: TensorType,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
    /// Little-endian values.
    pub bytes: Vec<u8>,
}

impl PlainMatrix {
    /// The values in f32, row by row.
    pub fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows * self.columns];
        widen(self.dtype, &self.bytes, &mut values);
        values
    }
}

/// The matrices of projections with the same input.
#[derive(Debug)]
pub struct SiteMatrices {
    /// The matrices `A`, `[width, in]`, with the rows of all projections. [`Site::Keys`] has one
    /// for each head, and other sites have one in total.
    ///
    /// [`Site::Keys`]: super::Site::Keys
    pub first: Vec<PlainMatrix>,
    /// The scale of each row of `first`, `[width]`.
    pub scales: Vec<f32>,
    /// Number of output features of each projection of the site, or of each head at
    /// [`Site::Keys`](super::Site::Keys) and [`Site::Values`](super::Site::Values).
    pub outputs: Vec<usize>,
    /// The matrix `B` of each projection or head; `None` if the adapter does not change it.
    pub second: Vec<Option<PlainSecond>>,
    /// Whether there is an input for each head, as at [`Site::Keys`](super::Site::Keys) and
    /// [`Site::Values`](super::Site::Values).
    pub by_head: bool,
}

/// The matrix `B` of a projection.
#[derive(Debug)]
pub struct PlainSecond {
    /// Index of the first row of [`SiteMatrices::first`] that belongs to it.
    pub start: usize,
    /// `[out, rank]`. All heads of [`Site::Keys`](super::Site::Keys) share it.
    pub matrix: Arc<PlainMatrix>,
}

/// The matrices of the embedding.
#[derive(Debug)]
pub struct EmbeddingMatrices {
    /// `[vocab_size, rank]`: the columns of `A`.
    pub columns: PlainMatrix,
    /// The factor of the update.
    pub scale: f32,
    /// The matrix `B`, `[hidden_size, rank]`.
    pub second: PlainMatrix,
}

/// Reads the matrices of an adapter.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    files: &'a AdapterFiles,
    pub(super) budget: Budget,
    /// The largest rank of the matrices that were read.
    pub(super) rank: usize,
}

/// A matrix `A` of a site with several.
struct First {
    /// The name of the matrix in the file that it belongs to.
    source: String,
    /// Index of its first row among the rows of its site.
    start: usize,
    rank: usize,
    dtype: TensorType,
    bytes: Vec<u8>,
}

impl<'a> Reader<'a> {
    /// Reads the matrices of `files`, which may take `bytes_max` bytes in the form of a backend.
    pub(super) fn new(files: &'a AdapterFiles, bytes_max: u64) -> Self {
        Self { files, budget: Budget::new(files.file(), bytes_max), rank: 0 }
    }

    /// The matrices of the embedding; `None` if the adapter does not change it.
    pub(super) fn embedding(&mut self) -> Result<Option<EmbeddingMatrices>, ModelError> {
        let Some(spec) = &self.files.sites().embedding else { return Ok(None) };
        let (name, tokens) = (&spec.name, spec.shape[1]);
        let Some(rank) = self.files.rank(spec)? else { return Ok(None) };
        self.rank = self.rank.max(rank);
        let by_token = self.files.has_columns();
        let shape = if by_token { [tokens, rank] } else { [rank, tokens] };
        let tensor = self.files.weights().tensor(&format!("{name}{FIRST}"), &shape)?;
        let dtype = float_type(tensor.dtype);
        self.budget.check(tokens, rank, dtype)?;
        let values = floats(&tensor);
        let bytes = match by_token {
            true => values.into_owned(),
            false => transposed(&values, rank, dtype.block_bytes()),
        };
        let columns = PlainMatrix { name: name.clone(), dtype, rows: tokens, columns: rank, bytes };
        let (scale, second) = (self.files.scale(name, rank)?, self.second(spec, rank)?);
        Ok(Some(EmbeddingMatrices { columns, scale, second }))
    }

    /// The matrices of the projections `parts` with the same input; `None` if the adapter changes
    /// none of them.
    pub(super) fn site(
        &mut self,
        parts: &[TensorSpec],
    ) -> Result<Option<SiteMatrices>, ModelError> {
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
            second.push(Some(PlainSecond { start: firsts[index].start, matrix }));
        }
        if firsts.is_empty() {
            return Ok(None);
        }
        let mut scales = Vec::new();
        for First { source, rank, .. } in &firsts {
            let scale = self.files.scale(source, *rank)?;
            scales.resize(scales.len() + rank, scale);
        }
        let first = vec![self.stack(firsts, scales.len(), parts[0].shape[1])?];
        let outputs = parts.iter().map(|spec| spec.shape[0]).collect();
        Ok(Some(SiteMatrices { first, scales, outputs, second, by_head: false }))
    }

    /// The matrices of the projections to the keys of all heads of latent attention. `keys` are the
    /// transposed matrices of the heads, so the file's `B` is applied first and its `A` second.
    /// `value` is the projection to values of one of the heads, which has the same `A` in the file.
    pub(super) fn keys(
        &self,
        keys: &[TensorSpec],
        value: &TensorSpec,
    ) -> Result<Option<SiteMatrices>, ModelError> {
        let Some(rank) = self.files.rank(value)? else { return Ok(None) };
        let (source, width) = (self.files.source(value), value.shape[1]);
        let mut first = Vec::with_capacity(keys.len());
        for key in keys {
            let tensor = self.weights().tensor(&key.name, &[rank, key.shape[1]])?;
            let (dtype, bytes) = (tensor.dtype, tensor.bytes.into_owned());
            let own = First { source: key.name.clone(), start: 0, rank, dtype, bytes };
            first.push(self.stack(vec![own], rank, key.shape[1])?);
        }
        let name = format!("{source}{FIRST}");
        let tensor = self.weights().tensor(&name, &[rank, width])?;
        let dtype = float_type(tensor.dtype);
        self.budget.check(rank, width, dtype)?;
        let bytes = transposed(&floats(&tensor), rank, dtype.block_bytes());
        let matrix = Arc::new(PlainMatrix { name, dtype, rows: width, columns: rank, bytes });
        let scales = vec![self.files.scale(&source, rank)?; rank];
        let second = || Some(PlainSecond { start: 0, matrix: Arc::clone(&matrix) });
        let second = keys.iter().map(|_| second()).collect();
        let outputs = vec![width; keys.len()];
        Ok(Some(SiteMatrices { first, scales, outputs, second, by_head: true }))
    }

    /// The matrices of the projections to the values of all heads of latent attention.
    pub(super) fn values(
        &mut self,
        values: &[TensorSpec],
    ) -> Result<Option<SiteMatrices>, ModelError> {
        Ok(self.site(values)?.map(|matrices| SiteMatrices { by_head: true, ..matrices }))
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

    /// Stacks the matrices `A` of a site to one matrix with `rows` rows and `columns` columns. It
    /// is f32 if their types differ or are quantized.
    fn stack(
        &self,
        firsts: Vec<First>,
        rows: usize,
        columns: usize,
    ) -> Result<PlainMatrix, ModelError> {
        let dtype = firsts[0].dtype;
        let is_same = firsts.iter().all(|first| first.dtype == dtype) && dtype.block_len() == 1;
        let dtype = if is_same { dtype } else { TensorType::F32 };
        let name = firsts[0].source.clone();
        self.budget.check(rows, columns, dtype)?;
        let mut bytes = Vec::with_capacity(rows * columns * dtype.block_bytes());
        for first in firsts {
            match is_same {
                true => bytes.extend_from_slice(&first.bytes),
                false => bytes.extend(widened(first.dtype, &first.bytes, first.rank * columns)),
            }
        }
        Ok(PlainMatrix { name, dtype, rows, columns, bytes })
    }

    /// Reads the matrix `B` `[out, rank]` of the projection `spec`.
    fn second(&self, spec: &TensorSpec, rank: usize) -> Result<PlainMatrix, ModelError> {
        let (name, rows) = (&spec.name, spec.shape[0]);
        let tensor = self.weights().tensor(name, &[rows, rank])?;
        let dtype = float_type(tensor.dtype);
        self.budget.check(rows, rank, dtype)?;
        let bytes = floats(&tensor).into_owned();
        Ok(PlainMatrix { name: name.clone(), dtype, rows, columns: rank, bytes })
    }

    fn weights(&self) -> &Weights {
        self.files.weights()
    }
}

/// The type in which values of the type `dtype` are kept: the same type, or f32 if it is quantized.
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
