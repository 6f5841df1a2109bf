//! What can be wrong with a request to the kernels. All of it is found before any work is done.

use crate::tensor_type::TensorType;

/// Why weights could not be packed or a path not be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The name of a path is none of those that exist.
    #[error("unknown CPU path: expected one of {expected}, got {got:?}")]
    UnknownPath {
        /// The names that exist.
        expected: &'static str,
        /// The name that was given.
        got: String,
    },
    /// The processor or the operating system does not allow the path.
    #[error("this processor does not support the CPU path: expected one of {expected}, got {got}")]
    UnsupportedPath {
        /// The names this machine supports.
        expected: String,
        /// The path that was asked for.
        got: &'static str,
    },
    /// The weights' bytes do not fit their shape.
    #[error(
        "{dtype:?} weights of shape [{out_features}, {in_features}]: \
         expected {expected} bytes, got {got}"
    )]
    WrongByteCount {
        /// Type of the weights.
        dtype: TensorType,
        /// Rows of the weights.
        out_features: usize,
        /// Columns of the weights.
        in_features: usize,
        /// Bytes the shape asks for.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// A quantised type packs its weights in blocks, and a row is no whole number of them.
    #[error("{dtype:?} weights: expected a multiple of {expected} columns, got {got}")]
    PartialBlock {
        /// Type of the weights.
        dtype: TensorType,
        /// Weights in a block.
        expected: usize,
        /// Columns given.
        got: usize,
    },
    /// A matrix without rows or columns.
    #[error("weights: expected at least 1 row and 1 column, got [{out_features}, {in_features}]")]
    Empty {
        /// Rows given.
        out_features: usize,
        /// Columns given.
        in_features: usize,
    },
    /// Weights of one type cannot be rounded to the other.
    #[error("expected {to:?} weights, or F32, F16 or BF16 to round to Q8_0, got {from:?}")]
    NotRounded {
        /// Type of what was given.
        from: TensorType,
        /// Type of the matrix.
        to: TensorType,
    },
}
