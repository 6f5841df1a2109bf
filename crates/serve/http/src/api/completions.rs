//! `POST /v1/completions`: continues prompts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::fields::{self, UnknownFields};
use super::logprobs::{CompletionLogprobs, PromptLogprobs};
use super::options::{ChoiceOptions, GenerationOptions, MAX_CHOICES, MAX_LOGPROBS};
use super::reply::{CutReason, FinishReason, Reply};

/// The request body.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(expecting = "an object")]
pub struct CompletionRequest {
    /// The prompts: at least one.
    pub prompt: PromptInput,
    /// The text after the gap that the model fills, for models that were trained for it; the
    /// prompts, which are texts, are what precedes it. Not possible with `echo`,
    /// `append_to_session` and `truncate_prompt_tokens`. Default, and the empty text: prompts are
    /// continued.
    pub suffix: Option<String>,
    /// Maximum number of tokens to generate per choice. Default 16. 0 generates nothing and is
    /// allowed only with `echo`: the reply then has the prompt and its log-probabilities.
    #[serde(default, deserialize_with = "fields::count::<_, 0, { usize::MAX }>")]
    #[schemars(range(min = 0))]
    pub max_tokens: Option<usize>,
    /// Number of most likely tokens to report per position, 0 to 20, with their
    /// log-probabilities; the generated token's own is reported in any case. `false` or left out:
    /// none.
    #[serde(default, deserialize_with = "fields::count_or_false::<_, 0, MAX_LOGPROBS>")]
    #[schemars(schema_with = "super::schemas::count_or_false::<0, MAX_LOGPROBS>")]
    pub logprobs: Option<usize>,
    /// Whether each choice begins with its prompt. Default false.
    pub echo: Option<bool>,
    /// Number of candidates to generate per prompt, `n` to 128, of which the `n` with the highest
    /// log-probability per token are returned, best first. Not possible with `stream`. Default:
    /// `n`, in the order of their seeds.
    #[serde(default, deserialize_with = "fields::count::<_, 1, MAX_CHOICES>")]
    #[schemars(range(min = 1, max = MAX_CHOICES))]
    pub best_of: Option<usize>,
    /// Whether the prompt follows the tokens of the session (`session_id`): prompt and answer of
    /// its last turn, which do not have to be sent again. Default false: the prompt is the whole
    /// one.
    pub append_to_session: Option<bool>,
    /// Parameters of replies that are lists of choices.
    #[serde(flatten)]
    pub choices: ChoiceOptions,
    /// Parameters of all APIs for generation.
    #[serde(flatten)]
    pub options: GenerationOptions,
    /// Every other member; must be empty.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

/// The `prompt` of a request: one prompt or a list of them, as text or as token ids.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a string, a list of strings, a list of token ids or a list of such lists"
)]
pub enum PromptInput {
    /// One text.
    Text(String),
    /// Several texts.
    Texts(Vec<String>),
    /// The token ids of one prompt.
    Tokens(Vec<u32>),
    /// The token ids of several prompts.
    TokenLists(Vec<Vec<u32>>),
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text, to be tokenized.
    Text(String),
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
}

impl PromptInput {
    /// The prompts in the order in which they were given; empty for an empty list.
    #[must_use]
    pub fn into_prompts(self) -> Vec<Prompt> {
        match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            Self::TokenLists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        }
    }
}

/// The reply, whole or one piece of a streamed one.
pub type Completion = Reply<CompletionChoice>;

/// One choice, or one piece of it.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CompletionChoice {
    /// Number of the choice over all prompts: those of prompt `p` are `p * n` to `p * n + n - 1`.
    pub index: usize,
    /// Generated text, after the prompt if `echo` was set.
    pub text: String,
    /// Log-probabilities of the tokens of `text`, if they were requested.
    pub logprobs: Option<CompletionLogprobs>,
    /// Why generation ended; `null` in all pieces but the last of a choice.
    pub finish_reason: Option<FinishReason>,
    /// Why the answer was cut off, if not at a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<CutReason>,
    /// Log-probabilities of the prompt, in a whole choice; `null` (inner `None`) if they were not
    /// requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Option<PromptLogprobs>>,
    /// Token ids of the prompt, in a whole choice or in its first piece, if they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Ids of the tokens that were generated, or that this piece adds, if they were requested. An
    /// end-of-sequence token is one of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}
