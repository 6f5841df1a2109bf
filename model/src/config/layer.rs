//! The properties in which the layers of a decoder may differ.

/// How a layer mixes positions. Layers may have several, or none; see [`LayerConfig::mixers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerKind {
    /// Attention.
    Attention,
    /// A short convolution (LFM2), as
    /// [`DecoderConfig::convolution_taps`](super::DecoderConfig::convolution_taps) says.
    Convolution,
    /// Gated DeltaNet, as [`DecoderConfig::delta_net`](super::DecoderConfig::delta_net) says.
    DeltaNet,
    /// Mamba-2, as [`DecoderConfig::mamba2`](super::DecoderConfig::mamba2) says.
    Mamba2,
}

/// Which MLP a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// One MLP for all tokens.
    Dense,
    /// The mixture of experts that [`DecoderConfig::experts`](super::DecoderConfig::experts)
    /// describes.
    Experts,
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
    /// The MLP; `None` if the layer only mixes positions (Nemotron-H).
    pub mlp: Option<MlpKind>,
}

impl LayerConfig {
    /// Whether the layer has attention.
    #[must_use]
    pub fn has_attention(&self) -> bool {
        self.has(MixerKind::Attention)
    }

    /// Whether the layer mixes positions in this way.
    #[must_use]
    pub fn has(&self, mixer: MixerKind) -> bool {
        self.mixers.contains(&mixer)
    }

    /// Whether the layer has a mixture of experts.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        self.mlp == Some(MlpKind::Experts)
    }
}
