//! Log-probabilities (natural logarithms) in the forms of completions and of chat completions.
//!
//! JSON has no infinity, so a token that cannot occur is reported with -9999.

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::Serialize;

/// Lists with one entry per token of a choice's text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct CompletionLogprobs {
    /// The tokens' texts, or `token_id:` and their ids if that was requested.
    pub tokens: Vec<String>,
    /// Their log-probabilities; `null` for a prompt's first token, which nothing precedes.
    pub token_logprobs: Vec<Option<f64>>,
    /// The most likely tokens at each position, by their texts, most likely first, and the
    /// generated token itself. Among tokens with the same text, only the most likely is listed.
    pub top_logprobs: Vec<Option<IndexMap<String, f64>>>,
    /// Number of characters of the choice's text before each token. All tokens of one character
    /// have the offset of the character.
    pub text_offset: Vec<usize>,
}

/// Log-probabilities of a prompt, one entry per token: `null` for the first one, which nothing
/// precedes, and otherwise the log-probabilities of the token and of the most likely ones, by their
/// ids.
pub type PromptLogprobs = Vec<Option<IndexMap<String, PromptTokenLogprob>>>;

/// The log-probability of one token at a position of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PromptTokenLogprob {
    /// The log-probability.
    pub logprob: f64,
    /// The token's place among all tokens, from 1, in order of decreasing probability.
    pub rank: u32,
    /// The token's text.
    pub decoded_token: String,
}

/// Log-probabilities of a chat choice, or of one piece of it.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ChatLogprobs {
    /// One entry per token.
    pub content: Vec<ChatTokenLogprobs>,
    /// Always `null`.
    pub refusal: Option<Vec<ChatTokenLogprobs>>,
}

/// A generated token and its alternatives.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ChatTokenLogprobs {
    /// The token that was generated.
    #[serde(flatten)]
    pub chosen: ChatTokenLogprob,
    /// The most likely tokens at its position, as many as `top_logprobs` asks for.
    pub top_logprobs: Vec<ChatTokenLogprob>,
}

/// A token's log-probability.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ChatTokenLogprob {
    /// The token's text, or `token_id:` and its id if that was requested.
    pub token: String,
    /// Its log-probability.
    pub logprob: f64,
    /// The text's UTF-8 bytes; `null` if the token is only a part of a character, because its bytes
    /// are not known.
    pub bytes: Option<Vec<u8>>,
}
