//! The CPU's compute: packed matrix products, paged attention and the elementwise steps between.
//!
//! Everything here works on plain `f32` slices and is reached through safe functions that check
//! their sizes. Five things make up the room:
//!
//! * [`Path`]: which instruction set is used. A value of it proves that the processor and the
//!   operating system allow that set, which is what makes the functions taking one safe.
//! * [`Threads`]: the engine's own pool. No global one exists, so two engines in a process do
//!   not disturb each other.
//! * [`Matrix`]: weights packed once at load into the layout the kernels read.
//! * [`multiply`]: products of packed rows ([`Operands`]) with several matrices at once, their sums
//!   finished and passed on while they are in the nearest caches.
//! * [`attention`]: ragged causal attention that reads keys and values through block tables.
//!
//! **Invariant: batch invariance.** Every output element is summed in an order that depends on the
//! matrix's inner size alone (products) or on absolute positions alone (attention). How many rows
//! stand in a call, how they were cut into chunks, how work is split over threads and how large
//! blocks are changes not one bit of a result. Different paths may differ from each other.
//!
//! **Precision.** `F32` weights are multiplied in true `f32` on every path. `Bf16` weights on the
//! paths with bf16 hardware ([`PathKind::Amx`], [`PathKind::Avx512Bf16`]) round the activations to
//! bf16 and add in `f32`; on other paths they are widened and the activations stay `f32`.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod buffer;
mod elementwise;
mod error;
mod fetch;
mod gemm;
mod heads;
mod int8;
mod kv_layout;
mod kv_rows;
mod lanes;
mod matrix;
mod operand;
mod path;
mod product;
mod quant;
mod tensor_type;
mod threads;

#[cfg(test)]
mod reference;

pub use attention::{AttentionArgs, AttentionSequence, KvSlice, attention, positions_read};
pub use buffer::{Buffer, Plain};
pub use elementwise::{
    add, add_bias, gelu_tanh_mul, log_sum_exp, rms_norm, rms_norm_in_place, rope, silu_mul, softmax,
};
pub use error::KernelError;
pub use heads::{HeadNorm, norm_and_rope};
pub use kv_layout::KvLayout;
pub use kv_rows::{KvPlaces, KvRows, KvSliceMut};
pub use matrix::Matrix;
pub use operand::Operands;
pub use path::{Path, PathKind};
pub use product::{Finish, Product, Sink, Sums, multiply};
pub use quant::widen;
pub use tensor_type::TensorType;
pub use threads::Threads;
