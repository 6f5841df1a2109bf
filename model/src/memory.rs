//! How much memory packed weights need, and whether it is free.

mod control_group;
mod process_limits;

use std::path::Path;

use stolon_kernels::{Matrix, TensorType};

use crate::config::TensorSpec;
use crate::error::{KvStoreError, ModelError};
use crate::kv_store::{KvBudget, KvShape};
use crate::weight_type::WeightType;
use crate::weights::Weights;

/// The number of bytes that the process can still allocate without swapping: the system's available
/// memory, what its control groups leave, or what its own limits leave, whichever is the least.
/// Cached files count as free. At least 1; 0 if the system does not tell.
#[must_use]
pub fn free_memory() -> u64 {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let available = Some(system.available_memory()).filter(|bytes| *bytes > 0);
    let root = Path::new("/");
    let rooms = [available, control_group::room(root), process_limits::room(root)];
    rooms.into_iter().flatten().min().map_or(0, |least| least.max(1))
}

/// The memory that a backend needs next to the weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needed<'a> {
    /// The sizes of the KV store.
    pub(crate) shape: &'a KvShape,
    /// The number of its blocks.
    pub(crate) kv_budget: KvBudget,
    /// Size of the states of all slots in bytes.
    pub(crate) state_bytes: u64,
}

/// Checks that there is memory for the packed weights, the states, and an explicit KV
/// budget, before anything is packed, which takes long. The default KV budget depends on the memory
/// that is free afterwards.
pub(crate) fn check(
    tensors: impl Iterator<Item = TensorSpec>,
    weights: &Weights,
    weight_type: WeightType,
    Needed { shape, kv_budget, state_bytes }: &Needed<'_>,
) -> Result<(), ModelError> {
    // Weights in buffers are released while they are packed.
    let packed = packed_bytes(tensors, weights, weight_type);
    let needed = packed.saturating_sub(weights.buffered_bytes());
    check_free("the packed weights", needed)?;
    let needed = needed.saturating_add(*state_bytes);
    check_free("the packed weights and the states of all slots", needed)?;
    if *kv_budget == KvBudget::Auto {
        return Ok(());
    }
    let (block_count, block_bytes) =
        (kv_budget.block_count(shape.block_bytes())?, shape.block_bytes());
    let expected = (block_count as u64).saturating_mul(block_bytes as u64);
    let free = free_memory();
    let left = free.saturating_sub(needed);
    if free > 0 && expected > left {
        let error = KvStoreError::OutOfMemory { expected, block_count, block_bytes, free: left };
        return Err(error.into());
    }
    Ok(())
}

/// The size in bytes of `tensors` after packing.
pub(crate) fn packed_bytes(
    tensors: impl Iterator<Item = TensorSpec>,
    weights: &Weights,
    weight_type: WeightType,
) -> u64 {
    let bytes = |spec: TensorSpec| match *spec.shape.as_slice() {
        [rows, columns] if spec.role.is_matrix() => {
            let stored = weights.dtype(&spec.name).unwrap_or(TensorType::F32);
            let elements = rows.next_multiple_of(Matrix::ROWS_STEP).saturating_mul(columns);
            weight_type.of(&spec, stored).bytes_of(elements).map_or(u64::MAX, |n| n as u64)
        }
        // Norms, biases and the taps of convolutions are kept in f32.
        _ => 4 * spec.shape.iter().product::<usize>() as u64,
    };
    tensors.map(bytes).fold(0, u64::saturating_add)
}

/// The error that `expected` bytes of memory for `what` are not free.
pub(crate) fn out_of_memory(what: &str, expected: u64) -> ModelError {
    ModelError::OutOfMemory { what: what.to_owned(), expected, free: free_memory() }
}

/// Checks that `expected` bytes of memory are free. `what` needs them.
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub(crate) fn check_free(what: &str, expected: u64) -> Result<(), ModelError> {
    match free_memory() {
        // Some systems do not tell.
        0 => Ok(()),
        free if expected <= free => Ok(()),
        free => Err(ModelError::OutOfMemory { what: what.to_owned(), expected, free }),
    }
}
