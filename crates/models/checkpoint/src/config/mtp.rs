//! The model's own head for multi-token prediction (MTP): a layer that computes from the hidden
//! state of a position and the token after it which token follows that one.
//!
//! It is described as a decoder with one layer, whose input is
//! `projection([norm(embedding of the token), norm(hidden state)])`. The embedding and the output
//! matrix are the model's. [`MtpInput`] says which hidden state it is.

use super::tensors::LinearWeights;
use super::{DecoderConfig, LayerConfig, MixerConfig, NormWeights, TensorRole, TensorSpec};

/// What the head of an architecture reads, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MtpInput {
    /// The token, and the hidden state after the model's last norm.
    TokenFirst,
    /// The hidden state before the model's last norm, and the token (MiMo).
    StateFirst,
}

/// The weights that join a token and the hidden state of the position before it.
#[derive(Clone, Debug, PartialEq)]
pub struct MtpWeights {
    /// The order of the columns of the projection, and which hidden state is read.
    pub input: MtpInput,
    /// The norm of the token's embedding, `[hidden_size]`.
    pub embedding_norm: NormWeights,
    /// The norm of the hidden state, `[hidden_size]`.
    pub hidden_norm: NormWeights,
    /// The projection to the residual stream, `[hidden_size, 2 * hidden_size]`.
    pub projection: LinearWeights,
}

impl DecoderConfig {
    /// The head for multi-token prediction of a model with this configuration, as a decoder with
    /// one layer; `None` if models of the architecture have none. Whether the files have one, the
    /// tensors tell.
    #[must_use]
    pub fn mtp_head(&self) -> Option<DecoderConfig> {
        use MixerConfig::{Attention, Latent};
        let is_attention =
            |layer: &&LayerConfig| matches!(layer.mixers[..], [Attention(_) | Latent(_)]);
        let layer = self.layers.iter().rev().find(is_attention);
        let layer = layer.filter(|_| self.architecture.description().mtp.is_some())?;
        Some(DecoderConfig { layers: vec![layer.clone()], ..self.clone() })
    }

    /// The weights of the input of a head with this configuration, which
    /// [`mtp_head`](Self::mtp_head) has returned.
    #[must_use]
    pub fn mtp_weights(&self) -> MtpWeights {
        let weight = TensorSpec {
            name: "mtp.fc.weight".to_owned(),
            shape: vec![self.hidden_size, 2 * self.hidden_size],
            role: TensorRole::Matrix,
        };
        MtpWeights {
            input: self.architecture.description().mtp.unwrap_or(MtpInput::TokenFirst),
            embedding_norm: self.residual_norm("mtp.pre_fc_norm_embedding"),
            hidden_norm: self.residual_norm("mtp.pre_fc_norm_hidden"),
            projection: LinearWeights { weight, bias: None },
        }
    }
}

impl MtpWeights {
    /// All tensors.
    #[must_use]
    pub fn tensors(&self) -> [TensorSpec; 3] {
        let Self { input: _, embedding_norm, hidden_norm, projection } = self;
        [&embedding_norm.weight, &hidden_norm.weight, &projection.weight].map(TensorSpec::clone)
    }
}
