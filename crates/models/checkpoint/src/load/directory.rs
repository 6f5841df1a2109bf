//! Loads a Hugging Face model directory, or a directory with a GGUF model.

use std::path::{Path, PathBuf};

use serde_json::Value;
use stolon_text::{TextSource, TokenizerSource};

use super::embedding;
use super::encoder::{self, TextPrompts};
use super::model::{GenerationDefaults, LoadedModel, LoadedScores};
use super::{class, generation, head, images, mtp, skills, task_adapters, token_scores};
use crate::config::gguf::EncoderKind;
use crate::config::{self, Architecture, Keys, ParsedConfig};
use crate::error::ModelError;
use crate::files::{self, optional, read_json};
use crate::gguf::split;
use crate::weights::{Weights, safetensors};

pub(crate) const CONFIG: &str = "config.json";
/// The descriptions of the quantization of AutoGPTQ and of older versions of AutoAWQ.
const QUANTIZE_CONFIG: &str = "quantize_config.json";
const QUANT_CONFIG: &str = "quant_config.json";
pub(crate) const GENERATION: &str = "generation_config.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(crate) const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// The directory of additional chat templates, `NAME.jinja`.
pub(crate) const NAMED_TEMPLATES: &str = "additional_chat_templates";
/// Maximum number of additional chat templates.
pub(crate) const NAMED_TEMPLATES_MAX: usize = 32;
pub(crate) const CHAT_TEMPLATE_JSON: &str = "chat_template.json";

/// All files that are read, except the weights.
#[cfg(feature = "hub")]
pub(crate) const SMALL: [&str; 15] = [
    CONFIG,
    QUANTIZE_CONFIG,
    QUANT_CONFIG,
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
    embedding::MODULES,
    embedding::POOLING,
    token_scores::LOGIT_SCORE,
    encoder::PROMPTS,
    encoder::SENTENCE_CONFIG,
    images::PREPROCESSOR,
    images::PROCESSOR,
];

/// Loads the safetensors model in `directory`, and its head for multi-token prediction if `with_mtp`
/// is true and it has one. `id` is the model's name.
pub(super) fn load(
    directory: &Path,
    id: String,
    with_mtp: bool,
) -> Result<LoadedModel, ModelError> {
    let path = directory.join(CONFIG);
    let Some(value) = optional(read_config(directory))? else { return Err(no_config(directory)) };
    let file = path.display().to_string();
    let mut config = config::parse_json(&file, &value)?;
    config.notes.iter().for_each(|note| tracing::warn!("{note}"));
    let embedding = embedding::of_directory(directory, &value, config.decoder.hidden_size)?;
    let generation = generation(directory, &value, &config)?;
    let generation = logged(generation);
    let mut weights = Weights::open_directory(directory)?;
    let head = weights.mtp_head(&config.decoder);
    prepare(&mut weights, &config)?;
    let scores = class::scores(&file, &value, &weights, config.decoder.hidden_size)?;
    let has_no_output = embedding.is_some() || scores.is_some();
    let generates = head::tie_missing(&mut config, &mut weights, has_no_output);
    let generates = generates && scores.is_none();
    let tokens = token_scores::of_directory(directory, &config.decoder)?;
    if let Some(note) = head::untie_different(&mut config, &weights) {
        tracing::warn!("{note}");
    }
    if !has_no_output {
        class::refuse_scores(&file, &value, &weights)?;
    }
    weights.check(&config.decoder)?;
    let scores = match tokens {
        Some(tokens) => Some(LoadedScores::of_tokens(tokens, &config.decoder, &mut weights)?),
        None => scores,
    };
    let images = images::of_directory(directory, &value, &config.decoder, &weights)?;
    let skills = skills::of_config(&Keys::root(&file, &value)?, &config.decoder)?;
    let text = text(directory)?;
    let head = head.filter(|_| generates);
    let head = head.map_or(Ok(None), |head| mtp::of_directory(head, &config));
    let has_mtp = matches!(head, Ok(Some(_)));
    let mtp = if with_mtp { head? } else { None };
    let prompts = match embedding {
        Some(_) => encoder::prompts(directory)?,
        None => TextPrompts::default(),
    };
    let tasks = task_adapters::of_directory(directory, (&file, &value))?;
    let config = config.decoder;
    Ok(LoadedModel {
        id,
        config,
        weights,
        text,
        generation,
        embedding,
        prompts,
        tasks,
        scores,
        generates,
        images,
        skills,
        has_mtp,
        mtp,
    })
}

/// The content of `config.json` in `directory`. If it does not say how the weights are quantized,
/// the files of older tools are read, too.
pub(crate) fn read_config(directory: &Path) -> Result<Value, ModelError> {
    let mut config = read_json(&directory.join(CONFIG))?;
    let says = |config: &Value| {
        let keys = ["quantization_config", "compression_config"];
        let objects = [Some(config), config.get("text_config")];
        objects.into_iter().flatten().any(|object| keys.iter().any(|key| !object[*key].is_null()))
    };
    if !config.is_object() || says(&config) {
        return Ok(config);
    }
    for (name, method) in [(QUANTIZE_CONFIG, "gptq"), (QUANT_CONFIG, "awq")] {
        if let Some(Value::Object(mut members)) = optional(read_json(&directory.join(name)))? {
            for (older, newer) in [("q_group_size", "group_size"), ("w_bit", "bits")] {
                if let Some(value) = members.get(older).cloned() {
                    members.entry(newer).or_insert(value);
                }
            }
            members.entry("quant_method").or_insert(method.into());
            config["quantization_config"] = members.into();
            break;
        }
    }
    Ok(config)
}

/// The generation defaults of the model in `directory`, from `generation_config.json` if it exists,
/// and otherwise from `config`, the content of `config.json`. Also returns notes for users about
/// them.
pub(crate) fn generation(
    directory: &Path,
    config: &Value,
    parsed: &ParsedConfig,
) -> Result<(GenerationDefaults, Vec<String>), ModelError> {
    let path = directory.join(GENERATION);
    let file = optional(read_json(&path))?;
    let path = if file.is_some() { path } else { directory.join(CONFIG) };
    let members = file.or_else(|| generation::of_config(config));
    generation::parse(&path.display().to_string(), members.as_ref(), parsed)
}

/// Logs the notes for users about a part of the model, and returns the part.
pub(super) fn logged<T>((part, notes): (T, Vec<String>)) -> T {
    notes.iter().for_each(|note| tracing::warn!("{note}"));
    part
}

/// Gives the tensors of a directory the names and the form that `config` requires.
pub(crate) fn prepare(weights: &mut Weights, config: &ParsedConfig) -> Result<(), ModelError> {
    dequantize(weights, config)?;
    match config.decoder.architecture {
        Architecture::Moondream2 | Architecture::Moondream3 => {
            weights.name_moondream(&config.decoder)?;
        }
        other if EncoderKind::of(other) == Some(EncoderKind::Qwen3Vl) => weights.name_qwen3_vl()?,
        _ => {}
    }
    omit_prediction(weights, config.decoder.layers.len());
    arrange(weights, config)
}

/// Gives quantized matrices the form in which they are read.
pub(super) fn dequantize(weights: &mut Weights, config: &ParsedConfig) -> Result<(), ModelError> {
    match &config.quantization {
        Some(quantization) => weights.convert(quantization, &config.decoder),
        None => refuse_codes(weights),
    }
}

/// Divides tensors that contain several of the decoder's, and orders their rows.
pub(super) fn arrange(weights: &mut Weights, config: &ParsedConfig) -> Result<(), ModelError> {
    let adjacent = config.decoder.architecture.description().rotation.adjacent;
    weights.arrange(&config.decoder, adjacent)
}

/// Refuses quantized weights without a description of the quantization.
fn refuse_codes(weights: &Weights) -> Result<(), ModelError> {
    let is_code = |name: &&str| name.ends_with(".qweight") || name.ends_with(".weight_packed");
    match weights.names().filter(is_code).min() {
        None => Ok(()),
        Some(name) => {
            let expected = format!(
                "an object, or a file {QUANTIZE_CONFIG} or {QUANT_CONFIG}, because the weights are \
                 quantized (`{name}`)"
            );
            Err(ModelError::key(CONFIG, "quantization_config", expected, "nothing"))
        }
    }
}

/// Removes the tensors for multi-token prediction. DeepSeek-V3 and GLM-4.5 have them in layers
/// after the `layers` layers of the decoder.
fn omit_prediction(weights: &mut Weights, layers: usize) {
    let is_other = |name: &str| {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let layer = layer.and_then(|(layer, _)| layer.parse::<usize>().ok());
        ["mtp.", "model.mtp.", "model.mtp_layers."].iter().any(|prefix| name.starts_with(prefix))
            || layer.is_some_and(|layer| layer >= layers)
    };
    let names: Vec<String> =
        weights.names().filter(|name| is_other(name)).map(str::to_owned).collect();
    if !names.is_empty() {
        tracing::debug!("{} tensors of multi-token prediction are not the decoder's", names.len());
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
    let chat_template = match optional(read_template(&directory.join(CHAT_TEMPLATE)))? {
        Some(template) => Some(template),
        None => {
            let older = optional(read_json(&directory.join(CHAT_TEMPLATE_JSON)))?;
            older
                .as_ref()
                .and_then(template)
                .or_else(|| tokenizer_config.as_ref().and_then(template))
        }
    };
    let named_templates = named_templates(directory)?;
    Ok(TextSource { tokenizer, tokenizer_config, chat_template, named_templates })
}

/// The additional chat templates of the model in `directory`. The name of each file is the name of
/// the template.
fn named_templates(directory: &Path) -> Result<Vec<(String, String)>, ModelError> {
    let Ok(entries) = std::fs::read_dir(directory.join(NAMED_TEMPLATES)) else {
        return Ok(Vec::new());
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|end| end == "jinja")).collect();
    paths.sort_unstable();
    let mut templates = Vec::new();
    for path in paths.into_iter().take(NAMED_TEMPLATES_MAX) {
        let Some(name) = path.file_stem().and_then(|name| name.to_str()) else { continue };
        templates.push((name.to_owned(), read_template(&path)?));
    }
    Ok(templates)
}

/// Reads a file with a chat template.
fn read_template(path: &Path) -> Result<String, ModelError> {
    let bytes = files::read(path, files::TEMPLATE_BYTES_MAX)?;
    String::from_utf8(bytes)
        .map_err(|error| ModelError::malformed(path.display().to_string(), error.utf8_error()))
}

/// The key `chat_template` of a JSON object. Its value is a string or a list of named templates.
/// From a list, the template `default` is used, or the first one if there is no such template.
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

/// The GGUF model in `directory`. `None` if the directory has a configuration with safetensors
/// files.
pub(crate) fn gguf_instead(directory: &Path) -> Result<Option<PathBuf>, ModelError> {
    match directory.join(CONFIG).exists() && has_weights(directory) {
        true => Ok(None),
        false => split::find(directory),
    }
}

/// Whether `directory` has safetensors files of a model.
pub(crate) fn has_weights(directory: &Path) -> bool {
    [safetensors::SINGLE, safetensors::INDEX].iter().any(|name| directory.join(name).exists())
}

/// The error for a directory without `config.json`.
fn no_config(directory: &Path) -> ModelError {
    let expected = format!("{CONFIG} or a .gguf file");
    ModelError::MissingFile { directory: directory.to_owned(), expected }
}
