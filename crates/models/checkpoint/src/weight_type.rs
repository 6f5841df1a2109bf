//! [`WeightType`] is the element type in which a backend keeps matrices.

use stolon_kernels::TensorType;

use crate::config::{TensorRole, TensorSpec};
use crate::error::ModelError;

/// The element type in which a model's matrices, including the embedding, are kept in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightType {
    /// The type in the file. Only an F16 matrix whose values are all exact in BF16 is kept as BF16.
    #[default]
    Stored,
    /// F32, F16 and BF16 matrices are rounded to Q8_0 while they are loaded. This needs about half
    /// the memory of BF16 and is about twice as fast where the computation is memory-bound.
    /// Matrices that are quantized already, or whose row length is not a multiple of 32, and
    /// routers of experts are kept as stored.
    Q8_0,
}

impl WeightType {
    /// The type in which the matrix `spec` is kept, if it is stored as `stored`.
    pub fn of(self, spec: &TensorSpec, stored: TensorType) -> TensorType {
        let columns = spec.shape.last().copied().unwrap_or(0);
        let fits = stored.block_len() == 1 && columns.is_multiple_of(TensorType::Q8_0.block_len());
        let rounds = self == Self::Q8_0 && spec.role != TensorRole::Router;
        if rounds && fits { TensorType::Q8_0 } else { stored }
    }
}

impl std::str::FromStr for WeightType {
    type Err = ModelError;

    fn from_str(name: &str) -> Result<Self, ModelError> {
        match name {
            "stored" => Ok(Self::Stored),
            "q8_0" => Ok(Self::Q8_0),
            _ => Err(ModelError::option("weights", "`stored` or `q8_0`", format!("`{name}`"))),
        }
    }
}

impl std::fmt::Display for WeightType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Stored => "stored",
            Self::Q8_0 => "q8_0",
        })
    }
}
