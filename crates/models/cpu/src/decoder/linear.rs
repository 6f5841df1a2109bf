//! The decoder's weights: packed matrices with optional biases, and vectors in f32.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use stolon_checkpoint::WeightType;
use stolon_checkpoint::config::{FactoredWeights, LinearWeights, TensorSpec};
use stolon_checkpoint::error::ModelError;
use stolon_checkpoint::weights::{Tensor, Weights};
use stolon_kernels::{
    self as kernels, Epilogue, Matrix, Operands, Path, Product, RowSums, Sink, TensorType,
};

use super::adapters::{RowUpdates, Updates};
use crate::table::Table;
use crate::workers::Workers;

/// Number of bytes of a matrix that are packed before their pages are released.
const RUN_BYTES: usize = 8 << 20;
/// Number of bytes of a matrix that one task checks for bf16 values.
const CHECK_BYTES: usize = 1 << 20;

/// Packs a model's weights. The memory of each tensor is released as soon as it is packed, so that
/// the model is never in memory twice.
#[derive(Debug)]
pub(crate) struct Loader<'a> {
    pub(crate) weights: Weights,
    pub(crate) weight_type: WeightType,
    /// Whether tables stay in their file where they can.
    pub(crate) map_tables: bool,
    pub(crate) path: Path,
    pub(crate) workers: &'a Workers,
}

impl Loader<'_> {
    /// Packs the matrix `spec` in the type that the options and its role select.
    pub(crate) fn matrix(&mut self, spec: &TensorSpec) -> Result<Matrix, ModelError> {
        let unpackable = |error| ModelError::Unpackable { tensor: spec.name.clone(), error };
        let tensor = self.weights.tensor(&spec.name, &spec.shape)?;
        let (rows, columns) = (spec.shape[0], spec.shape[1]);
        let dtype = self.kept_type(spec, &tensor);
        let mut matrix = Matrix::zeroed(dtype, rows, columns, self.path).map_err(unpackable)?;
        let row_bytes = tensor.bytes.len() / rows;
        let run_rows = (RUN_BYTES / row_bytes).max(1).next_multiple_of(Matrix::ROWS_STEP);
        for (index, rows) in tensor.bytes.chunks(run_rows * row_bytes).enumerate() {
            matrix
                .fill(self.workers.pool(), index * run_rows, tensor.dtype, rows)
                .map_err(unpackable)?;
            self.weights.release(rows);
        }
        drop(tensor);
        self.weights.remove(&spec.name);
        Ok(matrix)
    }

    /// Packs the table `spec`, or leaves it in its file.
    pub(crate) fn table(&mut self, spec: &TensorSpec) -> Result<Table, ModelError> {
        let table = self.map_tables.then(|| self.weights.file_table(spec, self.weight_type));
        let Some(table) = table.flatten() else { return Ok(Table::Packed(self.matrix(spec)?)) };
        self.weights.remove(&spec.name);
        table.expect_random_reads();
        Ok(Table::File(table))
    }

    /// The type in which a matrix is kept. An F16 matrix is kept as BF16 if BF16 represents all its
    /// values exactly, as it does in files that were converted from BF16. Some processors multiply
    /// BF16 faster.
    fn kept_type(&self, spec: &TensorSpec, tensor: &Tensor<'_>) -> TensorType {
        let dtype = self.weight_type.of(spec, tensor.dtype);
        if dtype != TensorType::F16 {
            return dtype;
        }
        let is_bf16 = AtomicBool::new(true);
        self.workers.run(tensor.bytes.chunks(CHECK_BYTES), |numbers| {
            if is_bf16.load(Relaxed) && !kernels::is_bf16(numbers) {
                is_bf16.store(false, Relaxed);
            }
            self.weights.release(numbers);
        });
        if is_bf16.into_inner() { TensorType::Bf16 } else { dtype }
    }

    /// Packs a matrix and reads its bias.
    pub(crate) fn linear(&mut self, spec: &LinearWeights) -> Result<Linear, ModelError> {
        let LinearWeights { weight, bias } = spec;
        Ok(Linear { matrix: self.matrix(weight)?, bias: self.optional_vector(bias.as_ref())? })
    }

    /// Packs a projection that may be the product of two matrices.
    pub(crate) fn factored(&mut self, spec: &FactoredWeights) -> Result<Factored, ModelError> {
        let FactoredWeights { down, up } = spec;
        Ok(Factored { down: self.optional(down.as_ref())?, up: self.linear(up)? })
    }

    /// The same as [`Self::linear`], if the model has the projection.
    pub(crate) fn optional(
        &mut self,
        spec: Option<&LinearWeights>,
    ) -> Result<Option<Linear>, ModelError> {
        spec.map(|spec| self.linear(spec)).transpose()
    }

    /// Packs a matrix without a bias.
    pub(crate) fn unbiased(&mut self, spec: &TensorSpec) -> Result<Linear, ModelError> {
        Ok(Linear { matrix: self.matrix(spec)?, bias: None })
    }

    /// Packs a matrix without a bias that is stored transposed in the file, `[in, out]`. It is kept
    /// in f32, because there is only one such matrix, and it is small.
    pub(crate) fn transposed(&mut self, spec: &TensorSpec) -> Result<Linear, ModelError> {
        let (inputs, outputs) = (spec.shape[0], spec.shape[1]);
        let values = self.vector(spec)?;
        let column = |output: usize| values[output..].iter().step_by(outputs);
        let bytes: Vec<u8> =
            (0..outputs).flat_map(column).flat_map(|value| value.to_le_bytes()).collect();
        let matrix = Matrix::pack(TensorType::F32, outputs, inputs, &bytes, self.path)
            .map_err(|error| ModelError::Unpackable { tensor: spec.name.clone(), error })?;
        Ok(Linear { matrix, bias: None })
    }

    /// Reads a norm or a bias and converts it to f32.
    pub(crate) fn vector(&mut self, spec: &TensorSpec) -> Result<Vec<f32>, ModelError> {
        let vector = self.weights.floats(spec)?;
        self.weights.remove(&spec.name);
        Ok(vector)
    }

    /// The same as [`Self::vector`], if the model has the tensor.
    pub(crate) fn optional_vector(
        &mut self,
        spec: Option<&TensorSpec>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        spec.map(|spec| self.vector(spec)).transpose()
    }
}

/// The product of a group of rows with a matrix.
#[derive(Debug)]
pub(super) struct GroupProduct<'a> {
    /// Index of the group.
    pub(super) group: usize,
    pub(super) matrix: &'a Matrix,
    /// The updates by adapters that are added to the result, and the index of the matrix among the
    /// projections of their site; `None` if there are none.
    pub(super) updates: Option<(Updates<'a>, usize)>,
    pub(super) sink: Sink<'a>,
}

/// Multiplies groups of rows with matrices, and writes the results to the sinks.
pub(super) fn multiply_groups<'a>(
    path: Path,
    rows: &Operands,
    products: impl IntoIterator<Item = GroupProduct<'a>>,
    workers: &Workers,
) {
    let (mut matrices, mut epilogues, mut sinks) = (Vec::new(), Vec::new(), Vec::new());
    let mut work = 0;
    for GroupProduct { group, matrix, updates, sink } in products {
        work += rows.group_rows(group) * matrix.in_features() * matrix.out_features();
        matrices.push([matrix]);
        epilogues.push(updates.map(|(updates, part)| updates.then([part], |_: RowSums<'_>| {})));
        sinks.push((group, sink));
    }
    let parts = matrices.iter().zip(&epilogues).zip(sinks);
    let mut products: Vec<Product<'_>> = parts
        .map(|((matrices, epilogue), (group, sink))| {
            let epilogue = epilogue.as_ref().map(|epilogue| epilogue as Epilogue<'_>);
            Product { group, matrices, step: 1, epilogue, sink }
        })
        .collect();
    kernels::multiply(path, workers.for_work(work), rows, &mut products);
}

/// Computes products of the rows `normed`. Returns the time of their epilogues.
pub(super) fn multiply_all(
    path: Path,
    normed: &Operands,
    products: &mut [Product<'_>],
    workers: &Workers,
) -> Duration {
    let matrices: Vec<&Matrix> = products.iter().map(|product| product.matrices[0]).collect();
    let threads = workers.for_products(&matrices, normed.rows());
    kernels::multiply(path, threads, normed, products)
}

/// Multiplies `rows` with the matrix of `linear` and writes the results, after `epilogue`, to
/// `sink`.
pub(crate) fn multiply(
    linear: &Linear,
    rows: &Operands,
    epilogue: Epilogue<'_>,
    sink: Sink<'_>,
    (path, workers): (Path, &Workers),
) {
    let matrices = [&linear.matrix];
    let product =
        Product { group: 0, matrices: &matrices, step: 1, epilogue: Some(epilogue), sink };
    kernels::multiply(path, workers.for_products(&matrices, rows.rows()), rows, &mut [product]);
}

/// Projects `rows` and adds the bias.
pub(crate) fn project(
    linear: &Linear,
    rows: &Operands,
    sink: Sink<'_>,
    path: Path,
    workers: &Workers,
) {
    let add_bias = |sums: RowSums<'_>| linear.add_bias(path, sums.feature, sums.first);
    multiply(linear, rows, &add_bias, sink, (path, workers));
}

/// A matrix `[out, in]` with an optional bias `[out]`, which is added in the epilogue of the GEMM.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) matrix: Matrix,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Adds the bias to the part of a row that starts at output feature `first`.
    pub(crate) fn add_bias(&self, path: Path, first: usize, sums: &mut [f32]) {
        if let Some(bias) = &self.bias {
            kernels::add(path, sums, &bias[first..first + sums.len()]);
        }
    }

    /// Adds `value` to all features of the result, by adding it to the bias.
    pub(crate) fn shift(&mut self, value: f32) {
        let bias = self.bias.get_or_insert_with(|| vec![0.0; self.matrix.out_features()]);
        bias.iter_mut().for_each(|bias| *bias += value);
    }

    /// Number of features of the result.
    pub(crate) fn out_features(&self) -> usize {
        self.matrix.out_features()
    }

    /// The first `rows` rows of a buffer for the result, `[rows, out]`.
    pub(crate) fn rows_sink<'a>(&self, buffer: &'a mut [f32], rows: usize) -> Sink<'a> {
        Sink::Rows(&mut buffer[..rows * self.out_features()])
    }

    /// The product of the first group of rows with the matrix.
    pub(super) fn product<'a>(
        &'a self,
        updates: Option<(Updates<'a>, usize)>,
        sink: Sink<'a>,
    ) -> GroupProduct<'a> {
        GroupProduct { group: 0, matrix: &self.matrix, updates, sink }
    }

    /// Size of the packed matrix in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.matrix.bytes()
    }
}

/// A projection of the residual stream, which may be the product of two matrices.
#[derive(Debug)]
pub(crate) struct Factored {
    /// The projection to fewer features; `None` if there is only one matrix.
    down: Option<Linear>,
    up: Linear,
}

impl Factored {
    /// The matrix that the residual stream is multiplied with.
    pub(crate) fn first(&self) -> &Linear {
        self.down.as_ref().unwrap_or(&self.up)
    }

    /// The matrix that the result of the first one is multiplied with, if there is one.
    pub(crate) fn second(&self) -> Option<&Linear> {
        self.down.as_ref().map(|_| &self.up)
    }
}
