//! The paged KV store: keys and values of all layers, in blocks that block tables point into.
//!
//! Layout of each layer's values: `[block_count, block_size, kv_heads, head_dim]`; its keys stand as the
//! shape's [`KvLayout`] says. Integers have scales besides, `[block_count, block_size, kv_heads]`: one a position
//! and head, so that a position's bits depend on itself alone, whenever and with whatever it is written.
//! The store belongs to one backend and is written by its steps alone; who owns which block is
//! not its business.
//!
//! Memory is reserved zeroed at the start, mapped anew so that it can lie in huge pages, and becomes
//! resident where blocks are written, so a large budget costs nothing before it is used. It is given back when the
//! store is dropped.

use stolon_kernels::{KvLayout, KvSlice};

pub use capacity::{
    DEFAULT_BUDGET_MAX, FREE_MEMORY_SHARE, KvBudget, default_kv_budget, free_memory, kv_capacity,
};
pub use kv_type::KvType;
pub(crate) use plane::Plane;

mod capacity;
mod kv_type;
mod plane;

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
    /// How keys stand; values stand as rows.
    pub key_layout: KvLayout,
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
        let heads = 2 * self.layer_count * self.block_size * self.kv_heads;
        heads * self.kv_type.head_bytes(self.head_dim)
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

/// Keys and values of all layers. See the module's documentation.
#[derive(Debug)]
pub struct KvStore {
    shape: KvShape,
    block_count: usize,
    /// Two a layer: keys, values.
    planes: Vec<Plane>,
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
        let planes = (0..2 * shape.layer_count)
            .map(|_| Plane::new(&shape, block_count))
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

    /// Keys and values of a layer, to be written; both at once, so that two threads can.
    pub(crate) fn layer_mut(&mut self, layer: usize) -> [&mut Plane; 2] {
        let [keys, values] = &mut self.planes[2 * layer..2 * layer + 2] else {
            unreachable!("there are two planes a layer");
        };
        [keys, values]
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
