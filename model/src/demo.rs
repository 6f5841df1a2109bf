//! The demo model, which the feature `demo-model` embeds in the binary.
//!
//! It is a small Llama that answers questions about a handbook in its prompt. The embedded files
//! are those of a model directory. They are read in place and never copied.

use std::borrow::Cow;

use serde_json::Value;
use stolon_text::{TextSource, TokenizerSource};

use crate::config;
use crate::error::ModelError;
use crate::load::model::LoadedModel;
use crate::load::{directory, generation};
use crate::mmap::Bytes;
use crate::weights::Weights;

mod handbook;

pub use handbook::{Handbook, Question, handbook};

/// The name of the demo model.
pub const ID: &str = "stolon-demo";

/// An embedded file: its name for error messages, and its content.
macro_rules! file {
    ($name:literal) => {
        (concat!("demo/", $name), include_bytes!(concat!("../demo/", $name)).as_slice())
    };
}

/// Parses an embedded JSON file.
fn json((file, bytes): (&str, &[u8])) -> Result<Value, ModelError> {
    serde_json::from_slice(bytes).map_err(|e| ModelError::malformed(file, e))
}

/// Loads the embedded model.
pub(crate) fn load() -> Result<LoadedModel, ModelError> {
    let config_file = file!("config.json");
    let config = config::parse_json(config_file.0, &json(config_file)?)?;
    let generation_file = file!("generation_config.json");
    let generation = json(generation_file)?;
    let generation = generation::parse(generation_file.0, Some(&generation), &config)?;
    let (name, bytes) = file!("model.safetensors");
    let weights = Weights::from_safetensors(name, Bytes::Static(bytes))?;
    weights.check(&config.decoder)?;
    let (file, bytes) = file!("tokenizer.json");
    let tokenizer = TokenizerSource::Json { file: file.into(), bytes: Cow::Borrowed(bytes) };
    let tokenizer_config = json(file!("tokenizer_config.json"))?;
    let chat_template = directory::template(&tokenizer_config);
    let text = TextSource { tokenizer, tokenizer_config: Some(tokenizer_config), chat_template };
    Ok(LoadedModel {
        id: ID.into(),
        config: config.decoder,
        weights,
        text,
        generation,
        embedding: None,
        generates: true,
        images: None,
        skills: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the embedded files are a complete model, and its weights are not copied.
    #[test]
    fn loads_without_copying() {
        let model = load().unwrap();
        assert_eq!(model.id, ID);
        for spec in model.config.tensors() {
            let tensor = model.weights.tensor(&spec.name, &spec.shape).unwrap();
            assert!(matches!(tensor.bytes, Cow::Borrowed(_)), "{}", spec.name);
        }
        assert!(!model.generation.eos_token_ids.is_empty());
        assert!(model.text.chat_template.is_some());
    }
}
