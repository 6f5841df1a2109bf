//! Draft heads: a layer that guesses tokens from hidden states of the model for which it was trained.
//!
//! A head is described as a decoder with one layer, and by its kind, which says what the layer reads
//! in place of the embedding of a token.

use serde_json::Value;

use super::eagle3::{self, Eagle3Config};
use super::gemma4_assistant::{self, AssistantConfig};
use super::{DecoderConfig, DecoderWeights, TensorSpec};
use crate::error::ModelError;

/// The kinds of heads that are published in separate files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadFiles {
    Eagle3,
    Gemma4,
}

impl HeadFiles {
    /// The kind that a `config.json` describes, if it is one.
    pub(crate) fn of(value: &Value) -> Option<Self> {
        if eagle3::is_eagle3(value) {
            return Some(Self::Eagle3);
        }
        gemma4_assistant::is_assistant(value).then_some(Self::Gemma4)
    }

    /// The name in descriptions of files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Eagle3 => "eagle3",
            Self::Gemma4 => "gemma4_assistant",
        }
    }

    /// The error for a head where a model is expected.
    pub(crate) fn no_model(self, file: &str, value: &Value) -> ModelError {
        let expected = "a language model; a draft head guesses tokens for the model that it was \
                        trained for, as its draft model";
        let class = value["architectures"][0].as_str();
        ModelError::unsupported(file, "architectures", expected, class.unwrap_or(self.name()))
    }
}

/// The kind of a draft head.
#[derive(Clone, Debug, PartialEq)]
pub enum DraftHeadKind {
    /// The model's own head for multi-token prediction (MTP). It reads the hidden state after the
    /// model's last norm.
    Mtp,
    /// An EAGLE-3 head, which reads the hidden states after several layers.
    Eagle3(Eagle3Config),
    /// An assistant of Gemma 4. It reads the hidden state after the model's last norm, and the
    /// model's keys and values.
    Gemma4(AssistantConfig),
}

/// The error for a file that guesses tokens for another model and is not supported, if it is one.
/// `key` of the file has the name of its architecture or class.
pub(super) fn refused(file: &str, key: &str, name: &str) -> Option<ModelError> {
    let lower = name.to_ascii_lowercase();
    let is_eagle = lower.starts_with("eagle") && lower.ends_with("forcausallm")
        || lower.ends_with("forcausallmeagle");
    let reason = match &*lower {
        "eagle3" => "EAGLE-3 heads are read from safetensors files only",
        "gemma4-assistant" => "assistants of Gemma 4 are read from safetensors files only",
        _ if is_eagle || ["dflash", "dspark"].iter().any(|kind| lower.contains(kind)) => {
            "heads of EAGLE-1, EAGLE-2, DFlash and DSpark are not supported"
        }
        _ => return None,
    };
    Some(ModelError::unsupported(file, key, format!("a language model; {reason}"), name))
}

/// Checks that a head was made for its model. `sizes` are keys of the head, their values, and the
/// model's values. `file` is the name of the head's file in error messages.
pub(super) fn check_sizes(file: &str, sizes: [(&str, usize, usize); 2]) -> Result<(), ModelError> {
    match sizes.into_iter().find(|(_, got, expected)| got != expected) {
        Some((key, got, expected)) => {
            Err(ModelError::key(file, key, format!("{expected}, as the model has"), got))
        }
        None => Ok(()),
    }
}

impl DraftHeadKind {
    /// The name of the kind in messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mtp => "MTP",
            Self::Eagle3(_) => "EAGLE-3",
            Self::Gemma4(_) => "Gemma 4 assistant",
        }
    }

    /// Whether the head attends to the model's keys and values and stores none. Such a head reads
    /// hidden states only at positions with logits.
    #[must_use]
    pub fn reads_model_kv(&self) -> bool {
        matches!(self, Self::Gemma4(_))
    }

    /// Number of values of a hidden state that the head reads. `decoder` is the head's.
    #[must_use]
    pub fn state_width(&self, decoder: &DecoderConfig) -> usize {
        match self {
            Self::Mtp | Self::Eagle3(_) => decoder.hidden_size,
            Self::Gemma4(assistant) => assistant.model_width,
        }
    }

    /// The weights of the decoder of a head of this kind.
    #[must_use]
    pub fn decoder_weights(&self, decoder: &DecoderConfig) -> DecoderWeights {
        match self {
            Self::Mtp | Self::Gemma4(_) => decoder.weights(),
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
            Self::Gemma4(assistant) => assistant.own_weights(decoder).tensors(),
        });
        list
    }
}
