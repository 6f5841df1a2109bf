//! What a stream yields, and what is left when it has ended.

use std::time::Duration;

use crate::TokenLogprob;

/// One thing that happened to a request, in order: `Started`, then `PromptLogprobs` if asked
/// for, then `Token`s, then `Finished`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// The request left the queue and is being computed.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// How many of them were in the cache already.
        cached_tokens: usize,
    },
    /// One entry a prompt token; the first has none, because nothing comes before it.
    PromptLogprobs(Vec<Option<TokenLogprob>>),
    /// A token was generated.
    Token(TokenEvent),
    /// The request ended well; nothing follows.
    Finished(Finish),
}

/// A generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// The token. `None` in one last event that only carries text held back until it was
    /// clear that no stop string would complete.
    pub id: Option<u32>,
    /// The text that became certain with this token; empty while a character is incomplete, or
    /// while the text may still turn out to be the start of a stop string.
    pub text: String,
    /// Present when [`Request::logprobs`](crate::Request::logprobs) asked for it.
    pub logprob: Option<TokenLogprob>,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model produced an end-of-sequence id.
    Stop,
    /// The model produced one of the request's stop ids.
    StopToken(u32),
    /// One of the request's stop strings appeared.
    StopString(String),
    /// `max_tokens`, the model's context or the KV pool was reached.
    Length,
}

impl FinishReason {
    /// `stop` or `length`: the name in OpenAI's API.
    pub fn as_str(&self) -> &'static str {
        match self {
            FinishReason::Length => "length",
            _ => "stop",
        }
    }
}

/// How much was computed for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many of them were read from the cache.
    pub cached_tokens: usize,
    /// Tokens generated, an end-of-sequence token included.
    pub completion_tokens: usize,
}

/// Where a request's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission until it began to run.
    pub queue: Duration,
    /// From submission until its first token was sampled.
    pub ttft: Duration,
    /// From submission until its end.
    pub total: Duration,
}

/// A request's end.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
    /// How long it took.
    pub timings: Timings,
}

/// A whole generation, collected from its stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The generated text, without a stop string and what follows it.
    pub text: String,
    /// The generated tokens, an end-of-sequence token included.
    pub token_ids: Vec<u32>,
    /// One entry a generated token, when asked for; empty otherwise.
    pub logprobs: Vec<TokenLogprob>,
    /// One entry a prompt token, when asked for; empty otherwise.
    pub prompt_logprobs: Vec<Option<TokenLogprob>>,
    /// How it ended.
    pub finish: Finish,
}
