//! Adds the image encoder to the description of a model.

use std::path::Path;

use serde_json::Value;

use super::{InspectOptions, Inspection};
use crate::config::DecoderConfig;
use crate::load::images;
use crate::memory::packed_bytes;
use crate::weights::Weights;

impl Inspection {
    /// Adds the memory of the model's image encoder, or why it would be refused. `json` is the
    /// content of `config.json` in `directory`.
    pub(super) fn add_images(
        &mut self,
        (directory, json): (&Path, &Value),
        config: &DecoderConfig,
        weights: &Weights,
        options: &InspectOptions,
    ) {
        match images::of_directory(directory, json, config, weights) {
            Ok(Some(images)) => {
                let tensors = images.encoder.tensors().into_iter();
                let bytes = packed_bytes(tensors, weights, options.weight_type);
                if let Some(memory) = &mut self.memory {
                    memory.weights = memory.weights.saturating_add(bytes);
                }
            }
            Ok(None) => {}
            Err(error) => self.refuse(error),
        }
    }
}
