//! Where the keys and values of a tile of positions are in the paged KV cache.
//!
//! Nothing here dereferences a pointer. The pointers that a [`TileView`] returns are valid by the
//! checks of [`AttentionArgs::validate`]: each belongs to a position that the query chunk's block
//! table covers.

use std::ops::Range;

use crate::attention::args::AttentionArgs;
use crate::attention::query_chunk::QueryChunk;
use crate::attention::sizes::POSITIONS_PER_TILE;
use crate::gemm::{Panels, Stored};
use crate::lanes::LANES;
use crate::prefetch::{CACHE_LINE_BYTES, prefetch_l2};

/// Panels of 16 positions in a tile.
const PANELS_PER_TILE: usize = POSITIONS_PER_TILE / LANES;

/// Where the keys and values of a tile's positions are. The block table is looked up once for all
/// kv heads.
pub(super) struct TileLocation {
    /// First position of the tile.
    pub(super) begin: usize,
    /// The positions that are read, all in this tile; not empty.
    pub(super) seen: Range<usize>,
    /// For each position of the tile the number of its first stored head, as
    /// [`AttentionArgs::stored_head`] counts. For positions outside `seen` that of a position
    /// inside.
    first_heads: [usize; POSITIONS_PER_TILE],
    /// For each panel of 16 positions: where the transposed keys of its first head begin, divided
    /// by the head length. For panels without a position in `seen` that of another panel.
    panels: [usize; PANELS_PER_TILE],
}

impl TileLocation {
    /// Looks up the positions `seen` of the tile that begins at `begin`, for a query chunk's
    /// sequence.
    #[inline]
    pub(super) fn new(
        args: &AttentionArgs<'_>,
        chunk: &QueryChunk,
        begin: usize,
        seen: Range<usize>,
    ) -> TileLocation {
        let sequence = chunk.sequence;
        let mut first_heads = [args.stored_head(sequence, 0, seen.start); POSITIONS_PER_TILE];
        let mut position = seen.start;
        while position < seen.end {
            let left = args.block_size - position % args.block_size;
            let len = left.min(seen.end - position);
            let first = args.stored_head(sequence, 0, position);
            for (index, head) in first_heads[position - begin..][..len].iter_mut().enumerate() {
                *head = first + index * args.kv_heads;
            }
            position += len;
        }
        let panels = std::array::from_fn(|panel| {
            let position = (begin + panel * LANES).clamp(seen.start, seen.end - 1);
            let offset = position % args.block_size / LANES * LANES;
            args.block(sequence, position) * args.block_size * args.kv_heads + offset
        });
        TileLocation { begin, seen, first_heads, panels }
    }
}

/// The keys and values of one kv head in a tile.
#[derive(Clone, Copy)]
pub(super) struct TileView<'a> {
    pub(super) args: &'a AttentionArgs<'a>,
    pub(super) location: &'a TileLocation,
    pub(super) kv_head: usize,
}

impl TileView<'_> {
    /// Number of panels of 16 positions from the tile's first position to the last that is read.
    #[inline]
    pub(super) fn panels(&self) -> usize {
        (self.location.seen.end - self.location.begin).div_ceil(LANES)
    }

    /// The start of the head of each position of a panel, in keys or values stored as rows. It is
    /// that of another position for positions that are not read.
    #[inline(always)]
    pub(super) fn rows<T: Stored>(&self, panel: usize, from: &[T]) -> [*const T; LANES] {
        let first_heads = &self.location.first_heads[panel * LANES..][..LANES];
        let len = self.head_len::<T>();
        std::array::from_fn(|lane| {
            from.as_ptr().wrapping_add((first_heads[lane] + self.kv_head) * len)
        })
    }

    /// The start of the transposed keys of each panel. It is that of another panel for panels
    /// without a position that is read.
    #[inline(always)]
    pub(super) fn transposed<T: Stored>(&self, from: &[T]) -> [*const T; PANELS_PER_TILE] {
        let (from, head) = (from.as_ptr(), self.kv_head * self.args.block_size);
        let len = self.head_len::<T>();
        self.location.panels.map(|first| from.wrapping_add((first + head) * len))
    }

    /// The values of the positions from number `index` of the tile to the end of their block, as
    /// they are stored, and those at the same place of the tile `next`, to be prefetched.
    #[inline(always)]
    pub(super) fn stored_values<T: Stored>(
        &self,
        next: &TileView<'_>,
        index: usize,
        from: &[T],
    ) -> StoredValues<T> {
        let len = self.head_len::<T>();
        let row = self.args.kv_heads * len;
        let first = |view: &TileView<'_>| {
            let head = view.location.first_heads[index] + view.kv_head;
            from.as_ptr().wrapping_add(head * len)
        };
        StoredValues { now: first(self), next: first(next), row }
    }

    /// Number of stored numbers of a head.
    #[inline(always)]
    fn head_len<T: Stored>(&self) -> usize {
        self.args.head_dim / T::VALUES
    }

    /// The scales of the tile's keys and values if they have any. They are those of another
    /// position for positions that are not read.
    #[inline(always)]
    pub(super) fn scales(&self) -> Option<TileScales> {
        let (keys, values) = (self.args.keys.scales()?, self.args.values.scales()?);
        let of = |from: &[f32]| self.location.first_heads.map(|head| from[head + self.kv_head]);
        Some(TileScales { keys: of(keys), values: of(values) })
    }
}

/// The scales of keys and values, for each position of a tile.
pub(super) struct TileScales {
    pub(super) keys: [f32; POSITIONS_PER_TILE],
    pub(super) values: [f32; POSITIONS_PER_TILE],
}

/// The transposed keys of a tile as they are stored, and those of the tile that is read after it,
/// to be prefetched.
pub(super) struct TransposedKeys<T> {
    /// The start of each panel.
    pub(super) now: [*const T; PANELS_PER_TILE],
    /// The start of each panel of the tile that is read next.
    pub(super) next: [*const T; PANELS_PER_TILE],
}

/// The transposed keys of a tile that has been read, so that it is in the L1 or L2 cache.
#[cfg(target_arch = "x86_64")]
pub(super) struct CachedKeys<T>([*const T; PANELS_PER_TILE]);

#[cfg(target_arch = "x86_64")]
impl<T> TransposedKeys<T> {
    /// The same panels without prefetching.
    pub(super) fn cached(self) -> CachedKeys<T> {
        CachedKeys(self.now)
    }
}

#[cfg(target_arch = "x86_64")]
impl<T: Stored> Panels<T> for CachedKeys<T> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const T {
        self.0[p]
    }
    #[inline(always)]
    fn inner_step(&self) -> usize {
        LANES / T::VALUES
    }
    #[inline(always)]
    fn prefetch<const P: usize>(&self, _: usize, _: usize, _: *const T) {}
}

impl<T: Stored> Panels<T> for TransposedKeys<T> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const T {
        self.now[p]
    }
    #[inline(always)]
    fn inner_step(&self) -> usize {
        LANES / T::VALUES
    }
    #[inline(always)]
    fn prefetch<const P: usize>(&self, p: usize, k: usize, _: *const T) {
        let from = k * (LANES / T::VALUES);
        if (from * size_of::<T>()).is_multiple_of(CACHE_LINE_BYTES) {
            prefetch_l2(self.next[p].wrapping_add(from));
        }
    }
}

/// The values of some positions of a block as they are stored, in vectors of 16 values of a head,
/// and those that are read after them, to be prefetched.
pub(super) struct StoredValues<T> {
    pub(super) now: *const T,
    next: *const T,
    /// Stored numbers from one position to the next.
    pub(super) row: usize,
}

impl<T: Stored> Panels<T> for StoredValues<T> {
    #[inline(always)]
    fn at(&self, p: usize) -> *const T {
        self.now.wrapping_add(p * (LANES / T::VALUES))
    }
    #[inline(always)]
    fn inner_step(&self) -> usize {
        self.row
    }
    #[inline(always)]
    fn prefetch<const P: usize>(&self, p: usize, k: usize, _: *const T) {
        let from = p * (LANES / T::VALUES);
        if (from * size_of::<T>()).is_multiple_of(CACHE_LINE_BYTES) {
            prefetch_l2(self.next.wrapping_add(k * self.row + from));
        }
    }
}
