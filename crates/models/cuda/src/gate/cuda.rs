//! The launch of the kernels in `kernels/gate.cu`.

#![allow(unsafe_code, reason = "a kernel launch cannot be checked by the compiler")]

use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, DeviceRepr, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::{CudaStorage, Layout, Result, bail};
use stolon_checkpoint::GateFunction;

use super::Sizes;
use crate::storage::view;

/// The kernels, compiled by the build script.
const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/gate.ptx"));
/// Number of threads of a block.
const THREADS: u32 = 256;
/// Maximum number of blocks in each dimension of the grid.
const BLOCKS_MAX: u32 = 65_535;

/// Runs the kernel for the operand's type on rows whose layout was checked.
pub(super) fn gate(
    function: GateFunction,
    sizes: &Sizes,
    x: &CudaStorage,
    layout: &Layout,
) -> Result<CudaStorage> {
    let launch = Launch { function, sizes, device: &x.device };
    let slice = match &x.slice {
        CudaStorageSlice::F32(x) => CudaStorageSlice::F32(launch.run("gate_f32", x, layout)?),
        CudaStorageSlice::F16(x) => CudaStorageSlice::F16(launch.run("gate_f16", x, layout)?),
        CudaStorageSlice::BF16(x) => CudaStorageSlice::BF16(launch.run("gate_bf16", x, layout)?),
        _ => bail!("gate: expected f32, f16 or bf16"),
    };
    Ok(CudaStorage { slice, device: x.device.clone() })
}

struct Launch<'a> {
    function: GateFunction,
    sizes: &'a Sizes,
    device: &'a CudaDevice,
}

impl Launch<'_> {
    fn run<T: DeviceRepr>(
        &self,
        kernel: &str,
        x: &CudaSlice<T>,
        layout: &Layout,
    ) -> Result<CudaSlice<T>> {
        let x = view(x, layout)?;
        let (Ok(rows), Ok(width)) =
            (u32::try_from(self.sizes.rows), u32::try_from(self.sizes.width))
        else {
            bail!("gate: expected sizes below 2^32");
        };
        // The kernel has the same numbers for the functions.
        let (kind, alpha, limit) = match self.function {
            GateFunction::Silu => (0_u32, 0.0, 0.0),
            GateFunction::GeluTanh => (1, 0.0, 0.0),
            GateFunction::ClampedSwiglu { alpha, limit } => (2, alpha, limit),
        };
        // SAFETY: the kernel writes all elements.
        let output = unsafe { self.device.alloc::<T>(self.sizes.rows * self.sizes.width) }?;
        if rows == 0 || width == 0 {
            return Ok(output);
        }
        let function = self.device.get_or_load_custom_func(kernel, "stolon_gate", PTX)?;
        let config = LaunchConfig {
            grid_dim: (width.div_ceil(THREADS).min(BLOCKS_MAX), rows.min(BLOCKS_MAX), 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut builder = function.builder();
        builder.arg(&x).arg(&output).arg(&rows).arg(&width).arg(&kind).arg(&alpha).arg(&limit);
        // SAFETY: the arguments have the types and the order of the kernel's parameters. The view
        // holds `rows` rows of `2 * width` elements and `output` as many of `width`, and the kernel
        // reads and writes no others.
        unsafe { builder.launch(config) }.w()?;
        Ok(output)
    }
}
