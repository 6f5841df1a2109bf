//! How the activations of a batch are packed in memory.
//!
//! The kernels of each matrix read rows in one [`Packing`]. Rows are packed in groups, which the
//! microkernels compute together. Only the last group may be smaller than
//! [`group_max`](Packing::group_max) rows.
#![allow(unsafe_code, reason = "tasks pack disjoint blocks of one buffer")]

#[cfg(target_arch = "x86_64")]
use crate::amx::{chunk::pack_row_tile, tile::AMX_TILE_ROWS};
use crate::gemm;
use crate::int8;
use crate::path::Path;
use crate::quant::SUB_BLOCK;
use crate::source_rows::SourceRows;
use crate::threads::Threads;

/// The first column of a packed block is a multiple of this: the depth of an AMX tile of bf16 and
/// the sub-block size of quantized weights.
pub(crate) const COLUMNS_STEP: usize = 32;
/// Number of rows that one task packs: a multiple of the group size of every packing.
pub(crate) const BLOCK_ROWS: usize = 48;

/// How rows are packed. `inner` is the length of a row, padded as the rows of the matrix are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// f32 values for SIMD lanes: `[group][inner][rows of the group]`.
    Lanes { inner: usize, group_max: usize, path: Path },
    /// bf16 pairs for AVX-512 BF16: `[group][inner / 2][rows of the group]`.
    #[cfg(target_arch = "x86_64")]
    Pairs { inner: usize, group_max: usize },
    /// bf16 values for AMX: `[group of 16 rows][inner / 32][16][32]`.
    #[cfg(target_arch = "x86_64")]
    Tiles { inner: usize },
    /// Signed bytes with scales for quantized weights: see [`int8`].
    Bytes { inner: usize, groups: int8::Groups },
}

impl Packing {
    /// Length of a row, padded.
    pub(crate) fn inner(self) -> usize {
        match self {
            Packing::Lanes { inner, .. } | Packing::Bytes { inner, .. } => inner,
            #[cfg(target_arch = "x86_64")]
            Packing::Pairs { inner, .. } | Packing::Tiles { inner } => inner,
        }
    }

    /// Number of rows in every group except possibly the last. A divisor of [`BLOCK_ROWS`].
    pub(crate) fn group_max(self) -> usize {
        match self {
            Packing::Lanes { group_max, .. } => group_max,
            #[cfg(target_arch = "x86_64")]
            Packing::Pairs { group_max, .. } => group_max,
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { .. } => AMX_TILE_ROWS,
            Packing::Bytes { groups, .. } => groups.size_max(),
        }
    }

    /// The number of rows of a task should be a multiple of this.
    pub(crate) fn rows_step(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { .. } => 2 * AMX_TILE_ROWS,
            _ => self.group_max(),
        }
    }

    /// Number of rows of the next group if `left` rows are left.
    fn group_rows(self, left: usize) -> usize {
        match self {
            Packing::Lanes { group_max, .. } => gemm::group_rows(left, group_max),
            #[cfg(target_arch = "x86_64")]
            Packing::Pairs { group_max, .. } => gemm::group_rows(left, group_max),
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { .. } => AMX_TILE_ROWS,
            Packing::Bytes { groups, .. } => groups.size(left),
        }
    }

    /// Number of rows in all groups together, including the unused rows of the last group.
    fn packed_rows(self, rows: usize) -> usize {
        let whole = rows / self.group_max() * self.group_max();
        if whole == rows { rows } else { whole + self.group_rows(rows - whole) }
    }

    /// Number of bytes of the packed values of a row, without scales.
    fn row_bytes(self) -> usize {
        match self {
            Packing::Lanes { inner, .. } => 4 * inner,
            #[cfg(target_arch = "x86_64")]
            Packing::Pairs { inner, .. } | Packing::Tiles { inner } => 2 * inner,
            Packing::Bytes { inner, groups } => inner / 4 * groups.word_bytes(),
        }
    }

    /// Number of scales of a row.
    fn row_scales(self) -> usize {
        match self {
            Packing::Bytes { inner, .. } => inner / SUB_BLOCK,
            _ => 0,
        }
    }

    /// Number of bytes that `rows` packed rows need.
    pub(crate) fn bytes(self, rows: usize) -> usize {
        self.packed_rows(rows)
            * (self.row_bytes() + (1 + 2 * int8::SUMS) * size_of::<f32>() * self.row_scales())
    }
}

/// A view of the memory that holds packed rows. Tasks on several threads share it.
///
/// It does not borrow the memory: its creator keeps the memory alive while the view is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    packing: Packing,
    rows: usize,
    /// The values of all groups, followed for bytes by the scales, the negated sums and the offsets
    /// of all groups.
    base: *mut u8,
}

// SAFETY: the pointer is only written through `pack`, whose callers ensure that no other thread
// accesses the same block, and only read through pointers whose users ensure the same.
unsafe impl Send for Packed {}
// SAFETY: `pack` is the only method that accesses the memory. Its callers ensure that no two
// threads access the same block.
unsafe impl Sync for Packed {}

impl Packed {
    /// A view of `memory` for `rows` rows. The contents of the memory are not defined until
    /// [packed](Packed::pack).
    ///
    /// # Panics
    /// If `memory` is too small.
    pub(crate) fn new(packing: Packing, rows: usize, memory: &mut [u8]) -> Packed {
        assert!(
            memory.len() >= packing.bytes(rows),
            "{} bytes are too few for {rows} rows",
            memory.len()
        );
        debug_assert!(BLOCK_ROWS.is_multiple_of(packing.group_max()));
        Packed { packing, rows, base: memory.as_mut_ptr() }
    }

    /// A view for reading rows that were packed into `memory`, which must not be packed again.
    pub(crate) fn for_reading(packing: Packing, rows: usize, memory: &[u8]) -> Packed {
        Packed { packing, rows, base: memory.as_ptr().cast_mut() }
    }

    /// How the rows are packed.
    pub(crate) fn packing(&self) -> Packing {
        self.packing
    }

    /// The values of the group that begins with row `first`.
    pub(crate) fn values(&self, first: usize) -> *mut u8 {
        self.base.wrapping_add(first * self.packing.row_bytes())
    }

    /// The scales of the group that begins with row `first`.
    pub(crate) fn scales(&self, first: usize) -> *mut f32 {
        let values = self.packing.packed_rows(self.rows) * self.packing.row_bytes();
        let scales = self.base.wrapping_add(values).cast::<f32>();
        scales.wrapping_add(first * self.packing.row_scales())
    }

    /// The negated sums of the group that begins with row `first`.
    pub(crate) fn sums(&self, first: usize) -> *mut f32 {
        let (rows, row_scales) = (self.packing.packed_rows(self.rows), self.packing.row_scales());
        self.scales(0).wrapping_add((rows + first * int8::SUMS) * row_scales)
    }

    /// The offsets of the group that begins with row `first`.
    pub(crate) fn offsets(&self, first: usize) -> *mut i32 {
        let row_sums = int8::SUMS * self.packing.row_scales();
        self.sums(self.packing.packed_rows(self.rows)).cast::<i32>().wrapping_add(first * row_sums)
    }

    /// Packs a block of rows and columns.
    ///
    /// Row `first` begins a group, and the block ends with a group or with the last row. Column
    /// `from` is a multiple of [`COLUMNS_STEP`], and the block ends at such a multiple or with the
    /// row.
    ///
    /// # Safety
    /// The memory given to [`Packed::new`] is still alive, and no other thread accesses the block.
    pub(crate) unsafe fn pack(&self, first: usize, from: usize, source: SourceRows<'_>) {
        let inner = self.packing.inner();
        let to = inner.min((from + source.columns).next_multiple_of(COLUMNS_STEP));
        debug_assert!(from.is_multiple_of(COLUMNS_STEP) && from + source.columns <= to);
        debug_assert!(first.is_multiple_of(self.packing.group_max()));
        debug_assert!(first + source.rows <= self.rows);
        let mut row = 0;
        while row < source.rows {
            let group = self.packing.group_rows(self.rows - first - row);
            // SAFETY: `first + row` begins a group inside the memory, and the caller has exclusive
            // access to these columns of it.
            unsafe { self.pack_group(first + row, group, from..to, source.rows(row, group)) }
            row += group;
        }
    }

    /// Packs some columns of the group of `group` rows that begins with row `first`.
    ///
    /// # Safety
    /// The memory given to [`Packed::new`] is still alive and no other thread accesses these
    /// columns of the group. `columns` begins at a multiple of [`COLUMNS_STEP`] and ends at one or
    /// with the row.
    unsafe fn pack_group(
        &self,
        first: usize,
        group: usize,
        columns: std::ops::Range<usize>,
        source: SourceRows<'_>,
    ) {
        let values = self.values(first);
        let (from, count) = (columns.start, columns.len());
        // SAFETY: in every packing the columns of a group are contiguous, so `start` is followed by
        // `count * group` values (tiles: 16 rows) of exclusively accessed memory. A
        // `Packing::Pairs`, `Tiles` or `Bytes` exists only for a path or a dot-product set that
        // this machine has.
        unsafe {
            match self.packing {
                Packing::Lanes { path, .. } => {
                    let start = values.cast::<f32>().add(from * group);
                    let block = std::slice::from_raw_parts_mut(start, count * group);
                    gemm::pack_group(path, source, group, block);
                }
                #[cfg(target_arch = "x86_64")]
                Packing::Pairs { .. } => {
                    let start = values.cast::<f32>().add(from / 2 * group);
                    let block = std::slice::from_raw_parts_mut(start, count / 2 * group);
                    gemm::pack_group_pairs(source, group, block);
                }
                #[cfg(target_arch = "x86_64")]
                Packing::Tiles { .. } => {
                    let start = values.cast::<u16>().add(from * AMX_TILE_ROWS);
                    let block = std::slice::from_raw_parts_mut(start, count * AMX_TILE_ROWS);
                    pack_row_tile(source, block);
                }
                Packing::Bytes { groups, .. } => {
                    let scales = from / SUB_BLOCK * group;
                    let to = int8::PackedGroup {
                        words: values.add(from / 4 * groups.word_bytes() * group),
                        scales: self.scales(first).add(scales),
                        sums: self.sums(first).add(int8::SUMS * scales),
                        offsets: self.offsets(first).add(int8::SUMS * scales),
                    };
                    groups.pack(int8::GroupRows { source, size: group }, to);
                }
            }
        }
    }

    /// Packs all rows of `x`, `[rows, width]`, in parallel.
    pub(crate) fn pack_all(&self, threads: &Threads, x: &[f32]) {
        let width = x.len() / self.rows;
        threads.for_each(self.rows.div_ceil(BLOCK_ROWS), |index| {
            let first = index * BLOCK_ROWS;
            let rows = BLOCK_ROWS.min(self.rows - first);
            let source = SourceRows { x: &x[first * width..], stride: width, columns: width, rows };
            // SAFETY: BLOCK_ROWS is a multiple of the group size, so each block is packed by one
            // task only. The creator of this view keeps the memory alive.
            unsafe { self.pack(first, 0, source) }
        });
    }
}
