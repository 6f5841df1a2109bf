//! How a call of attention is divided into work for threads.
//!
//! The queries of each sequence are divided into query chunks. A work item, which a thread takes as
//! a whole, is some kv heads and spans of a chunk's context. If the context of a chunk is divided
//! into several work items (as in flash-decoding), every span stores its softmax state, and a
//! second pass merges the states in order of position. A work item that has the whole context
//! merges its spans in the same order as it goes. So the division, which depends on the number of
//! threads, changes no bit.
//!
//! Chunks of few queries, as in decoding, are memory-bound. Their work items are one span of
//! several kv heads, because the heads of a position are adjacent in memory: the bytes that the
//! hardware prefetches beyond one head belong to the next head. Chunks of many queries are
//! compute-bound. Their work items are one kv head of a chunk or, if those are too few to keep all
//! threads busy, some spans of one.
//!
//! **Decoding sequences that share a prefix** read it together. A work item then has several
//! readers, query chunks of one row each, and loads a tile of the cache that they have in the same
//! blocks once for all of them (see [`prefix_sharing`]). The sums of each query are computed as if
//! it were alone.

use std::ops::Range;

use crate::attention::args::AttentionArgs;
use crate::attention::prefix_sharing::{self, Reader};
use crate::attention::query_chunk::QueryChunk;
use crate::attention::sizes::POSITIONS_PER_SPAN;
use crate::attention::softmax_state::SoftmaxState;
use crate::lanes::LANES;

/// Approximate number of query vectors per kv head (rows times query heads per kv head) in a work
/// item: eight AMX tiles of 16.
pub(super) const QUERIES_PER_WORK_ITEM: usize = 128;
/// Work items per thread. With more than one, threads that finish early take over remaining work.
const WORK_ITEMS_PER_THREAD: usize = 4;
/// Approximate cost of loading a position, in rows that are computed with it.
const LOAD_COST_IN_ROWS: usize = 6;

/// The unit of work of a thread: some kv heads and spans of one query chunk, or of several chunks
/// of one row each that read a span together.
#[derive(Clone, Debug)]
pub(super) struct WorkItem {
    /// Index range of [`AttentionPlan::readers`]. If there are several, each reads one row, and
    /// `spans` is one span of which each of them sees some positions.
    pub(super) readers: Range<usize>,
    /// The kv heads to compute.
    pub(super) kv_heads: Range<usize>,
    /// The spans to compute.
    pub(super) spans: Range<usize>,
}

/// The work of one call of attention.
///
/// **Invariant**: each kv head of each span that a query chunk sees is in exactly one work item. A
/// chunk whose [`states`](QueryChunk::states) are `None` has all its spans of a head in the same
/// work item.
#[derive(Debug, Default)]
pub(super) struct AttentionPlan {
    /// The query chunks, in the order of their rows.
    pub(super) chunks: Vec<QueryChunk>,
    /// The readers, one per chunk, ordered so that readers which share tiles are neighbors.
    pub(super) readers: Vec<Reader>,
    /// The work items, with the most expensive first.
    pub(super) items: Vec<WorkItem>,
    /// Indexes of the chunks whose context is divided into several work items.
    pub(super) split_chunks: Vec<usize>,
    /// Number of `f32`s that the states of those chunks' spans take.
    pub(super) state_len: usize,
}

impl AttentionPlan {
    /// The plan for a number of threads. `tile` is the number of positions per tile, a divisor of
    /// [`POSITIONS_PER_SPAN`].
    pub(super) fn new(args: &AttentionArgs<'_>, threads: usize, tile: usize) -> AttentionPlan {
        let chunks = query_chunks(args);
        let can_share = |chunk: &QueryChunk| chunk.count == 1 && chunk.memory_bound(args);
        let readers = prefix_sharing::readers(args, &chunks, tile, can_share);
        let mut plan = AttentionPlan { chunks, readers, ..AttentionPlan::default() };
        let largest = plan.largest_items(args);
        let wanted = if threads == 1 { 1 } else { WORK_ITEMS_PER_THREAD * threads };
        let least_pieces = |item: &WorkItem| {
            if plan.chunk(item, 0).memory_bound(args) { 1 } else { args.kv_heads }
        };
        // How many pieces each of the largest items must be divided into for the wanted number.
        let pieces = wanted.div_ceil(largest.iter().map(least_pieces).sum::<usize>().max(1));
        let spans_per_item = |chunk: &QueryChunk| {
            if chunk.memory_bound(args) { 1 } else { chunk.spans().len().div_ceil(pieces) }
        };
        for (index, chunk) in plan.chunks.iter_mut().enumerate() {
            let spans = chunk.spans().len();
            if spans > spans_per_item(chunk) {
                let width = args.head_dim.next_multiple_of(LANES);
                let state_len = SoftmaxState::len(chunk.queries(args), width);
                chunk.states = Some(plan.state_len);
                plan.state_len += spans * args.kv_heads * state_len;
                plan.split_chunks.push(index);
            }
        }
        for item in &largest {
            let chunk = plan.chunk(item, 0);
            let (queries, spans) = (chunk.queries(args), spans_per_item(chunk));
            let readers_max = (QUERIES_PER_WORK_ITEM / queries).max(1);
            let readers =
                item.readers.len().div_ceil(pieces.div_ceil(args.kv_heads)).min(readers_max);
            let heads = if chunk.memory_bound(args) {
                args.kv_heads.div_ceil(pieces).min((readers_max / readers).max(1))
            } else {
                1
            };
            for readers in divide(&item.readers, readers) {
                for spans in divide(&item.spans, spans) {
                    plan.items.extend(divide(&item.kv_heads, heads).map(|kv_heads| WorkItem {
                        readers: readers.clone(),
                        kv_heads,
                        spans: spans.clone(),
                    }));
                }
            }
        }
        let mut items = std::mem::take(&mut plan.items);
        items.sort_by_cached_key(|item| std::cmp::Reverse(plan.cost(item)));
        plan.items = items;
        plan
    }

    /// All work in the largest possible items: a single span with all readers that share any of its
    /// tiles, or a whole compute-bound chunk.
    fn largest_items(&self, args: &AttentionArgs<'_>) -> Vec<WorkItem> {
        let mut items = Vec::new();
        for (index, reader) in self.readers.iter().enumerate() {
            let chunk = &self.chunks[reader.chunk];
            let mut add = |readers, spans| {
                items.push(WorkItem { readers, kv_heads: 0..args.kv_heads, spans });
            };
            if !chunk.memory_bound(args) {
                add(index..index + 1, chunk.spans());
                continue;
            }
            // A span that this reader shares with the one before it is in that reader's item.
            for span in chunk.spans().filter(|&span| !reader.shares_in(span)) {
                let later = &self.readers[index + 1..];
                let more = later.iter().take_while(|later| later.shares_in(span)).count();
                add(index..index + 1 + more, span..span + 1);
            }
        }
        items
    }

    /// The query chunk of a work item's reader, whose number counts from the item's first reader.
    #[inline]
    pub(super) fn chunk(&self, item: &WorkItem, reader: usize) -> &QueryChunk {
        &self.chunks[self.readers[item.readers.start + reader].chunk]
    }

    /// Approximate cost of a work item, in pairs of a row and a position of one kv head.
    fn cost(&self, item: &WorkItem) -> usize {
        let positions = item.spans.start * POSITIONS_PER_SPAN..item.spans.end * POSITIONS_PER_SPAN;
        let readers = self.readers[item.readers.clone()].iter().enumerate();
        let costs = readers.map(|(index, reader)| {
            let chunk = &self.chunks[reader.chunk];
            let seen = chunk.seen(positions.clone());
            let shared = if index > 0 { reader.shared.end.clamp(seen.start, seen.end) } else { 0 };
            seen.len() * chunk.count + (seen.end - shared.max(seen.start)) * LOAD_COST_IN_ROWS
        });
        costs.sum::<usize>() * item.kv_heads.len()
    }
}

/// Divides a range into ranges of `step` numbers; the last may be shorter.
fn divide(range: &Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(step).map(move |from| from..end.min(from + step))
}

/// Divides the queries of each sequence into chunks.
fn query_chunks(args: &AttentionArgs<'_>) -> Vec<QueryChunk> {
    let rows_per_chunk = (QUERIES_PER_WORK_ITEM * args.kv_heads / args.heads).max(1);
    let mut chunks = Vec::new();
    let mut row = 0;
    for (index, sequence) in args.sequences.iter().enumerate() {
        for from in (0..sequence.count).step_by(rows_per_chunk) {
            let position = sequence.start + from;
            let count = rows_per_chunk.min(sequence.count - from);
            let end = sequence.start + sequence.count;
            let last = position + count - 1;
            let seen_end = if sequence.full { args.full_end(last, end) } else { last + 1 };
            chunks.push(QueryChunk {
                sequence: index,
                row: row + from,
                position,
                count,
                first: args.first_seen(position),
                end: seen_end,
                full: sequence.full.then_some(end),
                states: None,
            });
        }
        row += sequence.count;
    }
    chunks
}

#[cfg(test)]
mod tests;
