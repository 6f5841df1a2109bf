//! Rows of activations, packed for the matrices that will be multiplied with them.
//!
//! Matrices with the same [`Packing`] read the same packed rows. So the input of the query, key and
//! value projections (or of gate and up) is packed once. The results of a norm or of an activation
//! function are packed while they are in the cache, without being written to memory as f32 rows
//! first.
//!
//! Rows are divided into groups, and each group has its own readers. In a mixture of experts there
//! is one group per expert, with the rows that chose it. Otherwise there is one group.
//!
//! Life cycle of [`Operands`], which is reused in every step:
//! 1. [`reset`](Operands::reset) (or [`reset_groups`](Operands::reset_groups)) sets the number of
//!    rows and the matrices that will read them.
//! 2. The rows are packed: all at once ([`pack`](Operands::pack), [`fill`](Operands::fill)), or
//!    block by block as the [`Sink`](crate::Sink) of another product.
//! 3. [`multiply`](crate::multiply) or [`accumulate`](crate::accumulate) reads them.
#![allow(unsafe_code, reason = "tasks pack disjoint blocks of one buffer")]

use std::marker::PhantomData;

use crate::buffer::{BUFFER_ALIGN, Buffer};
use crate::matrix::Matrix;
use crate::packing::{BLOCK_ROWS, Packed, Packing};
use crate::source_rows::SourceRows;
use crate::threads::Threads;

/// Groups of rows of activations, packed once for each distinct packing of the matrices that read
/// them.
#[derive(Debug)]
pub struct Operands {
    groups: Vec<Group>,
    /// The packed copies of all groups, those of the first group first.
    copies: Vec<PackedCopy>,
    /// The memory of all copies. It grows to the largest need so far.
    memory: Buffer,
}

/// The rows of a group.
#[derive(Debug)]
struct Group {
    rows: usize,
    /// Length of a row, without padding.
    width: usize,
    /// The range of the group in [`Operands::copies`].
    copies: std::ops::Range<usize>,
}

/// The location of a group's rows in one packing.
#[derive(Debug)]
struct PackedCopy {
    packing: Packing,
    /// The byte range in [`Operands::memory`], which begins at a multiple of [`BUFFER_ALIGN`].
    bytes: std::ops::Range<usize>,
}

/// Exclusive access to one group of [`Operands`], which a product fills: see
/// [`Sink::Operands`](crate::Sink::Operands).
#[derive(Debug)]
pub struct OperandsMut<'a> {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// One view per packing.
    pub(crate) packed: Vec<Packed>,
    operands: PhantomData<&'a mut Operands>,
}

impl Default for Operands {
    fn default() -> Operands {
        Operands { groups: Vec::new(), copies: Vec::new(), memory: Buffer::zeroed::<u8>(0) }
    }
}

impl Operands {
    /// Allocates memory for one group of `rows` rows that will be multiplied with the matrices
    /// `readers`. The previous contents are lost.
    ///
    /// # Panics
    /// If the readers have different numbers of input features.
    pub fn reset(&mut self, rows: usize, readers: &[&Matrix]) {
        self.reset_groups([(rows, readers)]);
    }

    /// Allocates memory for groups of rows, each given by its number of rows and the matrices that
    /// will be multiplied with it. The previous contents are lost.
    ///
    /// # Panics
    /// If the readers of a group have different numbers of input features.
    pub fn reset_groups<'a, R: AsRef<[&'a Matrix]>>(
        &mut self,
        groups: impl IntoIterator<Item = (usize, R)>,
    ) {
        self.groups.clear();
        self.copies.clear();
        let mut end = 0;
        for (rows, readers) in groups {
            let readers = readers.as_ref();
            let width = readers.first().map_or(0, |matrix| matrix.in_features());
            let first = self.copies.len();
            for matrix in readers {
                assert_eq!(
                    matrix.in_features(),
                    width,
                    "all readers of a group must have the same input features"
                );
                let packing = matrix.packing(rows);
                if self.copies[first..].iter().all(|copy| copy.packing != packing) {
                    let bytes = end..end + packing.bytes(rows);
                    end = bytes.end.next_multiple_of(BUFFER_ALIGN);
                    self.copies.push(PackedCopy { packing, bytes });
                }
            }
            self.groups.push(Group { rows, width, copies: first..self.copies.len() });
        }
        if self.memory.byte_len() < end {
            self.memory = Buffer::zeroed::<u8>(end);
        }
    }

    /// Packs `x`, which has the shape `[rows, in_features]`, as the only group.
    ///
    /// # Panics
    /// If there is not one group of the shape of `x`.
    pub fn pack(&mut self, threads: &Threads, x: &[f32]) {
        let [group] = self.groups.as_slice() else { panic!("`pack` needs one group of rows") };
        let (rows, width) = (group.rows, group.width);
        assert_eq!(x.len(), rows * width, "x must be [{rows}, {width}]");
        if rows > 0 {
            self.only().packed.iter().for_each(|packed| packed.pack_all(threads, x));
        }
    }

    /// Packs rows that `produce` computes. It is called in parallel with the index of the group,
    /// the index of the first row of a block within the group and the memory for the block,
    /// `[rows of the block, in_features]`.
    pub fn fill(&mut self, threads: &Threads, produce: impl Fn(usize, usize, &mut [f32]) + Sync) {
        let groups = self.groups_mut();
        let blocks = groups.iter().map(|group| group.rows.div_ceil(BLOCK_ROWS));
        let tasks = TaskRanges::of(blocks);
        threads.for_each(tasks.count(), |task| {
            let (index, block) = tasks.locate(task);
            let group = &groups[index];
            let (first, width) = (block * BLOCK_ROWS, group.width);
            let rows = BLOCK_ROWS.min(group.rows - first);
            let mut block = threads.scratch::<f32>(rows * width);
            let block = &mut block.slice_mut::<f32>()[..rows * width];
            produce(index, first, block);
            let source = SourceRows { x: block, stride: width, columns: width, rows };
            for packed in &group.packed {
                // SAFETY: BLOCK_ROWS is a multiple of the group size, so each block is packed by
                // one task only. The mutable borrow of `self` keeps the memory alive and exclusive.
                unsafe { packed.pack(first, 0, source) }
            }
        });
    }

    /// Exclusive access to each group.
    pub fn groups_mut(&mut self) -> Vec<OperandsMut<'_>> {
        let mut memory = self.memory.slice_mut::<u8>();
        let mut start = 0;
        let mut views = Vec::with_capacity(self.copies.len());
        for copy in &self.copies {
            let (_, rest) = memory.split_at_mut(copy.bytes.start - start);
            let (own, rest) = rest.split_at_mut(copy.bytes.len());
            (memory, start) = (rest, copy.bytes.end);
            views.push((copy.packing, own));
        }
        let mut views = views.into_iter();
        let groups = self.groups.iter().map(|group| OperandsMut {
            rows: group.rows,
            width: group.width,
            packed: views
                .by_ref()
                .take(group.copies.len())
                .map(|(packing, memory)| Packed::new(packing, group.rows, memory))
                .collect(),
            operands: PhantomData,
        });
        groups.collect()
    }

    /// Exclusive access to the only group.
    ///
    /// # Panics
    /// If there is not exactly one group.
    pub fn only(&mut self) -> OperandsMut<'_> {
        assert_eq!(self.groups.len(), 1, "the rows must be one group");
        self.groups_mut().remove(0)
    }

    /// The packed rows of a group that `matrix` reads.
    ///
    /// # Panics
    /// If `matrix` was not among the readers given to [`reset`](Operands::reset).
    pub(crate) fn of(&self, group: usize, matrix: &Matrix) -> Packed {
        let group = &self.groups[group];
        let packing = matrix.packing(group.rows);
        let mut copies = self.copies[group.copies.clone()].iter();
        let copy = copies.find(|copy| copy.packing == packing);
        let copy = copy.expect("the matrix must be one of the readers given to `reset`");
        Packed::for_reading(packing, group.rows, &self.memory.slice::<u8>()[copy.bytes.clone()])
    }

    /// Number of rows of all groups.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.groups.iter().map(|group| group.rows).sum()
    }

    /// Number of groups.
    pub(crate) fn group_count(&self) -> usize {
        self.groups.len()
    }

    /// Number of rows of a group.
    ///
    /// # Panics
    /// If there is no such group.
    #[must_use]
    pub fn group_rows(&self, group: usize) -> usize {
        self.groups[group].rows
    }
}

/// Numbers the tasks of several jobs one after the other.
pub(crate) struct TaskRanges {
    /// For each job the number of tasks of the jobs up to and including it.
    ends: Vec<usize>,
}

impl TaskRanges {
    /// Ranges for jobs with these numbers of tasks.
    pub(crate) fn of(counts: impl Iterator<Item = usize>) -> TaskRanges {
        let mut end = 0;
        let ends = counts.map(|count| {
            end += count;
            end
        });
        TaskRanges { ends: ends.collect() }
    }

    /// Number of tasks of all jobs.
    pub(crate) fn count(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The index of the job that has task `task`, and the index of the task within the job.
    pub(crate) fn locate(&self, task: usize) -> (usize, usize) {
        let job = self.ends.partition_point(|end| *end <= task);
        (job, task - if job == 0 { 0 } else { self.ends[job - 1] })
    }
}
