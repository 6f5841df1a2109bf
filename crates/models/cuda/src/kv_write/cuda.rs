//! The launch of the kernels in `kernels/kv_write.cu`.

#![allow(unsafe_code, reason = "a kernel launch cannot be checked by the compiler")]

use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, Layout, Result, bail};

use super::Sizes;
use crate::storage::view;

/// The kernels, compiled by the build script.
const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/kv_write.ptx"));
/// Maximum number of threads that copy a row.
const THREADS_MAX: u32 = 256;

/// Runs the kernel. `layouts` are the layouts of the store, the rows and the indices.
pub(super) fn write_rows(
    store: &mut CudaStorage,
    rows: &CudaStorage,
    indices: &CudaStorage,
    [store_layout, rows_layout, indices_layout]: [&Layout; 3],
    sizes: &Sizes,
) -> Result<()> {
    let device = store.device.clone();
    let CudaStorageSlice::U32(indices) = &indices.slice else {
        bail!("write rows: expected indices in u32");
    };
    let start = store_layout.start_offset();
    let launch = Launch { device: &device, indices: view(indices, indices_layout)?, start, sizes };
    match (&mut store.slice, &rows.slice) {
        (CudaStorageSlice::F32(store), CudaStorageSlice::F32(rows)) => {
            launch.run(store, &view(rows, rows_layout)?)
        }
        (CudaStorageSlice::F16(store), CudaStorageSlice::F16(rows)) => {
            launch.run(store, &view(rows, rows_layout)?)
        }
        (CudaStorageSlice::BF16(store), CudaStorageSlice::BF16(rows)) => {
            launch.run(store, &view(rows, rows_layout)?)
        }
        _ => bail!("write rows: expected operands of the same type, f32, f16 or bf16"),
    }
}

struct Launch<'a> {
    device: &'a CudaDevice,
    indices: CudaView<'a, u32>,
    /// Index of the store's first element in its allocation.
    start: usize,
    sizes: &'a Sizes,
}

impl Launch<'_> {
    fn run<T>(&self, store: &mut CudaSlice<T>, rows: &CudaView<'_, T>) -> Result<()> {
        let (count, &Sizes { width, len }) = (self.indices.len(), self.sizes);
        if count == 0 || width == 0 {
            return Ok(());
        }
        let stream = self.device.cuda_stream();
        let Some(mut store) = store.try_slice_mut(self.start..self.start + len * width) else {
            bail!("write rows: expected operands inside of their allocations");
        };
        let row_bytes = width * size_of::<T>();
        let addresses = [store.device_ptr_mut(&stream).0, rows.device_ptr(&stream).0];
        let is_multiple = |unit: usize| {
            row_bytes.is_multiple_of(unit)
                && addresses.iter().all(|address| address.is_multiple_of(unit as u64))
        };
        let (name, unit) = match [16, 4].into_iter().find(|unit| is_multiple(*unit)) {
            Some(16) => ("write_rows_16", 16),
            Some(_) => ("write_rows_4", 4),
            None => bail!("write rows: expected rows of whole units of 4 bytes, got {row_bytes}"),
        };
        let (Ok(count), Ok(units)) = (u32::try_from(count), u32::try_from(row_bytes / unit)) else {
            bail!("write rows: expected fewer than 2^32 rows and units");
        };
        let function = self.device.get_or_load_custom_func(name, "stolon_kv_write", PTX)?;
        let config = LaunchConfig {
            grid_dim: (count.min(i32::MAX as u32), 1, 1),
            block_dim: (units.min(THREADS_MAX), 1, 1),
            shared_mem_bytes: 0,
        };
        let mut builder = function.builder();
        builder.arg(rows).arg(&self.indices).arg(&mut store).arg(&count).arg(&units);
        // SAFETY: The arguments have the types and the order of the kernel's parameters. The views
        // were checked to hold `count` rows, `count` indices and `len` rows of `width` elements,
        // and to be aligned to the kernel's unit. The kernel reads and writes only these rows, if
        // each index is below `len`: slots are computed from block tables that the batch checker
        // has accepted, and blocks of a copy are checked against the number of blocks.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    }
}
