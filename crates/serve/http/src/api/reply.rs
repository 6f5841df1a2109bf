//! The object around the choices of a reply, and the usage it reports.

use schemars::JsonSchema;
use serde::Serialize;

use super::logprobs::PromptLogprobs;

/// A whole reply, or one piece of a streamed one. All pieces of a reply have the same id.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Reply_{Choice}")]
pub struct Reply<Choice> {
    /// Unique id, with a prefix that names the endpoint.
    pub id: String,
    /// OpenAI's name for the type of object, such as `chat.completion.chunk`.
    pub object: &'static str,
    /// When the request was accepted: seconds since 1970-01-01 UTC.
    pub created: u64,
    /// The model's name as the request gave it, or its id.
    pub model: String,
    /// Identifies the version of the server and the model: answers to the same request with the
    /// same seed may differ if it has changed.
    pub system_fingerprint: String,
    /// The choices; empty in the piece that reports the usage.
    pub choices: Vec<Choice>,
    /// Token ids of the conversation's prompt, in a whole reply or in its first piece, if they were
    /// requested. Completions have them in their choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Log-probabilities of the conversation's prompt, in a whole reply; `null` (inner `None`) if
    /// they were not requested. Completions have them in their choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Option<PromptLogprobs>>,
    /// Token counts. Left out (outer `None`) of streamed pieces unless the client asked for them;
    /// then `null` (inner `None`) in all pieces but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

/// Token counts of a request over all of its choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Usage {
    /// Tokens of the prompts; each prompt counts once, however many choices it has.
    pub prompt_tokens: usize,
    /// Generated tokens, candidates of `best_of` that were not returned included.
    pub completion_tokens: usize,
    /// Sum of the two.
    pub total_tokens: usize,
    /// More about the prompt tokens; left out by a server that hides it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
    /// More about the generated tokens; left out if the model's format marks no reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

/// More about the generated tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CompletionTokensDetails {
    /// Tokens of the reasoning, which are generated tokens, too.
    pub reasoning_tokens: usize,
}

impl Usage {
    /// Prompt tokens that were read from the prefix cache; 0 if that is hidden.
    pub(crate) fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.map_or(0, |details| details.cached_tokens)
    }

    /// Generated tokens that are reasoning.
    pub(crate) fn reasoning_tokens(&self) -> usize {
        self.completion_tokens_details.map_or(0, |details| details.reasoning_tokens)
    }

    /// Prompt tokens that are positions of images; 0 if that is hidden.
    pub(crate) fn image_tokens(&self) -> usize {
        self.prompt_tokens_details.map_or(0, |details| details.image_tokens)
    }
}

/// More about the prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PromptTokensDetails {
    /// Prompt tokens that were read from the prefix cache.
    pub cached_tokens: usize,
    /// Prompt tokens that are positions of images; left out if there are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub image_tokens: usize,
}

pub(crate) fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended the answer, a stop string or stop token appeared, or the answer repeated
    /// itself without end.
    Stop,
    /// The token limit, the context length or the KV pool was reached.
    Length,
    /// The model ended the answer, which contains calls of tools.
    ToolCalls,
}

impl From<&stolon::FinishReason> for FinishReason {
    fn from(reason: &stolon::FinishReason) -> Self {
        match reason {
            stolon::FinishReason::Length => Self::Length,
            _ => Self::Stop,
        }
    }
}

/// Why an answer was cut off before any limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CutReason {
    /// It repeated itself without end.
    Repetition,
}

impl CutReason {
    /// The reason of an answer with this finish reason, if it was cut off.
    pub(crate) fn of(reason: &stolon::FinishReason) -> Option<Self> {
        matches!(reason, stolon::FinishReason::Repetition).then_some(Self::Repetition)
    }
}
