//! GEMM with floating-point weights.
//!
//! The structure is that of GotoBLAS and BLIS: both operands are packed so that the microkernel
//! reads memory in order, and the microkernel keeps a tile of sums in registers.
//!
//! * Weights are packed in panels of 16 output features, `[panel][inner][16]`: see [`weights`].
//! * Activations are packed in groups of rows, `[group][inner][rows of the group]`: see [`groups`]
//!   and
//!   [`pack`].
//! * The microkernel ([`tile`]) multiplies the rows of a group with some panels.
//! * [`chunk`] computes the task of a thread: all groups of some rows times some panels.
//!
//! **Invariant:** the microkernel walks the inner dimension once, in ascending order, with one
//! chain of additions per output element. Therefore the bits of an element depend neither on the
//! shape of its register tile nor on the other rows of the batch.

mod chunk;
mod groups;
mod pack;
mod tile;
mod weights;

#[cfg(target_arch = "x86_64")]
pub(crate) use chunk::chunk_bf16_dots;
pub(crate) use chunk::{GemmChunk, chunk_bf16, chunk_f16, chunk_f32};
pub(crate) use groups::{group_max, group_rows};
pub(crate) use pack::pack_group;
#[cfg(target_arch = "x86_64")]
pub(crate) use pack::pack_group_pairs;
pub(crate) use tile::{CachedPanels, Panels, RegisterTile, tile_group};
pub(crate) use weights::{Bf16, Bf16Pairs, F16, F32, Form, I4, I4Pairs, I8, SingleForm, Stored};
#[cfg(target_arch = "x86_64")]
pub(crate) use weights::{Bf16Dots, PairWord, pair_bytes};
