//! The options of a backend, and the errors of opening it.

use std::str::FromStr;

use candle_core::DType;
use stolon_checkpoint::kv::KvStoreError;
use stolon_checkpoint::{KvBudget, KvType, ModelError, TensorType};

use crate::DeviceChoice;

/// The element type of the operands of matrix products. The residual stream, norms, rotary
/// embeddings and gates are always computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16: the upper half of an f32. It is not supported on the CPU.
    Bf16,
}

impl ComputeType {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    /// The type's name: `f32`, `f16` or `bf16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.dtype().as_str()
    }

    /// The default on `device` for a model whose weights are mostly of the type `weights`.
    #[must_use]
    pub fn default_for(device: DeviceChoice, weights: TensorType) -> Self {
        match weights {
            _ if device == DeviceChoice::Cpu => Self::F32,
            TensorType::F32 => Self::F32,
            TensorType::F16 => Self::F16,
            _ => Self::Bf16,
        }
    }

    /// The KV type of the same precision.
    pub(crate) fn kv_type(self) -> KvType {
        match self {
            Self::F32 => KvType::F32,
            Self::F16 => KvType::F16,
            Self::Bf16 => KvType::Bf16,
        }
    }
}

impl FromStr for ComputeType {
    type Err = ModelError;

    fn from_str(name: &str) -> Result<Self, ModelError> {
        match name {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            _ => Err(ModelError::option(
                "compute type",
                "`f32`, `f16` or `bf16`",
                format!("`{name}`"),
            )),
        }
    }
}

/// Options of a [`CandleBackend`](crate::CandleBackend).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CandleOptions {
    /// The device on which the model runs.
    pub device: DeviceChoice,
    /// Positions per KV block: a power of two from 1 to 256. Flash attention on CUDA needs at least
    /// 32.
    pub block_size: usize,
    /// Size of the KV store. On a GPU, [`KvBudget::Auto`] is the rest of the share
    /// `memory_utilization`.
    pub kv_budget: KvBudget,
    /// Share of the GPU's memory that this backend may use for weights, activations and the KV
    /// store, above 0 and up to 1. Memory that is already in use, also by other programs, is part
    /// of the share. The option has an effect only on a GPU and with [`KvBudget::Auto`].
    pub memory_utilization: f64,
    /// Number of tokens of a step for which memory is kept free. A step may have more.
    pub step_tokens: usize,
    /// Number of sequences of a step for whose logits memory is kept free. A step may have more.
    pub step_sequences: usize,
    /// Maximum number of running sequences of a model with recurrent layers, at least 1. Each
    /// occupies a slot for its state, and the memory of all slots is reserved.
    pub state_slots: usize,
    /// Memory in bytes that the KV store leaves free on a GPU with [`KvBudget::Auto`], for LoRA
    /// adapters. If it is 0, adapters use the memory outside of the share `memory_utilization`.
    pub adapter_bytes: u64,
    /// Element type of matrix products. `None` selects f32 on the CPU and for f32 weights, f16 for
    /// f16 weights, and bf16 for all others.
    pub compute_type: Option<ComputeType>,
    /// Type of the KV store: [`KvType::F32`], [`KvType::F16`], [`KvType::Bf16`] or, except on Apple
    /// GPUs, [`KvType::Int8`]. `None` selects the same type as `compute_type`.
    pub kv_type: Option<KvType>,
    /// Whether all matrix products have a fixed number of rows, so that results do not depend on
    /// the other requests of a batch. The crate's README describes the guarantees without it.
    pub batch_invariant: bool,
    /// Whether decode steps are captured as CUDA graphs, which launch all of a step's kernels at
    /// once. This has no effect on models with experts, on steps that return more than tokens, or
    /// if attention gathers keys and values. On the CPU, which is used only for tests, the same
    /// steps are padded and replayed without a graph.
    pub cuda_graphs: bool,
    /// Whether KV blocks can be copied out of and into the KV store. It requires `batch_invariant`.
    /// The files of the weights stay mapped, and are read once more when the fingerprint of the
    /// format is computed.
    pub kv_copies: bool,
}

impl Default for CandleOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Cpu,
            block_size: 32,
            kv_budget: KvBudget::Auto,
            memory_utilization: 0.9,
            step_tokens: 2048,
            step_sequences: 256,
            state_slots: 64,
            adapter_bytes: 0,
            compute_type: None,
            kv_type: None,
            batch_invariant: true,
            cuda_graphs: false,
            kv_copies: false,
        }
    }
}

impl CandleOptions {
    /// Checks the documented ranges.
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        stolon_checkpoint::kv::check_block_size(self.block_size)?;
        let invalid =
            |name: &str, expected: &str, got: String| Err(ModelError::option(name, expected, got));
        if !(self.memory_utilization > 0.0 && self.memory_utilization <= 1.0) {
            let got = self.memory_utilization.to_string();
            return invalid("GPU memory utilization", "a number above 0 and up to 1", got);
        }
        if !(1..=u32::MAX as usize).contains(&self.state_slots) {
            let expected = format!("1 to {}", u32::MAX);
            return invalid("state slots", &expected, self.state_slots.to_string());
        }
        match self.kv_type {
            Some(kv_type @ (KvType::K8V4 | KvType::Int4)) => {
                let got = format!("`{kv_type}`");
                return invalid("KV type", "`f32`, `bf16`, `f16` or `int8` with this backend", got);
            }
            Some(KvType::Int8) if matches!(self.device, DeviceChoice::Metal(_)) => {
                return invalid("KV type", "`f32`, `bf16` or `f16` on Apple GPUs", "`int8`".into());
            }
            Some(KvType::F32 | KvType::Bf16 | KvType::F16 | KvType::Int8) | None => {}
        }
        if self.device == DeviceChoice::Cpu && self.compute_type == Some(ComputeType::Bf16) {
            return invalid("compute type", "`f32` or `f16` on the CPU", "`bf16`".into());
        }
        if self.kv_copies && !self.batch_invariant {
            let got = "KV copies without batch invariance".to_owned();
            return invalid("KV copies", "batch invariance", got);
        }
        Ok(())
    }
}

/// The reason why a backend cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The model or an option is not valid, or does not fit in memory.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device cannot be used.
    #[error("the device {device}: {reason}")]
    Device {
        /// The device's name.
        device: String,
        /// The reason why it cannot be used.
        reason: String,
    },
    /// The device failed while the model was loaded.
    #[error("loading the model on the device: {}", message(.0))]
    Candle(#[from] candle_core::Error),
}

/// The message of an error of candle, without the backtrace that it may contain.
pub(crate) fn message(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

impl From<KvStoreError> for OpenError {
    fn from(error: KvStoreError) -> Self {
        Self::Model(error.into())
    }
}
