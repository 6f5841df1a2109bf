//! Attention over a paged KV cache, for a ragged batch of prefill chunks and decodes. It is causal,
//! except that the positions of an image may see each other in both directions
//! ([`AttentionSequence::full`](args::AttentionSequence::full)).
//!
//! The queries of any number of sequences read the keys and values of one layer through block
//! tables, as in vLLM's paged attention (Kwon et al., 2023). Query heads that share a kv head
//! (grouped-query attention) are computed together, so that a tile of the cache is read and widened
//! once for all of them. So are the decodes of sequences that share a prefix: the part of it that
//! they have in the same blocks is read once (see [`prefix_sharing`]).
//!
//! **Order of sums.** The context is divided into tiles of 64 positions (128 on AMX) and spans of
//! 512, both at fixed absolute positions. A query has one online softmax per span, which runs tile
//! by tile as in FlashAttention, and the states of the spans are merged in order of position as in
//! flash-decoding. The bits of a result therefore depend on the query's position and context alone:
//! not on the chunk in which it was computed, the block size, the other sequences in the batch, or
//! the thread that computed which work item.
//!
//! **Precision.** Scores, weights and sums are f32. So are the products, for which keys and values
//! of other types are widened, with two exceptions: bf16 keys and values on AMX tiles (see
//! `amx_kernel`), and bf16, 8-bit and 4-bit ones with AVX-512 BF16. There, queries and weights are rounded
//! to bf16, and the products are those of bf16 pairs with f32 sums. f16 keys and values are widened
//! on every path: they have three more bits than bf16, which rounding would lose.
//!
//! **Rotation.** Keys and values of 4 bits are stored rotated ([`int4`](crate::int4)). Queries are
//! rotated before they are multiplied with such keys, and sums of such values are rotated back.
#![allow(unsafe_code, reason = "work items write disjoint parts of one output")]

#[cfg(target_arch = "x86_64")]
mod amx_kernel;
pub(crate) mod amx_support;
pub(crate) mod args;
mod plan;
pub(crate) mod prefix_sharing;
mod query_chunk;
mod scratch;
mod simd_kernel;
mod sizes;
mod softmax_state;
pub(crate) mod tile_loading;
mod tile_view;

use crate::buffer::SharedMut;
use crate::int4;
use crate::lanes::{LANES, Lanes, dispatch};
use crate::threads::Threads;
use args::AttentionArgs;
use plan::{AttentionPlan, WorkItem};
use query_chunk::QueryChunk;
use sizes::POSITIONS_PER_TILE;
use softmax_state::{AttentionOutput, SoftmaxState};

/// Computes attention for every query in `args` over the positions that it sees. `out` is
/// `[rows, heads, head_dim]`, like `args.q`.
///
/// The result of a query depends only on its position and its context, bit for bit; see
/// [`AttentionArgs`] for the shapes. The work is divided over `threads`, as in flash-decoding also
/// along the context of a single query.
///
/// # Panics
/// If the sizes do not fit together, or a block table is too short or names a block that does not
/// exist. This is checked before anything is written.
pub fn attention(threads: &Threads, args: &AttentionArgs<'_>, out: &mut [f32]) {
    args.validate(out);
    if args.keys.is_rotated() {
        let mut scratch = threads.scratch::<f32>(args.q.len());
        let q = &mut scratch.slice_mut()[..args.q.len()];
        q.copy_from_slice(args.q);
        rotate(threads, args, q);
        attend(threads, &AttentionArgs { q, ..*args }, out);
    } else {
        attend(threads, args, out);
    }
    if args.values.is_rotated() {
        rotate(threads, args, out);
    }
}

/// Rotates all heads of `rows`, which is `[rows, heads, head_dim]`.
fn rotate(threads: &Threads, args: &AttentionArgs<'_>, rows: &mut [f32]) {
    let width = args.heads * args.head_dim;
    let count = rows.len() / width;
    let rows = SharedMut::new(rows);
    threads.for_each(count, |row| {
        // SAFETY: the row lies within `rows`, which are borrowed exclusively, and no other task has
        // the same row.
        let row = unsafe { std::slice::from_raw_parts_mut(rows.get().add(row * width), width) };
        int4::rotate(args.path, row, args.head_dim);
    });
}

/// [`attention`] with keys and values as they are stored: rotated if they are stored rotated.
fn attend(threads: &Threads, args: &AttentionArgs<'_>, out: &mut [f32]) {
    let plan = AttentionPlan::new(args, threads.count(), positions_per_tile(args));
    let mut memory = threads.scratch::<f32>(plan.state_len);
    let states = SharedMut::new(memory.slice_mut());
    let out = SharedMut::new(out);
    let output = || AttentionOutput { out: out.get(), states: states.get() };
    threads.for_each(plan.items.len(), |index| {
        // SAFETY: `args` has been validated with `out`, the plan was made for it with the tile size
        // of the kernel that `compute` selects, and the scratch memory has at least `state_len`
        // values. By the invariant of `AttentionPlan`, two items have no head of the same span of a query
        // chunk in common, nor, where the context is not divided, of the same chunk. So their
        // states and their rows and heads of `out` are disjoint. Both borrows outlive `for_each`.
        unsafe { compute(args, &plan, &plan.items[index], threads, &output()) };
    });
    threads.for_each(plan.split_chunks.len() * args.kv_heads, |index| {
        let (chunk, kv_head) = (plan.split_chunks[index / args.kv_heads], index % args.kv_heads);
        // SAFETY: the first `for_each` has returned, so the work items have stored the states of
        // all spans of the chunk, and no thread writes them now. This task alone writes the chunk's
        // rows of `out` for this kv head, since work items do not write those of divided chunks.
        unsafe { merge_spans(args.path, args, &plan.chunks[chunk], kv_head, threads, &output()) }
    });
}

/// Positions per tile in the kernel that computes these arguments.
fn positions_per_tile(args: &AttentionArgs<'_>) -> usize {
    #[cfg(target_arch = "x86_64")]
    if amx_kernel::applies(args) {
        return amx_kernel::POSITIONS_PER_AMX_TILE;
    }
    _ = args;
    POSITIONS_PER_TILE
}

/// Computes a work item with the kernel for these arguments.
///
/// # Safety
/// * `args.validate` has accepted an output of the length of `args.q`, for which `output.out` is
///   valid.
/// * `plan` was made for `args` and tiles of [`positions_per_tile`], and `item` is one of its
///   items.
/// * `output.states` is valid for `plan.state_len` values.
/// * No other thread accesses the item's rows and heads of the output, nor the states of its spans.
unsafe fn compute(
    args: &AttentionArgs<'_>,
    plan: &AttentionPlan,
    item: &WorkItem,
    threads: &Threads,
    output: &AttentionOutput,
) {
    #[cfg(target_arch = "x86_64")]
    if amx_kernel::applies(args) {
        // SAFETY: `applies` is true, and the other conditions are those of this function.
        // `args.path` is `Amx`, which proves that AMX with bf16 and all the AVX-512 sets may be
        // used.
        return unsafe { amx_kernel::compute(args, plan, item, threads, output) };
    }
    // SAFETY: the conditions are those of this function.
    unsafe { simd_kernel::compute(args, plan, item, threads, output) }
}

/// # Safety
/// As for [`merge_spans`], and the instruction set of `L` is available.
#[inline(always)]
unsafe fn merge_spans_lanes<L: Lanes>(
    args: &AttentionArgs<'_>,
    chunk: &QueryChunk,
    kv_head: usize,
    threads: &Threads,
    output: &AttentionOutput,
) {
    let (queries, width) = (chunk.queries(args), args.head_dim.next_multiple_of(LANES));
    let len = SoftmaxState::len(queries, width);
    let mut scratch = threads.scratch::<f32>(len);
    let Some(states) = chunk.states else { return };
    // SAFETY: `scratch` has room for the states of the chunk's queries and belongs to this call.
    // The plan has reserved `spans * kv_heads` states of `len` values from `states` on, which no
    // thread writes now. The views have the chunk's queries and the padded head length, as `merge`
    // and `write` require.
    unsafe {
        let all = SoftmaxState::at(scratch.slice_mut().as_mut_ptr(), queries, width);
        all.reset();
        for index in 0..chunk.spans().len() {
            let at = states + (index * args.kv_heads + kv_head) * len;
            all.merge::<L>(&SoftmaxState::at(output.states.add(at), queries, width));
        }
        all.write::<L>(args, chunk, kv_head, output.out);
    }
}
dispatch! {
    /// Merges the states of the spans of a query chunk for a kv head, if its context is divided,
    /// and writes the result to its rows and heads of the output.
    ///
    /// # Safety
    /// * `args` has been validated, `chunk` is in its plan, and `kv_head` is below `args.kv_heads`.
    /// * `output.out` is valid for as many values as `args.q`; no other thread accesses the chunk's
    ///   rows for this kv head.
    /// * The work items of the plan have stored their states at `output.states`, and no thread
    ///   writes them meanwhile.
    unsafe fn merge_spans(
        args: &AttentionArgs<'_>, chunk: &QueryChunk, kv_head: usize, threads: &Threads,
        output: &AttentionOutput,
    ) = merge_spans_lanes
}

#[cfg(test)]
mod tests;
