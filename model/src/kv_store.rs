//! The paged KV store: keys and values of all layers, in blocks that block tables point into.
//!
//! Layout of each layer's keys, and of its values: `[block_count, block_size, kv_heads, head_dim]`.
//! The store belongs to one backend and is written by its steps alone; who owns which block is
//! not its business.
//!
//! Memory is reserved zeroed at the start and becomes resident where blocks are written, so a
//! large budget costs nothing before it is used. It is given back when the store is dropped.

use crate::kernels::KvSlice;

pub use capacity::{
    DEFAULT_BUDGET_MAX, FREE_MEMORY_SHARE, KvBudget, default_kv_budget, free_memory, kv_capacity,
};

mod capacity;

/// Element type of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Single precision: exact, twice the memory.
    F32,
    /// The upper half of an f32, rounded to nearest even.
    Bf16,
}

impl KvType {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Sizes of a store, all at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layer_count: usize,
    /// Positions a block holds, a power of two from 1 to 256.
    pub block_size: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Element type.
    pub kv_type: KvType,
}

impl KvShape {
    /// Elements of one position's keys in one layer.
    #[must_use]
    pub fn position_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of one block over all layers, keys and values together.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        2 * self.layer_count * self.block_size * self.position_len() * self.kv_type.bytes()
    }
}

/// Why there is no KV store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvStoreError {
    /// The block size is none that the engine knows.
    #[error("block size: expected a power of two from 1 to 256, got {got}")]
    BlockSize {
        /// What was asked for.
        got: usize,
    },
    /// Not even one block fits the budget.
    #[error("KV memory: expected at least {block_bytes} bytes (one block), got {budget}")]
    BudgetTooSmall {
        /// Bytes of one block over all layers.
        block_bytes: usize,
        /// Bytes allowed.
        budget: u64,
    },
    /// No blocks, or more than block ids can name.
    #[error("KV blocks: expected 1 to {max}, got {got}", max = u32::MAX)]
    BlockCount {
        /// What was asked for.
        got: usize,
    },
    /// The system does not give that much memory.
    #[error(
        "KV memory: the system refused {expected} bytes for {block_count} blocks of \
         {block_bytes} bytes ({free} bytes are free)"
    )]
    OutOfMemory {
        /// Bytes asked for.
        expected: u64,
        /// Blocks asked for.
        block_count: usize,
        /// Bytes of one.
        block_bytes: usize,
        /// Bytes that the system calls free.
        free: u64,
    },
}

/// Keys or values of one layer.
#[derive(Debug)]
enum Plane {
    F32(Vec<f32>),
    /// The bits of bf16 values.
    Bf16(Vec<u16>),
}

/// Keys and values of all layers. See the module's documentation.
#[derive(Debug)]
pub struct KvStore {
    shape: KvShape,
    block_count: usize,
    /// Two a layer: keys, values.
    planes: Vec<Plane>,
}

/// Rows of keys or values on their way into the store: `[rows, kv_heads, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub enum KvRows<'a> {
    /// For a store of [`KvType::F32`].
    F32(&'a [f32]),
    /// For a store of [`KvType::Bf16`]: bits of bf16 values.
    Bf16(&'a [u16]),
}

impl KvStore {
    /// Reserves a store of `block_count` blocks, all zero.
    ///
    /// # Errors
    /// [`KvStoreError::BlockSize`], [`KvStoreError::BlockCount`], [`KvStoreError::OutOfMemory`].
    pub fn new(shape: KvShape, block_count: usize) -> Result<Self, KvStoreError> {
        check_block_size(shape.block_size)?;
        if block_count == 0 || u32::try_from(block_count).is_err() {
            return Err(KvStoreError::BlockCount { got: block_count });
        }
        let out_of_memory = || KvStoreError::OutOfMemory {
            expected: (block_count as u64).saturating_mul(shape.block_bytes() as u64),
            block_count,
            block_bytes: shape.block_bytes(),
            free: free_memory(),
        };
        let plane_len = (shape.block_size * shape.position_len())
            .checked_mul(block_count)
            .ok_or_else(out_of_memory)?;
        let planes = (0..2 * shape.layer_count)
            .map(|_| match shape.kv_type {
                KvType::F32 => zeroes(plane_len).map(Plane::F32),
                KvType::Bf16 => zeroes(plane_len).map(Plane::Bf16),
            })
            .collect::<Option<Vec<_>>>()
            .ok_or_else(out_of_memory)?;
        Ok(Self { shape, block_count, planes })
    }

    /// Sizes.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Blocks it holds.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.block_count
    }

    /// Keys of a layer.
    #[must_use]
    pub fn keys(&self, layer: usize) -> KvSlice<'_> {
        self.planes[2 * layer].slice()
    }

    /// Values of a layer.
    #[must_use]
    pub fn values(&self, layer: usize) -> KvSlice<'_> {
        self.planes[2 * layer + 1].slice()
    }

    /// Writes successive positions of one block: the first at `offset` in `block`.
    ///
    /// # Panics
    /// If the rows are of the other type or do not lie within the block: bugs of the caller.
    pub fn write(
        &mut self,
        layer: usize,
        block: usize,
        offset: usize,
        keys: KvRows<'_>,
        values: KvRows<'_>,
    ) {
        let position_len = self.shape.position_len();
        let room = (self.shape.block_size - offset) * position_len;
        let at = (block * self.shape.block_size + offset) * position_len;
        self.planes[2 * layer].write(at, room, keys);
        self.planes[2 * layer + 1].write(at, room, values);
    }
}

impl Plane {
    fn slice(&self) -> KvSlice<'_> {
        match self {
            Self::F32(values) => KvSlice::F32(values),
            Self::Bf16(values) => KvSlice::Bf16(values),
        }
    }

    fn write(&mut self, at: usize, room: usize, rows: KvRows<'_>) {
        match (self, rows) {
            (Self::F32(plane), KvRows::F32(rows)) => {
                plane[at..at + room][..rows.len()].copy_from_slice(rows);
            }
            (Self::Bf16(plane), KvRows::Bf16(rows)) => {
                plane[at..at + room][..rows.len()].copy_from_slice(rows);
            }
            (plane, rows) => panic!("rows {rows:?} do not fit a store of {plane:?}"),
        }
    }
}

/// `len` zeroes that become resident when they are first written.
fn zeroes<T: Clone + Default>(len: usize) -> Option<Vec<T>> {
    // A zeroed vector aborts the process where memory is refused, so ask first.
    Vec::<T>::new().try_reserve_exact(len).ok()?;
    Some(vec![T::default(); len])
}

/// Rounds to the bits of bf16, to nearest even.
///
/// # Panics
/// If the two differ in size.
pub fn round_to_bf16(from: &[f32], to: &mut [u16]) {
    assert_eq!(from.len(), to.len(), "both must be of one size");
    for (value, rounded) in from.iter().zip(to) {
        let bits = value.to_bits();
        // Written without a branch, so that it is compiled to vector code.
        let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet_nan = bits >> 16 | 0x40;
        *rounded = if value.is_nan() { quiet_nan } else { nearest } as u16;
    }
}

/// Checks that `block_size` is a power of two from 1 to 256.
///
/// # Errors
/// [`KvStoreError::BlockSize`].
pub fn check_block_size(block_size: usize) -> Result<(), KvStoreError> {
    if block_size.is_power_of_two() && block_size <= 256 {
        return Ok(());
    }
    Err(KvStoreError::BlockSize { got: block_size })
}

#[cfg(test)]
mod tests;
