//! Finds the positions of the KV cache that several decoding sequences read from the same blocks.
//!
//! A cached prefix has one copy, so the block tables of sequences with a common prefix begin with
//! the same blocks. If tables are sorted, each is next to the one it has the longest prefix in
//! common with, and the prefix that any two share is also shared by all tables between them. One
//! pass over neighbors therefore finds every group, whatever the order in which the sequences
//! came.
//!
//! Reading a shared prefix once for several decoding queries is also what the cascade attention of
//! FlashInfer and vLLM does.

use std::cmp::Ordering;
use std::ops::Range;

use stolon_kvcache::BlockId;

use crate::attention::args::{AttentionArgs, AttentionSequence};
use crate::attention::query_chunk::QueryChunk;
use crate::attention::sizes::{POSITIONS_PER_SPAN, POSITIONS_PER_TILE};

/// Number of positions whose keys and values [`attention`](crate::attention()) reads per kv head,
/// in one layer without a sliding window, for decoding sequences with one query each.
///
/// A shared prefix counts once for all sequences whose block tables agree on it, except for a
/// remainder that does not fill a tile of 64 positions, which each sequence reads by itself.
/// `block_size` is the number of positions per block.
///
/// The result is exact as long as all sequences that share a prefix fit in one work item, which
/// holds 128 query vectors per kv head. With bf16 on AMX tiles the tiles are of 128 positions.
///
/// # Panics
/// If a block table is shorter than its sequence.
#[must_use]
pub fn positions_read(decodes: &[AttentionSequence<'_>], block_size: usize) -> usize {
    let mut decodes: Vec<SeenBlocks<'_>> = decodes
        .iter()
        .map(|decode| {
            SeenBlocks::new(decode.block_table, 0..decode.start + decode.count, block_size)
        })
        .collect();
    decodes.sort_unstable_by(SeenBlocks::order);
    let shared = decodes
        .windows(2)
        .map(|pair| pair[0].shared(&pair[1], block_size, POSITIONS_PER_TILE).len());
    decodes.iter().map(|decode| decode.positions.len()).sum::<usize>() - shared.sum::<usize>()
}

/// The part of a sequence's cache that its decoding query sees.
struct SeenBlocks<'a> {
    /// The block table up to the last position that the query sees.
    table: &'a [BlockId],
    /// The positions that the query sees.
    positions: Range<usize>,
}

impl<'a> SeenBlocks<'a> {
    fn new(table: &'a [BlockId], positions: Range<usize>, block_size: usize) -> SeenBlocks<'a> {
        SeenBlocks { table: &table[..positions.end.div_ceil(block_size)], positions }
    }

    /// The order of the block tables, in which each is next to the one with the longest common
    /// prefix.
    fn order(&self, other: &SeenBlocks<'_>) -> Ordering {
        let equal = common_blocks(self.table, other.table);
        self.table.get(equal).cmp(&other.table.get(equal))
    }

    /// The positions of those tiles, of `tile` positions each, that both see completely and have in
    /// the same blocks.
    fn shared(&self, other: &SeenBlocks<'_>, block_size: usize, tile: usize) -> Range<usize> {
        let blocks = common_blocks(self.table, other.table);
        let begin = self.positions.start.max(other.positions.start).next_multiple_of(tile);
        let end = self.positions.end.min(other.positions.end).min(blocks * block_size);
        begin..end / tile * tile
    }
}

/// A query chunk as a reader of the cache, in an order in which readers that share tiles are
/// neighbors.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    /// Index of the query chunk in the plan.
    pub(super) chunk: usize,
    /// Positions of the successive tiles that this reader and the one before it both see completely
    /// and have in the same blocks; empty for the first.
    pub(super) shared: Range<usize>,
}

impl Reader {
    /// Whether this reader and the one before it share the tile that begins at `begin`.
    #[inline]
    pub(super) fn shares(&self, begin: usize) -> bool {
        self.shared.contains(&begin)
    }

    /// Whether this reader and the one before it share any tile of a span.
    pub(super) fn shares_in(&self, span: usize) -> bool {
        self.shared.start.max(span * POSITIONS_PER_SPAN)
            < self.shared.end.min((span + 1) * POSITIONS_PER_SPAN)
    }
}

/// The groups of readers that share the tile that begins at `begin`, as index ranges of `readers`.
/// Each reader is in exactly one group; a group may have one reader.
pub(super) fn groups(readers: &[Reader], begin: usize) -> impl Iterator<Item = Range<usize>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let first = next;
        let later = readers.get(first + 1..)?.iter();
        next += 1 + later.take_while(|reader| reader.shares(begin)).count();
        Some(first..next)
    })
}

/// One reader per query chunk. First come the chunks for which `can_share` is true, which have one
/// row each, in the order of their block tables; then the others, which share nothing. `tile` is
/// the number of positions per tile.
pub(super) fn readers(
    args: &AttentionArgs<'_>,
    chunks: &[QueryChunk],
    tile: usize,
    can_share: impl Fn(&QueryChunk) -> bool,
) -> Vec<Reader> {
    let (decodes, others): (Vec<usize>, Vec<usize>) =
        (0..chunks.len()).partition(|&chunk| can_share(&chunks[chunk]));
    let seen = |index: usize| {
        let chunk = &chunks[index];
        let table = args.sequences[chunk.sequence].block_table;
        (index, SeenBlocks::new(table, chunk.first..chunk.end, args.block_size))
    };
    let mut decodes: Vec<(usize, SeenBlocks<'_>)> = decodes.into_iter().map(seen).collect();
    decodes.sort_unstable_by(|(_, a), (_, b)| a.order(b));
    let mut readers = Vec::with_capacity(chunks.len());
    let mut before: Option<&SeenBlocks<'_>> = None;
    for (chunk, seen) in &decodes {
        let shared = before.map_or(0..0, |before| before.shared(seen, args.block_size, tile));
        readers.push(Reader { chunk: *chunk, shared });
        before = Some(seen);
    }
    readers.extend(others.into_iter().map(|chunk| Reader { chunk, shared: 0..0 }));
    readers
}

/// Number of blocks in the common prefix of two block tables.
fn common_blocks(a: &[BlockId], b: &[BlockId]) -> usize {
    /// Ids that are compared without a branch, so that the compiler vectorizes the comparison.
    const IDS_PER_COMPARISON: usize = 16;
    let differ = |(a, b): &(&[BlockId], &[BlockId])| {
        a.iter().zip(*b).fold(0, |bits, (a, b)| bits | (a.0 ^ b.0)) != 0
    };
    let pairs = a.chunks_exact(IDS_PER_COMPARISON).zip(b.chunks_exact(IDS_PER_COMPARISON));
    let whole = IDS_PER_COMPARISON * pairs.take_while(|pair| !differ(pair)).count();
    whole + a[whole..].iter().zip(&b[whole..]).take_while(|(a, b)| a == b).count()
}
