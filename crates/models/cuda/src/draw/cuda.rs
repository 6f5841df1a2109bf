//! The launch of the kernel in `kernels/draw.cu`.

#![allow(unsafe_code, reason = "a kernel launch cannot be checked by the compiler")]

use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, Layout, Result, bail};

use super::Sizes;
use crate::storage::view;

/// The kernel, compiled by the build script.
const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/draw.ptx"));
/// Number of threads of a block. The kernel has the same constant.
const THREADS: u32 = 512;

/// Runs the kernel on logits and draws whose layouts were checked.
pub(super) fn draw(
    sizes: &Sizes,
    (logits, logits_layout): (&CudaStorage, &Layout),
    (draws, draws_layout): (&CudaStorage, &Layout),
) -> Result<CudaStorage> {
    let (CudaStorageSlice::F32(values), CudaStorageSlice::U32(numbers)) =
        (&logits.slice, &draws.slice)
    else {
        bail!("draw: expected logits in f32 and draws in u32");
    };
    let (values, numbers) = (view(values, logits_layout)?, view(numbers, draws_layout)?);
    let (Ok(rows), Ok(vocab_size)) = (u32::try_from(sizes.rows), u32::try_from(sizes.vocab_size))
    else {
        bail!("draw: expected sizes below 2^32");
    };
    let device = logits.device.clone();
    let mut tokens = device.alloc_zeros::<u32>(sizes.rows)?;
    let function = device.get_or_load_custom_func("draw", "stolon_draw", PTX)?;
    let config =
        LaunchConfig { grid_dim: (rows, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    let mut builder = function.builder();
    builder.arg(&values).arg(&numbers).arg(&mut tokens).arg(&vocab_size);
    // SAFETY: the arguments have the types and the order of the kernel's parameters. The views hold
    // `rows` rows of `vocab_size` logits and `rows` draws, `tokens` has room for as many, and the
    // vocabulary is not empty and not larger than the kernel's.
    unsafe { builder.launch(config) }.w()?;
    Ok(CudaStorage { slice: CudaStorageSlice::U32(tokens), device })
}
