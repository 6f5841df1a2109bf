//! Adds the image encoder to the description of a model.

use std::path::Path;

use serde_json::Value;

use super::{InspectOptions, Inspection};
use crate::config::{DecoderConfig, VisionConfig};
use crate::load::{images, mmproj};
use crate::memory::packed_bytes;
use crate::weights::Weights;

impl Inspection {
    /// Adds the memory of the model's image encoder, or the reason why it would be refused. `json`
    /// is the content of `config.json` in `directory`.
    pub(super) fn add_images(
        &mut self,
        (directory, json): (&Path, &Value),
        config: &DecoderConfig,
        weights: &Weights,
        options: &InspectOptions,
    ) {
        let images = images::of_directory(directory, json, config, weights);
        let has_encoder = !matches!(images, Ok(None));
        match images {
            Ok(Some(images)) => self.add_encoder(&images.encoder, weights, options),
            Ok(None) => {}
            Err(error) => self.refuse(error),
        }
        if options.load.mmproj.is_some()
            && let Err(error) = mmproj::check(config, has_encoder)
        {
            self.refuse(error);
        }
    }

    /// If a file with an encoder was given, adds the memory that the encoder needs, or the reason
    /// why it would be refused. If the data of the tokenizer cannot be read, the model has been
    /// refused already.
    pub(super) fn add_mmproj(
        &mut self,
        config: &DecoderConfig,
        weights: &mut Weights,
        options: &InspectOptions,
    ) {
        let (Some(path), Some(text)) = (&options.load.mmproj, &self.text) else { return };
        let images = mmproj::check(config, false)
            .and_then(|kind| mmproj::read(path, kind, config, weights, text));
        match images {
            Ok(images) => self.add_encoder(&images.encoder, weights, options),
            Err(error) => self.refuse(error),
        }
    }

    fn add_encoder(&mut self, encoder: &VisionConfig, weights: &Weights, options: &InspectOptions) {
        let bytes = packed_bytes(encoder.tensors().into_iter(), weights, options.weight_type);
        if let Some(memory) = &mut self.memory {
            memory.weights = memory.weights.saturating_add(bytes);
        }
    }
}
