//! Describes a model without loading it: its architecture and sizes, the memory that it needs, and
//! the reasons why it would be refused. Only headers and small files are read, within the same
//! limits as for loading.

mod draft_head;
mod encoder;
mod images;
mod memory;
mod outline;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use stolon_text::TextSource;

use crate::config::{self, DecoderConfig, ParsedConfig};
use crate::encoder::ScoreConfig;
use crate::error::{ModelError, quoted};
use crate::gguf::{Header, split};
#[cfg(feature = "hub")]
use crate::hub::{self, Remote};
use crate::kv::{KvType, WindowKv};
use crate::load::{
    EmbeddingConfig, GenerationDefaults, LoadOptions, class, directory, embedding,
    encoder as encoder_files, file_name, gguf, head, mtp, task_adapters, token_scores,
};
use crate::mmap::Bytes;
use crate::source::ModelSource;
use crate::weight_type::WeightType;
use crate::weights::Weights;
pub use memory::{HeadMemory, MemoryNeeded};
pub use outline::Outline;

/// Maximum number of reasons in [`Inspection::refusals`].
const REFUSALS_MAX: usize = 20;

/// The description of a model that was not loaded. Control characters in names from the model's
/// files are escaped.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Inspection {
    /// The model's name: the hub id, or the name of the directory or file.
    pub id: String,
    /// `gguf` or `safetensors`.
    pub format: &'static str,
    /// The architecture and the sizes of the model.
    pub outline: Outline,
    /// Number of weights. If the configuration is not supported, the number of elements of all
    /// tensors in the files.
    pub parameters: u64,
    /// The files with weights.
    pub files: Vec<FileSummary>,
    /// All tensors in the files, by name. The names are Hugging Face's if the configuration is
    /// supported, else the names in the file.
    pub tensors: Vec<TensorSummary>,
    /// The memory that the model needs; `None` if its configuration or a tensor's type is not
    /// supported.
    pub memory: Option<MemoryNeeded>,
    /// The reasons why the model would be refused, at most 20. Empty if it can be loaded.
    pub refusals: Vec<String>,
    /// Notes about ambiguous files and about settings that have no effect.
    pub notes: Vec<String>,
    /// The data of the tokenizer and the chat templates, unless it cannot be read.
    #[serde(skip)]
    pub text: Option<TextSource>,
    /// The ids of the end-of-sequence tokens.
    pub eos_token_ids: Vec<u32>,
    /// How embeddings are computed; `None` for a model that is not an embedding model.
    pub embedding: Option<EmbeddingConfig>,
    /// The labels of a model that computes scores; `None` for other models.
    pub scores: Option<ScoreConfig>,
    /// The tasks for which an embedding model has matrices of their own, or adapters; mostly empty.
    pub tasks: Vec<String>,
    /// The memory that the model's own head for multi-token prediction needs in addition, if it is
    /// used ([`LoadOptions::mtp`]); `None` if the model has none, or one that is not supported.
    pub mtp: Option<HeadMemory>,
    /// The memory that a draft head needs in addition to the model for which it guesses tokens, if the
    /// files are one: an EAGLE-3 head or an assistant of Gemma 4, as
    /// [`architecture`](Outline::architecture) says. The model's embedding is included if the files
    /// have a copy of it.
    pub draft_head: Option<HeadMemory>,
}

/// A file with weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileSummary {
    /// The path or name of the file.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// A stored tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorSummary {
    /// The name.
    pub name: String,
    /// The element type, such as `BF16` or `Q4_K`.
    pub dtype: String,
    /// The sizes of the dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Size in bytes; 0 if the type is unknown.
    pub bytes: u64,
}

/// Options of [`inspect()`].
#[derive(Clone, Debug, Default)]
pub struct InspectOptions {
    /// Options of reading the model.
    pub load: LoadOptions,
    /// Element type of matrices in memory, from which the memory is computed.
    pub weight_type: WeightType,
    /// Element type of the KV store; `None` selects the default of the model.
    pub kv_type: Option<KvType>,
    /// The place where layers with a sliding window would keep their keys and values.
    pub window_kv: WindowKv,
}

/// Describes a model directory, a GGUF file or a repository on the hub. A model that would be
/// refused is described as far as possible, with the reasons. If a model on the hub is not in the
/// cache, its small files are downloaded, and only the beginning of each file with weights is
/// requested. The values of weights are not read, so wrong values are not found.
///
/// # Errors
/// [`ModelError`] if the model cannot be described, because it does not exist, its files cannot be
/// read, or it has no files.
pub fn inspect(source: &ModelSource, options: &InspectOptions) -> Result<Inspection, ModelError> {
    let mut inspection = describe(source, options)?;
    if options.load.mtp && inspection.mtp.is_none() && inspection.refusals.is_empty() {
        inspection.refuse(mtp::no_head(&inspection.id));
    }
    Ok(inspection)
}

fn describe(source: &ModelSource, options: &InspectOptions) -> Result<Inspection, ModelError> {
    match source {
        ModelSource::Directory(path) => in_directory(path, file_name(path), options),
        ModelSource::Gguf(path) => gguf_file(path, file_name(path), options),
        #[cfg(feature = "hub")]
        ModelSource::Hub { id, revision, file } => {
            match hub::headers(id, revision, file.as_deref(), &options.load.hub)? {
                Remote::Cached(path) if path.is_dir() => in_directory(&path, id.clone(), options),
                Remote::Cached(path) => gguf_file(&path, id.clone(), options),
                Remote::Gguf { directory, files } => {
                    let (header, contents) = split::join(files.len(), files.into_iter().map(Ok))?;
                    Ok(of_gguf(id.clone(), &header, contents, &directory, options))
                }
                Remote::Safetensors { directory, files } => {
                    let mut weights = Weights::empty(format!("{id}@{revision}"));
                    let mut add = |(name, bytes): (String, Bytes)| {
                        crate::weights::safetensors::add(&mut weights, &name, bytes)
                    };
                    let added = files.into_iter().try_for_each(&mut add);
                    of_directory(&directory, id.clone(), added.map(|()| weights), options)
                }
            }
        }
        _ => Err(ModelError::UnknownSource {
            given: source.to_string(),
            reason: "only models in files can be inspected".into(),
        }),
    }
}

fn in_directory(
    path: &Path,
    id: String,
    options: &InspectOptions,
) -> Result<Inspection, ModelError> {
    match directory::gguf_instead(path)? {
        Some(path) => gguf_file(&path, id, options),
        None => of_directory(path, id, Weights::open_directory(path), options),
    }
}

fn gguf_file(path: &Path, id: String, options: &InspectOptions) -> Result<Inspection, ModelError> {
    let (header, contents) = split::open(path)?;
    Ok(of_gguf(id, &header, contents, gguf::directory_of(path), options))
}

/// Describes the GGUF model with the header `header`. Other files are read from `directory`.
fn of_gguf(
    id: String,
    header: &Header,
    contents: Vec<Bytes>,
    directory: &Path,
    options: &InspectOptions,
) -> Inspection {
    let mut inspection = Inspection::new(id, "gguf", Outline::of_gguf(header));
    let sizes = contents.iter().map(Bytes::file_bytes);
    inspection.files =
        header.files.iter().zip(sizes).map(|(name, bytes)| file(name, bytes)).collect();
    if let Some(family) = crate::encoder::gguf_family(header) {
        inspection.tensors = outline::gguf_tensors(header);
        inspection.parameters = elements(&inspection.tensors);
        let at = (directory, inspection.id.clone());
        let files = std::mem::take(&mut inspection.files);
        let loaded = encoder_files::load_gguf(header, contents, at, family);
        inspection.add_text_encoder(loaded, options);
        inspection.files = files;
        return inspection;
    }
    let mut described = None;
    match gguf::describe(header, contents) {
        Ok((parsed, weights)) => {
            inspection.describe(&parsed, &weights, options);
            if let Err(error) = weights.check_all(config::gguf::rank_matrix(header)) {
                inspection.refuse(error);
            }
            match mtp::of_gguf(header, &parsed, &weights) {
                Ok(head) => {
                    let head = head.map(|head| head.weights);
                    let memory = |head: Weights| HeadMemory::of_mtp(&parsed, &head, options);
                    inspection.mtp = head.and_then(memory);
                }
                Err(error) if options.load.mtp => inspection.refuse(error),
                Err(_) => {}
            }
            described = Some((parsed, weights));
        }
        Err(error) => {
            inspection.refuse(error);
            inspection.refuse_types(header);
        }
    }
    if inspection.tensors.is_empty() {
        inspection.tensors = outline::gguf_tensors(header);
        inspection.parameters = elements(&inspection.tensors);
    }
    match gguf::embedding(header) {
        Ok(embedding) => inspection.embedding = embedding,
        // An unknown architecture is among the refusals already.
        Err(_) if described.is_none() => {}
        Err(error) => inspection.refuse(error),
    }
    match gguf::text(header, directory) {
        Ok(text) => inspection.text = Some(text),
        Err(error) => inspection.refuse(error),
    }
    if let Some((config, mut weights)) = described {
        inspection.add_mmproj(&config, &mut weights, options);
        match gguf::generation(header, config, directory) {
            Ok(generation) => inspection.set_generation(generation),
            Err(error) => inspection.refuse(error),
        }
    }
    inspection
}

/// Describes the model with the `config.json` in `directory`.
fn of_directory(
    directory: &Path,
    id: String,
    weights: Result<Weights, ModelError>,
    options: &InspectOptions,
) -> Result<Inspection, ModelError> {
    let path = directory.join(directory::CONFIG);
    let json = directory::read_config(directory)?;
    let mut inspection = Inspection::new(id, "safetensors", Outline::of_json(&json));
    if let Some(family) = crate::encoder::family(&json) {
        if let Ok(weights) = &weights {
            inspection.of_weights(weights, None, options);
        }
        inspection.add_text_encoder_of(directory, &json, family, options);
        return Ok(inspection);
    }
    if let Some(head) = config::HeadFiles::of(&json) {
        inspection.add_draft_head(head, (&path.display().to_string(), &json), weights, options);
        return Ok(inspection);
    }
    let mut config = match config::parse_json(&path.display().to_string(), &json) {
        Ok(config) => Some(config),
        Err(error) => {
            inspection.refuse(error);
            None
        }
    };
    if let Some(config) = &config {
        inspection.notes.extend(config.notes.iter().cloned());
        match embedding::of_directory(directory, &json, config.decoder.hidden_size) {
            Ok(embedding) => inspection.embedding = embedding,
            Err(error) => inspection.refuse(error),
        }
        match task_adapters::of_directory(directory, (&path.display().to_string(), &json)) {
            Ok(tasks) => {
                inspection.tasks = tasks.into_iter().map(|(name, _)| name).collect();
            }
            Err(error) => inspection.refuse(error),
        }
    }
    let mut has_no_output = inspection.embedding.is_some();
    let mut mtp_head = None;
    let prepared = weights.and_then(|mut weights| {
        if let Some(config) = &mut config {
            mtp_head = weights.mtp_head(&config.decoder);
            directory::prepare(&mut weights, config)?;
            let file = path.display().to_string();
            let scores = class::scores(&file, &json, &weights, config.decoder.hidden_size)?;
            has_no_output = inspection.embedding.is_some() || scores.is_some();
            let is_classifier = scores.is_some();
            if let Some(scores) = scores {
                inspection.set_scores(scores.config);
            }
            let generates = head::tie_missing(config, &mut weights, has_no_output);
            mtp_head = mtp_head.take().filter(|_| generates && !is_classifier);
            inspection.notes.extend(head::untie_different(config, &weights));
        }
        Ok(weights)
    });
    match prepared {
        Ok(weights) => {
            if config.is_some() && !has_no_output {
                let file = path.display().to_string();
                class::refuse_scores(&file, &json, &weights)
                    .unwrap_or_else(|error| inspection.refuse(error));
            }
            inspection.of_weights(&weights, config.as_ref(), options);
            if let Some(config) = &config {
                if let Err(error) = token_scores::of_directory(directory, &config.decoder) {
                    inspection.refuse(error);
                }
                inspection.add_images((directory, &json), &config.decoder, &weights, options);
                if let Some(head) = mtp_head {
                    inspection.mtp = HeadMemory::of_mtp(&config.decoder, &head, options);
                    if options.load.mtp
                        && let Err(error) = mtp::of_directory(head, config)
                    {
                        inspection.refuse(error);
                    }
                }
            }
        }
        Err(error) => inspection.refuse(error),
    }
    match directory::text(directory) {
        Ok(text) => inspection.text = Some(text),
        Err(error) => inspection.refuse(error),
    }
    if let Some(config) = &config {
        match directory::generation(directory, &json, config) {
            Ok(generation) => inspection.set_generation(generation),
            Err(error) => inspection.refuse(error),
        }
    }
    Ok(inspection)
}

impl Inspection {
    fn new(id: String, format: &'static str, outline: Outline) -> Self {
        Self {
            id,
            format,
            outline,
            parameters: 0,
            files: Vec::new(),
            tensors: Vec::new(),
            memory: None,
            refusals: Vec::new(),
            notes: Vec::new(),
            text: None,
            eos_token_ids: Vec::new(),
            embedding: None,
            scores: None,
            tasks: Vec::new(),
            mtp: None,
            draft_head: None,
        }
    }

    /// Adds a reason why the model would be refused.
    pub fn refuse(&mut self, reason: impl ToString) {
        if self.refusals.len() < REFUSALS_MAX {
            self.refusals.push(quoted(&reason.to_string()));
        }
    }

    /// Adds the content of `weights` and, if it is supported, of the configuration.
    fn of_weights(
        &mut self,
        weights: &Weights,
        config: Option<&ParsedConfig>,
        options: &InspectOptions,
    ) {
        self.files = weights.files().map(|(name, bytes)| file(name, bytes)).collect();
        match config {
            Some(config) => self.describe(&config.decoder, weights, options),
            None => {
                self.tensors = summaries(weights);
                self.parameters = elements(&self.tensors);
            }
        }
    }

    /// Adds the description that follows from a supported configuration and its weights.
    fn describe(&mut self, config: &DecoderConfig, weights: &Weights, options: &InspectOptions) {
        self.outline.set(config);
        self.notes.extend(config.clone().limit_context(options.load.max_positions));
        self.parameters = config.parameter_count();
        self.tensors = summaries(weights);
        // All tensors of the same unsupported type are reported as one reason.
        let mut types = BTreeMap::<String, (String, usize)>::new();
        for error in weights.problems(config) {
            let text = error.to_string();
            match error {
                ModelError::WrongType { got, .. } => types.entry(got).or_insert((text, 0)).1 += 1,
                _ => self.refuse(text),
            }
        }
        if types.is_empty() {
            match MemoryNeeded::of(config, weights, options) {
                Ok(needed) => self.memory = Some(needed),
                Err(error) => self.refuse(error),
            }
        }
        for (first, count) in types.into_values() {
            match count {
                1 => self.refuse(first),
                _ => self.refuse(format!("{first} (and {} other tensors)", count - 1)),
            }
        }
    }

    /// Adds a reason for each tensor type of a GGUF file that is not supported.
    fn refuse_types(&mut self, header: &Header) {
        let mut types: Vec<&str> = header
            .tensors
            .values()
            .filter_map(|info| info.dtype.as_ref().err())
            .map(String::as_str)
            .collect();
        types.sort_unstable();
        types.dedup();
        for name in types {
            self.refuse(format!("{}: tensors of type {name} are not supported", header.file));
        }
    }

    /// Adds the content of `generation_config.json`.
    fn set_generation(&mut self, (generation, notes): (GenerationDefaults, Vec<String>)) {
        self.eos_token_ids = generation.eos_token_ids;
        self.notes.extend(notes);
    }
}

fn file(name: &str, bytes: u64) -> FileSummary {
    FileSummary { name: quoted(name), bytes }
}

/// The tensors of `weights`, by name.
fn summaries(weights: &Weights) -> Vec<TensorSummary> {
    let mut tensors: Vec<_> = weights
        .list()
        .map(|(name, dtype, shape, bytes)| TensorSummary {
            name: quoted(name),
            dtype: quoted(&dtype),
            shape: shape.to_vec(),
            bytes,
        })
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}

/// Total number of elements of all tensors, saturating.
fn elements(tensors: &[TensorSummary]) -> u64 {
    let of_one = |tensor: &TensorSummary| {
        tensor.shape.iter().fold(1_u64, |count, size| count.saturating_mul(*size as u64))
    };
    tensors.iter().map(of_one).fold(0, u64::saturating_add)
}
