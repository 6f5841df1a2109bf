//! The demo models, which the feature `demo-model` embeds in the binary.
//!
//! One is a small Llama that answers questions about a handbook in its prompt. The other has the
//! structure of SmolVLM and answers questions about a picture of a few shapes. `stolon-demo-model`
//! embeds their files, which are read in place and never copied.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;
use stolon_demo_model::{Files, TEXT, VISION};
use stolon_text::{TextSource, TokenizerSource};

use crate::config;
use crate::error::ModelError;
use crate::load::model::LoadedModel;
use crate::load::{TextPrompts, directory, generation, images};
use crate::mmap::Bytes;
use crate::weights::Weights;

mod handbook;
mod picture;

pub use handbook::{Handbook, handbook};
pub use picture::{Picture, picture};

/// The name of the demo model.
pub const ID: &str = "stolon-demo";

/// The name of the demo model that reads images.
pub const VISION_ID: &str = "stolon-demo-vision";

/// A question and its correct answer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Question {
    /// The question, which is used as the user's message.
    #[serde(rename = "q")]
    pub question: String,
    /// The exact answer that the model was trained to give.
    #[serde(rename = "a")]
    pub answer: String,
}

/// Loads the demo model.
pub(crate) fn load() -> Result<LoadedModel, ModelError> {
    load_files(ID, &TEXT)
}

/// Loads the demo model that reads images.
pub(crate) fn load_vision() -> Result<LoadedModel, ModelError> {
    load_files(VISION_ID, &VISION)
}

/// Parses an embedded JSON file.
fn json<'a, T: Deserialize<'a>>((file, bytes): (&str, &'a [u8])) -> Result<T, ModelError> {
    serde_json::from_slice(bytes).map_err(|e| ModelError::malformed(file, e))
}

/// Loads the model in the same way as from a directory.
fn load_files(id: &str, files: &Files) -> Result<LoadedModel, ModelError> {
    let config_json: Value = json(files.config)?;
    let config = config::parse_json(files.config.0, &config_json)?;
    let generation: Value = json(files.generation)?;
    let (generation, _) = generation::parse(files.generation.0, Some(&generation), &config)?;
    let (name, bytes) = files.weights;
    let weights = Weights::from_safetensors(name, Bytes::Static(bytes))?;
    weights.check(&config.decoder)?;
    let images = match files.preprocessor {
        None => None,
        Some(file) => {
            let processor: Value = json(file)?;
            let config_json = (files.config.0, &config_json);
            images::of_files(config_json, (file.0, &processor), &config.decoder, &weights)?
        }
    };
    let (file, bytes) = files.tokenizer;
    let tokenizer = TokenizerSource::Json { file: file.into(), bytes: Cow::Borrowed(bytes) };
    let tokenizer_config: Value = json(files.tokenizer_config)?;
    let chat_template = directory::template(&tokenizer_config);
    let text = TextSource {
        tokenizer,
        tokenizer_config: Some(tokenizer_config),
        chat_template,
        named_templates: Vec::new(),
    };
    Ok(LoadedModel {
        id: id.into(),
        config: config.decoder,
        weights,
        text,
        generation,
        embedding: None,
        prompts: TextPrompts::default(),
        tasks: Vec::new(),
        scores: None,
        generates: true,
        images,
        skills: None,
        has_mtp: false,
        mtp: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the embedded files are complete models, and their weights are not copied.
    #[test]
    fn models_load_without_copying() {
        for (model, id) in [(load().unwrap(), ID), (load_vision().unwrap(), VISION_ID)] {
            assert_eq!(model.id, id);
            assert_eq!(model.images.is_some(), id == VISION_ID);
            let mut specs = model.config.tensors();
            specs.extend(model.images.iter().flat_map(|images| images.encoder.tensors()));
            for spec in specs {
                let tensor = model.weights.tensor(&spec.name, &spec.shape).unwrap();
                assert!(matches!(tensor.bytes, Cow::Borrowed(_)), "{}", spec.name);
            }
            assert!(!model.generation.eos_token_ids.is_empty());
            assert!(model.text.chat_template.is_some());
        }
    }
}
