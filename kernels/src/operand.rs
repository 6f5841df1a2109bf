//! Rows of activations, packed for the matrices that will be multiplied with them.
//!
//! Matrices with the same [`Packing`] read the same packed rows. So the input of the query, key and
//! value projections (or of gate and up) is packed once. The results of a norm or of an activation
//! function are packed while they are in the cache, without being written to memory as f32 rows
//! first.
//!
//! Life cycle of [`Operands`], which is reused in every step:
//! 1. [`reset`](Operands::reset) sets the number of rows and the matrices that will read them.
//! 2. The rows are packed: all at once ([`pack`](Operands::pack), [`fill`](Operands::fill)), or block by
//!    block as the [`Sink`](crate::Sink) of another product.
//! 3. [`multiply`](crate::multiply) reads them.
#![allow(unsafe_code, reason = "tasks pack disjoint blocks of one buffer")]

use crate::buffer::Buffer;
use crate::matrix::Matrix;
use crate::packing::{BLOCK_ROWS, Packed, Packing};
use crate::source_rows::SourceRows;
use crate::threads::Threads;

/// Rows of activations, packed once for each distinct packing of the matrices that read them.
#[derive(Debug, Default)]
pub struct Operands {
    rows: usize,
    /// Length of a row, without padding.
    width: usize,
    /// The first `used` entries are in use. The others keep their memory for later steps.
    list: Vec<PackedBuffer>,
    used: usize,
}

/// Memory for the rows in one packing.
#[derive(Debug)]
struct PackedBuffer {
    packing: Packing,
    memory: Buffer,
}

impl Operands {
    /// Allocates memory for `rows` rows that will be multiplied with the matrices `readers`. The
    /// previous contents are lost.
    ///
    /// # Panics
    /// If the readers have different numbers of input features.
    pub fn reset(&mut self, rows: usize, readers: &[&Matrix]) {
        (self.rows, self.used) = (rows, 0);
        self.width = readers.first().map_or(0, |matrix| matrix.in_features());
        for matrix in readers {
            assert_eq!(
                matrix.in_features(),
                self.width,
                "all readers must have the same input features"
            );
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
                None => {
                    self.list.push(PackedBuffer { packing, memory: Buffer::zeroed::<u8>(bytes) })
                }
            }
            self.used += 1;
        }
    }

    /// Packs `x`, which has the shape `[rows, in_features]`.
    ///
    /// # Panics
    /// If `x` does not have the shape given to [`reset`](Operands::reset).
    pub fn pack(&mut self, threads: &Threads, x: &[f32]) {
        assert_eq!(x.len(), self.rows * self.width, "x must be [{}, {}]", self.rows, self.width);
        if self.rows > 0 {
            self.packed().for_each(|packed| packed.pack_all(threads, x));
        }
    }

    /// Packs rows that `produce` computes. It is called in parallel with the index of the first row
    /// of a block and the memory for the block, `[rows of the block, in_features]`.
    pub fn fill(&mut self, threads: &Threads, produce: impl Fn(usize, &mut [f32]) + Sync) {
        let (rows, width) = (self.rows, self.width);
        let packed: Vec<Packed> = self.packed().collect();
        threads.for_each(rows.div_ceil(BLOCK_ROWS), |index| {
            let first = index * BLOCK_ROWS;
            let rows = BLOCK_ROWS.min(rows - first);
            let mut block = threads.scratch::<f32>(rows * width);
            let block = &mut block.slice_mut::<f32>()[..rows * width];
            produce(first, block);
            let source = SourceRows { x: block, stride: width, columns: width, rows };
            for packed in &packed {
                // SAFETY: BLOCK_ROWS is a multiple of the group size, so each block is packed by
                // one task only. The mutable borrow of `self` keeps the memory alive and exclusive.
                unsafe { packed.pack(first, 0, source) }
            }
        });
    }

    /// Views of the memory of each packing in use, for tasks that pack blocks of it.
    pub(crate) fn packed(&mut self) -> impl Iterator<Item = Packed> {
        let rows = self.rows;
        let used = self.list[..self.used].iter_mut();
        used.map(move |operand| {
            Packed::new(operand.packing, rows, operand.memory.slice_mut::<u8>())
        })
    }

    /// The packed rows that `matrix` reads.
    ///
    /// # Panics
    /// If `matrix` was not among the readers given to [`reset`](Operands::reset).
    pub(crate) fn of(&self, matrix: &Matrix) -> Packed {
        let packing = matrix.packing(self.rows);
        let operand = self.list[..self.used].iter().find(|operand| operand.packing == packing);
        let operand = operand.expect("the matrix must be one of the readers given to `reset`");
        Packed::for_reading(packing, self.rows, operand.memory.slice::<u8>())
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Length of a row.
    pub(crate) fn width(&self) -> usize {
        self.width
    }
}
