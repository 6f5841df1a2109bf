//! The launch of the kernel in `kernels/recurrence.cu`.

#![allow(unsafe_code, reason = "a kernel launch cannot be checked by the compiler")]

use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, Layout, Result, bail};
use stolon_checkpoint::config::{RecurrentShape, Rule};

use super::{HeadLayout, Recur};
use crate::storage::view;

/// The kernel, compiled by the build script.
const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/recurrence.ptx"));
/// Number of threads of a block, each of which computes one column of the state.
const THREADS: u32 = 64;

/// Runs the kernel on states, rows and segments, whose layouts were checked. Returns `count`
/// elements: the outputs, followed by the states.
pub(super) fn recur(
    op: &Recur,
    [states, rows, segments]: [&CudaStorage; 3],
    [states_layout, rows_layout, segments_layout]: [&Layout; 3],
    count: usize,
) -> Result<CudaStorage> {
    let (
        CudaStorageSlice::F32(state_values),
        CudaStorageSlice::F32(row_values),
        CudaStorageSlice::U32(segment_values),
    ) = (&states.slice, &rows.slice, &segments.slice)
    else {
        bail!("recurrence: expected states and rows in f32, and segments in u32");
    };
    let device = &states.device;
    let (states, rows) = (view(state_values, states_layout)?, view(row_values, rows_layout)?);
    let segments = view(segment_values, segments_layout)?;
    let RecurrentShape { heads, key_dim, value_dim, rule, channels, .. } = op.shape;
    let HeadLayout { query, key, value, key_heads, grouped } = op.layout;
    let parts = value_dim.div_ceil(THREADS as usize);
    let numbers = [
        op.rows,
        op.slices,
        heads,
        key_dim,
        value_dim,
        channels,
        op.width(),
        query,
        key,
        value,
        key_heads,
        usize::from(grouped),
        op.shape.decays(),
        usize::from(rule != Rule::Additive),
        parts,
    ];
    let Ok(numbers) =
        numbers.iter().map(|n| u32::try_from(*n)).collect::<std::result::Result<Vec<_>, _>>()
    else {
        bail!("recurrence: expected sizes below 2^32");
    };
    // SAFETY: the kernel writes all elements: the outputs of each row, because the segments of the
    // slices cover all rows, and the states after each segment.
    let results = unsafe { device.alloc::<f32>(count) }?;
    if op.slices == 0 {
        return Ok(CudaStorage { slice: CudaStorageSlice::F32(results), device: device.clone() });
    }
    let (Ok(slices), Ok(blocks)) = (u32::try_from(op.slices), u32::try_from(heads * parts)) else {
        bail!("recurrence: expected sizes below 2^32");
    };
    let function = device.get_or_load_custom_func("recurrence", "stolon_recurrence", PTX)?;
    let config = LaunchConfig {
        grid_dim: (slices, blocks, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut builder = function.builder();
    builder.arg(&states).arg(&rows).arg(&segments).arg(&results);
    for number in &numbers {
        builder.arg(number);
    }
    // SAFETY: the arguments have the types and the order of the kernel's parameters. The views were
    // checked to have the shapes that the kernel expects, and `results` the elements of all outputs
    // and of the states of all segments. The rows of segments are those of the step.
    unsafe { builder.launch(config) }.w()?;
    Ok(CudaStorage { slice: CudaStorageSlice::F32(results), device: device.clone() })
}
