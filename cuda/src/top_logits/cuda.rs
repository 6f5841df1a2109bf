//! The launch of the kernel in `kernels/top_logits.cu`. No GPU has run it yet.

#![allow(unsafe_code, reason = "a kernel launch cannot be checked by the compiler")]

use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, Layout, Result, bail};

use super::{Sizes, TopLogits};
use crate::storage::view;

/// The kernel, compiled by the build script.
const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/top_logits.ptx"));
/// Number of threads of a block; the kernel has the same number.
const THREADS: u32 = 512;

/// Runs the kernel on logits and counts, whose layouts were checked.
pub(super) fn find(
    op: &TopLogits,
    sizes: &Sizes,
    (logits, logits_layout): (&CudaStorage, &Layout),
    (counts, counts_layout): (&CudaStorage, &Layout),
) -> Result<CudaStorage> {
    let (CudaStorageSlice::F32(values), CudaStorageSlice::U32(ks)) = (&logits.slice, &counts.slice)
    else {
        bail!("top logits: expected logits in f32 and counts in u32");
    };
    let (values, ks) = (view(values, logits_layout)?, view(ks, counts_layout)?);
    let (Ok(rows), Ok(vocab_size)) = (u32::try_from(sizes.rows), u32::try_from(sizes.vocab_size))
    else {
        bail!("top logits: expected sizes below 2^32");
    };
    let device = logits.device.clone();
    // Rows with fewer logits than the largest count are not written to their ends.
    let mut output = device.alloc_zeros::<u32>(sizes.rows * (1 + 2 * op.count_max))?;
    let count_max = op.count_max as u32;
    let function = device.get_or_load_custom_func("top_logits", "stolon_top_logits", PTX)?;
    let config =
        LaunchConfig { grid_dim: (rows, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    let mut builder = function.builder();
    builder.arg(&values).arg(&ks).arg(&mut output).arg(&vocab_size).arg(&count_max);
    // SAFETY: the arguments have the types and the order of the kernel's parameters. The views hold
    // `rows` rows of `vocab_size` logits and `rows` counts, and `output` has room for as many logits as
    // the largest count, which is at most the number of threads.
    unsafe { builder.launch(config) }.w()?;
    Ok(CudaStorage { slice: CudaStorageSlice::U32(output), device })
}
