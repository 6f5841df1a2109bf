//! What a model's files say about its text: plain data, read by a loader and turned into a
//! tokenizer and chat templates by `TextModel`.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use serde_json::Value;

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
