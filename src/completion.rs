//! A whole generation.

use serde::Serialize;
use stolon_backend::TokenLogprob;
use stolon_scheduler::Finish;
use stolon_text::Answer;

/// A whole generation, collected from its stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Completion {
    /// The generated text, up to the stop string, if one ended it.
    pub text: String,
    /// The text taken apart as [`Request::answer_format`](crate::Request::answer_format) says: its
    /// reasoning, its text and its calls. Without a format, all of it is text.
    #[serde(skip)]
    pub answer: Answer,
    /// The generated tokens, including an end-of-sequence token.
    pub token_ids: Vec<u32>,
    /// One entry per generated token if requested, empty otherwise.
    pub logprobs: Vec<TokenLogprob>,
    /// One entry per prompt token if requested, empty otherwise.
    pub prompt_logprobs: Vec<Option<TokenLogprob>>,
    /// Why the generation ended, how many tokens it used, and how long it took.
    pub finish: Finish,
}
