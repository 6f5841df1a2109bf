//! Computes how much memory packed weights need, and how much is free.

mod control_group;
mod process_limits;

use std::path::Path;

use stolon_kernels::{Matrix, TensorType};

use crate::config::TensorSpec;
use crate::error::ModelError;
use crate::weight_type::WeightType;
use crate::weights::Weights;

/// The number of bytes that the process can still allocate without swapping. It is the least of the
/// system's available memory, the rest of its control groups' limits, and the rest of its own
/// limits. Cached files count as free. At least 1; 0 if the system does not report it.
#[must_use]
pub fn free_memory() -> u64 {
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let available = Some(system.available_memory()).filter(|bytes| *bytes > 0);
    let root = Path::new("/");
    let rooms = [available, control_group::room(root), process_limits::room(root)];
    rooms.into_iter().flatten().min().map_or(0, |least| least.max(1))
}

/// Size in bytes of `tensors` after packing.
#[must_use]
pub fn packed_bytes(
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

/// The error for `expected` bytes of memory that `what` needs and that are not free.
#[must_use]
pub fn out_of_memory(what: &str, expected: u64) -> ModelError {
    ModelError::OutOfMemory { what: what.to_owned(), expected, free: free_memory() }
}

/// Checks that the `expected` bytes of memory that `what` needs are free.
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub fn check_free(what: &str, expected: u64) -> Result<(), ModelError> {
    match free_memory() {
        // Some systems do not report it.
        0 => Ok(()),
        free if expected <= free => Ok(()),
        free => Err(ModelError::OutOfMemory { what: what.to_owned(), expected, free }),
    }
}
