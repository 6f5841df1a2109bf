//! Ragged, causal, paged attention.
//!
//! Queries of any number of sequences, prefill chunks and decodes mixed, read keys and values of
//! one layer through their block tables. Heads that share keys and values (grouped queries) are
//! computed together, so a tile of the cache is read and converted once for all of them. So are decodes
//! of sequences that share a prefix: what they have in the same blocks is read once (see [`share`]).
//!
//! **Order of sums.** The context is cut into tiles of [`TILE`] positions and spans of [`SPAN`], both
//! at fixed absolute positions. A query's softmax runs tile by tile within a span and the spans'
//! results are merged in order. So its bits depend on its position and the context alone: not on
//! the chunk it came in, on the block size, on who reads with it, or on which thread took which part.
//!
//! **Precision.** Scores, weights and sums are f32, and so are the products on lanes, to which keys
//! and values of other types are widened. With keys and values in bf16 on the AMX path (see
//! [`tiles`]) queries and weights are rounded to bf16.
#![allow(unsafe_code, reason = "tasks write disjoint parts of one output")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: own parts")]

mod load;
mod plan;
mod share;
mod state;
mod task;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod walk;

use stolon_kvcache::BlockId;

use super::buffer::SharedMut;
use super::lanes::{LANES, Lanes, dispatch};
use super::{KvLayout, Path, Threads};
use plan::{Part, Plan, Task};
pub use share::positions_read;
use state::{Output, State};

/// Positions whose scores are computed together.
pub(super) const TILE: usize = 64;
/// Positions that share one running softmax; a multiple of [`TILE`].
pub(super) const SPAN: usize = 512;

/// Keys or values of one layer, in the order that their [`KvLayout`] says.
#[derive(Clone, Copy, Debug)]
pub enum KvSlice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// The bits of bf16 values.
    Bf16(&'a [u16]),
    /// The bits of f16 values.
    F16(&'a [u16]),
    /// Integers of 8 bits, which the scale of their position and head multiplies.
    Int8 {
        /// The integers.
        values: &'a [i8],
        /// `[block_count, block_size, kv_heads]`.
        scales: &'a [f32],
    },
}

impl KvSlice<'_> {
    fn len(&self) -> usize {
        match self {
            KvSlice::F32(values) => values.len(),
            KvSlice::Bf16(values) | KvSlice::F16(values) => values.len(),
            KvSlice::Int8 { values, .. } => values.len(),
        }
    }

    fn check(&self, head_dim: usize) {
        if let KvSlice::Int8 { values, scales } = self {
            assert_eq!(scales.len() * head_dim, values.len(), "attention: one scale a head");
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
    /// How they stand there.
    pub key_layout: KvLayout,
    /// Values of the layer, as [`KvLayout::Rows`].
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

    /// The block that holds a position of the task's sequence.
    #[inline]
    fn block(&self, task: &Task, position: usize) -> usize {
        self.sequences[task.sequence].block_table[position / self.block_size].0 as usize
    }

    /// Number of the head in the store that holds a position's values, and its keys unless they are turned:
    /// it begins at `head_dim` times that.
    #[inline]
    fn stored_head(&self, task: &Task, kv_head: usize, position: usize) -> usize {
        let first = self.block(task, position) * self.block_size;
        (first + position % self.block_size) * self.kv_heads + kv_head
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
        assert_eq!(
            std::mem::discriminant(&self.keys),
            std::mem::discriminant(&self.values),
            "attention: keys and values must be of one type"
        );
        if let KvLayout::Turned { block_size } = self.key_layout {
            let pairs = matches!(self.keys, KvSlice::Bf16(_)) && self.head_dim % 2 == 1;
            assert!(
                block_size == self.block_size && block_size.is_multiple_of(LANES) && !pairs,
                "attention: {block_size} positions of {} are not turned",
                self.head_dim
            );
        }
        self.keys.check(self.head_dim);
        self.values.check(self.head_dim);
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

/// Attention of every query over the positions it sees; `out` is `[rows, heads, head_dim]`.
///
/// # Panics
/// If sizes do not fit together, or a block table is too short or names a block that does not
/// exist: bugs of the caller, found before anything is written.
pub fn attention(threads: &Threads, args: &AttentionArgs<'_>, out: &mut [f32]) {
    args.check(out);
    let plan = Plan::new(args, threads.count(), tile(args));
    let mut memory = threads.scratch::<f32>(plan.state_len);
    let states = SharedMut::new(memory.slice_mut());
    let out = SharedMut::new(out);
    let output = || Output { out: out.get(), states: states.get() };
    threads.for_each(plan.parts.len(), |index| {
        // SAFETY: `check` has shown that all sizes fit; parts have disjoint rows, heads or spans, and
        // with them disjoint places in `out` or among the states.
        unsafe { run(args, &plan, &plan.parts[index], threads, &output()) };
    });
    threads.for_each(plan.cut.len() * args.kv_heads, |index| {
        let (task, kv_head) = (plan.cut[index / args.kv_heads], index % args.kv_heads);
        // SAFETY: all spans of the task have left their states, and its rows and heads of `out` are its own.
        unsafe { merge_spans(args.path, args, &plan.tasks[task], kv_head, threads, &output()) }
    });
}

/// Positions of a tile.
fn tile(args: &AttentionArgs<'_>) -> usize {
    #[cfg(target_arch = "x86_64")]
    if tiles::apply(args) {
        return tiles::TILE;
    }
    _ = args;
    TILE
}

/// Whether a path computes attention over keys and values in bf16 on tiles.
pub(super) fn on_tiles(path: Path, head_dim: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    return tiles::exist(path, head_dim);
    #[cfg(not(target_arch = "x86_64"))]
    {
        _ = (path, head_dim);
        false
    }
}

/// Computes a part.
///
/// # Safety
/// As [`task::run`].
unsafe fn run(
    args: &AttentionArgs<'_>,
    plan: &Plan,
    part: &Part,
    threads: &Threads,
    output: &Output,
) {
    #[cfg(target_arch = "x86_64")]
    if tiles::apply(args) {
        // SAFETY: the caller's promise.
        return unsafe { tiles::run(args, plan, part, threads, output) };
    }
    // SAFETY: the caller's promise.
    unsafe { task::run(args.path, args, plan, part, threads, output) }
}

#[inline(always)]
unsafe fn merge_spans_lanes<L: Lanes>(
    args: &AttentionArgs<'_>,
    task: &Task,
    kv_head: usize,
    threads: &Threads,
    output: &Output,
) {
    let (queries, width) = (task.queries(args), args.head_dim.next_multiple_of(LANES));
    let len = State::len(queries, width);
    let mut scratch = threads.scratch::<f32>(len);
    let Some(states) = task.states else { return };
    // SAFETY: the caller's promise; scratch has room for one state of each query.
    unsafe {
        let all = State::at(scratch.slice_mut().as_mut_ptr(), queries, width);
        all.reset();
        for index in 0..task.spans().len() {
            let at = states + (index * args.kv_heads + kv_head) * len;
            all.merge::<L>(&State::at(output.states.add(at), queries, width));
        }
        all.write::<L>(args, task, kv_head, output.out);
    }
}
dispatch! {
    /// Merges what the spans of a task that is cut have left for a kv head, and writes its rows and
    /// heads of the output.
    ///
    /// # Safety
    /// The states are there, and nobody else touches the task's rows and heads.
    unsafe fn merge_spans(
        args: &AttentionArgs<'_>, task: &Task, kv_head: usize, threads: &Threads, output: &Output,
    ) = merge_spans_lanes
}

#[cfg(test)]
mod tests;
