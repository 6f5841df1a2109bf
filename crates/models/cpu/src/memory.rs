//! Checks before the weights are packed whether there is enough memory for a backend.

use stolon_checkpoint::config::TensorSpec;
use stolon_checkpoint::kv::{KvBudget, KvStoreError};
use stolon_checkpoint::memory::{check_free, free_memory, packed_bytes};
use stolon_checkpoint::{ModelError, Weights};

use crate::backend::CpuOptions;

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

/// What errors call the weights.
pub(crate) const PACKED: &str = "the packed weights";

/// Decides whether tables stay in their file: if the options say so, or if there is no memory for
/// them. Returns that, and the size of the packed weights. `check` returns an error if a number of
/// bytes for packed weights is not free.
pub(crate) fn place_tables(
    tensors: impl IntoIterator<Item = TensorSpec>,
    weights: &Weights,
    options: &CpuOptions,
    check: impl Fn(u64) -> Result<(), ModelError>,
) -> Result<(bool, u64), ModelError> {
    let weight_type = options.weight_type;
    let can_stay = |spec: &TensorSpec| weights.can_stay_in_file(spec, weight_type);
    let (tables, others): (Vec<_>, Vec<_>) = tensors.into_iter().partition(can_stay);
    let bytes = |part: Vec<_>| packed_bytes(part.into_iter(), weights, weight_type);
    // Weights in buffers are released while they are packed, so their memory is available.
    let check = |packed: u64| check(packed.saturating_sub(weights.buffered_bytes()));
    place((bytes(tables), bytes(others)), options.map_tables, check)
}

/// The same for `tables` bytes of tables and `others` bytes of other weights.
fn place(
    (tables, others): (u64, u64),
    map_tables: bool,
    check: impl Fn(u64) -> Result<(), ModelError>,
) -> Result<(bool, u64), ModelError> {
    let all = others.saturating_add(tables);
    if map_tables {
        return check(others).map(|()| (true, others));
    }
    match check(all) {
        Err(_) if tables > 0 => {
            check(others)?;
            tracing::info!(bytes = tables, "embeddings stay in their file: memory is short");
            Ok((true, others))
        }
        result => result.map(|()| (false, all)),
    }
}

/// Checks that there are `packed` bytes for the packed weights, and memory for the states and an
/// explicit KV budget. This happens first because packing takes long. The default KV budget depends
/// on the memory that is free after packing.
pub(crate) fn check(
    packed: u64,
    Needed { block_bytes, kv_budget, state_bytes }: Needed,
) -> Result<(), ModelError> {
    check_free(PACKED, packed)?;
    let needed = packed.saturating_add(state_bytes);
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

#[cfg(test)]
mod tests {
    use stolon_checkpoint::memory::out_of_memory;

    use super::*;

    /// Goal: tables stay in their file if there is no memory for them, or if the options say so.
    #[test]
    fn tables_stay_in_their_file_where_memory_is_short() {
        let place = |tables, map, free| {
            let check = |packed: u64| match packed <= free {
                true => Ok(()),
                false => Err(out_of_memory(PACKED, packed)),
            };
            place((tables, 100), map, check).ok()
        };
        assert_eq!(place(30, false, 130), Some((false, 130)));
        assert_eq!(place(30, false, 129), Some((true, 100)));
        assert_eq!(place(30, true, 130), Some((true, 100)));
        assert_eq!(place(30, false, 99), None);
        assert_eq!(place(30, true, 99), None);
        assert_eq!(place(0, false, 99), None);
    }
}
