//! The sizes and element types of stored keys and values. A backend uses them to reserve memory,
//! and [`inspect`](fn@crate::inspect) to compute how much memory would be needed.

mod capacity;
mod kv_type;
mod window;

use std::ops::Range;

pub use stolon_kernels::KvLayout;

use crate::config::{DecoderConfig, MixerConfig};
pub use crate::error::KvStoreError;
use crate::error::ModelError;

pub use capacity::{
    DEFAULT_BUDGET_MAX, FREE_MEMORY_SHARE, KvBudget, default_kv_budget, kv_capacity,
};
pub use kv_type::{KvElement, KvType};
pub use window::WindowKv;

/// Default of the number of positions per block.
pub const DEFAULT_BLOCK_SIZE: usize = 16;

/// Default of the maximum number of tokens of one sequence in a step.
pub const DEFAULT_STEP_TOKENS: usize = 512;

/// The keys and values of one layer. All sizes are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// Number of key heads and of value heads.
    pub kv_heads: usize,
    /// Number of elements of a head.
    pub head_dim: usize,
    /// Layout of the keys. Values always have the layout [`KvLayout::Rows`].
    pub key_layout: KvLayout,
    /// Whether the keys are also the values. If so, their layout is [`KvLayout::Rows`].
    pub shared: bool,
    /// Whether the layer keeps only the positions of its window, in rings outside of the blocks.
    pub windowed: bool,
}

impl KvLayer {
    /// Number of planes: keys and values, or one for both.
    #[must_use]
    pub fn planes(&self) -> usize {
        if self.shared { 1 } else { 2 }
    }
}

/// The sizes and layout of a KV store. All sizes are at least 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// The layers that have keys and values of their own. Layers that read the keys and values of
    /// another layer are left out.
    pub attention_layers: Vec<KvLayer>,
    /// Number of layers with a convolution.
    pub convolution_layers: usize,
    /// Number of elements of a convolution's input at one position. It is unused if no layer has a
    /// convolution.
    pub convolution_width: usize,
    /// Maximum number of positions, including its own, that a query of a windowed layer attends to;
    /// 0 if no layer is windowed.
    pub window: usize,
    /// Positions per block: a power of two from 1 to 256.
    pub block_size: usize,
    /// Type of keys and values. The inputs of convolutions have the type [`KvType::of_convolutions`].
    pub kv_type: KvType,
}

impl KvShape {
    /// The shape for the layers of `config`. `key_layout` returns the layout of keys from the
    /// number of elements of a head.
    #[must_use]
    pub fn of(
        config: &DecoderConfig,
        block_size: usize,
        kv_type: KvType,
        key_layout: impl Fn(usize) -> KvLayout,
    ) -> Self {
        let kv_layer = |mixer: &MixerConfig| match mixer {
            MixerConfig::Attention(attention) if attention.has_own_kv() => Some(KvLayer {
                kv_heads: attention.kv_heads,
                head_dim: attention.head_dim,
                key_layout: key_layout(attention.head_dim),
                shared: false,
                windowed: false,
            }),
            // Latent attention has one key head, whose keys are also the values.
            MixerConfig::Latent(latent) => Some(KvLayer {
                kv_heads: 1,
                head_dim: latent.sizes.kept_dim(),
                key_layout: KvLayout::Rows,
                shared: true,
                windowed: false,
            }),
            _ => None,
        };
        let is_convolution = |mixer: &&MixerConfig| matches!(mixer, MixerConfig::Convolution(_));
        Self {
            attention_layers: config.mixers().filter_map(kv_layer).collect(),
            convolution_layers: config.mixers().filter(is_convolution).count(),
            convolution_width: config.hidden_size,
            window: 0,
            block_size,
            kv_type,
        }
    }

    /// The shape of the KV store of a draft head whose layers have this shape. It keeps the hidden
    /// state of each position in addition, of `width` values, as the input of a convolution.
    #[must_use]
    pub fn of_draft_head(self, width: usize) -> Self {
        Self { convolution_layers: 1, convolution_width: width, ..self }
    }

    /// Size in bytes of one block in all layers except the windowed ones.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        let inputs = self.kv_type.of_convolutions().head_bytes(self.convolution_width);
        self.heads_bytes(false) + self.convolution_layers * inputs * self.block_size
    }

    /// Size in bytes of the keys and values of one block, in the windowed layers or in all others.
    #[must_use]
    pub fn heads_bytes(&self, windowed: bool) -> usize {
        let layers = self.attention_layers.iter().filter(|layer| layer.windowed == windowed);
        let position = layers.flat_map(|layer| {
            self.elements(layer).map(|kind| layer.kv_heads * kind.head_bytes(layer.head_dim))
        });
        position.sum::<usize>() * self.block_size
    }

    /// The element type of each plane of a layer.
    pub fn elements(&self, layer: &KvLayer) -> impl Iterator<Item = KvElement> + use<> {
        self.kv_type.elements().into_iter().take(layer.planes())
    }

    /// Checks that the heads of all layers can be stored in the type.
    ///
    /// # Errors
    /// [`ModelError::InvalidOption`] for heads of an odd number of elements in 4 bits.
    pub fn check(&self) -> Result<(), ModelError> {
        let is_odd = |layer: &&KvLayer| {
            !layer.head_dim.is_multiple_of(2)
                && self.elements(layer).any(|kind| kind == KvElement::Int4)
        };
        match self.attention_layers.iter().find(is_odd) {
            Some(layer) => Err(ModelError::option(
                "KV type",
                format!(
                    "a type of at least 8 bits for a model with heads of {} elements",
                    layer.head_dim
                ),
                format!("`{}`", self.kv_type),
            )),
            None => Ok(()),
        }
    }

    /// The shape in which the layers with a window that is shorter than the context are windowed.
    /// All other layers stay in blocks. If there are no others, the shape does not change, because
    /// a prefix needs blocks.
    #[must_use]
    pub(crate) fn with_windows(mut self, config: &DecoderConfig) -> Self {
        let window = |mixer: &MixerConfig| match mixer {
            MixerConfig::Attention(attention) if attention.has_own_kv() => {
                Some(attention.sliding_window.filter(|window| *window < config.max_positions))
            }
            MixerConfig::Latent(_) => Some(None),
            _ => None,
        };
        let windows: Vec<Option<usize>> = config.mixers().filter_map(window).collect();
        if self.convolution_layers > 0 || windows.contains(&None) {
            for (layer, window) in self.attention_layers.iter_mut().zip(&windows) {
                layer.windowed = window.is_some();
            }
            self.window = windows.into_iter().flatten().max().unwrap_or(0);
        }
        self
    }

    /// Size in bytes of the window of a sequence in a checkpoint; 0 if no layer is windowed.
    #[must_use]
    pub fn window_bytes(&self) -> usize {
        let before = self.window.saturating_sub(1);
        // A checkpoint that ends inside a block contains a part of one more block.
        (before.div_ceil(self.block_size) + 1).saturating_mul(self.heads_bytes(true))
    }

    /// Size in bytes of a ring for slices of up to `slice_tokens` tokens; 0 if no layer is
    /// windowed.
    #[must_use]
    pub fn ring_bytes(&self, slice_tokens: usize) -> usize {
        self.ring_blocks(slice_tokens).saturating_mul(self.heads_bytes(true))
    }

    /// Number of blocks of a ring. It is one more than the positions would fill, because they can
    /// begin anywhere in a block.
    #[must_use]
    pub fn ring_blocks(&self, slice_tokens: usize) -> usize {
        self.window.saturating_add(slice_tokens).div_ceil(self.block_size) + 1
    }

    /// The blocks with the positions before `len` that queries at position `len` or later attend
    /// to.
    #[must_use]
    pub fn window_at(&self, len: usize) -> Range<usize> {
        len.saturating_sub(self.window.saturating_sub(1)) / self.block_size
            ..len.div_ceil(self.block_size)
    }
}

/// Checks that `block_size` is a power of two from 1 to 256.
///
/// # Errors
/// [`KvStoreError::BlockSize`].
pub fn check_block_size(block_size: usize) -> Result<(), KvStoreError> {
    if block_size.is_power_of_two() && block_size <= 256 {
        return Ok(());
    }
    Err(KvStoreError::BlockSize { got: block_size })
}

#[cfg(test)]
mod tests;
