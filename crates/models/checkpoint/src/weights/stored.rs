//! Where the bytes of a tensor are.

use std::ops::Range;

use super::TensorType;
use super::interleaved::Interleaved;
use super::quantized::Converted;
use super::rows::RowRuns;
use crate::config::AdjacentPairs;

/// Where a tensor's bytes are. The code that creates one has checked that the range is inside of
/// the region and has the length that shape and type require.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// Index into [`Weights::regions`](super::Weights).
    pub(super) region: usize,
    /// The element type, or the name of a type that the kernels do not support.
    pub(super) dtype: Result<TensorType, String>,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
    /// The order of the rows, if it is not that in memory.
    pub(super) pairs: Option<AdjacentPairs>,
    /// The parts of a quantised matrix. `region` and `range` are those of its codes.
    pub(super) converted: Option<Box<Converted>>,
    /// How the tensor is part of one that holds all experts, or that it is transposed; `None` if it
    /// is stored by itself as it is in memory.
    pub(super) interleaved: Option<Interleaved>,
    /// Which rows of the stored tensor are its own; `None` if all are.
    pub(super) runs: Option<RowRuns>,
}

impl Stored {
    /// A tensor with all bytes of a range, in the order that they have in memory.
    pub(super) fn whole(
        region: usize,
        dtype: Result<TensorType, String>,
        shape: Vec<usize>,
        range: Range<usize>,
    ) -> Stored {
        let (pairs, converted, interleaved, runs) = (None, None, None, None);
        Stored { region, dtype, shape, range, pairs, converted, interleaved, runs }
    }

    /// Whether the bytes of the range are the tensor as it is in memory.
    pub(super) fn is_plain(&self) -> bool {
        let Stored { pairs, converted, interleaved, runs, .. } = self;
        pairs.is_none() && converted.is_none() && interleaved.is_none() && runs.is_none()
    }

    /// Size of the tensor in bytes, as stored.
    pub(super) fn byte_len(&self) -> u64 {
        let all = self.range.len();
        match (&self.interleaved, &self.runs) {
            (Some(interleaved), _) => interleaved.byte_len(all) as u64,
            (None, runs) => runs.as_ref().map_or(all, |runs| runs.byte_len(all)) as u64,
        }
    }
}
