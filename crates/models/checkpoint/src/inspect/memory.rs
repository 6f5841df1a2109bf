//! The memory that a model needs.

use serde::Serialize;
use stolon_kernels::KvLayout;

use super::InspectOptions;
use crate::config::{DecoderConfig, DraftHeadKind, TensorSpec};
use crate::error::ModelError;
use crate::kv::{DEFAULT_BLOCK_SIZE, DEFAULT_STEP_TOKENS, KvShape, KvType};
use crate::memory::packed_bytes;
use crate::weight_type::WeightType;
use crate::weights::Weights;

/// The memory that a model needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryNeeded {
    /// Size of the packed weights.
    pub weights: u64,
    /// The part of it that can stay in the files: tables of which only rows are read.
    pub tables: u64,
    /// Size of the keys and values of one position in all layers that keep all positions.
    pub kv_per_token: u64,
    /// Size of the windows of one running request, with the default sizes of blocks and steps; 0
    /// unless windows are kept in states.
    pub windows: u64,
    /// Size of the keys and values of a request that fills the model's context, including its
    /// windows.
    pub kv_of_context: u64,
}

impl MemoryNeeded {
    /// Computes the memory that a supported model needs, without an image encoder.
    ///
    /// # Errors
    /// Those of [`KvShape::check`].
    pub(super) fn of(
        config: &DecoderConfig,
        weights: &Weights,
        options: &InspectOptions,
    ) -> Result<Self, ModelError> {
        let kv_type = options.kv_type.unwrap_or_else(|| KvType::of_weights(config.dtype));
        let shape = |block_size| {
            let shape = KvShape::of(config, block_size, kv_type, |_| KvLayout::Rows);
            options.window_kv.apply(shape, config)
        };
        shape(1).check()?;
        let kv_per_token = shape(1).block_bytes() as u64;
        let windows = shape(DEFAULT_BLOCK_SIZE).ring_bytes(DEFAULT_STEP_TOKENS) as u64;
        let of_positions = kv_per_token.saturating_mul(config.max_positions as u64);
        Ok(Self {
            weights: packed_bytes(config.tensors().into_iter(), weights, options.weight_type),
            tables: table_bytes(config.tensors(), weights, options.weight_type),
            kv_per_token,
            windows,
            kv_of_context: of_positions.saturating_add(windows),
        })
    }
}

/// Size of the tensors in `tensors` that can stay in their files.
pub(super) fn table_bytes(
    mut tensors: Vec<TensorSpec>,
    weights: &Weights,
    weight_type: WeightType,
) -> u64 {
    tensors.retain(|spec| weights.can_stay_in_file(spec, weight_type));
    packed_bytes(tensors.into_iter(), weights, weight_type)
}

/// The memory that a draft head needs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HeadMemory {
    /// Size of its weights, as they are stored.
    pub weights: u64,
    /// Size of its keys, values and hidden states of one position.
    pub kv_per_token: u64,
}

impl HeadMemory {
    /// Computes the memory of the own head of a model with this configuration. `weights` are the
    /// tensors of the head. `None` if models of the architecture have none.
    pub(super) fn of_mtp(
        config: &DecoderConfig,
        weights: &Weights,
        options: &InspectOptions,
    ) -> Option<Self> {
        let is_own = |name: &str| !["model.embed_tokens.weight", "lm_head.weight"].contains(&name);
        let head = (&config.mtp_head()?, &DraftHeadKind::Mtp);
        Some(Self::of(head, weights, is_own, options))
    }

    /// Computes the memory of a head with this decoder and of this kind. `is_own` says which tensors of
    /// `weights` are not the model's.
    pub(super) fn of(
        (head, kind): (&DecoderConfig, &DraftHeadKind),
        weights: &Weights,
        is_own: impl Fn(&str) -> bool,
        options: &InspectOptions,
    ) -> Self {
        let own = weights.list().filter(|(name, ..)| is_own(name));
        let kv_type = options.kv_type.unwrap_or_else(|| KvType::of_weights(head.dtype));
        let shape = KvShape::of(head, 1, kv_type, |_| KvLayout::Rows);
        let shape = shape.of_draft_head(kind.state_width(head));
        let weights = own.map(|(.., bytes)| bytes).sum();
        Self { weights, kv_per_token: shape.block_bytes() as u64 }
    }
}
