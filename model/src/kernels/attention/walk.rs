//! Where positions stand in the store, block by block.

use std::ops::Range;

use super::super::lanes::LANES;
use super::AttentionArgs;
use super::plan::Task;

/// Successive positions in one block.
pub(super) struct Stretch {
    pub(super) position: usize,
    pub(super) len: usize,
    /// Number of the head in the store that holds the first position's keys or values: it begins at
    /// `head_dim` times that. The next position's stands `kv_heads` further.
    pub(super) head: usize,
}

/// One kv head's keys and values of some positions of a task's sequence.
#[derive(Clone)]
pub(super) struct Walk<'a> {
    pub(super) args: &'a AttentionArgs<'a>,
    pub(super) task: &'a Task,
    pub(super) kv_head: usize,
    /// First position of their tile.
    pub(super) begin: usize,
    /// The positions, all in that tile; not empty.
    pub(super) seen: Range<usize>,
}

impl Walk<'_> {
    /// Panels of 16 positions from the tile's first on.
    #[inline]
    pub(super) fn panels(&self) -> usize {
        (self.seen.end - self.begin).div_ceil(LANES)
    }

    /// The stretches of `positions` that are there.
    #[inline]
    pub(super) fn stretches(&self, positions: Range<usize>) -> impl Iterator<Item = Stretch> {
        let (mut position, end) =
            (positions.start.max(self.seen.start), positions.end.min(self.seen.end));
        std::iter::from_fn(move || {
            let left = end.checked_sub(position).filter(|&left| left > 0)?;
            let head = self.args.stored_head(self.task, self.kv_head, position);
            let len = left.min(self.args.block_size - position % self.args.block_size);
            position += len;
            Some(Stretch { position: position - len, len, head })
        })
    }

    /// Where the stored head of each position of a panel begins; at `zeroes`, where there is none.
    #[inline(always)]
    pub(super) fn rows<T>(&self, panel: usize, from: &[T], zeroes: *const T) -> [*const T; LANES] {
        let first = self.begin + panel * LANES;
        let mut rows = [zeroes; LANES];
        for stretch in self.stretches(first..first + LANES) {
            let lanes = &mut rows[stretch.position - first..][..stretch.len];
            for (index, row) in lanes.iter_mut().enumerate() {
                let head = stretch.head + index * self.args.kv_heads;
                *row = &raw const from[head * self.args.head_dim];
            }
        }
        rows
    }

    /// The scale of each position of a panel, one where there is no position.
    #[inline(always)]
    pub(super) fn scales(&self, panel: usize, from: &[f32]) -> [f32; LANES] {
        let first = self.begin + panel * LANES;
        let mut scales = [1.0; LANES];
        for stretch in self.stretches(first..first + LANES) {
            for index in 0..stretch.len {
                let head = stretch.head + index * self.args.kv_heads;
                scales[stretch.position - first + index] = from[head];
            }
        }
        scales
    }
}
