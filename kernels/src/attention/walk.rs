//! Where positions stand in the store.

use std::ops::Range;

use super::super::fetch::{LINE, fetch_second};
use super::super::gemm::Panels;
use super::super::lanes::LANES;
use super::plan::Task;
use super::{AttentionArgs, KvSlice, TILE};

/// Where the keys and values of a tile's positions stand, looked up once for all of its kv heads.
pub(super) struct Places {
    /// First position of the tile.
    pub(super) begin: usize,
    /// The positions that are there, all in that tile; not empty.
    pub(super) seen: Range<usize>,
    /// The number of each position's first head in the store; where there is none, that of another one.
    first_heads: [usize; TILE],
    /// Of each panel of 16 positions, the head's length times that is where the turned keys of its first head
    /// begin; where there is no position, those of another one.
    panels: [usize; PANELS],
}

/// Panels of 16 positions in a tile.
const PANELS: usize = TILE / LANES;

impl Places {
    /// The places of `seen` for a task's sequence.
    #[inline]
    pub(super) fn new(
        args: &AttentionArgs<'_>,
        task: &Task,
        begin: usize,
        seen: Range<usize>,
    ) -> Places {
        let mut first_heads = [args.stored_head(task, 0, seen.start); TILE];
        let mut position = seen.start;
        while position < seen.end {
            let left = args.block_size - position % args.block_size;
            let len = left.min(seen.end - position);
            let first = args.stored_head(task, 0, position);
            for (index, head) in first_heads[position - begin..][..len].iter_mut().enumerate() {
                *head = first + index * args.kv_heads;
            }
            position += len;
        }
        let panels = std::array::from_fn(|panel| {
            let position = (begin + panel * LANES).clamp(seen.start, seen.end - 1);
            let offset = position % args.block_size / LANES * LANES;
            args.block(task, position) * args.block_size * args.kv_heads + offset
        });
        Places { begin, seen, first_heads, panels }
    }
}

/// One kv head's keys and values of a tile's positions.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a> {
    pub(super) args: &'a AttentionArgs<'a>,
    pub(super) places: &'a Places,
    pub(super) kv_head: usize,
}

impl Walk<'_> {
    /// Panels of 16 positions from the tile's first on.
    #[inline]
    pub(super) fn panels(&self) -> usize {
        (self.places.seen.end - self.places.begin).div_ceil(LANES)
    }

    /// Where the stored head of each position of a panel begins: of another position, where there is none.
    #[inline(always)]
    pub(super) fn rows<T>(&self, panel: usize, from: &[T]) -> [*const T; LANES] {
        let first_heads = &self.places.first_heads[panel * LANES..][..LANES];
        std::array::from_fn(|lane| {
            from.as_ptr().wrapping_add((first_heads[lane] + self.kv_head) * self.args.head_dim)
        })
    }

    /// Where the turned keys of each panel begin: of another panel, where there is no position.
    #[inline(always)]
    pub(super) fn turned<T>(&self, from: &[T]) -> [*const T; PANELS] {
        let (from, head) = (from.as_ptr(), self.kv_head * self.args.block_size);
        self.places.panels.map(|first| from.wrapping_add((first + head) * self.args.head_dim))
    }

    /// Where the values of the tile's positions from number `index` on stand, up to the block's end; with those
    /// of `ahead` in the same place.
    #[inline(always)]
    pub(super) fn stored_values<T>(
        &self,
        ahead: &Walk<'_>,
        index: usize,
        from: &[T],
    ) -> StoredValues<T> {
        let row = self.args.kv_heads * self.args.head_dim;
        let first = |walk: &Walk<'_>| {
            let head = walk.places.first_heads[index] + walk.kv_head;
            from.as_ptr().wrapping_add(head * self.args.head_dim)
        };
        StoredValues { now: first(self), ahead: first(ahead), row }
    }

    /// The scales of the tile's keys and values, if they are integers; where there is no position, of another
    /// one.
    #[inline(always)]
    pub(super) fn scales(&self) -> Option<Scales> {
        match (self.args.keys, self.args.values) {
            (KvSlice::Int8 { scales: keys, .. }, KvSlice::Int8 { scales: values, .. }) => {
                let of =
                    |from: &[f32]| self.places.first_heads.map(|head| from[head + self.kv_head]);
                Some(Scales { keys: of(keys), values: of(values) })
            }
            _ => None,
        }
    }
}

/// What integers of a tile are to be multiplied with, position by position.
pub(super) struct Scales {
    pub(super) keys: [f32; TILE],
    pub(super) values: [f32; TILE],
}

/// The turned keys of a tile, read where they stand, and the tile that is read next in their place.
pub(super) struct TurnedKeys<T> {
    pub(super) now: [*const T; PANELS],
    pub(super) ahead: [*const T; PANELS],
}

impl<T> Panels<T> for TurnedKeys<T> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const T {
        self.now[p]
    }
    #[inline(always)]
    fn prefetch<const P: usize>(&self, p: usize, k: usize, _: *const T) {
        let from = k * LANES;
        if (from * size_of::<T>()).is_multiple_of(LINE) {
            fetch_second(self.ahead[p].wrapping_add(from));
        }
    }
}

/// The values of some positions of a block, read where they stand, 16 of a head at a time; and those that are
/// read next in their place.
pub(super) struct StoredValues<T> {
    now: *const T,
    ahead: *const T,
    /// Values between two positions.
    row: usize,
}

impl<T> Panels<T> for StoredValues<T> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const T {
        self.now.wrapping_add(p * LANES)
    }
    #[inline(always)]
    fn inner_step(&self) -> usize {
        self.row
    }
    #[inline(always)]
    fn prefetch<const P: usize>(&self, p: usize, k: usize, _: *const T) {
        if (p * LANES * size_of::<T>()).is_multiple_of(LINE) {
            fetch_second(self.ahead.wrapping_add(k * self.row + p * LANES));
        }
    }
}
