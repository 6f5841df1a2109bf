//! Loading: from a [`ModelSource`] to everything a backend and the
//! text side start from.
//!
//! What comes out is plain data. The backend takes the configuration and the weights, the text
//! side takes [`TextSource`]; neither reads a file again.

pub(crate) mod directory;
pub(crate) mod generation;
mod gguf;

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use serde_json::Value;

use crate::config::DecoderConfig;
use crate::error::ModelError;
use crate::hub::{self, HubOptions};
use crate::source::ModelSource;
use crate::weights::Weights;

/// A model, read and checked.
#[derive(Debug)]
pub struct LoadedModel {
    /// Name for people and for the server's model list: the hub id, or the directory's or
    /// file's name.
    pub id: String,
    /// The decoder's shape.
    pub config: DecoderConfig,
    /// The tensors.
    pub weights: Weights,
    /// What the tokenizer and the chat template are made from.
    pub text: TextSource,
    /// What the model's makers recommend for generation.
    pub generation: GenerationDefaults,
}

/// What the text side is made from.
#[derive(Clone, Debug)]
pub struct TextSource {
    /// The tokenizer itself.
    pub tokenizer: TokenizerSource,
    /// `tokenizer_config.json`, when there is one.
    pub tokenizer_config: Option<Value>,
    /// The chat template's text: from `chat_template.jinja`, else from `tokenizer_config.json`
    /// (its `default` entry when it holds several), else from the GGUF's metadata.
    pub chat_template: Option<String>,
}

/// Where the tokenizer is.
#[derive(Clone)]
pub enum TokenizerSource {
    /// A `tokenizer.json`.
    Json {
        /// Its name, for messages.
        file: String,
        /// Its content.
        bytes: Cow<'static, [u8]>,
    },
    /// The vocabulary in a GGUF's metadata.
    Gguf(Box<GgufTokenizer>),
    /// There is none: the model answers in token ids only, and any text is an error that says
    /// so.
    Missing {
        /// Where a `tokenizer.json` was looked for.
        directory: PathBuf,
    },
    /// Every byte is the token of its value: for random models. `vocab_size` is at least 256.
    Bytes {
        /// Ids of the model; those from 256 on stand for nothing.
        vocab_size: usize,
    },
}

impl fmt::Debug for TokenizerSource {
    /// Which it is and how large, not some megabytes of vocabulary.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json { file, bytes } => write!(f, "Json({file}, {} bytes)", bytes.len()),
            Self::Gguf(gguf) => write!(f, "Gguf({}, {} tokens)", gguf.file, gguf.tokens.len()),
            Self::Missing { directory } => write!(f, "Missing({})", directory.display()),
            Self::Bytes { vocab_size } => write!(f, "Bytes({vocab_size})"),
        }
    }
}

/// The `tokenizer.ggml.*` metadata of a GGUF file, as it stands there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizer {
    /// The file, for messages.
    pub file: String,
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// Name of the split pattern before BPE, e.g. `llama-bpe`, `qwen2`.
    pub pre: Option<String>,
    /// The tokens; the index is the id.
    pub tokens: Vec<String>,
    /// A score a token (SentencePiece).
    pub scores: Option<Vec<f32>>,
    /// A type a token: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub token_types: Option<Vec<i32>>,
    /// `left right` pairs in order of rank (BPE).
    pub merges: Option<Vec<String>>,
    /// Beginning of a sequence.
    pub bos_token_id: Option<u32>,
    /// End of a sequence.
    pub eos_token_id: Option<u32>,
    /// Stands for what the vocabulary cannot spell.
    pub unknown_token_id: Option<u32>,
    /// Padding.
    pub padding_token_id: Option<u32>,
    /// Whether encoding starts with `bos_token_id`.
    pub add_bos_token: Option<bool>,
    /// Whether encoding ends with `eos_token_id`.
    pub add_eos_token: Option<bool>,
    /// Whether a space is put before the text (SentencePiece).
    pub add_space_prefix: Option<bool>,
}

/// `generation_config.json`, as far as it concerns an engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Generation ends at any of these; sorted, without duplicates, all below `vocab_size`.
    pub eos_token_ids: Vec<u32>,
    /// Starts every sequence, where the model has such a token.
    pub bos_token_id: Option<u32>,
    /// False: greedy, whatever the fields below say.
    pub do_sample: Option<bool>,
    /// Above 0.
    pub temperature: Option<f32>,
    /// 0 stands for no limit.
    pub top_k: Option<u32>,
    /// Above 0, at most 1.
    pub top_p: Option<f32>,
    /// 0 to 1.
    pub min_p: Option<f32>,
    /// Above 0; 1 changes nothing.
    pub repetition_penalty: Option<f32>,
}

/// How to load.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Where models are fetched from; by default what the environment says.
    pub hub: HubOptions,
}

/// Loads a model: reads its configuration, maps its weights and checks that every tensor the
/// configuration asks for is there in the right shape and in a type that can be computed with.
///
/// Blocks: on the disk, and for [`ModelSource::Hub`] on the network.
///
/// # Errors
/// [`ModelError`]; its message names the file, and the key or tensor in it.
pub fn load(source: &ModelSource, options: &LoadOptions) -> Result<LoadedModel, ModelError> {
    match source {
        ModelSource::Directory(path) => directory::load(path, file_name(path)),
        ModelSource::Gguf(path) => gguf::load(path, file_name(path)),
        ModelSource::Hub { id, revision } => {
            let snapshot = hub::fetch(id, revision, &options.hub)?;
            directory::load(&snapshot, id.clone())
        }
        #[cfg(feature = "demo-model")]
        ModelSource::Demo => crate::demo::load(),
        ModelSource::Random { preset, seed } => crate::random::load(preset, *seed),
    }
}

/// The last part of a path, for a model's name.
fn file_name(path: &std::path::Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}
