//! Loads a model from a [`ModelSource`].
//!
//! The result is plain data. A backend is created from the configuration and the weights, and the
//! tokenizer and chat templates from [`TextSource`](stolon_text::TextSource). No file is opened
//! again afterwards.

pub(crate) mod class;
pub(crate) mod directory;
pub(crate) mod draft_head;
pub(crate) mod eagle3;
pub(crate) mod embedding;
pub(crate) mod encoder;
pub(crate) mod gemma4_assistant;
pub(crate) mod generation;
pub(crate) mod gguf;
pub(crate) mod head;
pub(crate) mod images;
pub(crate) mod mmproj;
pub(crate) mod model;
pub(crate) mod mtp;
pub(crate) mod skills;
pub(crate) mod suppressed;
pub(crate) mod task_adapters;
pub(crate) mod token_scores;

pub use draft_head::{DraftHead, load_draft_head};
pub use embedding::{EmbeddingConfig, EmbeddingSizes};
pub use encoder::{EncoderTask, LoadedEncoder, TextPrompts};
pub use gguf::read_gguf_tokenizer;
pub use images::ImageModel;
pub use model::{GenerationDefaults, LoadedModel, LoadedScores, PairForm};
pub use skills::{PromptParts, ReasoningTokens, SkillPrompts};
pub use suppressed::SuppressedTokens;
pub use token_scores::ScoreTokens;

use std::path::{Path, PathBuf};

use crate::config::HeadFiles;
use crate::encoder::EncoderFamily;
use crate::error::ModelError;
use crate::files::optional;
#[cfg(feature = "hub")]
use crate::hub::{self, HubOptions};
use crate::source::ModelSource;

/// Options for loading a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Address, token and cache of the hub. The default is read from the environment.
    #[cfg(feature = "hub")]
    pub hub: HubOptions,
    /// Replaces entries about sampling in the model's `generation_config.json`.
    pub generation: Option<serde_json::Value>,
    /// The file with the image encoder of a GGUF model (`mmproj`), for Gemma 3,
    /// SmolVLM, Idefics 3, Qwen3-VL and Qwen3.5.
    pub mmproj: Option<PathBuf>,
    /// Maximum number of positions that will be used, if it is less than the model's maximum.
    /// LongRoPE has different factors for short contexts.
    pub max_positions: Option<usize>,
    /// Whether the model's own head for multi-token prediction is loaded, too. A model without one
    /// is then refused.
    pub mtp: bool,
}

/// The name of [`LoadOptions::generation`] in errors.
const OVERRIDE: &str = "override_generation_config";

/// Loads a model: reads its configuration, maps its weights, and checks that every tensor that the
/// configuration requires is present with the right shape and a supported type.
///
/// Blocks the calling thread on disk access, and for [`ModelSource::Hub`] on the network.
///
/// # Errors
/// [`ModelError`]. Its message names the file and the key or tensor in it.
pub fn load(source: &ModelSource, options: &LoadOptions) -> Result<LoadedModel, ModelError> {
    match load_any(source, options)? {
        AnyModel::Decoder(model) => Ok(*model),
        AnyModel::Encoder(encoder) => Err(no_decoder(encoder.config.family)),
    }
}

/// The error for a text encoder where a language model is expected.
pub(crate) fn no_decoder(family: EncoderFamily) -> ModelError {
    let expected = "a language model; a text encoder can be served, but has no decoder";
    ModelError::unsupported(directory::CONFIG, "model_type", expected, family.name())
}

/// A model that was loaded, of any kind.
#[derive(Debug)]
pub enum AnyModel {
    /// A decoder: a language model, perhaps with an image encoder.
    Decoder(Box<LoadedModel>),
    /// A text encoder.
    Encoder(Box<LoadedEncoder>),
}

/// As [`load`], for models that generate text and for text encoders.
///
/// # Errors
/// As [`load`].
pub fn load_any(source: &ModelSource, options: &LoadOptions) -> Result<AnyModel, ModelError> {
    let mut model = match read(source, options)? {
        AnyModel::Decoder(model) => model,
        AnyModel::Encoder(mut encoder) => {
            if options.mmproj.is_some() {
                return Err(ModelError::option("mmproj", "none for a text encoder", "a file"));
            }
            if options.mtp {
                return Err(mtp::no_head(&encoder.id));
            }
            let most = options.max_positions.unwrap_or(usize::MAX);
            encoder.config.max_positions = encoder.config.max_positions.min(most).max(1);
            return Ok(AnyModel::Encoder(encoder));
        }
    };
    for note in model.config.limit_context(options.max_positions) {
        tracing::info!("{note}");
    }
    if options.mtp && model.mtp.is_none() {
        return Err(mtp::no_head(&model.id));
    }
    if let Some(path) = &options.mmproj {
        mmproj::add(&mut model, path)?;
    }
    if let Some(value) = &options.generation {
        let vocab_size = model.config.vocab_size;
        generation::replace(&mut model.generation, OVERRIDE, value, vocab_size)?;
    }
    Ok(AnyModel::Decoder(model))
}

/// The same model in files on this machine: downloads the missing files of a model on the hub. A
/// caller that looks at the files before it loads them thus asks the hub only once.
///
/// # Errors
/// [`ModelError::Hub`] with the hub's answer.
#[cfg_attr(not(feature = "hub"), allow(unused_variables, reason = "the options are the hub's"))]
pub fn fetched(source: &ModelSource, options: &LoadOptions) -> Result<ModelSource, ModelError> {
    #[cfg(feature = "hub")]
    if let ModelSource::Hub { id, revision, file } = source {
        let path = hub::fetch(id, revision, file.as_deref(), &options.hub)?;
        return Ok(path.as_path().into());
    }
    Ok(source.clone())
}

#[cfg_attr(
    not(feature = "hub"),
    allow(unused_variables, reason = "the other options are the hub's")
)]
fn read(source: &ModelSource, options: &LoadOptions) -> Result<AnyModel, ModelError> {
    let decoder = |model: Result<LoadedModel, ModelError>| {
        model.map(|model| AnyModel::Decoder(Box::new(model)))
    };
    match source {
        ModelSource::Directory(path) => from_directory(path, file_name(path), options),
        ModelSource::Gguf(path) => gguf::load(path, file_name(path), options.mtp),
        #[cfg(feature = "hub")]
        ModelSource::Hub { id, revision, file } => {
            let path = hub::fetch(id, revision, file.as_deref(), &options.hub)?;
            match path.is_dir() {
                true => from_directory(&path, id.clone(), options),
                false => gguf::load(&path, id.clone(), options.mtp),
            }
        }
        #[cfg(not(feature = "hub"))]
        ModelSource::Hub { .. } => Err(ModelError::UnknownSource {
            given: source.to_string(),
            reason: "it looks like a hub id, but this build cannot download (feature `hub`)".into(),
        }),
        #[cfg(feature = "demo-model")]
        ModelSource::Demo => decoder(crate::demo::load()),
        #[cfg(feature = "demo-model")]
        ModelSource::DemoVision => decoder(crate::demo::load_vision()),
        ModelSource::Random { preset, seed } => decoder(crate::random::load(preset, *seed)),
    }
}

/// Loads the model in `directory` with the name `id`, from its GGUF file or its safetensors files.
fn from_directory(
    directory: &Path,
    id: String,
    options: &LoadOptions,
) -> Result<AnyModel, ModelError> {
    let io = |error| ModelError::Io { path: directory.to_owned(), error };
    if !std::fs::metadata(directory).map_err(io)?.is_dir() {
        return Err(io(std::io::Error::other("expected a directory")));
    }
    if let Some(path) = directory::gguf_instead(directory)? {
        return gguf::load(&path, id, options.mtp);
    }
    let config = optional(directory::read_config(directory))?;
    let head = config.as_ref().and_then(|config| Some((HeadFiles::of(config)?, config)));
    if let Some((head, config)) = head {
        let file = directory.join(directory::CONFIG).display().to_string();
        return Err(head.no_model(&file, config));
    }
    let family = config.as_ref().and_then(crate::encoder::family);
    if let Some((config, family)) = config.as_ref().zip(family) {
        let encoder = encoder::load(directory, id, config, family)?;
        return Ok(AnyModel::Encoder(Box::new(encoder)));
    }
    Ok(AnyModel::Decoder(Box::new(directory::load(directory, id, options.mtp)?)))
}

/// The last component of a path, which is used as the model's name.
pub(crate) fn file_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}
