//! Checks before the weights are packed whether there is enough memory for a backend.

use stolon_checkpoint::config::TensorSpec;
use stolon_checkpoint::kv::{KvBudget, KvStoreError};
use stolon_checkpoint::memory::{check_free, free_memory, packed_bytes};
use stolon_checkpoint::{ModelError, WeightType, Weights};

/// The memory that a backend needs in addition to the weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needed {
    /// Number of bytes of the budget that a KV block takes.
    pub(crate) block_bytes: usize,
    /// The budget that determines the number of blocks.
    pub(crate) kv_budget: KvBudget,
    /// Size of the states of all slots in bytes.
    pub(crate) state_bytes: u64,
}

/// Checks that there is memory for the packed weights, the states, and an explicit KV budget. This
/// happens first because packing takes long. The default KV budget depends on the memory that is
/// free after packing.
pub(crate) fn check(
    tensors: impl Iterator<Item = TensorSpec>,
    weights: &Weights,
    weight_type: WeightType,
    Needed { block_bytes, kv_budget, state_bytes }: Needed,
) -> Result<(), ModelError> {
    // Weights in buffers are released while they are packed, so their memory is available.
    let packed = packed_bytes(tensors, weights, weight_type);
    let needed = packed.saturating_sub(weights.buffered_bytes());
    check_free("the packed weights", needed)?;
    let needed = needed.saturating_add(state_bytes);
    check_free("the packed weights and the states of all slots", needed)?;
    if kv_budget == KvBudget::Auto {
        return Ok(());
    }
    let block_count = kv_budget.block_count(block_bytes)?;
    let expected = (block_count as u64).saturating_mul(block_bytes as u64);
    let free = free_memory();
    let left = free.saturating_sub(needed);
    if free > 0 && expected > left {
        let error = KvStoreError::OutOfMemory { expected, block_count, block_bytes, free: left };
        return Err(error.into());
    }
    Ok(())
}
