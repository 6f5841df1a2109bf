//! Loads the head for multi-token prediction of a model.

use super::directory;
use super::draft_head::DraftHead;
use crate::config::{self, DecoderConfig, DraftHeadKind, ParsedConfig};
use crate::error::ModelError;
use crate::gguf::Header;
use crate::weights::Weights;

/// The error for a model without a head that is supported.
pub(crate) fn no_head(id: &str) -> ModelError {
    ModelError::InvalidOption {
        name: "mtp".to_owned(),
        expected:
            "a model whose files have a head for multi-token prediction (Qwen3-Next, Qwen3.5, \
                   Qwen3.6, GLM-4.5 to 4.7, DeepSeek-V3 or MiMo-7B; GGUF files have tensors `nextn.*`)"
                .to_owned(),
        got: format!("`{id}`, which has none"),
    }
}

/// The head with the tensors `weights` ([`Weights::mtp_head`]) of a model in safetensors files,
/// whose configuration is `config`.
pub(crate) fn of_directory(
    mut weights: Weights,
    config: &ParsedConfig,
) -> Result<Option<DraftHead>, ModelError> {
    let Some(head) = config.decoder.mtp_head() else { return Ok(None) };
    let is_qwen = config.decoder.delta_net().is_some();
    let config = ParsedConfig { decoder: head, ..config.clone() };
    directory::dequantize(&mut weights, &config)?;
    directory::arrange(&mut weights, &config)?;
    if weights.names().any(|name| name.starts_with("model.layers.1.")) {
        let key = if is_qwen { "mtp_num_hidden_layers" } else { "num_nextn_predict_layers" };
        let file = format!("{}/{}", weights.origin(), directory::CONFIG);
        return Err(ModelError::unsupported(&file, key, "1 with `mtp`", "more"));
    }
    checked(config.decoder, weights).map(Some)
}

/// The head of a model in GGUF files. `weights` are the model's, and `config` is its configuration.
/// `None` if the files have none.
pub(crate) fn of_gguf(
    header: &Header,
    config: &DecoderConfig,
    weights: &Weights,
) -> Result<Option<DraftHead>, ModelError> {
    let Some(head) = config.mtp_head() else { return Ok(None) };
    let parts = |name: &str| super::gguf::parts(&head, name);
    let Some(mut own) = weights.gguf_mtp_head(header, config, parts)? else { return Ok(None) };
    config::gguf::check_one_mtp_layer(header)?;
    own.arrange(&head, head.architecture.description().gguf.adjacent)?;
    checked(head, own).map(Some)
}

/// A head all of whose tensors were found.
fn checked(config: DecoderConfig, weights: Weights) -> Result<DraftHead, ModelError> {
    weights.check(&config)?;
    weights.check_all(config.mtp_weights().tensors())?;
    let kind = DraftHeadKind::Mtp;
    Ok(DraftHead { config, kind, weights, token_ids: None, cluster_tokens: None })
}
