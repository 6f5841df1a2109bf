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
    let end = |decode: &AttentionSequence<'_>| decode.start + decode.count;
    let mut tables: Vec<(&[BlockId], usize)> = decodes
        .iter()
        .map(|decode| (&decode.block_table[..end(decode).div_ceil(block_size)], end(decode)))
        .collect();
    tables.sort_unstable_by(|(a, _), (b, _)| order(a, b));
    let shared = tables.windows(2).map(|pair| {
        let [(before, end), (own, own_end)] = [pair[0], pair[1]];
        (common(before, own) * block_size).min(end).min(own_end) / TILE * TILE
    });
    decodes.iter().map(end).sum::<usize>() - shared.sum::<usize>()
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
    let (mut decodes, others): (Vec<usize>, Vec<usize>) =
        (0..tasks.len()).partition(|&task| together(&tasks[task]));
    let table = |task: usize| {
        let task = &tasks[task];
        &args.sequences[task.sequence].block_table[..task.end().div_ceil(args.block_size)]
    };
    decodes.sort_unstable_by(|&a, &b| order(table(a), table(b)));
    let alone = |task| Reader { task, shared: 0..0 };
    let mut readers = Vec::with_capacity(tasks.len());
    for (index, &task) in decodes.iter().enumerate() {
        readers.push(match index.checked_sub(1).map(|before| decodes[before]) {
            None => alone(task),
            Some(before) => {
                let positions = common(table(before), table(task)) * args.block_size;
                let (before, own) = (&tasks[before], &tasks[task]);
                let begin = before.first.max(own.first).next_multiple_of(tile);
                let end = before.end().min(own.end()).min(positions) / tile * tile;
                Reader { task, shared: begin..end }
            }
        });
    }
    readers.extend(others.into_iter().map(alone));
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

fn order(a: &[BlockId], b: &[BlockId]) -> Ordering {
    let equal = common(a, b);
    a.get(equal).cmp(&b.get(equal))
}
