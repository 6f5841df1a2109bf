//! The data in a model's files about its tokenizer and chat templates. A loader reads this plain
//! data, and `TextModel` creates the tokenizer and the templates from it.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

use crate::CustomTokenizer;

/// The tokenizer and chat template data of one model.
#[derive(Clone, Debug)]
pub struct TextSource {
    /// The tokenizer.
    pub tokenizer: TokenizerSource,
    /// Content of `tokenizer_config.json`, if the model has this file.
    pub tokenizer_config: Option<Value>,
    /// Source text of the default chat template, from the first of these that has one:
    /// `chat_template.jinja`, `chat_template.json`, `tokenizer_config.json` (its `default` entry if
    /// there are several), GGUF metadata.
    pub chat_template: Option<String>,
    /// Names and source texts of further chat templates, such as `tool_use`: from the files in
    /// `additional_chat_templates`, or from GGUF metadata. Those in `tokenizer_config.json` come
    /// after them.
    pub named_templates: Vec<(String, String)>,
}

/// The data that a tokenizer is created from.
#[derive(Clone)]
#[non_exhaustive]
pub enum TokenizerSource {
    /// A `tokenizer.json`.
    Json {
        /// Name of the file, used in error messages.
        file: String,
        /// Content of the file.
        bytes: Cow<'static, [u8]>,
    },
    /// The vocabulary in the metadata of a GGUF file.
    Gguf(Box<GgufTokenizer>),
    /// The model has no tokenizer. It can be used with token ids only.
    Missing {
        /// The directory that has no `tokenizer.json`.
        directory: PathBuf,
    },
    /// One token per byte value, for models with random weights.
    Bytes {
        /// Vocabulary size of the model, at least 256. Token ids from 256 on have no text.
        vocab_size: usize,
    },
    /// The program's own tokenizer.
    Custom(Arc<dyn CustomTokenizer>),
}

impl fmt::Debug for TokenizerSource {
    /// Shows the variant and the size instead of megabytes of vocabulary.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json { file, bytes } => write!(f, "Json({file}, {} bytes)", bytes.len()),
            Self::Gguf(gguf) => write!(f, "Gguf({}, {} tokens)", gguf.file, gguf.tokens.len()),
            Self::Missing { directory } => write!(f, "Missing({})", directory.display()),
            Self::Bytes { vocab_size } => write!(f, "Bytes({vocab_size})"),
            Self::Custom(_) => f.write_str("Custom"),
        }
    }
}

/// The `tokenizer.ggml.*` metadata of a GGUF file. A field is `None` if the file lacks the key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizer {
    /// Name of the file, used in error messages.
    pub file: String,
    /// Kind of tokenizer: `gpt2` (byte-level BPE), `llama` (SentencePiece's BPE), `bert` (WordPiece)
    /// or `t5` (SentencePiece's Unigram).
    pub model: String,
    /// Name of the pattern that splits a text into words before BPE, e.g. `llama-bpe`, `qwen2`.
    pub pre: Option<String>,
    /// The spelling of each token, by id.
    pub tokens: Vec<String>,
    /// The score of each token, by id (SentencePiece).
    pub scores: Option<Vec<f32>>,
    /// The type of each token, by id: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused,
    /// 6 byte.
    pub token_types: Option<Vec<i32>>,
    /// Merges of BPE, each as `left right`, in order of rank.
    pub merges: Option<Vec<String>>,
    /// Id of the token that begins a sequence.
    pub bos_token_id: Option<u32>,
    /// Id of the token that ends a sequence.
    pub eos_token_id: Option<u32>,
    /// Id of the token for text that the vocabulary cannot represent.
    pub unknown_token_id: Option<u32>,
    /// Id of the padding token.
    pub padding_token_id: Option<u32>,
    /// Id of the token between two texts.
    pub separator_token_id: Option<u32>,
    /// Whether encoding starts with `bos_token_id`.
    pub add_bos_token: Option<bool>,
    /// Whether encoding ends with `eos_token_id`.
    pub add_eos_token: Option<bool>,
    /// Whether encoding prepends a space to the text (SentencePiece).
    pub add_space_prefix: Option<bool>,
    /// Whether runs of spaces become one space (Unigram).
    pub remove_extra_whitespaces: Option<bool>,
    /// The table of SentencePiece's normalizer (Unigram).
    pub precompiled_charsmap: Option<Vec<u8>>,
}
