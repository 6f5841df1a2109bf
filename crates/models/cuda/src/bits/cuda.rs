//! Copies the elements of a tensor on a CUDA device to one of another type.

#![allow(unsafe_code, reason = "bits are read as another type")]

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DeviceRepr};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, DType, Layout, Result, bail};
use half::{bf16, f16};

use crate::storage::view;

/// Copies the elements of `x` as `count` elements of the type `dtype`, which have as many bytes.
pub(super) fn reinterpret(
    x: &CudaStorage,
    layout: &Layout,
    dtype: DType,
    count: usize,
) -> Result<CudaStorage> {
    let device = &x.device;
    let slice = match (&x.slice, dtype) {
        (CudaStorageSlice::F32(x), DType::U8) => {
            CudaStorageSlice::U8(copy::<_, u8>(device, &view(x, layout)?, count)?)
        }
        (CudaStorageSlice::F16(x), DType::U8) => {
            CudaStorageSlice::U8(copy::<_, u8>(device, &view(x, layout)?, count)?)
        }
        (CudaStorageSlice::BF16(x), DType::U8) => {
            CudaStorageSlice::U8(copy::<_, u8>(device, &view(x, layout)?, count)?)
        }
        (CudaStorageSlice::U8(x), DType::F32) => {
            CudaStorageSlice::F32(copy::<_, f32>(device, &view(x, layout)?, count)?)
        }
        (CudaStorageSlice::U8(x), DType::F16) => {
            CudaStorageSlice::F16(copy::<_, f16>(device, &view(x, layout)?, count)?)
        }
        (CudaStorageSlice::U8(x), DType::BF16) => {
            CudaStorageSlice::BF16(copy::<_, bf16>(device, &view(x, layout)?, count)?)
        }
        _ => bail!("reinterpret: expected bytes and f32, f16 or bf16"),
    };
    Ok(CudaStorage { slice, device: device.clone() })
}

fn copy<S, T: DeviceRepr>(
    device: &CudaDevice,
    from: &CudaView<'_, S>,
    count: usize,
) -> Result<CudaSlice<T>> {
    // SAFETY: both types are numbers without invalid values. The view is only read by a copy of its
    // bytes, which needs no alignment.
    let Some(from) = (unsafe { from.transmute::<T>(count) }) else {
        bail!("reinterpret: expected as many bytes as before");
    };
    // SAFETY: the copy writes all elements.
    let mut to = unsafe { device.alloc::<T>(count) }?;
    device.cuda_stream().memcpy_dtod(&from, &mut to).w()?;
    Ok(to)
}
