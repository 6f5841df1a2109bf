//! Loads a text encoder: its configuration, its weights, and the files of sentence-transformers
//! that say what becomes of its hidden states.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::Serialize;
use serde_json::Value;
use stolon_backend::Pooling;
use stolon_text::TextSource;

use super::embedding::{self, EmbeddingConfig, EmbeddingSizes, Modules};
use super::{directory, task_adapters};
use crate::config::gguf::Metadata;
use crate::config::{Keys, LinearWeights, TensorRole, TensorSpec};
use crate::encoder::{
    self, EncoderConfig, EncoderFamily, HeadActivation, HeadConfig, HeadLayer, ScoreConfig,
};
use crate::error::ModelError;
use crate::files::{optional, read_json};
use crate::gguf::Header;
use crate::mmap::Bytes;
use crate::weights::{Weights, safetensors};

/// The maximum number of tokens of a text, in sentence-transformers.
pub(crate) const SENTENCE_CONFIG: &str = "sentence_bert_config.json";
/// The prompts of sentence-transformers.
pub(crate) const PROMPTS: &str = "config_sentence_transformers.json";
/// Maximum number of prompts.
const PROMPTS_MAX: usize = 256;
/// Maximum number of bytes of a prompt.
const PROMPT_BYTES_MAX: usize = 16 << 10;

/// An encoder that was read and checked.
#[derive(Debug)]
pub struct LoadedEncoder {
    /// The model's name: the hub id, or the name of the directory.
    pub id: String,
    /// The description of the forward pass.
    pub config: EncoderConfig,
    /// The tensors of the encoder and of the head.
    pub weights: Weights,
    /// The data of the tokenizer.
    pub text: TextSource,
    /// Whether texts are converted to lower case before the tokenizer reads them.
    pub lowercase: bool,
    /// What is computed from a pooled hidden state.
    pub head: HeadConfig,
    /// What the model computes.
    pub task: EncoderTask,
    /// The texts that the model expects before others.
    pub prompts: TextPrompts,
}

/// What an encoder computes.
#[derive(Clone, Debug, PartialEq)]
pub enum EncoderTask {
    /// Embeddings.
    Embed(EmbeddingConfig),
    /// Scores of texts or of pairs of texts.
    Score(Pooling, ScoreConfig),
}

impl EncoderTask {
    /// How hidden states become one vector.
    #[must_use]
    pub fn pooling(&self) -> Pooling {
        match self {
            Self::Embed(config) => config.pooling,
            Self::Score(pooling, _) => *pooling,
        }
    }
}

/// The texts that a model expects before others, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TextPrompts {
    /// The texts, by name (`query`, for example).
    pub named: BTreeMap<String, String>,
    /// The name of the one that is used if a request names none.
    pub default: Option<String>,
}

/// Loads the encoder in `directory`, whose `config.json` has the content `value`.
pub(crate) fn load(
    directory: &Path,
    id: String,
    value: &Value,
    family: EncoderFamily,
) -> Result<LoadedEncoder, ModelError> {
    let file = directory.join(directory::CONFIG).display().to_string();
    let mut config = encoder::parse(&file, value, family)?;
    let keys = Keys::root(&file, value)?;
    // The code of these is implemented.
    let implemented = [
        EncoderFamily::NomicBert,
        EncoderFamily::NomicBertMoe,
        EncoderFamily::JinaBert,
        EncoderFamily::EuroBert,
        EncoderFamily::Gte,
        EncoderFamily::JinaRoberta,
    ];
    if !implemented.contains(&family) {
        embedding::refuse_own_code(&keys)?;
    }
    let mut weights = Weights::open_named(directory, str::to_owned)?;
    config.prepare(&mut weights)?;
    refuse_unused(&config, &weights)?;
    let has_adapters = encoder::has_task_adapters(value);
    if has_adapters {
        let tasks = task_adapters::of_directory(directory, (&file, value))?;
        task_adapters::add(&mut config, &mut weights, tasks)?;
    }
    let (task, head) = if has_adapters {
        (EncoderTask::Embed(task_adapters::EMBEDDING), HeadConfig::default())
    } else if encoder::is_classifier(value) {
        score(&keys, &config)?
    } else {
        embed(directory, &keys, &config, &mut weights)?
    };
    weights.check_all(config.tensors().into_iter().chain(head.tensors()))?;
    let text = directory::text(directory)?;
    let TextLimits { max_tokens, lowercase } = text_limits(directory, &text)?;
    config.max_positions = config.max_positions.min(max_tokens);
    let mut prompts = prompts(directory)?;
    // The instructions of tasks that are not among the prompts.
    if let (Some(tasks), Some(texts)) = (&config.tasks, keys.object("task_instructions")?) {
        for task in &tasks.names {
            if let Some(text) = texts.text(task)? {
                prompts.named.entry(task.clone()).or_insert_with(|| text.to_owned());
            }
        }
    }
    Ok(LoadedEncoder { id, config, weights, text, lowercase, head, task, prompts })
}

/// Refuses tensors of layers and norms that the configuration does not use, because they would
/// change the result.
fn refuse_unused(config: &EncoderConfig, weights: &Weights) -> Result<(), ModelError> {
    let used: HashSet<String> = config.tensors().into_iter().map(|spec| spec.name).collect();
    let is_unused = |name: &&str| config.is_of_layers(name) && !used.contains(*name);
    match weights.names().filter(is_unused).min() {
        None => Ok(()),
        Some(name) => {
            let expected = "a model without this tensor";
            Err(ModelError::unsupported(weights.origin(), name, expected, "a tensor"))
        }
    }
}

/// Loads the encoder in the GGUF file with the header `header`. `contents` are the bytes of its
/// files; a tokenizer and prompts in `directory` take precedence over those of the file.
pub(crate) fn load_gguf(
    header: &Header,
    contents: Vec<Bytes>,
    (directory, id): (&Path, String),
    family: EncoderFamily,
) -> Result<LoadedEncoder, ModelError> {
    let mut config = encoder::parse_gguf(header, family)?;
    let mut weights = header.weights(contents, |_| 0, |name| Some(name.to_owned()))?;
    config.prepare(&mut weights)?;
    refuse_unused(&config, &weights)?;
    let (task, head) = match gguf_pooling(header)? {
        GgufPooling::Vector(pooling) => {
            // As llama.cpp by default. The file does not say it.
            let (normalize, sizes) = (true, EmbeddingSizes::Full);
            let task = EmbeddingConfig { pooling, normalize, sizes };
            (EncoderTask::Embed(task), HeadConfig::dense_of_gguf(header))
        }
        GgufPooling::Rank => {
            let head = HeadConfig::of_gguf(header, &config);
            (EncoderTask::Score(Pooling::First, ScoreConfig::of_gguf(header)?), head)
        }
    };
    weights.check_all(config.tensors().into_iter().chain(head.tensors()))?;
    let text = super::gguf::text(header, directory)?;
    let prompts = prompts(directory)?;
    Ok(LoadedEncoder { id, config, weights, text, lowercase: false, head, task, prompts })
}

/// What `pooling_type` of an encoder says.
enum GgufPooling {
    Vector(Pooling),
    Rank,
}

fn gguf_pooling(header: &Header) -> Result<GgufPooling, ModelError> {
    let keys = Metadata { header, prefix: encoder::gguf_prefix(header) };
    let Some(value) = keys.value("pooling_type") else {
        let rule = "embeddings are the mean of all hidden states";
        tracing::warn!("{} has no pooling_type: {rule}", header.file);
        return Ok(GgufPooling::Vector(Pooling::Mean));
    };
    Ok(GgufPooling::Vector(match value.as_u64() {
        Some(0 | 1) => Pooling::Mean,
        Some(2) => Pooling::First,
        Some(3) => Pooling::Last,
        Some(4) => return Ok(GgufPooling::Rank),
        _ => {
            let expected = "0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)";
            return Err(keys.unsupported("pooling_type", expected, value.shown()));
        }
    }))
}

/// The task of a classifier.
fn score(keys: &Keys<'_>, config: &EncoderConfig) -> Result<(EncoderTask, HeadConfig), ModelError> {
    let EncoderConfig { family, prefix, hidden_size, .. } = config;
    let scores = ScoreConfig::parse(keys)?;
    let labels = scores.labels.len();
    let head = HeadConfig::classifier(keys, *family, prefix, *hidden_size, labels)?;
    let pooling = match keys.text("classifier_pooling")? {
        None | Some("cls") => Pooling::First,
        Some("mean") => Pooling::Mean,
        Some(_) => return Err(keys.unsupported("classifier_pooling", "`cls` or `mean`")),
    };
    Ok((EncoderTask::Score(pooling, scores), head))
}

/// The task of an embedding model.
fn embed(
    directory: &Path,
    keys: &Keys<'_>,
    config: &EncoderConfig,
    weights: &mut Weights,
) -> Result<(EncoderTask, HeadConfig), ModelError> {
    let hidden = config.hidden_size;
    let Some(Modules { dense, normalize }) = embedding::modules_of(directory)? else {
        // The same defaults as in sentence-transformers.
        tracing::warn!(
            "{} has no modules.json: embeddings are the mean of all hidden states",
            directory.display()
        );
        let task = EmbeddingConfig {
            pooling: Pooling::Mean,
            normalize: false,
            sizes: EmbeddingSizes::Full,
        };
        return Ok((EncoderTask::Embed(task), HeadConfig::default()));
    };
    let pooling = embedding::pooling_of(directory, hidden)?;
    let mut head = HeadConfig::default();
    for path in dense {
        let inputs = head.output_size(hidden);
        head.layers.push(dense_layer(directory, &path, inputs, weights)?);
    }
    let sizes = embedding::sizes(keys, head.output_size(hidden))?;
    Ok((EncoderTask::Embed(EmbeddingConfig { pooling, normalize, sizes }), head))
}

/// Reads a module `Dense` of sentence-transformers, and adds its tensors to `weights`.
fn dense_layer(
    directory: &Path,
    path: &str,
    inputs: usize,
    weights: &mut Weights,
) -> Result<HeadLayer, ModelError> {
    let config = directory.join(path).join(directory::CONFIG);
    let file = config.display().to_string();
    let value = read_json(&config)?;
    let keys = Keys::root(&file, &value)?;
    if keys.required("in_features")? != inputs {
        return Err(keys.invalid("in_features", &inputs.to_string()));
    }
    let outputs = keys.required("out_features")?;
    let activation = match keys.text("activation_function")? {
        None => HeadActivation::Tanh,
        Some(name) => HeadActivation::of_class(name).ok_or_else(|| {
            keys.unsupported("activation_function", "Identity, Tanh, GELU, ReLU, SiLU or Sigmoid")
        })?,
    };
    weights.add_module(&directory.join(path).join(safetensors::SINGLE), path)?;
    let has_bias = keys.flag("bias")?.unwrap_or(true);
    let name = |part: &str| format!("{path}.linear.{part}");
    let weight =
        TensorSpec { name: name("weight"), shape: vec![outputs, inputs], role: TensorRole::Matrix };
    let bias = TensorSpec { name: name("bias"), shape: vec![outputs], role: TensorRole::Bias };
    let weights = LinearWeights { weight, bias: has_bias.then_some(bias) };
    Ok(HeadLayer::Linear { weights, activation })
}

/// How sentence-transformers reads texts.
struct TextLimits {
    /// The maximum number of tokens of a text: what sentence-transformers truncates to.
    max_tokens: usize,
    /// Whether texts are converted to lower case first.
    lowercase: bool,
}

fn text_limits(directory: &Path, text: &TextSource) -> Result<TextLimits, ModelError> {
    let path = directory.join(SENTENCE_CONFIG);
    let file = path.display().to_string();
    let (mut max_tokens, mut lowercase) = (None, false);
    if let Some(value) = optional(read_json(&path))? {
        let keys = Keys::root(&file, &value)?;
        max_tokens = keys.size("max_seq_length")?;
        lowercase = keys.flag("do_lower_case")?.unwrap_or(false);
    }
    let config = text.tokenizer_config.as_ref();
    let length = config.and_then(|config| config["model_max_length"].as_f64());
    // Files without a limit have a very large number.
    let length =
        length.filter(|length| *length >= 1.0).map_or(usize::MAX, |length| length as usize);
    Ok(TextLimits { max_tokens: max_tokens.unwrap_or(length), lowercase })
}

/// The prompts in `config_sentence_transformers.json`.
pub(crate) fn prompts(directory: &Path) -> Result<TextPrompts, ModelError> {
    let path = directory.join(PROMPTS);
    let file = path.display().to_string();
    let Some(value) = optional(read_json(&path))? else { return Ok(TextPrompts::default()) };
    let keys = Keys::root(&file, &value)?;
    let mut named = BTreeMap::new();
    if let Some(prompts) = keys.object("prompts")? {
        for name in prompts.names().take(PROMPTS_MAX + 1) {
            let Some(prompt) = prompts.text(name)? else { continue };
            if prompt.len() > PROMPT_BYTES_MAX || named.len() == PROMPTS_MAX {
                let expected =
                    format!("at most {PROMPTS_MAX} prompts of at most {PROMPT_BYTES_MAX} bytes");
                return Err(ModelError::key(&file, "prompts", expected, "more"));
            }
            named.insert(name.to_owned(), prompt.to_owned());
        }
    }
    let default = keys.text("default_prompt_name")?.map(str::to_owned);
    if default.as_ref().is_some_and(|default| !named.contains_key(default)) {
        return Err(keys.invalid("default_prompt_name", "the name of a prompt"));
    }
    Ok(TextPrompts { named, default })
}
