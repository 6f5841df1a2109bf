//! The parts of a decoder's layer: its mixers and its MLP, each with data of its own.

use super::{
    AttentionConfig, DecoderConfig, DeltaNetConfig, ExpertsConfig, FeedForwardConfig,
    KeysAndValues, LatentConfig, Mamba2Config, MlpConfig,
};
use crate::error::ModelError;

/// Maximum number of taps of a convolution. Known models have 3.
const CONVOLUTION_TAPS_MAX: usize = 64;

/// The way in which a layer mixes positions.
#[allow(clippy::large_enum_variant, reason = "there are a few per layer")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MixerConfig {
    /// Attention.
    Attention(AttentionConfig),
    /// Latent attention.
    Latent(LatentConfig),
    /// A short convolution (LFM2).
    Convolution(ConvolutionConfig),
    /// Gated DeltaNet or Kimi Delta Attention.
    DeltaNet(DeltaNetConfig),
    /// Mamba-2.
    Mamba2(Mamba2Config),
}

/// A short convolution. It has as many channels as the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvolutionConfig {
    /// Number of positions in the convolution, including the current one: from 2 to 64.
    pub taps: usize,
}

impl MixerConfig {
    /// Whether the mixer keeps data of each position that later positions need: keys and values of
    /// its own, the inputs of a convolution, or a recurrent state.
    #[must_use]
    pub fn keeps_positions(&self) -> bool {
        match self {
            Self::Attention(attention) => attention.has_own_kv(),
            Self::Latent(_) | Self::Convolution(_) | Self::DeltaNet(_) | Self::Mamba2(_) => true,
        }
    }

    /// The rotary embedding of attention, and the number of elements of a head that it rotates;
    /// `None` for mixers other than attention.
    pub(super) fn rotation(&self) -> Option<(Option<usize>, usize)> {
        match self {
            Self::Attention(attention) => Some((attention.rope, attention.rotary_dim)),
            Self::Latent(latent) => Some((latent.rope, latent.sizes.rotary_dim)),
            Self::Convolution(_) | Self::DeltaNet(_) | Self::Mamba2(_) => None,
        }
    }
}

/// A layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// The mixers of the layer. There is one; or attention and Mamba-2, which both read the input
    /// of the layer (Falcon-H1); or none, so that the layer has only an MLP (Nemotron-H). Their
    /// outputs are added to the residual stream in this order.
    pub mixers: Vec<MixerConfig>,
    /// The MLP; `None` if the layer has only mixers (Nemotron-H).
    pub mlp: Option<FeedForwardConfig>,
}

impl LayerConfig {
    /// A layer with attention and an MLP.
    pub(super) fn new(attention: AttentionConfig, mlp: MlpConfig) -> Self {
        Self {
            mixers: vec![MixerConfig::Attention(attention)],
            mlp: Some(FeedForwardConfig::Dense(mlp)),
        }
    }

    /// The same layer with another rotary embedding and another sliding window of its attention.
    pub(super) fn at(&self, rope: Option<usize>, sliding_window: Option<usize>) -> Self {
        let mut layer = self.clone();
        if let Some(attention) = layer.attention_mut() {
            *attention = AttentionConfig { rope, sliding_window, ..*attention };
        }
        layer
    }

    /// Adds a mixture of experts next to the MLP of the layer.
    pub(super) fn add_experts(&mut self, experts: ExpertsConfig) {
        self.mlp = self.mlp.map(|mlp| match mlp {
            FeedForwardConfig::Dense(mlp) | FeedForwardConfig::DenseAndExperts(mlp, _) => {
                FeedForwardConfig::DenseAndExperts(mlp, experts)
            }
            FeedForwardConfig::Experts(_) => FeedForwardConfig::Experts(experts),
        });
    }

    /// The attention of the layer. Latent attention does not count.
    #[must_use]
    pub fn attention(&self) -> Option<&AttentionConfig> {
        self.mixers.iter().find_map(|mixer| match mixer {
            MixerConfig::Attention(attention) => Some(attention),
            _ => None,
        })
    }

    /// The same as [`Self::attention`], mutable.
    pub(super) fn attention_mut(&mut self) -> Option<&mut AttentionConfig> {
        self.mixers.iter_mut().find_map(|mixer| match mixer {
            MixerConfig::Attention(attention) => Some(attention),
            _ => None,
        })
    }

    /// Whether the layer has attention or latent attention.
    #[must_use]
    pub fn has_attention(&self) -> bool {
        self.mixers.iter().any(|mixer| mixer.rotation().is_some())
    }

    /// The rotary embedding of the layer's attention, an index into [`DecoderConfig::ropes`];
    /// `None` if it has none.
    #[must_use]
    pub fn rope(&self) -> Option<usize> {
        self.mixers.iter().find_map(|mixer| mixer.rotation()?.0)
    }

    /// The sliding window of the layer's attention; `None` if it has none.
    #[must_use]
    pub fn sliding_window(&self) -> Option<usize> {
        self.attention().and_then(|attention| attention.sliding_window)
    }

    /// The mixture of experts of the layer, if it has one.
    #[must_use]
    pub fn experts(&self) -> Option<&ExpertsConfig> {
        match &self.mlp {
            Some(
                FeedForwardConfig::Experts(experts)
                | FeedForwardConfig::DenseAndExperts(_, experts),
            ) => Some(experts),
            Some(FeedForwardConfig::Dense(_)) | None => None,
        }
    }

    /// Whether the layer has a mixture of experts.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        self.experts().is_some()
    }

    /// Whether the layer keeps data of each position that later positions need.
    #[must_use]
    pub fn keeps_positions(&self) -> bool {
        self.mixers.iter().any(MixerConfig::keeps_positions)
    }
}

impl DecoderConfig {
    /// The mixers of all layers.
    pub fn mixers(&self) -> impl Iterator<Item = &MixerConfig> {
        self.layers.iter().flat_map(|layer| &layer.mixers)
    }

    /// The first convolution, if there is one.
    #[must_use]
    pub fn convolution(&self) -> Option<&ConvolutionConfig> {
        self.mixers().find_map(|mixer| match mixer {
            MixerConfig::Convolution(convolution) => Some(convolution),
            _ => None,
        })
    }

    /// The first mixture of experts, if there is one.
    #[must_use]
    pub fn experts(&self) -> Option<&ExpertsConfig> {
        self.layers.iter().find_map(LayerConfig::experts)
    }

    /// Index of the last layer that keeps data of each position. The results of later layers are
    /// needed only at positions whose logits or hidden states are requested.
    #[must_use]
    pub fn last_keeping_layer(&self) -> usize {
        self.layers.iter().rposition(LayerConfig::keeps_positions).unwrap_or(0)
    }

    /// For each mixer of each layer, its index among the mixers that keep the same kind of data: keys
    /// and values, inputs of convolutions, or states. Attention that reads the keys and values of
    /// another layer, or of a model, has the index of those.
    #[must_use]
    pub fn kept_indices(&self) -> Vec<Vec<usize>> {
        let [mut keys, mut inputs, mut states] = [(); 3].map(|()| 0..);
        let mut all: Vec<Vec<usize>> = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let kept = layer.mixers.iter().filter_map(|mixer| match mixer {
                MixerConfig::Attention(attention) => match attention.keys_and_values {
                    // Attention is the first mixer of a layer.
                    KeysAndValues::OfLayer(source) => all[source].first().copied(),
                    KeysAndValues::OfModel(kept) => Some(kept),
                    KeysAndValues::Own | KeysAndValues::OneMatrix => keys.next(),
                },
                MixerConfig::Latent(_) => keys.next(),
                MixerConfig::Convolution(_) => inputs.next(),
                MixerConfig::DeltaNet(_) | MixerConfig::Mamba2(_) => states.next(),
            });
            let kept = kept.collect();
            all.push(kept);
        }
        all
    }

    /// Checks all layers, and their relations to each other. `file` is the file's name in error
    /// messages.
    pub(super) fn check_layers(&self, file: &str) -> Result<(), ModelError> {
        let with_experts = self.layers.iter().filter(|layer| layer.has_experts()).count();
        for (index, layer) in self.layers.iter().enumerate() {
            for mixer in &layer.mixers {
                match mixer {
                    MixerConfig::Attention(attention) => {
                        self.check_attention(file, index, attention)?;
                    }
                    MixerConfig::Latent(latent) => latent.check(file, self.layers.len())?,
                    MixerConfig::Convolution(ConvolutionConfig { taps }) => {
                        if !(2..=CONVOLUTION_TAPS_MAX).contains(taps) {
                            let expected = format!("2 to {CONVOLUTION_TAPS_MAX}");
                            return Err(ModelError::key(file, "conv_L_cache", expected, taps));
                        }
                    }
                    MixerConfig::DeltaNet(delta_net) => delta_net.check(file)?,
                    MixerConfig::Mamba2(mamba2) => mamba2.check(file)?,
                }
            }
            let is_known = match &layer.mixers[..] {
                [] => layer.mlp.is_some(),
                [_] | [MixerConfig::Attention(_), MixerConfig::Mamba2(_)] => true,
                _ => false,
            };
            if !is_known {
                let expected = "layers with a mixer, Mamba-2 next to attention, or an MLP";
                return Err(ModelError::unsupported(file, "layer_types", expected, "others"));
            }
            if let Some(mlp) = &layer.mlp {
                mlp.check(file, with_experts)?;
            }
        }
        self.check_states(file)?;
        // The blocks of the KV store must not be empty, because they also store the checkpoints of
        // states.
        if self.layers.iter().any(LayerConfig::has_attention) || self.convolution().is_some() {
            return Ok(());
        }
        let expected = "at least one layer with full_attention";
        Err(ModelError::unsupported(file, "layer_types", expected, "none"))
    }
}
