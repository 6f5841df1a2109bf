//! The launch of the kernels in `kernels/kv_write.cu`.

#![allow(unsafe_code, reason = "a kernel launch cannot be checked by the compiler")]

use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, DevicePtr, DevicePtrMut, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, Layout, Result, bail};

use super::Sizes;
use super::int8::{HeadSizes, Part};
use crate::storage::view;

/// The kernels, compiled by the build script.
const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/kv_write.ptx"));
const MODULE: &str = "stolon_kv_write";
/// Maximum number of threads that copy a row.
const THREADS_MAX: u32 = 256;
/// Number of threads that round a head. The kernels have the same constant.
const HEAD_THREADS: u32 = 32;

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
        (CudaStorageSlice::U8(store), CudaStorageSlice::U8(rows)) => {
            launch.run(store, &view(rows, rows_layout)?)
        }
        (CudaStorageSlice::F32(store), CudaStorageSlice::F32(rows)) => {
            launch.run(store, &view(rows, rows_layout)?)
        }
        (CudaStorageSlice::F16(store), CudaStorageSlice::F16(rows)) => {
            launch.run(store, &view(rows, rows_layout)?)
        }
        (CudaStorageSlice::BF16(store), CudaStorageSlice::BF16(rows)) => {
            launch.run(store, &view(rows, rows_layout)?)
        }
        _ => bail!("write rows: expected operands of the same type, u8, f32, f16 or bf16"),
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
            None => ("write_rows_1", 1),
        };
        let (Ok(count), Ok(units)) = (u32::try_from(count), u32::try_from(row_bytes / unit)) else {
            bail!("write rows: expected fewer than 2^32 rows and units");
        };
        let function = self.device.get_or_load_custom_func(name, MODULE, PTX)?;
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

/// Runs the kernel that rounds heads and writes their codes or their scales. `layouts` are the layouts
/// of the store, the rows and the indices.
pub(super) fn write_int8(
    store: &mut CudaStorage,
    rows: &CudaStorage,
    indices: &CudaStorage,
    [store_layout, rows_layout, indices_layout]: [&Layout; 3],
    sizes: &HeadSizes,
) -> Result<()> {
    let device = store.device.clone();
    let (CudaStorageSlice::F32(rows), CudaStorageSlice::U32(indices)) =
        (&rows.slice, &indices.slice)
    else {
        bail!("write int8: expected rows in f32 and indices in u32");
    };
    let operands = Int8Operands {
        device: &device,
        rows: view(rows, rows_layout)?,
        indices: view(indices, indices_layout)?,
        start: store_layout.start_offset(),
        sizes,
    };
    match (sizes.part, &mut store.slice) {
        (Part::Codes, CudaStorageSlice::U8(store)) => operands.run("write_int8_codes", store),
        (Part::Scales, CudaStorageSlice::F32(store)) => operands.run("write_int8_scales", store),
        _ => bail!("write int8: expected codes in u8 and scales in f32"),
    }
}

struct Int8Operands<'a> {
    device: &'a CudaDevice,
    /// `[count, heads, dim]`.
    rows: CudaView<'a, f32>,
    indices: CudaView<'a, u32>,
    /// Index of the store's first element in its allocation.
    start: usize,
    sizes: &'a HeadSizes,
}

impl Int8Operands<'_> {
    fn run<T>(&self, kernel: &str, store: &mut CudaSlice<T>) -> Result<()> {
        let HeadSizes { heads, dim, width, len, .. } = *self.sizes;
        let count = self.indices.len();
        if count == 0 {
            return Ok(());
        }
        let Some(mut store) = store.try_slice_mut(self.start..self.start + len * width) else {
            bail!("write int8: expected operands inside of their allocations");
        };
        let (Ok(count), Ok(heads), Ok(dim)) =
            (i32::try_from(count), u16::try_from(heads), u32::try_from(dim))
        else {
            bail!("write int8: expected fewer than 2^31 rows, 2^16 heads and 2^32 elements");
        };
        let function = self.device.get_or_load_custom_func(kernel, MODULE, PTX)?;
        let config = LaunchConfig {
            grid_dim: (count.unsigned_abs(), u32::from(heads), 1),
            block_dim: (HEAD_THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut builder = function.builder();
        builder.arg(&self.rows).arg(&self.indices).arg(&mut store).arg(&dim);
        // SAFETY: The arguments have the types and the order of the kernels' parameters. The views
        // were checked to hold `count` rows of `heads` heads of `dim` elements, `count` indices and
        // `len` rows of codes or scales. Indices are below `len`, as in `Launch::run`.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    }
}
