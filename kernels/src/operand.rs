//! Rows of activations, packed for the products that read them.
//!
//! A matrix's kernels want rows rounded and reordered: its [`Packing`]. Matrices of one packing read
//! the same packed rows, so what queries, keys and values (or gate and up) are computed from is packed
//! once, and what a norm or a gate function gives is packed while it stands in the nearest caches,
//! without being written to memory as rows of f32 first.
//!
//! Life of [`Operands`]: kept between steps; [`reset`](Operands::reset) for the rows of a step and the
//! matrices that will read them; packed whole, or block by block as another product's
//! [`Sink`](super::Sink); then read by [`multiply`](super::multiply).
#![allow(unsafe_code, reason = "tasks pack disjoint blocks of one buffer")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "each block is one rule: own block")]

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::buffer::Buffer;
use super::gemm;
use super::int8;
use super::quant::PART;
use super::{Matrix, Path, Threads};

/// Columns of a block begin at a multiple of this: a tile's depth, a part of quantised weights.
pub(super) const COLUMNS_STEP: usize = 32;
/// Rows that one task packs: whole groups of every packing.
const BLOCK_ROWS: usize = 48;

/// How rows are packed. `inner` is a row's length, padded as the weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// f32, `[group][inner][rows of the group]`.
    Lanes { inner: usize, group_max: usize, path: Path },
    /// Pairs of bf16, `[group][inner / 2][rows of the group]`.
    Pairs { inner: usize, group_max: usize },
    /// bf16, `[row tile][inner / 32][16][32]`.
    #[cfg(target_arch = "x86_64")]
    Tiles { inner: usize },
    /// Bytes with scales, as [`int8`] reads them.
    Bytes { inner: usize, groups: int8::Groups },
}

/// Successive rows of f32, a part of their columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    /// The first row's columns, the next row's `stride` values later.
    pub(super) x: &'a [f32],
    pub(super) stride: usize,
    pub(super) columns: usize,
    /// Rows that there are; a group's others are zero, or whatever they were.
    pub(super) rows: usize,
}

impl<'a> Source<'a> {
    /// The columns of a row.
    #[inline(always)]
    pub(super) fn row(&self, index: usize) -> &'a [f32] {
        &self.x[index * self.stride..][..self.columns]
    }

    /// The rows from `first` on, at most `count`.
    fn rows(&self, first: usize, count: usize) -> Source<'a> {
        Source { x: &self.x[first * self.stride..], rows: count.min(self.rows - first), ..*self }
    }
}

impl Packing {
    /// A row's length, padded.
    pub(super) fn inner(self) -> usize {
        match self {
            Packing::Lanes { inner, .. }
            | Packing::Pairs { inner, .. }
            | Packing::Bytes { inner, .. } => inner,
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { inner } => inner,
        }
    }

    /// Rows of every group but perhaps the last; a divisor of 48.
    pub(super) fn group_max(self) -> usize {
        match self {
            Packing::Lanes { group_max, .. } | Packing::Pairs { group_max, .. } => group_max,
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { .. } => amx::ROWS,
            Packing::Bytes { groups, .. } => groups.size_max(),
        }
    }

    /// Rows that a task's should be a multiple of.
    pub(super) fn rows_step(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { .. } => 2 * amx::ROWS,
            _ => self.group_max(),
        }
    }

    /// Rows of the next group when `left` are left.
    fn group_rows(self, left: usize) -> usize {
        match self {
            Packing::Lanes { group_max, .. } | Packing::Pairs { group_max, .. } => {
                gemm::group_rows(left, group_max)
            }
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { .. } => amx::ROWS,
            Packing::Bytes { groups, .. } => groups.size(left),
        }
    }

    /// Rows of all groups together.
    fn packed_rows(self, rows: usize) -> usize {
        let whole = rows / self.group_max() * self.group_max();
        if whole == rows { rows } else { whole + self.group_rows(rows - whole) }
    }

    /// Bytes of a row's values.
    fn row_bytes(self) -> usize {
        match self {
            Packing::Lanes { inner, .. } => 4 * inner,
            Packing::Pairs { inner, .. } => 2 * inner,
            #[cfg(target_arch = "x86_64")]
            Packing::Tiles { inner } => 2 * inner,
            Packing::Bytes { inner, groups } => inner / 4 * groups.word_bytes(),
        }
    }

    /// Scales of a row.
    fn row_scales(self) -> usize {
        match self {
            Packing::Bytes { inner, .. } => inner / PART,
            _ => 0,
        }
    }

    /// Bytes of `rows` packed rows.
    pub(super) fn bytes(self, rows: usize) -> usize {
        self.packed_rows(rows) * (self.row_bytes() + 2 * size_of::<f32>() * self.row_scales())
    }
}

/// Packed rows in memory that tasks share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    packing: Packing,
    rows: usize,
    /// Values of all groups; then, for bytes, their scales and their negative sums.
    base: *mut u8,
}

// SAFETY: a pointer and sizes; whoever packs promises that no two tasks touch one block.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

impl Packed {
    /// `rows` rows in `memory`, whose content is whatever it is.
    pub(super) fn new(packing: Packing, rows: usize, memory: &mut [u8]) -> Packed {
        assert!(memory.len() >= packing.bytes(rows), "{} bytes for {rows} rows", memory.len());
        debug_assert!(BLOCK_ROWS.is_multiple_of(packing.group_max()));
        Packed { packing, rows, base: memory.as_mut_ptr() }
    }

    pub(super) fn packing(&self) -> Packing {
        self.packing
    }

    /// Values of the group that begins with row `first`.
    pub(super) fn values(&self, first: usize) -> *mut u8 {
        self.base.wrapping_add(first * self.packing.row_bytes())
    }

    /// Scales of that group.
    pub(super) fn scales(&self, first: usize) -> *mut f32 {
        let values = self.packing.packed_rows(self.rows) * self.packing.row_bytes();
        let scales = self.base.wrapping_add(values).cast::<f32>();
        scales.wrapping_add(first * self.packing.row_scales())
    }

    /// Negative sums of that group.
    pub(super) fn sums(&self, first: usize) -> *mut f32 {
        let rows = self.packing.packed_rows(self.rows);
        self.scales(first).wrapping_add(rows * self.packing.row_scales())
    }

    /// Packs a block of rows from `first` on, which begins a group, and of columns from `from` on, a
    /// multiple of [`COLUMNS_STEP`]; it ends with a group and at such a multiple, or with the rows and
    /// with the inner size.
    ///
    /// # Safety
    /// Nobody else touches the block, and the memory is still there.
    pub(super) unsafe fn pack(&self, first: usize, from: usize, source: Source<'_>) {
        let inner = self.packing.inner();
        let to = inner.min((from + source.columns).next_multiple_of(COLUMNS_STEP));
        debug_assert!(from.is_multiple_of(COLUMNS_STEP) && from + source.columns <= to);
        debug_assert!(first.is_multiple_of(self.packing.group_max()));
        debug_assert!(first + source.rows <= self.rows);
        let mut row = 0;
        while row < source.rows {
            let group = self.packing.group_rows(self.rows - first - row);
            // SAFETY: the columns of a group stand together in every packing, inside the memory,
            // and are this call's alone.
            unsafe { self.pack_group(first + row, group, from..to, source.rows(row, group)) }
            row += group;
        }
    }

    /// # Safety
    /// As [`Packed::pack`].
    unsafe fn pack_group(
        &self,
        first: usize,
        group: usize,
        columns: std::ops::Range<usize>,
        source: Source<'_>,
    ) {
        let values = self.values(first);
        let (from, count) = (columns.start, columns.len());
        // SAFETY: the caller's promise; tiles and sets of bytes are packings of paths that have them.
        unsafe {
            match self.packing {
                Packing::Lanes { path, .. } => {
                    let start = values.cast::<f32>().add(from * group);
                    let block = std::slice::from_raw_parts_mut(start, count * group);
                    gemm::pack_group(path, source, group, block);
                }
                Packing::Pairs { .. } => {
                    let start = values.cast::<f32>().add(from / 2 * group);
                    let block = std::slice::from_raw_parts_mut(start, count / 2 * group);
                    gemm::pack_group_pairs(source, group, block);
                }
                #[cfg(target_arch = "x86_64")]
                Packing::Tiles { .. } => {
                    let start = values.cast::<u16>().add(from * amx::ROWS);
                    let block = std::slice::from_raw_parts_mut(start, count * amx::ROWS);
                    amx::pack_row_tile(source, block);
                }
                Packing::Bytes { groups, .. } => {
                    let scales = from / PART * group;
                    let to = int8::PackedGroup {
                        words: values.add(from / 4 * groups.word_bytes() * group),
                        scales: self.scales(first).add(scales),
                        sums: self.sums(first).add(scales),
                    };
                    groups.pack(int8::Rows { source, size: group }, to);
                }
            }
        }
    }

    /// Packs whole rows, shared out over the threads.
    pub(super) fn pack_all(&self, threads: &Threads, x: &[f32]) {
        let width = x.len() / self.rows;
        threads.for_each(self.rows.div_ceil(BLOCK_ROWS), |index| {
            let first = index * BLOCK_ROWS;
            let rows = BLOCK_ROWS.min(self.rows - first);
            let source = Source { x: &x[first * width..], stride: width, columns: width, rows };
            // SAFETY: blocks of rows are whole groups, each packed by its own task; whoever made
            // this from a borrow still holds it.
            unsafe { self.pack(first, 0, source) }
        });
    }
}

/// Rows packed for some matrices: once for each packing among them.
#[derive(Debug, Default)]
pub struct Operands {
    rows: usize,
    /// A row's length, not padded.
    width: usize,
    /// Those in use come first; the others are kept for their memory.
    list: Vec<Operand>,
    used: usize,
}

#[derive(Debug)]
struct Operand {
    packing: Packing,
    memory: Buffer,
}

impl Operands {
    /// Makes room for `rows` rows that `readers` will multiply. What was packed is forgotten.
    ///
    /// # Panics
    /// If the readers take rows of different lengths.
    pub fn reset(&mut self, rows: usize, readers: &[&Matrix]) {
        (self.rows, self.used) = (rows, 0);
        self.width = readers.first().map_or(0, |matrix| matrix.in_features());
        for matrix in readers {
            assert_eq!(matrix.in_features(), self.width, "readers of one operand");
            let packing = matrix.packing(rows);
            if self.list[..self.used].iter().any(|operand| operand.packing == packing) {
                continue;
            }
            let bytes = packing.bytes(rows);
            match self.list.get_mut(self.used) {
                Some(operand) => {
                    operand.packing = packing;
                    if operand.memory.byte_len() < bytes {
                        operand.memory = Buffer::zeroed::<u8>(bytes);
                    }
                }
                None => self.list.push(Operand { packing, memory: Buffer::zeroed::<u8>(bytes) }),
            }
            self.used += 1;
        }
    }

    /// Packs `x`, `[rows, in_features]`.
    ///
    /// # Panics
    /// If `x` is of another size than was made room for.
    pub fn pack(&mut self, threads: &Threads, x: &[f32]) {
        assert_eq!(x.len(), self.rows * self.width, "x must be [{}, {}]", self.rows, self.width);
        if self.rows > 0 {
            self.packed().for_each(|packed| packed.pack_all(threads, x));
        }
    }

    /// Packs the rows that `produce` writes: called with the first of some rows and room for them.
    pub fn fill(&mut self, threads: &Threads, produce: impl Fn(usize, &mut [f32]) + Sync) {
        let (rows, width) = (self.rows, self.width);
        let packed: Vec<Packed> = self.packed().collect();
        threads.for_each(rows.div_ceil(BLOCK_ROWS), |index| {
            let first = index * BLOCK_ROWS;
            let rows = BLOCK_ROWS.min(rows - first);
            let mut block = threads.scratch::<f32>(rows * width);
            let block = &mut block.slice_mut::<f32>()[..rows * width];
            produce(first, block);
            let source = Source { x: block, stride: width, columns: width, rows };
            for packed in &packed {
                // SAFETY: blocks of rows are whole groups, each packed by its own task, in memory
                // that this borrow holds.
                unsafe { packed.pack(first, 0, source) }
            }
        });
    }

    /// The memory of each packing, for tasks that pack blocks of it.
    pub(super) fn packed(&mut self) -> impl Iterator<Item = Packed> {
        let rows = self.rows;
        let used = self.list[..self.used].iter_mut();
        used.map(move |operand| {
            Packed::new(operand.packing, rows, operand.memory.slice_mut::<u8>())
        })
    }

    /// The rows as `matrix` reads them. To be read only.
    ///
    /// # Panics
    /// If they were not made for it.
    pub(super) fn of(&self, matrix: &Matrix) -> Packed {
        let packing = matrix.packing(self.rows);
        let operand = self.list[..self.used].iter().find(|operand| operand.packing == packing);
        let operand = operand.expect("rows are packed for those who read them");
        let base = operand.memory.slice::<u8>().as_ptr().cast_mut();
        Packed { packing, rows: self.rows, base }
    }

    /// Rows it holds.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// A row's length.
    pub(super) fn width(&self) -> usize {
        self.width
    }
}
