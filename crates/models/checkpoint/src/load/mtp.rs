//! Loads the head for multi-token prediction of a model in safetensors files.

use std::path::Path;

use super::directory;
use crate::config::{DecoderConfig, ParsedConfig};
use crate::error::ModelError;
use crate::weights::Weights;

/// A model's own head for multi-token prediction.
#[derive(Debug)]
pub struct MtpHead {
    /// The head as a decoder with one layer. [`DecoderConfig::mtp_weights`] describes its input.
    pub config: DecoderConfig,
    /// The tensors of the head. The embedding and the output matrix are the model's.
    pub weights: Weights,
}

/// The error for a model without a head that is supported.
pub(crate) fn no_head(id: &str) -> ModelError {
    ModelError::InvalidOption {
        name: "mtp".to_owned(),
        expected: "a model in safetensors files with a head for multi-token prediction (tensors \
                   `mtp.*` of Qwen3-Next, Qwen3.5 and Qwen3.6)"
            .to_owned(),
        got: format!("`{id}`, which has none"),
    }
}

/// Reads the head of the model in `directory`, whose configuration is `config`; `None` if it has
/// none.
pub(crate) fn load(directory: &Path, config: &ParsedConfig) -> Result<Option<MtpHead>, ModelError> {
    let Some(head) = config.decoder.mtp_head() else { return Ok(None) };
    let config = ParsedConfig { decoder: head, ..config.clone() };
    let mut weights = Weights::open_mtp(directory)?;
    let inputs = config.decoder.mtp_weights();
    if !weights.contains(&inputs.projection.weight.name) {
        return Ok(None);
    }
    directory::dequantize(&mut weights, &config)?;
    directory::arrange(&mut weights, &config)?;
    if weights.names().any(|name| name.starts_with("model.layers.1.")) {
        let file = directory.join(directory::CONFIG).display().to_string();
        return Err(ModelError::unsupported(
            &file,
            "mtp_num_hidden_layers",
            "1 with `mtp`",
            "more",
        ));
    }
    weights.check(&config.decoder)?;
    weights.check_all(inputs.tensors())?;
    Ok(Some(MtpHead { config: config.decoder, weights }))
}
