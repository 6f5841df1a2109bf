//! Converts the engine's log-probabilities to the forms of the two text endpoints.

use indexmap::IndexMap;
use stolon::{Engine, TokenLogprob};

use crate::api::logprobs::{ChatLogprobs, ChatTokenLogprob, ChatTokenLogprobs, CompletionLogprobs};

/// The value reported for a token that cannot occur: JSON has no infinity.
const LOWEST: f32 = -9999.0;

/// A token's text; empty for an engine without a tokenizer.
fn token_text(engine: &Engine, id: u32) -> String {
    engine.detokenize(&[id], false).unwrap_or_default()
}

/// The value as JSON can hold it.
fn finite(logprob: f32) -> f64 {
    f64::from(if logprob.is_nan() { LOWEST } else { logprob.max(LOWEST) })
}

/// Leaves out end-of-sequence tokens, which are not part of the text that clients align the
/// log-probabilities with.
pub(super) fn visible<'a>(
    engine: &'a Engine,
    entries: impl IntoIterator<Item = &'a TokenLogprob>,
) -> impl Iterator<Item = &'a TokenLogprob> {
    let ends = &engine.model_info().eos_token_ids;
    entries.into_iter().filter(|entry| !ends.contains(&entry.token_id))
}

/// The form of chat completions.
pub(super) fn chat<'a>(
    engine: &Engine,
    entries: impl Iterator<Item = &'a TokenLogprob>,
) -> ChatLogprobs {
    let token = |&(id, logprob): &(u32, f32)| chat_token(engine, id, logprob);
    let content = entries.map(|entry| ChatTokenLogprobs {
        chosen: chat_token(engine, entry.token_id, entry.logprob),
        top_logprobs: entry.top.iter().map(token).collect(),
    });
    ChatLogprobs { content: content.collect(), refusal: None }
}

fn chat_token(engine: &Engine, id: u32, logprob: f32) -> ChatTokenLogprob {
    let token = token_text(engine, id);
    // A token that is only part of a character is decoded to the replacement character.
    let bytes = (!token.contains(char::REPLACEMENT_CHARACTER)).then(|| token.as_bytes().to_vec());
    ChatTokenLogprob { token, logprob: finite(logprob), bytes }
}

/// Builds the lists of the completions form token by token.
#[derive(Default)]
pub(super) struct CompletionLists {
    lists: CompletionLogprobs,
    /// Number of characters before the next token.
    offset: usize,
}

impl CompletionLists {
    /// Empty lists for tokens that begin `offset` characters into the text.
    pub(super) fn starting_at(offset: usize) -> Self {
        Self { offset, ..Self::default() }
    }

    /// Adds a token with its log-probability. The token itself is always among the most likely
    /// ones that are listed.
    pub(super) fn push(&mut self, engine: &Engine, entry: &TokenLogprob) {
        let mut top = IndexMap::new();
        for &(id, logprob) in entry.top.iter().chain([&(entry.token_id, entry.logprob)]) {
            top.entry(token_text(engine, id)).or_insert_with(|| finite(logprob));
        }
        self.add(token_text(engine, entry.token_id), Some(finite(entry.logprob)), Some(top));
    }

    /// Adds a token without a log-probability: the first of a prompt.
    pub(super) fn push_first(&mut self, engine: &Engine, id: u32) {
        self.add(token_text(engine, id), None, None);
    }

    fn add(&mut self, token: String, logprob: Option<f64>, top: Option<IndexMap<String, f64>>) {
        self.lists.text_offset.push(self.offset);
        self.offset += token.chars().count();
        self.lists.tokens.push(token);
        self.lists.token_logprobs.push(logprob);
        self.lists.top_logprobs.push(top);
    }

    pub(super) fn finish(self) -> CompletionLogprobs {
        self.lists
    }
}
