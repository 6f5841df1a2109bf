//! The tensors of a model's own head for multi-token prediction, as those of a decoder with one
//! layer that shares the model's files.
//!
//! | file | layer | last norm | input |
//! |---|---|---|---|
//! | Qwen, safetensors | `mtp.layers.0` | `mtp.norm` | `mtp.fc`, `mtp.pre_fc_norm_*` |
//! | GLM and DeepSeek, safetensors | the next one | `shared_head.norm` | `eh_proj`, `enorm`, `hnorm` |
//! | MiMo, safetensors | `mtp_layers.0` | `final_layernorm` | `input_proj`, `token_`, `hidden_layernorm` |
//! | GGUF | the next one | `nextn.shared_head_norm` | `nextn.eh_proj`, `.enorm`, `.hnorm` |
//!
//! The next layer is the one after those of the model, and the other names are within it.

use super::Weights;
use crate::config::{DecoderConfig, gguf};
use crate::error::ModelError;
use crate::gguf::Header;

impl Weights {
    /// The tensors of the head of a model in safetensors files, whose configuration is `config`.
    /// They have the names of the decoder [`DecoderConfig::mtp_head`] and of
    /// [`DecoderConfig::mtp_weights`]. The embedding and the output matrix are the model's. `None`
    /// if the files have no head.
    pub(crate) fn mtp_head(&self, config: &DecoderConfig) -> Option<Self> {
        let head = config.mtp_head()?;
        let named = self.tensors.iter().filter_map(|(name, stored)| {
            Some((head_name(name, config.layers.len())?, stored.clone()))
        });
        let (origin, regions) = (self.origin.clone(), self.regions.clone());
        let own = Self { origin, regions, tensors: named.collect() };
        own.contains(&head.mtp_weights().projection.weight.name).then_some(own)
    }

    /// As [`mtp_head`](Self::mtp_head) for a model in GGUF files with the header `header`, which
    /// are the first files of these weights. `parts` is as for [`Header::weights`].
    ///
    /// # Errors
    /// [`ModelError::WrongShape`] if stacked experts cannot be divided.
    pub(crate) fn gguf_mtp_head(
        &self,
        header: &Header,
        config: &DecoderConfig,
        parts: impl Fn(&str) -> usize,
    ) -> Result<Option<Self>, ModelError> {
        if !header.has_mtp_head(config) {
            return Ok(None);
        }
        let layer = config.layers.len();
        let norm = format!("blk.{layer}.nextn.shared_head_norm.weight");
        let has_norm = header.tensors.contains_key(&norm);
        let mut own = Self::empty(self.origin.clone());
        own.regions.clone_from(&self.regions);
        let files: Vec<usize> = (0..header.files.len()).collect();
        own.add_gguf_tensors(header, &files, parts, |name| match name {
            // As in llama.cpp, a head without a norm of its own has the model's.
            "output_norm.weight" if has_norm => None,
            _ => gguf::mtp_tensor_name(config.architecture, layer, name),
        })?;
        Ok(Some(own))
    }
}

impl Header {
    /// Whether a model with the configuration `config` has a head in these files.
    fn has_mtp_head(&self, config: &DecoderConfig) -> bool {
        let projection = format!("blk.{}.nextn.eh_proj.weight", config.layers.len());
        config.mtp_head().is_some() && self.tensors.contains_key(&projection)
    }
}

/// The name in the head of the tensor `name` of a model with `layers` layers; `None` if the head
/// does not have it. The layers of further heads become further layers, which are refused later.
fn head_name(name: &str, layers: usize) -> Option<String> {
    if ["model.embed_tokens.", "lm_head."].iter().any(|shared| name.starts_with(shared)) {
        return Some(name.to_owned());
    }
    if let Some(rest) = name.strip_prefix("mtp.") {
        let is_decoder = ["layers.", "norm."].iter().any(|part| rest.starts_with(part));
        return Some(if is_decoder { format!("model.{rest}") } else { name.to_owned() });
    }
    let (index, rest) = match name.strip_prefix("model.mtp_layers.") {
        Some(own) => {
            let (index, rest) = own.split_once('.')?;
            (index.parse::<usize>().ok()?, rest)
        }
        None => {
            let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
            (layer.parse::<usize>().ok()?.checked_sub(layers)?, rest)
        }
    };
    Some(match rest {
        "eh_proj.weight" | "input_proj.weight" if index == 0 => "mtp.fc.weight".to_owned(),
        "enorm.weight" | "token_layernorm.weight" if index == 0 => {
            "mtp.pre_fc_norm_embedding.weight".to_owned()
        }
        "hnorm.weight" | "hidden_layernorm.weight" if index == 0 => {
            "mtp.pre_fc_norm_hidden.weight".to_owned()
        }
        "shared_head.norm.weight" | "final_layernorm.weight" if index == 0 => {
            "model.norm.weight".to_owned()
        }
        // Copies of the model's embedding and output matrix.
        _ if rest.starts_with("embed_tokens.") || rest.starts_with("shared_head.head.") => {
            return None;
        }
        _ => format!("model.layers.{index}.{rest}"),
    })
}
