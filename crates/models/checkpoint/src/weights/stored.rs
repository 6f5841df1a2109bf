//! The location of a tensor's bytes.

use std::ops::Range;

use super::TensorType;
use super::interleaved::Interleaved;
use super::quantized::Converted;
use super::rows::RowRuns;
use crate::config::AdjacentPairs;

/// The location of a tensor's bytes. The code that creates a `Stored` has checked that the range is
/// inside the region and has the length that follows from the type and the shape.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// Index into [`Weights::regions`](super::Weights).
    pub(super) region: usize,
    /// The element type, or the name of a type that the kernels do not support.
    pub(super) dtype: Result<TensorType, String>,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
    /// The order of the rows, if it differs from the order in memory.
    pub(super) pairs: Option<AdjacentPairs>,
    /// The parts of a quantized matrix. `region` and `range` locate its codes.
    pub(super) converted: Option<Box<Converted>>,
    /// The place of the tensor within a tensor that combines all experts, or within a transposed
    /// matrix; `None` if it is stored separately in the same form as in memory.
    pub(super) interleaved: Option<Interleaved>,
    /// The rows of the stored tensor that belong to this one; `None` for all rows.
    pub(super) runs: Option<RowRuns>,
}

impl Stored {
    /// A tensor that consists of all bytes of a range, in the order in memory.
    pub(super) fn whole(
        region: usize,
        dtype: Result<TensorType, String>,
        shape: Vec<usize>,
        range: Range<usize>,
    ) -> Stored {
        let (pairs, converted, interleaved, runs) = (None, None, None, None);
        Stored { region, dtype, shape, range, pairs, converted, interleaved, runs }
    }

    /// Whether the bytes of the range are the same as the bytes in memory.
    pub(super) fn is_plain(&self) -> bool {
        let Stored { pairs, converted, interleaved, runs, .. } = self;
        pairs.is_none() && converted.is_none() && interleaved.is_none() && runs.is_none()
    }

    /// Size of the stored tensor in bytes.
    pub(super) fn byte_len(&self) -> u64 {
        let all = self.range.len();
        match (&self.interleaved, &self.runs) {
            (Some(interleaved), _) => interleaved.byte_len(all) as u64,
            (None, runs) => runs.as_ref().map_or(all, |runs| runs.byte_len(all)) as u64,
        }
    }
}
