//! Converts a memory budget to a number of blocks, and chooses the default budget.

use super::KvStoreError;
use crate::memory::free_memory;

/// The share of the free memory for the default budget. The rest is left for activations, the file
/// cache and other processes.
pub const FREE_MEMORY_SHARE: f64 = 0.5;

/// Maximum of the default budget in bytes. A larger KV store must be requested explicitly.
pub const DEFAULT_BUDGET_MAX: u64 = 8 << 30;

/// The size of a KV store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvBudget {
    /// [`FREE_MEMORY_SHARE`] of the memory that is free after the weights are loaded, at most
    /// [`DEFAULT_BUDGET_MAX`].
    #[default]
    Auto,
    /// The number of blocks that fit in this number of bytes.
    Bytes(u64),
    /// This number of blocks.
    Blocks(usize),
}

impl KvBudget {
    /// The number of blocks of `block_bytes` bytes each that fit in the budget, at least 1.
    ///
    /// # Errors
    /// [`KvStoreError::BudgetTooSmall`] if not even one block fits, and
    /// [`KvStoreError::BlockCount`] for `Blocks(0)`.
    pub fn block_count(self, block_bytes: usize) -> Result<usize, KvStoreError> {
        match self {
            Self::Auto => kv_capacity(default_kv_budget(free_memory()), block_bytes),
            Self::Bytes(budget) => kv_capacity(budget, block_bytes),
            Self::Blocks(0) => Err(KvStoreError::BlockCount { got: 0 }),
            Self::Blocks(count) => Ok(count),
        }
    }
}

/// The number of blocks of `block_bytes` bytes each that fit in `budget` bytes: at least 1 and at
/// most `u32::MAX`, because block ids are 32-bit.
///
/// # Errors
/// [`KvStoreError::BudgetTooSmall`] if not even one block fits.
pub fn kv_capacity(budget: u64, block_bytes: usize) -> Result<usize, KvStoreError> {
    let fitting = budget / (block_bytes.max(1) as u64);
    if fitting == 0 {
        return Err(KvStoreError::BudgetTooSmall { block_bytes, budget });
    }
    Ok(fitting.min(u64::from(u32::MAX)) as usize)
}

/// The default budget in bytes if `free_bytes` bytes of memory are free.
#[must_use]
pub fn default_kv_budget(free_bytes: u64) -> u64 {
    ((free_bytes as f64 * FREE_MEMORY_SHARE) as u64).min(DEFAULT_BUDGET_MAX)
}
