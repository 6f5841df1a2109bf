//! The elements of a contiguous tensor, on the CPU and on a CUDA device.

#[cfg(feature = "cuda-core")]
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
use candle_core::{CpuStorage, Layout, Result, WithDType, bail};

/// The elements of a tensor on the CPU.
pub(crate) fn elements<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice()?[start..end]),
        None => bail!("expected contiguous operands"),
    }
}

/// The elements of a tensor on a CUDA device.
#[cfg(feature = "cuda-core")]
pub(crate) fn view<'a, T>(slice: &'a CudaSlice<T>, layout: &Layout) -> Result<CudaView<'a, T>> {
    let range = layout.contiguous_offsets();
    match range.and_then(|(start, end)| slice.try_slice(start..end)) {
        Some(view) => Ok(view),
        None => bail!("expected contiguous operands inside of their allocations"),
    }
}
