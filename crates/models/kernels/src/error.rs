//! The errors of this crate. All of them are found before any work is done.

use crate::tensor_type::TensorType;

/// Why an instruction set could not be selected or weights could not be packed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// No instruction set has the given name.
    #[error("unknown CPU instruction set: expected one of {expected}, got {got:?}")]
    UnknownPath {
        /// The names that exist, separated by commas.
        expected: &'static str,
        /// The given name.
        got: String,
    },
    /// The processor or the operating system does not support the instruction set.
    #[error(
        "this machine does not support the CPU instruction set: expected one of {expected}, \
         got {got}"
    )]
    UnsupportedPath {
        /// The names of the instruction sets that this machine supports, separated by commas.
        expected: String,
        /// The name of the requested instruction set.
        got: &'static str,
    },
    /// The number of bytes does not match the shape and element type of the weights.
    #[error(
        "{dtype:?} weights of shape [{out_features}, {in_features}]: \
         expected {expected} bytes, got {got}"
    )]
    WrongByteCount {
        /// Element type of the weights.
        dtype: TensorType,
        /// Rows of the weight matrix.
        out_features: usize,
        /// Columns of the weight matrix.
        in_features: usize,
        /// Bytes that the shape requires.
        expected: usize,
        /// Bytes that were given.
        got: usize,
    },
    /// A quantized type stores its weights in blocks, and the row length is not a multiple of the
    /// block length.
    #[error("{dtype:?} weights: expected a multiple of {expected} columns, got {got}")]
    PartialBlock {
        /// Element type of the weights.
        dtype: TensorType,
        /// Weights in a block.
        expected: usize,
        /// Columns of the weight matrix.
        got: usize,
    },
    /// The weight matrix has no rows or no columns.
    #[error("weights: expected at least 1 row and 1 column, got [{out_features}, {in_features}]")]
    Empty {
        /// Rows of the weight matrix.
        out_features: usize,
        /// Columns of the weight matrix.
        in_features: usize,
    },
    /// Weights of one element type cannot be converted to the other. The only conversions are the
    /// rounding of F32, F16 or BF16 to Q8_0, and that of F16 to BF16.
    #[error("expected {to:?} weights, F32, F16 or BF16 for Q8_0, or F16 for BF16, got {from:?}")]
    NotRounded {
        /// Element type of the given weights.
        from: TensorType,
        /// Element type of the matrix.
        to: TensorType,
    },
}
