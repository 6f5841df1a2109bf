//! How many blocks a memory budget pays for, and the budget taken where none is given.

use super::KvStoreError;

/// Share of the free memory that the default budget takes. The rest is left to activations, to
/// the file cache and to everybody else.
pub const FREE_MEMORY_SHARE: f64 = 0.5;

/// The default budget's upper bound in bytes: a machine's whole memory is taken only on request.
pub const DEFAULT_BUDGET_MAX: u64 = 8 << 30;

/// How large a KV store is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvBudget {
    /// [`FREE_MEMORY_SHARE`] of the memory that is free once the weights are in place, at most
    /// [`DEFAULT_BUDGET_MAX`].
    #[default]
    Auto,
    /// Bytes.
    Bytes(u64),
    /// Blocks.
    Blocks(usize),
}

impl KvBudget {
    /// Blocks of `block_bytes` bytes that it pays for, at least 1.
    ///
    /// # Errors
    /// [`KvStoreError::BudgetTooSmall`], [`KvStoreError::BlockCount`].
    pub fn block_count(self, block_bytes: usize) -> Result<usize, KvStoreError> {
        match self {
            Self::Auto => kv_capacity(default_kv_budget(free_memory()), block_bytes),
            Self::Bytes(budget) => kv_capacity(budget, block_bytes),
            Self::Blocks(0) => Err(KvStoreError::BlockCount { got: 0 }),
            Self::Blocks(count) => Ok(count),
        }
    }
}

/// Blocks of `block_bytes` bytes that fit `budget` bytes, at least 1 and at most what block ids
/// can name.
///
/// # Errors
/// [`KvStoreError::BudgetTooSmall`] when not even one fits.
pub fn kv_capacity(budget: u64, block_bytes: usize) -> Result<usize, KvStoreError> {
    let fitting = budget / (block_bytes.max(1) as u64);
    if fitting == 0 {
        return Err(KvStoreError::BudgetTooSmall { block_bytes, budget });
    }
    Ok(fitting.min(u64::from(u32::MAX)) as usize)
}

/// The default budget in bytes, given the bytes of memory that are free.
#[must_use]
pub fn default_kv_budget(free_bytes: u64) -> u64 {
    ((free_bytes as f64 * FREE_MEMORY_SHARE) as u64).min(DEFAULT_BUDGET_MAX)
}

/// Bytes of memory that a process could still take without swapping: what the system calls
/// available, or what the control group leaves, whichever is less.
#[must_use]
pub fn free_memory() -> u64 {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let available = system.available_memory();
    match system.cgroup_limits() {
        Some(limits) => available.min(limits.free_memory),
        None => available,
    }
}
