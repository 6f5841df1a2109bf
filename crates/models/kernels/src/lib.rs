#![doc = include_str!("../README.md")]
//!
//! # Map of the crate
//!
//! Items that callers use:
//!
//! * [`Path`]: the instruction set. A value proves that the processor and the operating system
//!   support it, which makes the functions that take one safe.
//! * [`Threads`]: a thread pool. There is no global pool, so two engines in a process do not
//!   disturb each other.
//! * [`Matrix`]: weights, packed once at load time into the layout that the kernels read.
//! * [`Operands`] and [`multiply`]: packed activations, and GEMMs with several matrices at once
//!   whose epilogues are fused. [`accumulate`] adds the products of groups of rows, such as those
//!   of experts, to rows of a common output.
//! * [`LowRank`]: the update of a product's results by a LoRA adapter, in the epilogue.
//! * [`attention`]: causal attention over ragged batches, which reads keys and values through block
//!   tables. [`KvRows`] writes them.
//! * [`convolution`]: short causal convolutions over the same store. [`convolution_silu`] has f32
//!   rows instead.
//! * [`Recurrence`]: the states of linear recurrences, such as Gated DeltaNet, token by token.
//! * [`rms_norm`], [`layer_norm`], [`silu_mul`], [`norm_and_rope`] and others: elementwise
//!   operations between GEMMs.
//!
//! How the modules build on each other, from the lowest to the highest:
//!
//! | modules | contents |
//! |---|---|
//! | `path`, `topology`, `threads`, `buffer`, `error`, `tensor_type`, `prefetch` | instruction sets, processors, threads, aligned memory, prefetching |
//! | `lanes` | SIMD vectors on each instruction set, dispatch, exponentials |
//! | `quant`, `source_rows` | GGUF block formats; rows that are not packed yet |
//! | `gemm`, `int8`, `amx` | packing and microkernels for floats, quantized weights, AMX |
//! | `packing`, `matrix`, `operand` | layouts of activations; packed weights; packed activations |
//! | `elementwise`, `heads`, `int4`, `kv_layout`, `kv_rows` | norms, gates, rotary embedding, rounding to 4 bits, KV cache rows |
//! | `product`, `low_rank` | GEMMs with fused epilogues; updates of their results by LoRA adapters |
//! | `attention`, `convolution` | flash-style attention with online softmax; short convolutions |
//! | `recurrence` | linear recurrences with a state |

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod buffer;
mod convolution;
mod elementwise;
mod error;
mod gemm;
mod heads;
mod int4;
mod int8;
mod kv_layout;
mod kv_rows;
mod lanes;
mod low_rank;
mod matrix;
mod operand;
mod packing;
mod path;
mod prefetch;
mod product;
mod quant;
mod recurrence;
mod source_rows;
mod sync;
mod tensor_type;
mod threads;
mod topology;

#[cfg(test)]
mod reference;

/// The optimization level with which this crate was compiled, as in a profile's `opt-level`.
pub const OPT_LEVEL: &str = env!("STOLON_KERNELS_OPT_LEVEL");

pub use attention::args::{AttentionArgs, AttentionSequence, KvSlice, RelativeBias};
pub use attention::attention;
pub use attention::prefix_sharing::positions_read;
pub use buffer::{Buffer, Plain};
pub use convolution::{convolution, convolution_silu};
pub use elementwise::{
    LayerNorm, add, clamped_swiglu, decay_in_place, gelu_in_place, gelu_mul, gelu_tanh_in_place,
    gelu_tanh_mul, layer_norm, mul, mul_sigmoid, mul_silu, rms_norm, rms_norm_in_place, scale,
    silu_mul, soft_cap, squared_relu_in_place,
};
pub use error::KernelError;
pub use heads::{HeadNorm, norm_and_rope};
pub use kv_layout::KvLayout;
pub use kv_rows::{KvRows, KvSliceMut, SlotMapping, int8_head};
pub use low_rank::LowRank;
pub use matrix::Matrix;
pub use operand::{Operands, OperandsMut};
pub use path::{Path, PathKind};
pub use product::{
    ColumnsMut, Epilogue, Finish, Product, RowSums, Sink, Term, accumulate, multiply,
};
pub use quant::{is_bf16, widen};
pub use recurrence::{Recurrence, Rule, StridedRows};
#[cfg(loom)]
pub use sync::planted;
pub use tensor_type::TensorType;
pub use threads::Threads;
