//! `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as in vLLM.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::chat::{MAX_MESSAGES, MAX_TOOLS, Message, Tool};
use super::fields::{self, UnknownFields};

/// The body of `POST /tokenize`. It has either a `prompt` or `messages`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct TokenizeRequest {
    /// The model's id or one of its names. Default: the served model.
    pub model: Option<String>,
    /// A text.
    pub prompt: Option<String>,
    /// A conversation, which is rendered with the model's chat template; 1 to [`MAX_MESSAGES`]
    /// messages.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_MESSAGES>")]
    #[schemars(length(min = 1, max = MAX_MESSAGES))]
    pub messages: Option<Vec<Message>>,
    /// Functions that the model may call, which are a part of the prompt; at most [`MAX_TOOLS`].
    /// Allowed only with `messages`.
    #[serde(default, deserialize_with = "fields::optional_list::<_, _, MAX_TOOLS>")]
    #[schemars(length(max = MAX_TOOLS))]
    pub tools: Option<Vec<Tool>>,
    /// Whether to add the special tokens that the model expects around a text. Default true. The
    /// chat template adds those of a conversation, so that only `false` is allowed with `messages`.
    pub add_special_tokens: Option<bool>,
    /// Whether a conversation ends with the start of the model's answer. Default true. Allowed only
    /// with `messages`.
    pub add_generation_prompt: Option<bool>,
    /// Whether the prompt ends within the last message, which must be the assistant's. Default
    /// false. Allowed only with `messages`.
    pub continue_final_message: Option<bool>,
    /// Whether to return the pieces of the vocabulary. Default false.
    pub return_token_strs: Option<bool>,
    /// Variables of the chat template. Allowed only with `messages`.
    pub chat_template_kwargs: Option<serde_json::Map<String, Value>>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The reply to `POST /tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Tokenized {
    /// Number of tokens.
    pub count: usize,
    /// Context length of the model in tokens: prompt and generated tokens together.
    pub max_model_len: usize,
    /// The token ids.
    pub tokens: Vec<u32>,
    /// Each token as it is spelled in the vocabulary, if that was requested, otherwise `null`. Many
    /// vocabularies have a sign of their own for a space, such as `Ġ` or `▁`.
    pub token_strs: Option<Vec<String>>,
}

/// The body of `POST /detokenize`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct DetokenizeRequest {
    /// The model's id or one of its names. Default: the served model.
    pub model: Option<String>,
    /// Token ids, each below the model's vocabulary size.
    pub tokens: Vec<u32>,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The reply to `POST /detokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Detokenized {
    /// The text of the tokens, special tokens included.
    pub prompt: String,
}

/// `GET /tokenizer_info`: the facts that a client needs to use the tokenizer through `/tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenizerInfo {
    /// The text of the token that begins a text; `null` if the model has none.
    pub bos_token: Option<String>,
    /// The text of the token that ends an answer; `null` if the model has none.
    pub eos_token: Option<String>,
    /// Always `null`: sequences are not padded.
    pub pad_token: Option<String>,
    /// The chat template, in Jinja; `null` if the model has none.
    pub chat_template: Option<String>,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Context length in tokens: prompt and generated tokens together.
    pub model_max_length: usize,
}
