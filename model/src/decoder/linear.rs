//! Weights as the decoder holds them: packed matrices with biases, and vectors in f32.

use half::{bf16, f16};

use super::workers::Workers;
use crate::error::ModelError;
use crate::kernels::{Matrix, Path};
use crate::weights::{Tensor, TensorType, Weights};

/// A product with a matrix, `[out, in]`, and perhaps a bias, `[out]`, added by the pass after it.
#[derive(Debug)]
pub(super) struct Linear {
    matrix: Matrix,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// Loads `{name}.weight` and, if there is to be one, `{name}.bias`.
    pub(super) fn load(
        weights: &Weights,
        name: &str,
        [out, input]: [usize; 2],
        bias: bool,
        path: Path,
    ) -> Result<Self, ModelError> {
        let matrix = load_matrix(weights, &format!("{name}.weight"), [out, input], path)?;
        let bias = match bias {
            true => Some(load_vector(weights, &format!("{name}.bias"), out)?),
            false => None,
        };
        Ok(Self { matrix, bias })
    }

    /// `out = x * weight^T`, without the bias: `[rows, in]` to `[rows, out]`.
    pub(super) fn product(&self, x: &[f32], rows: usize, out: &mut [f32], workers: &Workers) {
        self.matrix.matmul(workers.for_product(&self.matrix, rows), x, rows, out);
    }

    /// What is to be added to each row of the product.
    pub(super) fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Bytes of the packed matrix.
    pub(super) fn bytes(&self) -> usize {
        self.matrix.bytes()
    }
}

/// Packs the matrix called `name`.
pub(super) fn load_matrix(
    weights: &Weights,
    name: &str,
    [out, input]: [usize; 2],
    path: Path,
) -> Result<Matrix, ModelError> {
    let tensor = weights.tensor(name, &[out, input])?;
    Matrix::pack(tensor.dtype, out, input, &tensor.bytes, path)
        .map_err(|source| ModelError::Unpackable { tensor: name.to_owned(), source })
}

/// Reads the vector called `name` (a norm or a bias), widened to f32.
pub(super) fn load_vector(
    weights: &Weights,
    name: &str,
    len: usize,
) -> Result<Vec<f32>, ModelError> {
    let Tensor { dtype, bytes, .. } = weights.tensor(name, &[len])?;
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        TensorType::F32 => {
            let quads = bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
            Ok(quads.map(f32::from_le_bytes).collect())
        }
        TensorType::F16 => Ok(pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect()),
        TensorType::Bf16 => Ok(pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect()),
        quantised => Err(ModelError::WrongType {
            file: "weights".to_owned(),
            tensor: name.to_owned(),
            expected: "F32, F16 or BF16".to_owned(),
            got: quantised.name().to_owned(),
        }),
    }
}
