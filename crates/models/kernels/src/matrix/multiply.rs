//! One task of a product: the call of the microkernels for the type of the weights and the packing
//! of the activations.
#![allow(unsafe_code, reason = "the microkernels take pointers")]

use super::{GemmTask, Matrix};
#[cfg(target_arch = "x86_64")]
use crate::amx::chunk::{AmxChunkArgs, multiply_chunk, partial_sums_len};
use crate::gemm;
use crate::int8;
use crate::lanes::LANES;
use crate::packing::{Packed, Packing};
use crate::tensor_type::TensorType;
use crate::threads::Threads;

impl Matrix {
    /// Computes one task of a product. `out` points to the first sum of the task, and its rows are
    /// `out_row` values apart.
    ///
    /// # Safety
    /// `x` holds the rows of the task in this matrix's [`packing`](Matrix::packing) for the rows of
    /// the whole product, and no thread writes them. `out` is writable for the features of the task
    /// in each of its rows, and no other thread accesses them.
    pub(crate) unsafe fn multiply_task(
        &self,
        threads: &Threads,
        x: &Packed,
        task: &GemmTask,
        out: *mut f32,
        out_row: usize,
    ) {
        let (rows, features) = (task.rows, task.features);
        let values = x.values(task.first_row);
        match x.packing() {
            Packing::Bytes { inner, groups } => {
                let args = int8::Int8Chunk {
                    words: values,
                    scales: x.scales(task.first_row),
                    sums: x.sums(task.first_row),
                    offsets: x.offsets(task.first_row),
                    rows,
                    inner,
                    panels: self.data.slice::<u8>()[self.panel_start(task, 1)..].as_ptr(),
                    out,
                    out_row,
                    features,
                };
                // SAFETY: `x` was packed by these groups, the panels are those of the task, and
                // `out` is exclusive to it.
                unsafe { groups.chunk(threads, &args, self.dtype) }
            }
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { inner } => {
                let mut partial_sums = threads.scratch::<f32>(partial_sums_len(rows));
                let args = AmxChunkArgs {
                    packed: values.cast::<u16>(),
                    rows,
                    padded_inner: inner,
                    panels: self.data.slice::<u16>()[self.panel_start(task, 2)..].as_ptr(),
                    out,
                    out_features: out_row,
                    features,
                    partial_sums: partial_sums.slice_mut::<f32>().as_mut_ptr(),
                };
                // SAFETY: `Packing::Tiles` exists only for a path with AMX. The panels are those of
                // the task, and `out` is exclusive to it.
                unsafe { multiply_chunk(&args) }
            }
            #[cfg(target_arch = "x86_64")]
            Packing::Pairs { inner, .. } => {
                let args = lane_args(values, inner / 2, task, out, out_row);
                // SAFETY: `x` holds the rows as bf16 pairs, and `out` is exclusive to the task.
                unsafe { self.multiply_lanes(&args, task) }
            }
            Packing::Lanes { inner, .. } => {
                let args = lane_args(values, inner, task, out, out_row);
                // SAFETY: `x` holds the rows as f32, and `out` is exclusive to the task.
                unsafe { self.multiply_lanes(&args, task) }
            }
        }
    }

    /// Index of the first weight of a task, in units of `unit` bytes.
    fn panel_start(&self, task: &GemmTask, unit: usize) -> usize {
        task.first_panel * self.layout().panel_bytes / unit
    }

    /// Computes one task on SIMD lanes. `args` is complete except for the weights.
    ///
    /// # Safety
    /// With the task's panels of this matrix as weights, `args` is valid (see [`gemm::GemmChunk`]).
    unsafe fn multiply_lanes(&self, args: &gemm::GemmChunk<u8>, task: &GemmTask) {
        // SAFETY: each slice begins with the first panel of the task and holds all of its panels.
        // `uses_dots` is true only for a path with AVX-512 BF16.
        unsafe {
            match self.dtype {
                TensorType::F32 => {
                    let panels = &self.data.slice::<f32>()[self.panel_start(task, 4)..];
                    gemm::chunk_f32(self.path, &with_panels(args, panels));
                }
                TensorType::F16 => {
                    let panels = &self.data.slice::<u16>()[self.panel_start(task, 2)..];
                    gemm::chunk_f16(self.path, &with_panels(args, panels));
                }
                #[cfg(target_arch = "x86_64")]
                TensorType::Bf16 if self.uses_dots() => {
                    let panels = &self.data.slice::<f32>()[self.panel_start(task, 4)..];
                    gemm::chunk_bf16_dots(&with_panels(args, panels));
                }
                TensorType::Bf16 => {
                    let panels = &self.data.slice::<u16>()[self.panel_start(task, 2)..];
                    gemm::chunk_bf16(self.path, &with_panels(args, panels));
                }
                _ => unreachable!("quantized weights are multiplied as integers"),
            }
        }
    }
}

/// The arguments of a task on SIMD lanes, without the weights.
fn lane_args(
    values: *const u8,
    padded_inner: usize,
    task: &GemmTask,
    out: *mut f32,
    out_row: usize,
) -> gemm::GemmChunk<u8> {
    gemm::GemmChunk {
        packed: values.cast::<f32>(),
        rows: task.rows,
        padded_inner,
        panels: std::ptr::null(),
        panel_count: task.features.div_ceil(LANES),
        out,
        out_row,
        features: task.features,
    }
}

/// `args` with `panels` as weights.
fn with_panels<Raw>(args: &gemm::GemmChunk<u8>, panels: &[Raw]) -> gemm::GemmChunk<Raw> {
    gemm::GemmChunk {
        packed: args.packed,
        rows: args.rows,
        padded_inner: args.padded_inner,
        panels: panels.as_ptr(),
        panel_count: args.panel_count,
        out: args.out,
        out_row: args.out_row,
        features: args.features,
    }
}
