//! The decoder's weights: packed matrices with optional biases, and vectors in f32.

use stolon_kernels::{self as kernels, Matrix, Path};

use super::workers::Workers;
use crate::cpu::WeightType;
use crate::error::ModelError;
use crate::weights::Weights;

/// Number of bytes of a matrix that are packed before their pages are released.
const RUN_BYTES: usize = 8 << 20;

/// Packs a model's weights. It releases the memory of each one as soon as it is packed, so that the
/// model is never in memory twice.
#[derive(Debug)]
pub(super) struct Loader<'a> {
    pub(super) weights: Weights,
    pub(super) weight_type: WeightType,
    pub(super) path: Path,
    pub(super) workers: &'a Workers,
}

impl Loader<'_> {
    /// Packs the matrix `name` of the shape `[out, input]`.
    pub(super) fn matrix(
        &mut self,
        name: &str,
        [out, input]: [usize; 2],
    ) -> Result<Matrix, ModelError> {
        let weight_type = self.weight_type;
        self.matrix_as(name, [out, input], weight_type)
    }

    /// Packs the matrix `name` of the shape `[out, input]` in the type that `weight_type` selects.
    fn matrix_as(
        &mut self,
        name: &str,
        [out, input]: [usize; 2],
        weight_type: WeightType,
    ) -> Result<Matrix, ModelError> {
        let unpackable = |error| ModelError::Unpackable { tensor: name.to_owned(), error };
        let tensor = self.weights.tensor(name, &[out, input])?;
        let dtype = weight_type.of(tensor.dtype, input);
        let mut matrix = Matrix::zeroed(dtype, out, input, self.path).map_err(unpackable)?;
        let row_bytes = tensor.bytes.len() / out;
        let run_rows = (RUN_BYTES / row_bytes).max(1).next_multiple_of(Matrix::ROWS_STEP);
        for (index, rows) in tensor.bytes.chunks(run_rows * row_bytes).enumerate() {
            matrix
                .fill(self.workers.pool(), index * run_rows, tensor.dtype, rows)
                .map_err(unpackable)?;
            self.weights.release(rows);
        }
        drop(tensor);
        self.weights.remove(name);
        Ok(matrix)
    }

    /// Loads a small matrix whose results decide between alternatives, in the type in which it is
    /// stored. Otherwise as [`linear`](Self::linear).
    pub(super) fn exact_linear(
        &mut self,
        name: &str,
        [out, input]: [usize; 2],
        bias: bool,
    ) -> Result<Linear, ModelError> {
        let matrix = self.matrix_as(&format!("{name}.weight"), [out, input], WeightType::Stored)?;
        Ok(Linear { matrix, bias: self.bias(name, out, bias)? })
    }

    /// Reads the vector `name` (a norm or a bias) of the length `len` and converts it to f32.
    pub(super) fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.weights.tensor(name, &[len])?;
        if tensor.dtype.block_len() > 1 {
            return Err(ModelError::WrongType {
                file: "weights".to_owned(),
                tensor: name.to_owned(),
                expected: "F32, F16 or BF16".to_owned(),
                got: tensor.dtype.name().to_owned(),
            });
        }
        let mut vector = vec![0.0; len];
        stolon_kernels::widen(tensor.dtype, &tensor.bytes, &mut vector);
        drop(tensor);
        self.weights.remove(name);
        Ok(vector)
    }

    /// Loads `{name}.weight` of the shape `[out, input]` and, if `bias` is true, `{name}.bias`.
    pub(super) fn linear(
        &mut self,
        name: &str,
        [out, input]: [usize; 2],
        bias: bool,
    ) -> Result<Linear, ModelError> {
        let matrix = self.matrix(&format!("{name}.weight"), [out, input])?;
        Ok(Linear { matrix, bias: self.bias(name, out, bias)? })
    }

    /// Loads `{name}.bias` of the length `out` if `present` is true.
    fn bias(
        &mut self,
        name: &str,
        out: usize,
        present: bool,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        present.then(|| self.vector(&format!("{name}.bias"), out)).transpose()
    }
}

/// A matrix `[out, in]` with an optional bias `[out]`, which is added in the epilogue of the GEMM.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) matrix: Matrix,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Adds the bias to the part of a row that starts at output feature `first`.
    pub(super) fn add_bias(&self, path: Path, first: usize, sums: &mut [f32]) {
        if let Some(bias) = &self.bias {
            kernels::add(path, sums, &bias[first..first + sums.len()]);
        }
    }

    /// Size of the packed matrix in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.matrix.bytes()
    }
}
