//! The launches of the kernels in `kernels/split_attention.cu`.

#![allow(unsafe_code, reason = "a kernel launch cannot be checked by the compiler")]

use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, DevicePtr, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, Layout, Result, Storage, Tensor, bail};

use super::SplitAttention;
use crate::storage::view;

/// The kernels, compiled by the build script.
const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/split_attention.ptx"));
const MODULE: &str = "stolon_split_attention";
/// Number of threads of a block. The kernels have the same constant.
const THREADS: u32 = 128;
/// Maximum number of query heads of a block. The kernels have the same constant.
const HEADS: usize = 8;
/// The kernels read keys in units of this number of bytes.
const UNIT: u64 = 16;

/// Runs the kernels on queries, keys and values, whose layouts were checked.
pub(super) fn attend(
    op: &SplitAttention<'_>,
    [q, keys, values]: [&CudaStorage; 3],
    [q_layout, keys_layout, values_layout]: [&Layout; 3],
) -> Result<CudaStorage> {
    let CudaStorageSlice::F32(q_slice) = &q.slice else {
        bail!("split-KV attention: expected queries in f32");
    };
    let operands = Operands { op, device: &q.device, q: view(q_slice, q_layout)? };
    let (kl, vl) = (keys_layout, values_layout);
    let output = match (&keys.slice, &values.slice) {
        (CudaStorageSlice::U8(keys), CudaStorageSlice::U8(values)) => {
            operands.run("attend_parts_int8", &view(keys, kl)?, &view(values, vl)?)
        }
        (CudaStorageSlice::F32(keys), CudaStorageSlice::F32(values)) => {
            operands.run("attend_parts_f32", &view(keys, kl)?, &view(values, vl)?)
        }
        (CudaStorageSlice::F16(keys), CudaStorageSlice::F16(values)) => {
            operands.run("attend_parts_f16", &view(keys, kl)?, &view(values, vl)?)
        }
        (CudaStorageSlice::BF16(keys), CudaStorageSlice::BF16(values)) => {
            operands.run("attend_parts_bf16", &view(keys, kl)?, &view(values, vl)?)
        }
        _ => bail!("split-KV attention: expected keys and values in u8, f32, f16 or bf16"),
    };
    Ok(CudaStorage { slice: CudaStorageSlice::F32(output?), device: q.device.clone() })
}

struct Operands<'a> {
    op: &'a SplitAttention<'a>,
    device: &'a CudaDevice,
    /// `[count, heads, head_dim]`.
    q: CudaView<'a, f32>,
}

impl Operands<'_> {
    fn run<T>(
        &self,
        kernel: &str,
        keys: &CudaView<'_, T>,
        values: &CudaView<'_, T>,
    ) -> Result<CudaSlice<f32>> {
        let stream = self.device.cuda_stream();
        let addresses = [self.q.device_ptr(&stream).0, keys.device_ptr(&stream).0];
        if addresses.iter().any(|address| !address.is_multiple_of(UNIT)) {
            bail!("split-KV attention: expected operands that are aligned to {UNIT} bytes");
        }
        let partials = self.attend_parts(kernel, keys, values)?;
        self.merge_parts(&partials)
    }

    /// Computes the softmax state of each part: `[parts, heads, head_dim + 2]`.
    fn attend_parts<T>(
        &self,
        kernel: &str,
        keys: &CudaView<'_, T>,
        values: &CudaView<'_, T>,
    ) -> Result<CudaSlice<f32>> {
        let (launch, args) = (self.op.launch, self.op.args);
        let shape = args.kv.shape;
        let parts = launch.part_rows.elem_count();
        let [heads, dim] = [number(args.heads)?, number(shape.head_dim)?];
        let [kv_heads, block_size] = [number(shape.kv_heads)?, number(shape.block_size)?];
        let table_len = number(launch.tables.elem_count() / launch.count)?;
        let window = args.window.map_or(Ok(u32::MAX), number)?;
        let softcap = args.softcap.unwrap_or(0.0);
        let chunks = number((args.heads / shape.kv_heads).div_ceil(HEADS))?;
        // SAFETY: this kernel writes all elements that `merge_parts` reads, which belong to the
        // parts that the window of their query overlaps.
        let partials =
            unsafe { self.device.alloc::<f32>(parts * args.heads * (shape.head_dim + 2)) }?;
        let tables = [&launch.tables, &launch.contexts, &launch.part_rows, &launch.part_starts];
        let tables = tables.map(Tensor::storage_and_layout);
        let [tables, contexts, part_rows, part_starts] =
            tables.each_ref().map(|(storage, layout)| on_device::<u32>(storage, layout));
        let (tables, contexts) = (tables?, contexts?);
        let (part_rows, part_starts) = (part_rows?, part_starts?);
        let function = self.device.get_or_load_custom_func(kernel, MODULE, PTX)?;
        let config = LaunchConfig {
            grid_dim: (number(parts)?, kv_heads * chunks, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let scales = [&args.kv.keys, &args.kv.values].map(|plane| plane.scales.as_ref());
        let scales = scales.map(|scales| scales.map(Tensor::storage_and_layout));
        let [key_scales, value_scales] = scales.each_ref().map(|scales| {
            let scales = scales.as_ref();
            scales.map(|(storage, layout)| on_device::<f32>(storage, layout)).transpose()
        });
        let scales = [key_scales?, value_scales?];
        let none = 0_u64;
        let mut builder = function.builder();
        builder.arg(&self.q).arg(keys).arg(values);
        for scales in &scales {
            match scales {
                Some(scales) => builder.arg(scales),
                None => builder.arg(&none),
            };
        }
        builder.arg(&tables).arg(&contexts).arg(&part_rows);
        builder.arg(&part_starts).arg(&partials).arg(&heads).arg(&kv_heads).arg(&dim);
        builder.arg(&block_size).arg(&table_len).arg(&window).arg(&args.scale).arg(&softcap);
        // SAFETY: the arguments have the types and the order of the kernel's parameters. The views
        // have the shapes that the kernel expects, by the checks of the operation and the plan, and
        // are aligned as it needs; head sizes are those that `supports` allows. Without scales,
        // their addresses are null, and the kernel does not read them. Blocks of the tables, up to
        // the contexts, are below the number of blocks, because the batch checker has accepted them.
        unsafe { builder.launch(config) }.w()?;
        Ok(partials)
    }

    /// Merges the softmax states of the parts of each query: `[count, heads, head_dim]`.
    fn merge_parts(&self, partials: &CudaSlice<f32>) -> Result<CudaSlice<f32>> {
        let (launch, args) = (self.op.launch, self.op.args);
        let head_dim = args.kv.shape.head_dim;
        let [count, heads, dim] = [number(launch.count)?, number(args.heads)?, number(head_dim)?];
        let window = args.window.map_or(Ok(u32::MAX), number)?;
        // SAFETY: the kernel writes all elements.
        let output = unsafe { self.device.alloc::<f32>(launch.count * args.heads * head_dim) }?;
        let tables = [&launch.contexts, &launch.part_starts].map(Tensor::storage_and_layout);
        let [contexts, part_starts] =
            tables.each_ref().map(|(storage, layout)| on_device::<u32>(storage, layout));
        let (contexts, part_starts) = (contexts?, part_starts?);
        let sinks = args.sinks.map(Tensor::storage_and_layout);
        let sinks = sinks.as_ref().map(|(storage, layout)| on_device::<f32>(storage, layout));
        let sinks = sinks.transpose()?;
        let function = self.device.get_or_load_custom_func("merge_parts", MODULE, PTX)?;
        let config = LaunchConfig {
            grid_dim: (heads, count, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let none = 0_u64;
        let mut builder = function.builder();
        builder.arg(partials).arg(&contexts).arg(&part_starts);
        match &sinks {
            Some(sinks) => builder.arg(sinks),
            None => builder.arg(&none),
        };
        builder.arg(&output).arg(&dim).arg(&window);
        // SAFETY: as in `attend_parts`. Without sinks, their address is null, which the kernel
        // checks.
        unsafe { builder.launch(config) }.w()?;
        Ok(output)
    }
}

/// Converts a size to the type of the kernels' parameters.
fn number(value: usize) -> Result<u32> {
    match u32::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => bail!("split-KV attention: expected sizes below 2^32, got {value}"),
    }
}

/// The elements of a tensor that is on the device.
fn on_device<'a, T: CudaDType>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, T>> {
    match storage {
        Storage::Cuda(storage) => view(storage.as_cuda_slice::<T>()?, layout),
        _ => bail!("split-KV attention: expected tables, scales and sinks on the device"),
    }
}
