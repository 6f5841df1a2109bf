//! The models that the decoder supports.
//!
//! [`Supported::of`] destructures a configuration, with every field and variant named. A field that
//! is added to a configuration is therefore a compile error here until it is either computed or
//! refused with an error.

use stolon_checkpoint::config::{KeysAndValues, NormKind, NormPlacement, NormsConfig, QkNorm};
use stolon_checkpoint::{
    Activation, AttentionConfig, DecoderConfig, ExpertsConfig, FeedForwardConfig, LayerConfig,
    MixerConfig, MlpConfig, ModelError, QueryScaling,
};

use crate::OpenError;

/// The properties of attention, which must be the same in all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Supported {
    /// Number of query heads.
    pub(crate) heads: usize,
    /// Number of key heads and of value heads.
    pub(crate) kv_heads: usize,
    /// Number of elements of a head.
    pub(crate) head_dim: usize,
    /// Number of leading elements of a head that are rotated.
    pub(crate) rotary_dim: usize,
    /// Whether the norms of queries and keys, if there are any, normalize all heads of a position
    /// together instead of each head.
    pub(crate) norms_positions: bool,
    /// Whether each head has an attention sink.
    pub(crate) sinks: bool,
    /// Factor by which scores are multiplied.
    pub(crate) scale: f32,
    /// Soft cap of the scores; `None` if they are not capped.
    pub(crate) softcap: Option<f32>,
    /// The factor of queries that depends on their position, if the model has one.
    pub(crate) query_scaling: Option<QueryScaling>,
}

impl Supported {
    /// Returns the properties of attention in the layers of `config`.
    ///
    /// # Errors
    /// [`OpenError::Model`] if the decoder does not support the model.
    pub(crate) fn of(config: &DecoderConfig) -> Result<Self, OpenError> {
        let DecoderConfig {
            // Used only in messages.
            architecture: _,
            // Sizes of the weights and of the activations; see `DecoderConfig::weights`.
            vocab_size: _,
            hidden_size: _,
            // Determines which weights exist.
            tie_word_embeddings: _,
            head_bias,
            norms,
            // Used by `layer::add`.
            residual_scale: _,
            per_layer_input,
            layer_scales,
            // Used by `Decoder::embed`.
            embedding_scale: _,
            // Used by `Decoder::output`.
            logit_scale: _,
            logit_softcap: _,
            // Used by `RopeTable`.
            ropes: _,
            max_positions: _,
            layers,
            // Determines the default compute type.
            dtype: _,
        } = config;
        // The numbers are used by `Norm`.
        let NormsConfig {
            placement,
            kind,
            eps: _,
            output_eps: _,
            offset: _,
            plain_final: _,
            embedding,
        } = norms;
        if *embedding {
            return Err(unsupported(
                "model_type",
                config.architecture.name(),
                "a model without a norm of embeddings; other models are computed by the CPU backend",
            ));
        }
        let is_parallel = match placement {
            NormPlacement::Input
            | NormPlacement::Output
            | NormPlacement::InputAndOutput
            | NormPlacement::InputAndOutputOfGlm => false,
            NormPlacement::Parallel => true,
        };
        let is_rms = match kind {
            NormKind::Rms => true,
            NormKind::Layer | NormKind::LayerWithoutBias => false,
        };
        if *head_bias || is_parallel || !is_rms || !layers.iter().all(has_known_parts) {
            return Err(refused(config));
        }
        if *layer_scales || per_layer_input.is_some() {
            return Err(refused_layers(config));
        }
        let mut all = layers.iter().map(|layer| Self::of_layer(config, layer));
        let first = all.next().unwrap_or_else(|| Err(refused_layers(config)))?;
        for other in all {
            if other? != first {
                return Err(refused_layers(config));
            }
        }
        Ok(first)
    }

    /// The properties of the attention of one layer.
    fn of_layer(config: &DecoderConfig, layer: &LayerConfig) -> Result<Self, OpenError> {
        let LayerConfig { mixers, mlp } = layer;
        let attention = match &mixers[..] {
            [MixerConfig::Attention(attention)] => attention,
            []
            | [
                MixerConfig::Attention(_)
                | MixerConfig::Latent(_)
                | MixerConfig::Convolution(_)
                | MixerConfig::DeltaNet(_)
                | MixerConfig::Mamba2(_),
                ..,
            ] => {
                return Err(unsupported(
                    "layer_types",
                    "a layer with a convolution, a recurrent layer, or latent attention",
                    "layers with attention; other layers are computed by the CPU backend",
                ));
            }
        };
        match mlp {
            Some(FeedForwardConfig::Dense(_) | FeedForwardConfig::Experts(_)) => {}
            Some(FeedForwardConfig::DenseAndExperts(..)) | None => {
                return Err(refused_layers(config));
            }
        }
        let AttentionConfig {
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            // Used by `Decoder::compute` and `Decoder::attend`.
            rope: _,
            sliding_window: _,
            keys_and_values,
            // Determine which weights exist.
            qkv_bias: _,
            output_bias: _,
            output_gate,
            qk_norm,
            value_norm,
            // Refused by `has_known_parts`.
            selective: _,
            output_factor: _,
            sinks,
            scale,
            softcap,
            query_scaling,
        } = *attention;
        let has_own = match keys_and_values {
            KeysAndValues::Own => true,
            KeysAndValues::OneMatrix | KeysAndValues::OfLayer(_) => false,
        };
        if !has_own || value_norm {
            return Err(refused_layers(config));
        }
        if output_gate {
            return Err(unsupported(
                "attn_output_gate",
                "a gate of attention's output",
                "attention without gates; these are computed by the CPU backend",
            ));
        }
        let norms_positions = match qk_norm {
            Some(QkNorm::Position) => true,
            Some(QkNorm::Head) | None => false,
            Some(QkNorm::HeadWithoutWeights) => {
                return Err(unsupported(
                    "model_type",
                    config.architecture.name(),
                    "norms of queries and keys with weights; others are computed by the CPU backend",
                ));
            }
        };
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            norms_positions,
            sinks,
            scale,
            softcap,
            query_scaling,
        })
    }
}

/// Whether a layer has neither an MLP without a gate, nor factors of outputs, nor selective
/// attention.
fn has_known_parts(layer: &LayerConfig) -> bool {
    let is_known = |activation: &Activation| match activation {
        Activation::Gated(gate) => gate.factor == 1.0,
        Activation::Plain(_) => false,
    };
    let is_known_mlp = |mlp: &MlpConfig| {
        let MlpConfig { width: _, activation, bias: _, output_factor } = mlp;
        is_known(activation) && *output_factor == 1.0
    };
    let is_known_mixture = |experts: &ExpertsConfig| {
        let ExpertsConfig {
            // Used by `DecoderConfig::weights`, `experts::groups` and `ExpertsConfig::choose`.
            count: _,
            per_token: _,
            width: _,
            activation,
            bias: _,
            scores: _,
            normalized: _,
            router_bias: _,
            groups: _,
            scale: _,
            shared_width: _,
            shared_gate: _,
            scaled_router,
            shifted,
        } = experts;
        is_known(activation) && !scaled_router && !shifted
    };
    let mlp_is_known = match &layer.mlp {
        Some(FeedForwardConfig::Dense(mlp)) => is_known_mlp(mlp),
        Some(FeedForwardConfig::Experts(experts)) => is_known_mixture(experts),
        // Refused by `Supported::of_layer`.
        Some(FeedForwardConfig::DenseAndExperts(..)) | None => true,
    };
    let attention = layer.attention();
    mlp_is_known
        && attention.is_none_or(|attention| !attention.selective && attention.output_factor == 1.0)
}

/// The error for a model with layer norms, parallel layers, MLPs without a gate, factors within
/// layers, selective attention or a bias of the output matrix.
pub(crate) fn refused(config: &DecoderConfig) -> OpenError {
    unsupported(
        "model_type",
        config.architecture.name(),
        "a model with RMS norms, MLPs with gates that follow attention, no factors within layers, \
         and no bias of the output matrix; other models are computed by the CPU backend",
    )
}

/// The error for a model with features that only Gemma 4 has: layers whose sizes differ, layers
/// that share keys and values, norms of values, per-layer embeddings, factors of layers, and
/// experts next to an MLP.
fn refused_layers(config: &DecoderConfig) -> OpenError {
    unsupported(
        "model_type",
        config.architecture.name(),
        "a model whose layers have heads of the same size and their own keys and values, without \
         per-layer embeddings; other models are computed by the CPU backend",
    )
}

fn unsupported(key: &str, got: &str, expected: &str) -> OpenError {
    OpenError::Model(ModelError::Unsupported {
        file: "the configuration".to_owned(),
        key: key.to_owned(),
        got: got.to_owned(),
        expected: expected.to_owned(),
    })
}
