//! The memory of a device, and how much of it the KV store gets.

use candle_core::Device;
use stolon_model::config::TensorSpec;
use stolon_model::kv_store::{default_kv_budget, free_memory, kv_capacity};
use stolon_model::{DecoderConfig, KvBudget, ModelError, TensorType, Weights};

use crate::CandleOptions;
use crate::kv_store::KvShape;
use crate::loader::device_bytes;

/// Free and total memory of a device in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceMemory {
    pub(crate) free: u64,
    pub(crate) total: u64,
}

/// The memory of `device`; `None` if it does not tell. For the CPU, `total` is what is free.
pub(crate) fn of(device: &Device) -> Option<DeviceMemory> {
    match device {
        Device::Cpu => {
            let free = free_memory();
            (free > 0).then_some(DeviceMemory { free, total: free })
        }
        #[cfg(feature = "cuda-core")]
        Device::Cuda(device) => {
            let (free, total) = device.cuda_stream().context().mem_get_info().ok()?;
            Some(DeviceMemory { free: free as u64, total: total as u64 })
        }
        _ => None,
    }
}

/// Checks that the weights fit in the device's free memory, before anything is copied.
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub(crate) fn check_weights(
    memory: Option<DeviceMemory>,
    config: &DecoderConfig,
    weights: &Weights,
    width: usize,
) -> Result<(), ModelError> {
    let expected = weight_bytes(config, weights, width);
    match memory {
        Some(DeviceMemory { free, .. }) if expected > free => {
            Err(ModelError::OutOfMemory { what: "the weights".to_owned(), expected, free })
        }
        _ => Ok(()),
    }
}

/// The size in bytes of all weights on the device, if elements of dense matrices have `width` bytes.
fn weight_bytes(config: &DecoderConfig, weights: &Weights, width: usize) -> u64 {
    let bytes = |spec: &TensorSpec| {
        let elements = spec.shape.iter().fold(1_usize, |n, d| n.saturating_mul(*d));
        if spec.shape.len() < 2 {
            return 4 * elements as u64;
        }
        let dtype = weights.dtype(&spec.name).unwrap_or(TensorType::F32);
        let matrix = device_bytes(dtype, elements, width);
        // The embedding is dense. If it is also the output matrix, it may be there twice.
        let is_embedding = spec.name == "model.embed_tokens.weight";
        let dense = (elements as u64).saturating_mul(width as u64);
        match (is_embedding, config.tie_word_embeddings) {
            (true, true) if matrix != dense => dense.saturating_add(matrix),
            (true, _) => dense,
            (false, _) => matrix,
        }
    };
    config.tensors().iter().map(bytes).fold(0, u64::saturating_add)
}

/// An upper estimate of the memory in bytes for the activations of a step of `rows` rows: the largest
/// set of tensors that are alive together in a layer, or the logits of 64 rows.
fn activation_bytes(config: &DecoderConfig, rows: usize) -> u64 {
    let heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
    let inner = match config.experts {
        Some(experts) => experts.width * experts.per_token + experts.shared_width.unwrap_or(0),
        None => config.intermediate_size,
    };
    // The residual stream, its norm and an output; queries, keys and values before and after the
    // rotation; gate, up and their product; and the operands in the compute type.
    let per_row = 6 * config.hidden_size as u64 + 4 * heads as u64 + 5 * inner as u64;
    let logits = 2 * config.vocab_size as u64 * 64;
    4 * (per_row.saturating_mul(rows as u64)).max(logits)
}

/// The number of blocks of the KV store.
///
/// # Errors
/// [`ModelError::KvStore`] if not even one block fits in the budget, and [`ModelError::OutOfMemory`] if
/// the KV store does not fit in the device's free memory.
pub(crate) fn block_count(
    memory: Option<DeviceMemory>,
    device: &Device,
    config: &DecoderConfig,
    shape: &KvShape,
    options: &CandleOptions,
) -> Result<usize, ModelError> {
    let block_bytes = shape.block_bytes();
    let count = match (options.kv_budget, memory) {
        (KvBudget::Auto, Some(memory)) if !device.is_cpu() => {
            let activations = activation_bytes(config, options.step_tokens);
            let budget = share(memory, options.memory_utilization, activations);
            kv_capacity(budget, block_bytes)?
        }
        (KvBudget::Auto, Some(memory)) => kv_capacity(default_kv_budget(memory.free), block_bytes)?,
        (budget, _) => budget.block_count(block_bytes)?,
    };
    // Slots are 32-bit.
    let count = count.min(u32::MAX as usize / shape.block_size);
    let expected = (count as u64).saturating_mul(block_bytes as u64);
    match memory {
        Some(DeviceMemory { free, .. }) if expected > free => {
            let what = format!("the KV store of {count} blocks of {block_bytes} bytes");
            Err(ModelError::OutOfMemory { what, expected, free })
        }
        _ => Ok(count),
    }
}

/// What remains of `utilization` of the device's memory for the KV store, when `memory` was measured
/// after the weights were loaded.
fn share(memory: DeviceMemory, utilization: f64, activations: u64) -> u64 {
    let allowed = (memory.total as f64 * utilization) as u64;
    let used = memory.total.saturating_sub(memory.free);
    allowed.saturating_sub(used).saturating_sub(activations)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what is used already, by whomever, and the activations are subtracted from the share, and
    /// nothing underflows.
    #[test]
    fn the_kv_store_gets_the_rest_of_the_share() {
        let memory = DeviceMemory { free: 60, total: 100 };
        assert_eq!(share(memory, 0.9, 10), 40);
        assert_eq!(share(memory, 1.0, 0), 60);
        assert_eq!(share(memory, 0.3, 10), 0);
        assert_eq!(share(memory, 0.5, 100), 0);
    }
}
