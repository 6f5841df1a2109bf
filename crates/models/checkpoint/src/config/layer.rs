//! The properties in which the layers of a decoder may differ.

use super::keys::SIZE_MAX;
use super::{DecoderConfig, HEAD_DIM_MAX, QkNorm};
use crate::error::ModelError;

/// How a layer mixes positions. Layers may have several, or none; see [`LayerConfig::mixers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerKind {
    /// Attention.
    Attention,
    /// A short convolution (LFM2), as
    /// [`DecoderConfig::convolution_taps`](super::DecoderConfig::convolution_taps) says.
    Convolution,
    /// Gated DeltaNet or Kimi Delta Attention, as [`DecoderConfig::delta_net`](super::DecoderConfig::delta_net) says.
    DeltaNet,
    /// Mamba-2, as [`DecoderConfig::mamba2`](super::DecoderConfig::mamba2) says.
    Mamba2,
    /// Latent attention, as [`DecoderConfig::latent`](super::DecoderConfig::latent) says.
    Latent,
}

/// The sizes of the key heads and value heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Number of key heads and of value heads.
    pub kv_heads: usize,
    /// Number of elements of a head, also of query heads.
    pub head_dim: usize,
}

/// Which MLP a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// One MLP for all tokens.
    Dense,
    /// The mixture of experts that [`DecoderConfig::experts`](super::DecoderConfig::experts)
    /// describes.
    Experts,
    /// Both, next to each other: each reads the residual stream with a norm of its own, and the
    /// outputs are normalized before they are added (Gemma 4).
    DenseAndExperts,
}

/// The properties in which layers may differ from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// What the layer has to mix positions: one mixer; or attention and Mamba-2, both of which read
    /// the input of the layer (Falcon-H1); or none, so that the layer is its MLP (Nemotron-H). The
    /// outputs are added to the residual stream in this order. Without attention, the layer has
    /// neither a rotary embedding nor a sliding window.
    pub mixers: &'static [MixerKind],
    /// Index into [`DecoderConfig::ropes`](super::DecoderConfig::ropes), or `None` if queries and
    /// keys are not rotated.
    pub rope: Option<usize>,
    /// Number of positions that a query attends to, including its own: a query at position `p`
    /// reads the keys at `p + 1 - window ..= p`. At least 1. With `None`, it reads all keys up to
    /// its own.
    pub sliding_window: Option<usize>,
    /// The sizes of the heads, if they are not those that the
    /// [`DecoderConfig`](super::DecoderConfig) has (Gemma 4: layers without a sliding window).
    pub heads: Option<HeadShape>,
    /// Index of the earlier layer whose keys and values attention reads. The layer then has neither
    /// projections to keys and values nor memory for them. `None` if it has its own.
    pub kv_source: Option<usize>,
    /// Whether values are projected with the matrix of keys, so that there is none for values.
    pub values_from_keys: bool,
    /// The MLP; `None` if the layer only mixes positions (Nemotron-H).
    pub mlp: Option<MlpKind>,
    /// The width of the MLP, if it is not that of the [`DecoderConfig`](super::DecoderConfig)
    /// (Gemma 4: layers without keys and values of their own).
    pub intermediate_size: Option<usize>,
}

impl LayerConfig {
    /// Attention without a sliding window that reads its own keys and values, rotated by the first
    /// rotary embedding, and a dense MLP, both with the sizes of the decoder.
    pub(super) const PLAIN: Self = Self {
        mixers: &[MixerKind::Attention],
        rope: Some(0),
        sliding_window: None,
        heads: None,
        kv_source: None,
        values_from_keys: false,
        mlp: Some(MlpKind::Dense),
        intermediate_size: None,
    };

    /// Lets the last `shared` layers read the keys and values of the last layer before them that is
    /// of the same kind, with or without a sliding window. `None` if there is no such layer.
    pub(super) fn share_kv(shared: usize, layers: &mut [Self]) -> Option<()> {
        let first = layers.len().checked_sub(shared)?;
        let (own, others) = layers.split_at_mut(first);
        for layer in others {
            let is_local = layer.sliding_window.is_some();
            let source = own.iter().rposition(|own| own.sliding_window.is_some() == is_local)?;
            // The layer has no projection to values in any case.
            *layer = Self { kv_source: Some(source), values_from_keys: false, ..*layer };
        }
        Some(())
    }

    /// Whether the layer has attention.
    #[must_use]
    pub fn has_attention(&self) -> bool {
        self.has(MixerKind::Attention) || self.has(MixerKind::Latent)
    }

    /// Whether the layer mixes positions in this way.
    #[must_use]
    pub fn has(&self, mixer: MixerKind) -> bool {
        self.mixers.contains(&mixer)
    }

    /// Whether the layer has attention and computes its own keys and values. Otherwise it reads
    /// those of another layer, or has no attention.
    #[must_use]
    pub fn has_own_kv(&self) -> bool {
        self.has_attention() && self.kv_source.is_none()
    }

    /// Whether the layer has a mixture of experts.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        matches!(self.mlp, Some(MlpKind::Experts | MlpKind::DenseAndExperts))
    }

    /// Whether the layer keeps something of each position that later positions need: keys and
    /// values of its own, the inputs of a convolution, or a recurrent state.
    #[must_use]
    pub fn keeps_positions(&self) -> bool {
        self.mixers.iter().any(|mixer| match mixer {
            MixerKind::Attention => self.kv_source.is_none(),
            MixerKind::Convolution
            | MixerKind::DeltaNet
            | MixerKind::Mamba2
            | MixerKind::Latent => true,
        })
    }
}

impl DecoderConfig {
    /// Number of leading elements of each head that the rotary embedding `rope`, an index into
    /// [`ropes`](Self::ropes), rotates.
    #[must_use]
    pub fn rope_dim(&self, rope: usize) -> usize {
        let layer = self.layers.iter().find(|layer| layer.rope == Some(rope));
        let own = layer.and_then(|layer| layer.heads);
        own.map_or_else(|| self.rotary_dim(), |heads| heads.head_dim)
    }

    /// The sizes of the key heads and value heads of layer `layer`.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn heads(&self, layer: usize) -> HeadShape {
        let of_others = HeadShape { kv_heads: self.num_kv_heads, head_dim: self.head_dim };
        self.layers[layer].heads.unwrap_or(of_others)
    }

    /// Index of the last layer that keeps something of each position. What later layers compute is
    /// needed only at positions whose logits or hidden states are requested.
    #[must_use]
    pub fn last_keeping_layer(&self) -> usize {
        self.layers.iter().rposition(LayerConfig::keeps_positions).unwrap_or(0)
    }

    /// Checks what layers have in place of the sizes of the decoder, and whose keys and values they
    /// read. `file` is the file's name in error messages.
    pub(super) fn check_layers(&self, file: &str) -> Result<(), ModelError> {
        let sizes = [
            ("hidden_size_per_layer_input", self.per_layer_input.unwrap_or(1)),
            ("hidden_size_per_layer_input", self.per_layer_width()),
        ];
        let widths = self.layers.iter().filter_map(|layer| layer.intermediate_size);
        let widths = widths.map(|width| ("intermediate_size", width));
        let is_size = |size: usize| size > 0 && size as u64 <= SIZE_MAX;
        let mut sizes = sizes.into_iter().chain(widths);
        if let Some((key, size)) = sizes.find(|(_, size)| !is_size(*size)) {
            return Err(ModelError::key(file, key, format!("1 to {SIZE_MAX}"), size));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            if self.output_gate && (layer.kv_source.is_some() || layer.values_from_keys) {
                let expected = "layers with projections of their own to keys and values";
                return Err(ModelError::unsupported(file, "attn_output_gate", expected, true));
            }
            self.check_heads(file, layer)?;
            self.check_rotation(file, index)?;
            self.check_source(file, index)?;
        }
        self.check_selective(file)
    }

    /// Checks that all layers have the attention that can be selective, if it is.
    fn check_selective(&self, file: &str) -> Result<(), ModelError> {
        let is_plain = |layer: &LayerConfig| {
            layer.mixers == [MixerKind::Attention]
                && layer.heads.is_none()
                && layer.kv_source.is_none()
                && !layer.values_from_keys
        };
        let is_computed = self.layers.iter().all(is_plain)
            && self.num_kv_heads == self.num_heads
            && self.qk_norm.is_none()
            && !self.value_norm
            && !self.output_gate
            && self.query_scaling.is_none();
        if is_computed || !self.selective_attention {
            return Ok(());
        }
        let expected = "attention without norms and gates, and as many key heads as query heads";
        Err(ModelError::unsupported(file, "tau_attn", expected, true))
    }

    /// The number of values that a token has for all layers; 1 if there are no per-layer
    /// embeddings.
    fn per_layer_width(&self) -> usize {
        self.per_layer_input.map_or(1, |width| width.saturating_mul(self.layers.len()))
    }

    /// Checks the sizes of the heads of a layer.
    fn check_heads(&self, file: &str, layer: &LayerConfig) -> Result<(), ModelError> {
        let Some(HeadShape { kv_heads, head_dim }) = layer.heads else { return Ok(()) };
        if self.qk_norm == Some(QkNorm::Position) || self.rotary_dim.is_some() || self.output_gate {
            let expected = "the same heads in all layers with norms of all heads, partly rotated \
                            heads or gates of attention's output";
            return Err(ModelError::unsupported(file, "global_head_dim", expected, head_dim));
        }
        if !head_dim.is_multiple_of(2) || !(1..=HEAD_DIM_MAX).contains(&head_dim) {
            let expected = format!("an even number of at most {HEAD_DIM_MAX}");
            return Err(ModelError::key(file, "global_head_dim", expected, head_dim));
        }
        if kv_heads == 0 || !self.num_heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {}", self.num_heads);
            return Err(ModelError::key(file, "num_global_key_value_heads", expected, kv_heads));
        }
        if self.num_heads.saturating_mul(head_dim) as u64 > SIZE_MAX {
            let expected = format!("at most {SIZE_MAX} with num_attention_heads");
            return Err(ModelError::key(file, "global_head_dim", expected, head_dim));
        }
        Ok(())
    }

    /// Checks that all layers with the same rotary embedding as layer `index` have heads of the same
    /// length.
    fn check_rotation(&self, file: &str, index: usize) -> Result<(), ModelError> {
        let head_dim = self.heads(index).head_dim;
        match self.layers[index].rope.map(|rope| self.rope_dim(rope)) {
            Some(other) if self.rotary_dim.is_none() && other != head_dim => {
                let expected = format!("{other}, as in other layers");
                Err(ModelError::unsupported(file, "global_head_dim", &expected, head_dim))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the layer `index` can read the keys and values of the layer that it names.
    fn check_source(&self, file: &str, index: usize) -> Result<(), ModelError> {
        let Some(source) = self.layers[index].kv_source else { return Ok(()) };
        let is_possible = self.layers[..index].get(source).is_some_and(|layer| {
            layer.has_own_kv()
                && layer.rope == self.layers[index].rope
                && self.heads(source) == self.heads(index)
        });
        if is_possible {
            return Ok(());
        }
        let expected = "layers that share the keys and values of an earlier layer of the same kind";
        Err(ModelError::unsupported(file, "num_kv_shared_layers", expected, source))
    }
}
