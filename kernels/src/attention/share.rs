//! Which positions of the cache several decodes read from the same blocks.
//!
//! A cached prefix has one copy, so sequences that begin alike have equal blocks at the head of their
//! tables. In the order of their tables, each stands beside those it has most in common with:
//! what any two share, all between them share as well. So one pass over neighbours finds every group,
//! in whatever order the sequences came.

use std::cmp::Ordering;
use std::ops::Range;

use stolon_kvcache::BlockId;

use super::plan::Task;
use super::{AttentionArgs, AttentionSequence, SPAN, TILE};

/// Positions whose keys and values one layer without a sliding window reads of each head, for decodes
/// of one query a sequence: all that any of them sees, each once for all sequences whose tables are equal up to
/// there, but for what is left of a shared beginning beyond whole tiles of 64 positions.
///
/// So it is as long as a part has room for all that share: for 128 queries of one kv head. For bf16 on AMX
/// tiles, whole tiles are of 128 positions.
#[must_use]
pub fn positions_read(decodes: &[AttentionSequence<'_>], block_size: usize) -> usize {
    let mut decodes: Vec<Seen<'_>> = decodes
        .iter()
        .map(|decode| Seen::new(decode.block_table, 0..decode.start + decode.count, block_size))
        .collect();
    decodes.sort_unstable_by(Seen::order);
    let shared = decodes.windows(2).map(|pair| pair[0].shared(&pair[1], block_size, TILE).len());
    decodes.iter().map(|decode| decode.positions.len()).sum::<usize>() - shared.sum::<usize>()
}

/// What a decode reads.
struct Seen<'a> {
    /// Its blocks up to there.
    table: &'a [BlockId],
    positions: Range<usize>,
}

impl<'a> Seen<'a> {
    fn new(table: &'a [BlockId], positions: Range<usize>, block_size: usize) -> Seen<'a> {
        Seen { table: &table[..positions.end.div_ceil(block_size)], positions }
    }

    /// The order in which each stands beside those it has most in common with.
    fn order(&self, other: &Seen<'_>) -> Ordering {
        let equal = common(self.table, other.table);
        self.table.get(equal).cmp(&other.table.get(equal))
    }

    /// Positions of the tiles that both see in full and have in the same blocks.
    fn shared(&self, other: &Seen<'_>, block_size: usize, tile: usize) -> Range<usize> {
        let blocks = common(self.table, other.table);
        let begin = self.positions.start.max(other.positions.start).next_multiple_of(tile);
        let end = self.positions.end.min(other.positions.end).min(blocks * block_size);
        begin..end / tile * tile
    }
}

/// A task, as a part reads the cache for it.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    pub(super) task: usize,
    /// The tiles, one after the other, that it and the reader before it see in full and have in
    /// the same blocks: their positions.
    pub(super) shared: Range<usize>,
}

impl Reader {
    /// Whether the tile that begins at `begin` is the one of the reader before it, seen in full.
    #[inline]
    pub(super) fn shares(&self, begin: usize) -> bool {
        self.shared.contains(&begin)
    }

    /// Whether it shares any tile of a span.
    pub(super) fn shares_in(&self, span: usize) -> bool {
        self.shared.start.max(span * SPAN) < self.shared.end.min((span + 1) * SPAN)
    }
}

/// The runs of readers that share the tile that begins at `begin`, as numbers among `readers`. A run
/// may be of one.
pub(super) fn runs(readers: &[Reader], begin: usize) -> impl Iterator<Item = Range<usize>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let first = next;
        let later = readers.get(first + 1..)?.iter();
        next += 1 + later.take_while(|reader| reader.shares(begin)).count();
        Some(first..next)
    })
}

/// One reader a task: first the tasks `together`, of one row each, in the order of their
/// tables, then the others, which share nothing. A tile is so many positions.
pub(super) fn readers(
    args: &AttentionArgs<'_>,
    tasks: &[Task],
    tile: usize,
    together: impl Fn(&Task) -> bool,
) -> Vec<Reader> {
    let (decodes, others): (Vec<usize>, Vec<usize>) =
        (0..tasks.len()).partition(|&task| together(&tasks[task]));
    let seen = |index: usize| {
        let task = &tasks[index];
        let table = args.sequences[task.sequence].block_table;
        (index, Seen::new(table, task.first..task.end(), args.block_size))
    };
    let mut decodes: Vec<(usize, Seen<'_>)> = decodes.into_iter().map(seen).collect();
    decodes.sort_unstable_by(|(_, a), (_, b)| a.order(b));
    let mut readers = Vec::with_capacity(tasks.len());
    let mut before: Option<&Seen<'_>> = None;
    for (task, seen) in &decodes {
        let shared = before.map_or(0..0, |before| before.shared(seen, args.block_size, tile));
        readers.push(Reader { task: *task, shared });
        before = Some(seen);
    }
    readers.extend(others.into_iter().map(|task| Reader { task, shared: 0..0 }));
    readers
}

/// Blocks at the head of both tables that are equal.
fn common(a: &[BlockId], b: &[BlockId]) -> usize {
    /// Ids that are compared without a branch.
    const RUN: usize = 16;
    let differ = |(a, b): &(&[BlockId], &[BlockId])| {
        a.iter().zip(*b).fold(0, |bits, (a, b)| bits | (a.0 ^ b.0)) != 0
    };
    let runs = a.chunks_exact(RUN).zip(b.chunks_exact(RUN));
    let whole = RUN * runs.take_while(|pair| !differ(pair)).count();
    whole + a[whole..].iter().zip(&b[whole..]).take_while(|(a, b)| a == b).count()
}
