//! The memory of a device, and how much of it the KV store gets.

use candle_core::{Device, Result};
use stolon_checkpoint::config::{MixerConfig, RecurrentShape, TensorRole, TensorSpec};
use stolon_checkpoint::kv::{default_kv_budget, kv_capacity};
use stolon_checkpoint::memory::free_memory;
use stolon_checkpoint::{DecoderConfig, KvBudget, ModelError, TensorType, Weights};

use crate::kv_store::StoreShape;
use crate::linear::RowTile;
use crate::loader::device_bytes;
use crate::{CandleOptions, OpenError};

#[cfg(feature = "cuda-core")]
mod pool;

/// Free and total memory of a device in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceMemory {
    pub(crate) free: u64,
    pub(crate) total: u64,
}

/// Prepares a device that was opened for steps: see [`pool::prepare`].
#[cfg(feature = "cuda-core")]
pub(crate) fn prepare(device: &Device) -> Result<()> {
    match device {
        Device::Cuda(device) => pool::prepare(device),
        _ => Ok(()),
    }
}

/// The memory of `device`; `None` if it does not report it. For the CPU, `total` equals `free`.
pub(crate) fn of(device: &Device) -> Option<DeviceMemory> {
    match device {
        Device::Cpu => {
            let free = free_memory();
            (free > 0).then_some(DeviceMemory { free, total: free })
        }
        #[cfg(feature = "cuda-core")]
        Device::Cuda(device) => {
            let (free, total) = device.cuda_stream().context().mem_get_info().ok()?;
            // Memory that the pool keeps is available for tensors, too.
            let kept = pool::Pool::of(device).ok()?.map_or(Ok(0), |pool| pool.unused()).ok()?;
            Some(DeviceMemory { free: free as u64 + kept, total: total as u64 })
        }
        _ => None,
    }
}

/// Runs `work` and returns the peak memory in bytes of the device's allocator during the run,
/// beyond its memory before. If the device does not report it, returns `None` without running
/// `work`.
#[cfg_attr(not(feature = "cuda-core"), allow(unused_variables, reason = "only CUDA tells"))]
pub(crate) fn peak_of(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Option<u64>> {
    #[cfg(feature = "cuda-core")]
    if let Device::Cuda(cuda) = device
        && let Some(pool) = pool::Pool::of(cuda)?
    {
        device.synchronize()?;
        pool.trim()?;
        let before = pool.reserved()?;
        pool.reset_peak()?;
        work()?;
        let peak = pool.peak()?.saturating_sub(before);
        // The trimmed memory is returned to the device, so that the KV store is allocated from
        // contiguous free memory and not from gaps in the pool.
        device.synchronize()?;
        pool.trim()?;
        return Ok(Some(peak));
    }
    Ok(None)
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
) -> std::result::Result<(), ModelError> {
    let expected = weight_bytes(config, weights, width);
    match memory {
        Some(DeviceMemory { free, .. }) if expected > free => {
            Err(ModelError::OutOfMemory { what: "the weights".to_owned(), expected, free })
        }
        _ => Ok(()),
    }
}

/// Checks that the states of all slots, of `bytes` bytes together, fit in the device's free memory,
/// before they are reserved.
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub(crate) fn check_states(
    memory: Option<DeviceMemory>,
    bytes: u64,
) -> std::result::Result<(), ModelError> {
    match memory {
        Some(DeviceMemory { free, .. }) if bytes > free => {
            let what = "the recurrent states".to_owned();
            Err(ModelError::OutOfMemory { what, expected: bytes, free })
        }
        _ => Ok(()),
    }
}

/// Size in bytes of all weights on the device, where dense matrices have `width` bytes per element.
fn weight_bytes(config: &DecoderConfig, weights: &Weights, width: usize) -> u64 {
    let bytes = |spec: &TensorSpec| {
        let elements = spec.shape.iter().fold(1_usize, |n, d| n.saturating_mul(*d));
        if spec.shape.len() < 2 {
            return 4 * elements as u64;
        }
        let dtype = weights.dtype(&spec.name).unwrap_or(TensorType::F32);
        let matrix = device_bytes(dtype, elements, width);
        // The embedding is dense. If it is also the output matrix, the device may have it twice.
        let is_embedding = matches!(spec.role, TensorRole::Embedding | TensorRole::Table);
        let dense = (elements as u64).saturating_mul(width as u64);
        match (is_embedding, config.tie_word_embeddings) {
            (true, true) if matrix != dense => dense.saturating_add(matrix),
            (true, _) => dense,
            (false, _) => matrix,
        }
    };
    config.tensors().iter().map(bytes).fold(0, u64::saturating_add)
}

/// An upper estimate of the memory in bytes that a step needs in addition to the weights. It counts
/// the largest set of tensors that exist at the same time in a layer or at the output.
pub(crate) fn step_bytes(config: &DecoderConfig, options: &CandleOptions, tile: RowTile) -> u64 {
    let heads = config.layers.iter().map(|layer| layer.mixers.iter().map(inner_width).sum());
    let heads: usize = heads.max().unwrap_or(0);
    let widths = config.layers.iter().filter_map(|layer| layer.mlp.as_ref()?.dense());
    let inner = match config.experts() {
        Some(experts) => experts.width * experts.per_token + experts.shared_width.unwrap_or(0),
        None => widths.map(|mlp| mlp.width).max().unwrap_or(0),
    };
    // For each row: the residual stream, its norm and an output; queries, keys and values before
    // and after the rotation; and the operands in the compute type.
    let per_row = 6 * config.hidden_size as u64 + 4 * heads as u64;
    // For each row of the MLP's products: gate and up, the inputs of the gate, and its result.
    let mlp = 5 * inner as u64 * tile.rows(options.step_tokens) as u64;
    // The logits, and the temporary tensors that are computed from them to find the largest one.
    let logits = 4 * config.vocab_size as u64 * options.step_sequences.max(128) as u64;
    4 * per_row.saturating_mul(options.step_tokens as u64).saturating_add(mlp).max(logits)
}

/// The memory in bytes that is kept free for adapters: their weights, and an upper estimate of what
/// a step with adapters needs in addition to other steps. That is the results of a projection in
/// f32, their updates, and the sums.
pub(crate) fn adapter_bytes(config: &DecoderConfig, options: &CandleOptions, tile: RowTile) -> u64 {
    if options.adapter_bytes == 0 {
        return 0;
    }
    let mixers = config.mixers().map(inner_width).max().unwrap_or(0);
    let mlps = config.layers.iter().filter_map(|layer| layer.mlp.as_ref()?.dense());
    let experts = config.experts().map_or(0, |experts| experts.width);
    let inner = mlps.map(|mlp| mlp.width).max().unwrap_or(0).max(experts);
    let width = mixers.max(2 * inner).max(config.hidden_size) as u64;
    let of_layers = width.saturating_mul(tile.rows(options.step_tokens) as u64);
    let logits = config.vocab_size as u64 * tile.rows(options.step_sequences) as u64;
    options.adapter_bytes.saturating_add(of_layers.max(logits).saturating_mul(12))
}

/// Number of values that a mixer computes for each row between its projections.
fn inner_width(mixer: &MixerConfig) -> usize {
    let of_recurrence =
        |shape: RecurrentShape| 2 * shape.channels + shape.factor_width() + 2 * shape.value_width();
    match mixer {
        MixerConfig::Attention(attention) => {
            (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        }
        MixerConfig::Latent(latent) => {
            latent.heads * (latent.sizes.query_dim() + 2 * latent.sizes.kept_dim())
        }
        MixerConfig::Convolution(_) => 0,
        MixerConfig::DeltaNet(delta_net) => of_recurrence(delta_net.shape()),
        MixerConfig::Mamba2(mamba2) => of_recurrence(mamba2.shape()),
    }
}

/// Converts the error of a dry run: to `OutOfMemory` if the step probably does not fit in the
/// memory.
pub(crate) fn explain(
    error: candle_core::Error,
    memory: Option<DeviceMemory>,
    options: &CandleOptions,
    step_bytes: u64,
) -> OpenError {
    match memory {
        Some(DeviceMemory { free, .. }) if step_bytes > free => {
            let CandleOptions { step_tokens, step_sequences, .. } = options;
            let what = format!("a step of {step_tokens} tokens and {step_sequences} sequences");
            ModelError::OutOfMemory { what, expected: step_bytes, free }.into()
        }
        _ => error.into(),
    }
}

/// The number of blocks of the KV store.
///
/// # Errors
/// [`ModelError::KvStore`] if not even one block fits in the budget. [`ModelError::OutOfMemory`] if
/// the KV store, and on a GPU also `reserved` bytes for a step and adapters, do not fit in the
/// device's free memory.
pub(crate) fn block_count(
    memory: Option<DeviceMemory>,
    device: &Device,
    shape: &StoreShape,
    options: &CandleOptions,
    reserved: u64,
) -> std::result::Result<usize, ModelError> {
    let block_bytes = shape.block_bytes();
    let count = match (options.kv_budget, memory) {
        (KvBudget::Auto, Some(memory)) if !device.is_cpu() => {
            let budget = share(memory, options.memory_utilization, reserved);
            if budget < block_bytes as u64 {
                let share = options.memory_utilization;
                let what = format!("a KV block, in the {share} of the memory that may be in use");
                let expected = block_bytes as u64;
                return Err(ModelError::OutOfMemory { what, expected, free: budget });
            }
            kv_capacity(budget, block_bytes)?
        }
        (KvBudget::Auto, Some(memory)) => kv_capacity(default_kv_budget(memory.free), block_bytes)?,
        (budget, _) => budget.block_count(block_bytes)?,
    };
    // Slots are 32-bit.
    let count = count.min(u32::MAX as usize / shape.block_size());
    let kv_bytes = (count as u64).saturating_mul(block_bytes as u64);
    let (expected, step) = match device.is_cpu() {
        true => (kv_bytes, String::new()),
        false => (
            kv_bytes.saturating_add(reserved),
            format!(", and {reserved} bytes for a step and adapters"),
        ),
    };
    match memory {
        Some(DeviceMemory { free, .. }) if expected > free => {
            let what = format!("the KV store of {count} blocks of {block_bytes} bytes{step}");
            Err(ModelError::OutOfMemory { what, expected, free })
        }
        _ => Ok(count),
    }
}

/// The memory in bytes that remains for the KV store if the backend uses the share `utilization` of
/// the device's memory. `memory` was measured after the weights were loaded, and `reserved`
/// bytes are kept free for a step and adapters.
fn share(memory: DeviceMemory, utilization: f64, reserved: u64) -> u64 {
    let allowed = (memory.total as f64 * utilization) as u64;
    let used = memory.total.saturating_sub(memory.free);
    allowed.saturating_sub(used).saturating_sub(reserved)
}

#[cfg(test)]
mod tests {
    use stolon_checkpoint::{LoadOptions, ModelSource, load};

    use super::*;

    /// Goal: without adapters nothing is kept free for them. With them it is their weights, and more
    /// for steps with more tokens or sequences.
    #[test]
    fn adapters_take_memory_for_their_weights_and_for_steps() {
        let source = ModelSource::Random { preset: "20m".to_owned(), seed: 0 };
        let config = load(&source, &LoadOptions::default()).expect("a preset").config;
        let bytes = |adapter_bytes, step_tokens, step_sequences| {
            let sizes =
                CandleOptions { adapter_bytes, step_tokens, step_sequences, ..Default::default() };
            super::adapter_bytes(&config, &sizes, RowTile(Some(32)))
        };
        assert_eq!(bytes(0, 2048, 256), 0);
        let small = bytes(1000, 64, 1);
        assert!(small > 1000);
        assert!(bytes(1000, 4096, 1) > small && bytes(1000, 64, 512) > small);
        assert_eq!(bytes(3000, 64, 1), small + 2000);
        assert_eq!(bytes(u64::MAX, 64, 1), u64::MAX);
    }

    /// Goal: memory that any program uses already and the memory of a step are subtracted from the
    /// share, without underflow.
    #[test]
    fn the_kv_store_gets_the_rest_of_the_share() {
        let memory = DeviceMemory { free: 60, total: 100 };
        assert_eq!(share(memory, 0.9, 10), 40);
        assert_eq!(share(memory, 1.0, 0), 60);
        assert_eq!(share(memory, 0.3, 10), 0);
        assert_eq!(share(memory, 0.5, 100), 0);
    }
}
