//! Parses how a vision model reads images: the configuration of its encoder in `config.json`, and
//! of its processor in `preprocessor_config.json` or `processor_config.json`.

pub(super) mod gemma3;
pub(super) mod idefics3;
mod moondream;
pub(super) mod qwen3_vl;

use std::path::Path;

use serde_json::Value;
use stolon_vision::{ProcessorConfig, Resampling};

use crate::config::{DecoderConfig, Dialect, Keys, TowerConfig, VisionConfig};
use crate::error::ModelError;
use crate::files::{optional, read_json};
use crate::weights::Weights;

pub(crate) const PREPROCESSOR: &str = "preprocessor_config.json";
pub(crate) const PROCESSOR: &str = "processor_config.json";
/// Prefix of the names of the tensors for coordinates and sizes.
const REGIONS: &str = "model.region.";

/// How a model reads images.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageModel {
    /// The configuration of the encoder, whose tensors are among the model's weights.
    pub encoder: VisionConfig,
    /// How pictures are prepared for the encoder.
    pub processor: ProcessorConfig,
}

/// The configurations of a model that say how it reads images.
struct Sources<'a> {
    /// The content of `config.json`.
    config: Keys<'a>,
    /// Its object `vision_config`.
    vision: Keys<'a>,
    /// The configuration of the image processor.
    processor: Keys<'a>,
    decoder: &'a DecoderConfig,
}

/// How the model in `directory` reads images; `None` if it does not, or if its encoder is not
/// supported and it is used only for text. `config` is the content of `config.json`.
///
/// # Errors
/// [`ModelError`] if a file cannot be read, or if a key or a tensor of a supported encoder is
/// invalid.
pub(crate) fn of_directory(
    directory: &Path,
    config: &Value,
    decoder: &DecoderConfig,
    weights: &Weights,
) -> Result<Option<ImageModel>, ModelError> {
    usable(configured(directory, config, decoder)?, weights)
}

/// The same as [`of_directory`] for files in memory: `config.json` and the configuration of the
/// image processor, each with its name.
///
/// # Errors
/// The errors of [`of_directory`].
#[cfg(feature = "demo-model")]
pub(crate) fn of_files(
    config: (&str, &Value),
    processor: (&str, &Value),
    decoder: &DecoderConfig,
    weights: &Weights,
) -> Result<Option<ImageModel>, ModelError> {
    usable(of_json(config, processor, decoder)?, weights)
}

/// The same as [`of_directory`], without checking the weights.
fn configured(
    directory: &Path,
    config: &Value,
    decoder: &DecoderConfig,
) -> Result<Option<ImageModel>, ModelError> {
    let file = directory.join(super::directory::CONFIG).display().to_string();
    match processor(directory)? {
        Some((other, value)) => of_json((&file, config), (&other, &value), decoder),
        // Moondream has no configuration of a processor.
        None if decoder.architecture.description().dialect == Dialect::Moondream => {
            of_json((&file, config), (&file, config), decoder)
        }
        None => Ok(None),
    }
}

/// How a model reads images, from the content of `config.json` and the configuration of the image
/// processor, each with the name of its file.
///
/// # Errors
/// The errors of [`of_directory`].
pub(crate) fn of_json(
    (file, config): (&str, &Value),
    (processor_file, processor): (&str, &Value),
    decoder: &DecoderConfig,
) -> Result<Option<ImageModel>, ModelError> {
    let config = Keys::root(file, config)?;
    if decoder.architecture.description().dialect == Dialect::Moondream {
        return moondream::parse(&config, decoder).map(Some);
    }
    let Some(parse) = config.text("model_type")?.and_then(parser) else { return Ok(None) };
    let Some(vision) = config.object("vision_config")? else { return Ok(None) };
    let processor = Keys::root(processor_file, processor)?;
    match parse(&Sources { config, vision, processor, decoder }) {
        Ok(model) => Ok(Some(model)),
        Err(error @ ModelError::Unsupported { .. }) => {
            tracing::info!("the model reads no images: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns `images` if the weights have an encoder whose tensors have supported types.
fn usable(images: Option<ImageModel>, weights: &Weights) -> Result<Option<ImageModel>, ModelError> {
    let Some(mut images) = images else { return Ok(None) };
    if !weights.has_encoder(&images.encoder) {
        tracing::info!("the model reads no images: its files have the decoder only");
        return Ok(None);
    }
    if images.encoder.regions.is_some() && !weights.names().any(|n| n.starts_with(REGIONS)) {
        tracing::info!("the model finds nothing in images: its files have no weights for that");
        images.encoder.regions = None;
    }
    match weights.check_encoder(&images.encoder) {
        Ok(()) => Ok(Some(images)),
        Err(error @ ModelError::WrongType { .. }) => {
            tracing::info!("the model reads no images: {error}");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

type Parser = fn(&Sources<'_>) -> Result<ImageModel, ModelError>;

/// The parser of configurations with this `model_type`, if it is supported.
fn parser(model_type: &str) -> Option<Parser> {
    match model_type {
        "idefics3" | "smolvlm" => Some(idefics3::parse),
        "gemma3" => Some(gemma3::parse),
        "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe" => Some(qwen3_vl::parse),
        _ => None,
    }
}

/// The configuration of the image processor and the name of its file.
fn processor(directory: &Path) -> Result<Option<(String, Value)>, ModelError> {
    let path = directory.join(PREPROCESSOR);
    if let Some(value) = optional(read_json(&path))? {
        return Ok(Some((path.display().to_string(), value)));
    }
    // Since version 5, transformers has the configurations of all processors in one file.
    let path = directory.join(PROCESSOR);
    let value = optional(read_json(&path))?;
    let object = value.and_then(|mut value| value.get_mut("image_processor").map(Value::take));
    Ok(object.filter(Value::is_object).map(|object| (path.display().to_string(), object)))
}

impl Sources<'_> {
    /// Parses the configuration of the tower. `default` has the values of missing keys.
    fn tower(&self, default: TowerConfig) -> Result<TowerConfig, ModelError> {
        let size =
            |key: &str, default: usize| self.vision.size(key).map(|given| given.unwrap_or(default));
        Ok(TowerConfig {
            prefix: default.prefix,
            hidden_size: size("hidden_size", default.hidden_size)?,
            intermediate_size: size("intermediate_size", default.intermediate_size)?,
            layers: size("num_hidden_layers", default.layers)?,
            heads: size("num_attention_heads", default.heads)?,
            patch_size: size("patch_size", default.patch_size)?,
            frames: default.frames,
            image_size: size("image_size", default.image_size)?,
            positions: default.positions,
            norm_eps: self.vision.positive_f32("layer_norm_eps")?.unwrap_or(default.norm_eps),
        })
    }

    /// The mean and the standard deviation of each channel. Both are 0.5 by default, because no
    /// supported model uses the values of ImageNet.
    fn normalization(&self) -> Result<([f32; 3], [f32; 3]), ModelError> {
        let keys = &self.processor;
        for key in ["do_rescale", "do_normalize"] {
            if keys.flag(key)? == Some(false) {
                return Err(keys.unsupported(key, "true"));
            }
        }
        let factor = keys.positive("rescale_factor")?.unwrap_or(1.0 / 255.0);
        if (factor * 255.0 - 1.0).abs() > 1e-3 {
            return Err(keys.unsupported("rescale_factor", "1/255"));
        }
        let channels = |key: &str| match keys.numbers(key)?.as_deref() {
            None => Ok([0.5; 3]),
            Some([r, g, b]) => Ok([*r, *g, *b]),
            Some(_) => Err(keys.invalid(key, "3 numbers")),
        };
        Ok((channels("image_mean")?, channels("image_std")?))
    }

    /// The filter for resizing.
    fn resampling(&self, default: Resampling) -> Result<Resampling, ModelError> {
        match self.processor.count("resample")? {
            None => Ok(default),
            Some(number) => Resampling::from_pillow(number as u64)
                .ok_or_else(|| self.processor.unsupported("resample", "1, 2 or 3")),
        }
    }

    /// The entry `member` of the object `key` in the processor's configuration.
    fn size_in(&self, key: &str, member: &str) -> Result<Option<usize>, ModelError> {
        match self.processor.object(key)? {
            Some(object) => object.size(member),
            None => Ok(None),
        }
    }

    /// Refuses a tower with an activation other than GELU in its tanh approximation.
    fn refuse_activations(&self) -> Result<(), ModelError> {
        match self.vision.text("hidden_act")? {
            None | Some("gelu_pytorch_tanh") => Ok(()),
            Some(_) => Err(self.vision.unsupported("hidden_act", "gelu_pytorch_tanh")),
        }
    }

    /// The id of the image token, from the first of these keys that is present.
    fn image_token(&self, keys: [&str; 2]) -> Result<u32, ModelError> {
        for key in keys {
            if let Some(id) = self.config.token_ids(key)?.and_then(|ids| ids.first().copied()) {
                let is_valid = (id as usize) < self.decoder.vocab_size;
                let expected = format!("an id below vocab_size, {}", self.decoder.vocab_size);
                return is_valid.then_some(id).ok_or_else(|| self.config.invalid(key, &expected));
            }
        }
        Err(self.config.invalid(keys[0], "the id of a token"))
    }

    /// Checks that the encoder can process tiles of `edge` x `edge` pixels, and returns their
    /// number of embeddings. `key` is the key of the edge in the processor's configuration.
    fn rows_of_tile(
        &self,
        encoder: &VisionConfig,
        key: &str,
        edge: usize,
    ) -> Result<usize, ModelError> {
        encoder.check(self.config.file)?;
        encoder.rows_of([edge, edge]).map_err(|expected| self.processor.invalid(key, &expected))
    }
}
