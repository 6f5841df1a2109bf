//! Draft heads: a layer that guesses tokens from hidden states of the model for which it was trained.
//!
//! A head is described as a decoder with one layer, and by its kind, which says what the layer reads
//! in place of the embedding of a token.

use super::eagle3::Eagle3Config;
use super::{DecoderConfig, DecoderWeights, TensorSpec};
use crate::error::ModelError;

/// The kind of a draft head.
#[derive(Clone, Debug, PartialEq)]
pub enum DraftHeadKind {
    /// The model's own head for multi-token prediction (MTP). It reads the hidden state after the
    /// model's last norm.
    Mtp,
    /// An EAGLE-3 head, which reads the hidden states after several layers.
    Eagle3(Eagle3Config),
}

/// The error for a file that guesses tokens for another model and is not supported, if it is one.
/// `key` of the file has the name of its architecture or class.
pub(super) fn refused(file: &str, key: &str, name: &str) -> Option<ModelError> {
    let lower = name.to_ascii_lowercase();
    let is_eagle = lower.starts_with("eagle") && lower.ends_with("forcausallm")
        || lower.ends_with("forcausallmeagle");
    let reason = match &*lower {
        "eagle3" => "EAGLE-3 heads are read from safetensors files only",
        "gemma4_assistant" | "gemma4-assistant" => {
            "assistants of Gemma 4, which read the keys and values of their model, are not supported"
        }
        _ if is_eagle || ["dflash", "dspark"].iter().any(|kind| lower.contains(kind)) => {
            "heads of EAGLE-1, EAGLE-2, DFlash and DSpark are not supported"
        }
        _ => return None,
    };
    Some(ModelError::unsupported(file, key, format!("a language model; {reason}"), name))
}

impl DraftHeadKind {
    /// The name of the kind in messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mtp => "MTP",
            Self::Eagle3(_) => "EAGLE-3",
        }
    }

    /// The weights of the decoder of a head of this kind.
    #[must_use]
    pub fn decoder_weights(&self, decoder: &DecoderConfig) -> DecoderWeights {
        match self {
            Self::Mtp => decoder.weights(),
            Self::Eagle3(eagle3) => eagle3.decoder_weights(decoder),
        }
    }

    /// The tensors of a head of this kind: those of its decoder, and the others. `is_own` says of the
    /// embedding and of the output matrix, by their names, whether they are the head's own. If not,
    /// they are the model's.
    pub(crate) fn tensors(
        &self,
        decoder: &DecoderConfig,
        is_own: impl Fn(&str) -> bool,
    ) -> Vec<TensorSpec> {
        let weights = self.decoder_weights(decoder);
        let shared = [Some(weights.embedding.clone()), weights.head.clone()];
        let is_shared = |spec: &TensorSpec| shared.iter().flatten().any(|other| other == spec);
        let mut list = weights.tensors();
        list.retain(|spec| !is_shared(spec) || is_own(&spec.name));
        list.extend(match self {
            Self::Mtp => decoder.mtp_weights().tensors().into(),
            Self::Eagle3(eagle3) => eagle3.input_weights(decoder).tensors(),
        });
        list
    }
}
