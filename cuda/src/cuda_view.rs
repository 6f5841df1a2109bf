//! Parts of the memory of a CUDA device.

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::{Layout, Result, bail};

/// The elements of a contiguous tensor.
pub(crate) fn view<'a, T>(slice: &'a CudaSlice<T>, layout: &Layout) -> Result<CudaView<'a, T>> {
    let start = layout.start_offset();
    match slice.try_slice(start..start + layout.shape().elem_count()) {
        Some(view) if layout.is_contiguous() => Ok(view),
        _ => bail!("expected contiguous operands inside of their allocations"),
    }
}
