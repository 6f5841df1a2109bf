//! Ragged, causal, paged attention.
//!
//! Queries of any number of sequences, prefill chunks and decodes mixed, read keys and values of
//! one layer through their block tables. Heads that share keys and values (grouped queries) are
//! computed together, so a tile of the cache is read and converted once for all of them.
//!
//! **Order of sums.** The context is cut into tiles of [`TILE`] positions and spans of [`SPAN`], both
//! at fixed absolute positions. A query's softmax runs tile by tile within a span and the spans'
//! results are merged in order. So its bits depend on its position and the context alone: not on
//! the chunk it came in, on the block size, or on which thread took which part.
//!
//! **Precision.** Scores, weights and sums are f32, and so are the products on lanes. With keys and
//! values in bf16 on the AMX path (see [`tiles`]) queries and weights are rounded to bf16.
#![allow(unsafe_code, reason = "tasks write disjoint parts of one output")]

mod task;
#[cfg(target_arch = "x86_64")]
mod tiles;

use stolon_kvcache::BlockId;

use super::buffer::SharedMut;
use super::{Path, Threads};

/// Positions whose scores are computed together.
pub(super) const TILE: usize = 64;
/// Positions that share one running softmax; a multiple of [`TILE`].
pub(super) const SPAN: usize = 512;
/// Query vectors (rows times heads of a group) a task holds, about.
const TASK_QUERIES: usize = 96;

/// Keys or values of one layer: `[block_count, block_size, kv_heads, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub enum KvSlice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// The bits of bf16 values.
    Bf16(&'a [u16]),
}

impl KvSlice<'_> {
    fn len(&self) -> usize {
        match self {
            KvSlice::F32(values) => values.len(),
            KvSlice::Bf16(values) => values.len(),
        }
    }
}

/// The queries of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSequence<'a> {
    /// Position of its first query. Keys and values of `0..start + count` stand in the cache.
    pub start: usize,
    /// Its queries, at successive positions.
    pub count: usize,
    /// Its blocks in order of position; covers `start + count` positions.
    pub block_table: &'a [BlockId],
}

/// One call of [`attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Instruction set.
    pub path: Path,
    /// `[rows, heads, head_dim]`: the sequences' queries, concatenated.
    pub q: &'a [f32],
    /// The sequences, in the order of `q`.
    pub sequences: &'a [AttentionSequence<'a>],
    /// Keys of the layer.
    pub keys: KvSlice<'a>,
    /// Values of the layer.
    pub values: KvSlice<'a>,
    /// Positions a block holds.
    pub block_size: usize,
    /// Heads of a query.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Factor of the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Positions a query sees, its own included; all before it if `None`.
    pub sliding_window: Option<usize>,
}

impl AttentionArgs<'_> {
    /// Values of one position's keys.
    fn position_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// First position that a query at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        self.sliding_window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    fn check(&self, out: &[f32]) {
        assert!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            "attention: {} heads are no multiple of {} kv heads",
            self.heads,
            self.kv_heads
        );
        assert!(self.block_size > 0 && self.head_dim > 0, "attention: empty blocks or heads");
        assert!(self.sliding_window != Some(0), "attention: a window of 0 positions sees nothing");
        let rows: usize = self.sequences.iter().map(|sequence| sequence.count).sum();
        assert_eq!(
            self.q.len(),
            rows * self.heads * self.head_dim,
            "attention: q must be [{rows}, {}, {}]",
            self.heads,
            self.head_dim
        );
        assert_eq!(out.len(), self.q.len(), "attention: out must be as large as q");
        assert_eq!(self.keys.len(), self.values.len(), "attention: keys and values must match");
        let block_count = self.keys.len() / (self.block_size * self.position_len());
        for sequence in self.sequences {
            let blocks = (sequence.start + sequence.count).div_ceil(self.block_size);
            assert!(
                blocks <= sequence.block_table.len(),
                "attention: expected {blocks} blocks in a table, got {}",
                sequence.block_table.len()
            );
            for block in &sequence.block_table[..blocks] {
                assert!(
                    (block.0 as usize) < block_count,
                    "attention: block {} of {block_count}",
                    block.0
                );
            }
        }
    }
}

/// Some queries of a sequence and one kv head.
#[derive(Clone, Copy, Debug)]
struct Task {
    sequence: usize,
    /// Row of `q` that holds the task's first query.
    row: usize,
    /// That query's position.
    position: usize,
    count: usize,
    kv_head: usize,
}

/// Attention of every query over the positions it sees; `out` is `[rows, heads, head_dim]`.
///
/// # Panics
/// If sizes do not fit together, or a block table is too short or names a block that does not
/// exist: bugs of the caller, found before anything is written.
pub fn attention(threads: &Threads, args: &AttentionArgs<'_>, out: &mut [f32]) {
    args.check(out);
    let group = args.heads / args.kv_heads;
    let task_rows = (TASK_QUERIES / group).max(1);
    let mut tasks = Vec::new();
    let mut row = 0;
    for (index, sequence) in args.sequences.iter().enumerate() {
        for from in (0..sequence.count).step_by(task_rows) {
            for kv_head in 0..args.kv_heads {
                tasks.push(Task {
                    sequence: index,
                    row: row + from,
                    position: sequence.start + from,
                    count: task_rows.min(sequence.count - from),
                    kv_head,
                });
            }
        }
        row += sequence.count;
    }
    // The long ones first, so that no thread is left alone with one at the end.
    tasks.sort_by_key(|task| std::cmp::Reverse((task.position + task.count) * task.count));
    let out = SharedMut::new(out);
    threads.for_each(tasks.len(), |index| {
        let task = tasks[index];
        #[cfg(target_arch = "x86_64")]
        if tiles::apply(args) {
            // SAFETY: as below; the path is AMX and keys and values are bf16.
            return unsafe { tiles::run(args, &task, threads, out.get()) };
        }
        // SAFETY: `check` has shown that all sizes fit; tasks have disjoint rows or heads of `out`.
        unsafe { task::run(args.path, args, &task, threads, out.get()) }
    });
}

#[cfg(test)]
mod tests;
