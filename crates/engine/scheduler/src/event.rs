//! The events that a request's stream yields, and the information about the request at its end.

use std::time::Duration;

use serde::{Serialize, Serializer};
use stolon_backend::TokenLogprob;

/// One event of a request, in this order: `Started`, then `PromptLogprobs` if requested, then any
/// number of `Token`s or one `Embedding`, then `Finished`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub enum Event {
    /// The request has left the admission queue and is being computed.
    Started {
        /// Number of tokens of the prompt.
        prompt_tokens: usize,
        /// Number of them that were found in the prefix cache.
        cached_tokens: usize,
    },
    /// One entry per prompt token. The first entry is `None`, because no token precedes it.
    PromptLogprobs(Vec<Option<TokenLogprob>>),
    /// A token was generated.
    Token(TokenEvent),
    /// The pooled hidden states of the prompt, `[hidden_size]`, if an embedding was requested. They
    /// are finite, and not normalized.
    Embedding(Vec<f32>),
    /// The request is complete. No event follows.
    Finished(Finish),
}

/// A generated token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TokenEvent {
    /// The token's id. `None` in a final event that only carries text which was withheld until it
    /// was certain that it does not become a stop string.
    pub id: Option<u32>,
    /// The text that became final with this token. It is empty while a character is incomplete,
    /// while the text may still become a stop string, and on an engine without a tokenizer.
    pub text: String,
    /// The token's log-probability, if requested.
    pub logprob: Option<TokenLogprob>,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model generated an end-of-sequence id, or the request was for an embedding.
    Stop,
    /// The model generated this id, one of the request's own stop ids.
    StopToken(u32),
    /// This stop string of the request appeared in the text.
    StopString(String),
    /// `max_tokens`, the context length or the KV pool was exhausted.
    Length,
    /// The answer repeated itself without end.
    Repetition,
}

impl FinishReason {
    /// Whether the answer was cut off, so that the model would have continued it.
    pub fn is_cut(&self) -> bool {
        matches!(self, FinishReason::Length | FinishReason::Repetition)
    }

    /// The name in OpenAI's API: `stop` or `length`. Clients take `length` for a limit that they
    /// have set, so that a repetition is `stop`.
    pub fn as_str(&self) -> &'static str {
        match self {
            FinishReason::Length => "length",
            _ => "stop",
        }
    }
}

/// The numbers of tokens that a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of them that were read from the prefix cache.
    pub cached_tokens: usize,
    /// Number of the prompt's tokens that are positions of images.
    pub image_tokens: usize,
    /// Number of generated tokens, including an end-of-sequence token.
    pub completion_tokens: usize,
}

/// The durations of the phases of a request. Serialized in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Timings {
    /// From submission until the request left the admission queue.
    #[serde(serialize_with = "seconds")]
    pub queue: Duration,
    /// Time to first token, from submission.
    #[serde(serialize_with = "seconds")]
    pub ttft: Duration,
    /// From submission to the end.
    #[serde(serialize_with = "seconds")]
    pub total: Duration,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finish {
    /// Why the generation ended.
    pub reason: FinishReason,
    /// Number of tokens it used.
    pub usage: Usage,
    /// The durations of its phases.
    pub timings: Timings,
}

fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}
