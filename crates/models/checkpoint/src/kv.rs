//! The sizes and element types of stored keys and values: what a machine needs to know before it
//! reserves memory for them, and what [`inspect`](fn@crate::inspect) computes without one.

mod capacity;
mod kv_type;
mod window;

use std::ops::Range;

use stolon_kernels::KvLayout;

use crate::config::{DecoderConfig, MixerConfig};
pub use crate::error::KvStoreError;

pub use capacity::{
    DEFAULT_BUDGET_MAX, FREE_MEMORY_SHARE, KvBudget, default_kv_budget, kv_capacity,
};
pub use kv_type::KvType;
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
    /// Whether the keys are also the values. Their layout is [`KvLayout::Rows`] then.
    pub shared: bool,
    /// Whether the layer keeps the positions of its window only, apart from the blocks.
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
    /// The layers with keys and values of their own. Layers that read those of another one are not
    /// among them.
    pub attention_layers: Vec<KvLayer>,
    /// Number of layers with a convolution.
    pub convolution_layers: usize,
    /// Number of elements of a convolution's input at one position. It is not used if no layer has
    /// one.
    pub convolution_width: usize,
    /// Number of positions, including its own, that a query of a windowed layer sees at most; 0 if
    /// no layer is windowed.
    pub window: usize,
    /// Positions per block: a power of two from 1 to 256.
    pub block_size: usize,
    /// Element type. The inputs of convolutions have the type [`KvType::of_convolutions`].
    pub kv_type: KvType,
}

impl KvShape {
    /// The shape that the layers of `config` need. `key_layout` returns the layout of keys whose
    /// heads have the given number of elements.
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
            // One key head, whose keys are also the values.
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

    /// Size in bytes of one block in all layers but the windowed ones.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        let inputs = self.kv_type.of_convolutions().head_bytes(self.convolution_width);
        self.heads_bytes(false) + self.convolution_layers * inputs * self.block_size
    }

    /// Size in bytes of the keys and values of one block, in the windowed layers or in the others.
    #[must_use]
    pub fn heads_bytes(&self, windowed: bool) -> usize {
        let layers = self.attention_layers.iter().filter(|layer| layer.windowed == windowed);
        let position = layers
            .map(|layer| layer.planes() * layer.kv_heads * self.kv_type.head_bytes(layer.head_dim));
        position.sum::<usize>() * self.block_size
    }

    /// The shape in which the layers of `config` whose windows are shorter than its context are
    /// windowed. All others stay in blocks. If there are no others, nothing changes: a prefix needs
    /// blocks.
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
        // A checkpoint that ends inside of a block has a part of one more.
        (before.div_ceil(self.block_size) + 1).saturating_mul(self.heads_bytes(true))
    }

    /// Size in bytes of a ring; 0 if no layer is windowed.
    #[must_use]
    pub fn ring_bytes(&self, slice_tokens: usize) -> usize {
        self.ring_blocks(slice_tokens).saturating_mul(self.heads_bytes(true))
    }

    /// Number of blocks of a ring. One more than for the positions alone, because these begin
    /// anywhere in a block.
    #[must_use]
    pub fn ring_blocks(&self, slice_tokens: usize) -> usize {
        self.window.saturating_add(slice_tokens).div_ceil(self.block_size) + 1
    }

    /// The blocks of positions that a query at position `len` or after it sees of those before it.
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
