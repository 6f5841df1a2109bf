//! Attention on AMX tiles, for bf16 keys and values: computes one work item.
//!
//! Scores are computed transposed: a tile register of 16 positions' keys, read directly from the
//! cache, is multiplied with queries that are packed once per work item. A vector then holds the
//! scores of one position for 16 queries, so the largest scores, weights and sums need no
//! operations across lanes. The weights are rounded to bf16, transposed (32 positions times 16
//! queries at a time) and multiplied with the values, which are first interleaved in pairs of
//! successive positions.
//!
//! A tile of positions that several decodes share is computed for all their queries at once. A tile
//! register has rows for 16 queries, of which one decode fills only as many as there are query
//! heads per kv head.
//!
//! **Order of sums.** Scores add the products of a head 32 at a time. The positions of a tile are
//! added in ascending order; so is the weighted sum of values, 32 positions at a time from the
//! tile's first. Positions that a query does not see have the weight zero and change nothing.
//!
//! **Subnormals.** AMX treats bf16 and f32 numbers below 2^-126 as zero, whatever the thread's
//! floating-point mode is. Keys, values and queries of that size count as zero here, unlike on SIMD
//! lanes.
#![allow(
    unsafe_code,
    reason = "runs tile and vector instructions on scratch memory and the KV cache"
)]

mod packing;
mod products;
mod softmax;
mod work;

use std::ops::Range;

use crate::amx::tile::{AMX_TILE_ROWS, configure, release};
use crate::attention::amx_support;
use crate::attention::args::{AttentionArgs, KvSlice};
use crate::attention::plan::{AttentionPlan, WorkItem};
use crate::attention::prefix_sharing;
use crate::attention::scratch::pieces;
use crate::attention::sizes::POSITIONS_PER_SPAN;
use crate::attention::softmax_state::{AttentionOutput, SoftmaxState};
use crate::kv_layout::KvLayout;
use crate::lanes::Avx512;
use crate::threads::Threads;
use work::{AmxWork, position_lane};

pub(super) use work::POSITIONS_PER_AMX_TILE;

/// Whether these arguments are computed here. This depends only on shapes, types and the
/// instruction set, so that the same kernel computes all queries of a layer.
pub(super) fn applies(args: &AttentionArgs<'_>) -> bool {
    let bf16 = matches!((&args.keys, &args.values), (KvSlice::Bf16(_), KvSlice::Bf16(_)));
    amx_support::reads_bf16_heads(args.path, args.head_dim)
        && bf16
        && args.key_layout == KvLayout::Rows
        && args.bias.is_none()
}

/// Computes a work item: stores the states of its spans, or writes its rows and heads of the
/// output.
///
/// # Safety
/// * [`applies`] is true for `args`.
/// * `args.validate` has accepted an output of the length of `args.q`, for which `output.out` is
///   valid.
/// * `plan` was made for `args` with tiles of [`POSITIONS_PER_AMX_TILE`], and `item` is one of its
///   items.
/// * `output.states` is valid for `plan.state_len` values.
/// * No other thread accesses the item's rows and heads of the output, nor the states of its spans.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn compute(
    args: &AttentionArgs<'_>,
    plan: &AttentionPlan,
    item: &WorkItem,
    threads: &Threads,
    output: &AttentionOutput,
) {
    let (KvSlice::Bf16(keys), KvSlice::Bf16(values)) = (args.keys, args.values) else {
        unreachable!("`applies` is true only for bf16 keys and values");
    };
    let dim = args.head_dim;
    let queries_each = plan.chunk(item, 0).queries(args);
    let live = item.readers.len() * queries_each;
    let queries = live.next_multiple_of(AMX_TILE_ROWS);
    // All sizes are multiples of 16, so every piece is aligned to a cache line.
    let sizes = [
        queries * dim / 2,
        POSITIONS_PER_AMX_TILE * queries,
        POSITIONS_PER_AMX_TILE * AMX_TILE_ROWS / 2,
        POSITIONS_PER_AMX_TILE * dim / 2,
        POSITIONS_PER_AMX_TILE * dim / 2,
        queries,
        queries,
        SoftmaxState::len(queries, dim),
        SoftmaxState::len(live, dim),
        SoftmaxState::len(live, dim),
    ];
    let mut scratch = threads.scratch::<f32>(sizes.iter().sum());
    let [q, scores, weights, value_pairs, gathered_keys, first, last, group_span, span, all] =
        pieces(scratch.slice_mut(), sizes);
    for kv_head in item.kv_heads.clone() {
        // SAFETY: the pieces of scratch have the sizes that the fields of `AmxWork` require, do not
        // overlap and belong to this call until `scratch` is dropped; the views begin at pieces of
        // the lengths of their states. `args.path` is `Amx`, so AMX may be used. The other
        // conditions are those of this function, and `kv_head` is one of the item's.
        unsafe {
            let mut work = AmxWork {
                args,
                plan,
                item,
                kv_head,
                keys,
                values,
                readers: 0..0,
                queries_each,
                queries,
                q,
                scores,
                weights,
                value_pairs,
                gathered_keys: gathered_keys.cast(),
                first_seen: first.cast(),
                last_seen: last.cast(),
                group_span: SoftmaxState::at(group_span, queries, dim),
            };
            configure(AMX_TILE_ROWS, AMX_TILE_ROWS, true);
            work.run(&SoftmaxState::at(span, live, dim), &SoftmaxState::at(all, live, dim), output);
        }
    }
}

// The methods, here and in the files below, rely on the invariant of `AmxWork`, which says what
// each pointer is valid for and that the instruction sets are available.
impl AmxWork<'_> {
    /// Computes one kv head of the work item and releases the tile registers.
    ///
    /// `span` and `all` are views of the states of all readers' queries: over the current span and
    /// over all spans before. If the item has one reader, `span` is not used, because the reader's
    /// state is then always that of the reader group.
    ///
    /// # Safety
    /// The tile registers are configured for 16 rows with `single` true. `span` and `all` have
    /// `queries_each` queries for each reader and the width `head_dim`, in memory that is this
    /// call's alone and separate from that of the work. `output` is as [`compute`] requires.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn run(&mut self, span: &SoftmaxState, all: &SoftmaxState, output: &AttentionOutput) {
        let (args, plan, item) = (self.args, self.plan, self.item);
        let readers = &plan.readers[item.readers.clone()];
        let (each, several) = (self.queries_each, readers.len() > 1);
        let queries_of = |group: &Range<usize>| group.start * each..group.end * each;
        let group_span = self.group_span;
        let span = if several { span } else { &group_span };
        // SAFETY: groups and readers lie within the item's readers, so their queries are within the
        // views. `self.queries` is set to at most the padded queries of all readers, for which
        // scratch has room. `seen` is not empty and lies in the tile. Each reader's chunk has
        // `each` queries, so its views have the sizes that `finish_span` and `finish_chunk`
        // require; by the invariant of `AttentionPlan` no other item has this chunk, span and head,
        // nor, if the context is not divided, this chunk and head.
        unsafe {
            all.reset();
            for index in item.spans.clone() {
                self.group_span.reset();
                span.reset();
                let begins = index * POSITIONS_PER_SPAN..(index + 1) * POSITIONS_PER_SPAN;
                for begin in begins.step_by(POSITIONS_PER_AMX_TILE) {
                    for group in prefix_sharing::groups(readers, begin) {
                        let chunk = plan.chunk(item, group.start);
                        let seen = chunk.seen(begin..begin + POSITIONS_PER_AMX_TILE);
                        if seen.is_empty() {
                            continue;
                        }
                        let own = span.part(queries_of(&group));
                        if self.readers != group {
                            self.readers = group;
                            let live = self.readers.len() * self.queries_each;
                            self.queries = live.next_multiple_of(AMX_TILE_ROWS);
                            self.store_seen_positions();
                            self.pack_queries();
                        }
                        if several {
                            self.group_span.copy(&own);
                        }
                        self.add_tile(begin, seen);
                        if several {
                            own.copy(&self.group_span);
                        }
                    }
                }
                for reader in 0..readers.len() {
                    let (chunk, own) =
                        (plan.chunk(item, reader), queries_of(&(reader..reader + 1)));
                    let (span, all) = (span.part(own.clone()), all.part(own));
                    output.finish_span::<Avx512>(args, chunk, self.kv_head, index, &span, &all);
                }
            }
            release();
            for reader in 0..readers.len() {
                let (chunk, own) = (plan.chunk(item, reader), queries_of(&(reader..reader + 1)));
                output.finish_chunk::<Avx512>(args, chunk, self.kv_head, &all.part(own));
            }
        }
    }

    /// Adds the positions `seen` of the tile that begins at `begin` to the state of the reader
    /// group.
    ///
    /// # Safety
    /// The tile registers are configured for 16 rows with `single` true, and the queries of the
    /// group are packed. `seen` is not empty, lies in the tile, and is what the group's first
    /// reader sees of it.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
    unsafe fn add_tile(&self, begin: usize, seen: Range<usize>) {
        // Both products skip groups of 32 positions, before and after, that no query sees.
        let step = crate::amx::tile::AMX_BF16_DEPTH;
        let rows = (seen.start - begin) / step * step..(seen.end - begin).next_multiple_of(step);
        // SAFETY: `rows` covers `seen`, is not empty, and its ends are multiples of 32 up to 128,
        // as the callees require; `first` is a multiple of 16 below `self.queries`. The scores are
        // computed before the softmax reads them, and the weights and value pairs before the second
        // product.
        unsafe {
            self.score(begin, rows.clone(), seen.clone());
            self.pair_values(begin, rows.clone(), seen.clone());
            for first in (0..self.queries).step_by(AMX_TILE_ROWS) {
                if self.softmax_step(first, begin, rows.clone(), seen.end) {
                    self.add_values(first, rows.clone());
                }
            }
        }
    }

    /// Stores the first and last position that each query of the group sees. Several readers share
    /// a tile only if each of them sees all of it, so they need no limits.
    ///
    /// # Safety
    /// `self.queries` is at most the number of queries that `first_seen` and `last_seen` have room
    /// for.
    unsafe fn store_seen_positions(&self) {
        let group = self.args.heads / self.args.kv_heads;
        for query in 0..self.queries {
            let (mut first, mut last) = (0, i32::MAX);
            if self.readers.len() == 1 {
                // The padding sees what the last query sees, so that it does not need a mask if the
                // last query needs none.
                let row = query.min(self.queries_each - 1) / group;
                let first_seen = self.args.first_seen(self.chunk().position + row);
                let last_seen = self.chunk().seen_end(self.args, row) - 1;
                (first, last) = (position_lane(first_seen), position_lane(last_seen));
            }
            // SAFETY: `query` is below `self.queries`, for which both arrays have room.
            unsafe {
                *self.first_seen.add(query) = first;
                *self.last_seen.add(query) = last;
            }
        }
    }
}
