//! Loads a Hugging Face model directory, or a directory with a GGUF model.

use std::path::{Path, PathBuf};

use serde_json::Value;
use stolon_text::{TextSource, TokenizerSource};

use super::embedding::{self, EmbeddingConfig};
use super::model::LoadedModel;
use super::{generation, images, skills};
use crate::config::gguf::EncoderKind;
use crate::config::{self, Architecture, Keys, ParsedConfig};
use crate::error::ModelError;
use crate::files::{self, optional, read_json};
use crate::gguf::split;
use crate::weights::{Weights, safetensors};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const GENERATION: &str = "generation_config.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(crate) const CHAT_TEMPLATE: &str = "chat_template.jinja";
pub(crate) const CHAT_TEMPLATE_JSON: &str = "chat_template.json";

/// All files that are read, except the weights.
#[cfg(feature = "hub")]
pub(crate) const SMALL: [&str; 10] = [
    CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
    embedding::MODULES,
    embedding::POOLING,
    images::PREPROCESSOR,
    images::PROCESSOR,
];

/// Loads the safetensors model in `directory`. `id` is the model's name.
pub(super) fn load(directory: &Path, id: String) -> Result<LoadedModel, ModelError> {
    let path = directory.join(CONFIG);
    let Some(value) = optional(read_json(&path))? else { return Err(no_config(directory)) };
    let mut config = config::parse_json(&path.display().to_string(), &value)?;
    let embedding = embedding::of_directory(directory, &value, config.decoder.hidden_size)?;
    let path = directory.join(GENERATION);
    let generation = optional(read_json(&path))?;
    let generation = generation::parse(&path.display().to_string(), generation.as_ref(), &config)?;
    let mut weights = Weights::open_directory(directory)?;
    prepare(&mut weights, &config)?;
    let generates = tie_missing_head(&mut config, &weights, embedding.as_ref());
    weights.check(&config.decoder)?;
    let images = images::of_directory(directory, &value, &config.decoder, &weights)?;
    let file = directory.join(CONFIG).display().to_string();
    let skills = skills::of_config(&Keys::root(&file, &value)?, &config.decoder)?;
    let text = text(directory)?;
    let config = config.decoder;
    Ok(LoadedModel { id, config, weights, text, generation, embedding, generates, images, skills })
}

/// Models for embeddings may have no output matrix, although it is not tied to the embedding
/// (Qwen3-Embedding-8B). The decoder then uses the embedding in its place, whose logits have no
/// meaning. Returns whether the model generates text.
pub(crate) fn tie_missing_head(
    config: &mut ParsedConfig,
    weights: &Weights,
    embedding: Option<&EmbeddingConfig>,
) -> bool {
    let tied = &mut config.decoder.tie_word_embeddings;
    let is_missing = embedding.is_some() && !*tied && !weights.contains("lm_head.weight");
    *tied |= is_missing;
    !is_missing
}

/// Gives the tensors of a directory the names and the form that `config` requires.
pub(crate) fn prepare(weights: &mut Weights, config: &ParsedConfig) -> Result<(), ModelError> {
    if let Some(quantization) = &config.quantization {
        weights.convert(quantization, &config.decoder)?;
    }
    match config.decoder.architecture {
        Architecture::Moondream2 | Architecture::Moondream3 => {
            weights.name_moondream(&config.decoder)?;
        }
        other if EncoderKind::of(other) == Some(EncoderKind::Qwen3Vl) => weights.name_qwen3_vl()?,
        _ => {}
    }
    omit_prediction(weights, config.decoder.layers.len());
    let adjacent = config.decoder.architecture.description().rotation.adjacent;
    weights.arrange(&config.decoder, adjacent)
}

/// Removes the tensors of multi-token prediction, which compute several tokens at once. DeepSeek-V3
/// and GLM-4.5 have them in layers after the `layers` of the decoder.
fn omit_prediction(weights: &mut Weights, layers: usize) {
    let is_other = |name: &str| {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let layer = layer.and_then(|(layer, _)| layer.parse::<usize>().ok());
        ["mtp.", "model.mtp."].iter().any(|prefix| name.starts_with(prefix))
            || layer.is_some_and(|layer| layer >= layers)
    };
    let names: Vec<String> =
        weights.names().filter(|name| is_other(name)).map(str::to_owned).collect();
    if !names.is_empty() {
        tracing::info!("{} tensors of multi-token prediction are not used", names.len());
    }
    names.iter().for_each(|name| weights.remove(name));
}

/// Reads the files of the tokenizer and the chat template in `directory`.
pub(crate) fn text(directory: &Path) -> Result<TextSource, ModelError> {
    let path = directory.join(TOKENIZER);
    let tokenizer = match optional(files::read(&path, files::TOKENIZER_BYTES_MAX))? {
        Some(bytes) => {
            TokenizerSource::Json { file: path.display().to_string(), bytes: bytes.into() }
        }
        None => TokenizerSource::Missing { directory: directory.to_owned() },
    };
    let tokenizer_config = optional(read_json(&directory.join(TOKENIZER_CONFIG)))?;
    let path = directory.join(CHAT_TEMPLATE);
    let chat_template = match optional(files::read(&path, files::TEMPLATE_BYTES_MAX))? {
        Some(bytes) => Some(String::from_utf8(bytes).map_err(|error| {
            ModelError::malformed(path.display().to_string(), error.utf8_error())
        })?),
        None => {
            let older = optional(read_json(&directory.join(CHAT_TEMPLATE_JSON)))?;
            older
                .as_ref()
                .and_then(template)
                .or_else(|| tokenizer_config.as_ref().and_then(template))
        }
    };
    Ok(TextSource { tokenizer, tokenizer_config, chat_template })
}

/// The key `chat_template` of a JSON object. Its value is a string or a list of named templates. In
/// a list, the template `default` is used, or else the first one.
pub(crate) fn template(object: &Value) -> Option<String> {
    match object.get("chat_template")? {
        Value::String(template) => Some(template.clone()),
        Value::Array(list) => {
            let named =
                |entry: &&Value| entry.get("name").and_then(Value::as_str) == Some("default");
            let entry = list.iter().find(named).or_else(|| list.first())?;
            entry.get("template").and_then(Value::as_str).map(str::to_owned)
        }
        _ => None,
    }
}

/// The GGUF model in `directory`, unless the directory has a configuration with safetensors files.
pub(crate) fn gguf_instead(directory: &Path) -> Result<Option<PathBuf>, ModelError> {
    let has = |name: &str| directory.join(name).exists();
    match has(CONFIG) && (has(safetensors::SINGLE) || has(safetensors::INDEX)) {
        true => Ok(None),
        false => split::find(directory),
    }
}

/// The error for a directory without `config.json`.
fn no_config(directory: &Path) -> ModelError {
    let expected = format!("{CONFIG} or a .gguf file");
    ModelError::MissingFile { directory: directory.to_owned(), expected }
}
