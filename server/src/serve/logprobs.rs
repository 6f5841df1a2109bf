//! Log-probabilities in the forms of OpenAI's two APIs.

use serde_json::{Map, Value, json};
use stolon::{Engine, TokenLogprob};

/// Lowest value that is reported: JSON has no infinity, and a token that cannot occur has one.
const LOWEST: f32 = -9999.0;

/// Spells tokens. An engine without a tokenizer spells them as nothing.
fn spell(engine: &Engine, id: u32) -> String {
    engine.detokenize(&[id], false).unwrap_or_default()
}

/// The value as JSON can hold it.
fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { LOWEST } else { logprob.max(LOWEST) }
}

/// Leaves out end-of-sequence tokens: they are no part of the text that clients align with.
pub(super) fn visible<'a>(
    engine: &'a Engine,
    entries: impl IntoIterator<Item = &'a TokenLogprob>,
) -> impl Iterator<Item = &'a TokenLogprob> {
    let ends = &engine.model_info().eos_token_ids;
    entries.into_iter().filter(|entry| !ends.contains(&entry.token_id))
}

/// The chat form: `{"content": [{token, logprob, bytes, top_logprobs}]}`.
pub(super) fn chat<'a>(engine: &Engine, entries: impl Iterator<Item = &'a TokenLogprob>) -> Value {
    let content: Vec<Value> = entries
        .map(|entry| {
            let mut object = chat_token(engine, entry.token_id, entry.logprob);
            let top = entry.top.iter().map(|&(id, logprob)| chat_token(engine, id, logprob));
            object["top_logprobs"] = top.collect();
            object
        })
        .collect();
    json!({"content": content, "refusal": null})
}

fn chat_token(engine: &Engine, id: u32, logprob: f32) -> Value {
    let token = spell(engine, id);
    // A token that is part of a character cannot be written as text, nor its bytes known here.
    let bytes = (!token.contains(char::REPLACEMENT_CHARACTER)).then(|| token.as_bytes().to_vec());
    json!({"token": token, "logprob": finite(logprob), "bytes": bytes})
}

/// The lists of the completions form, filled token by token.
#[derive(Default)]
pub(super) struct Legacy {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
    /// Characters before the next token.
    offset: usize,
}

impl Legacy {
    /// Lists whose first token stands `offset` characters into the text.
    pub(super) fn starting_at(offset: usize) -> Self {
        Self { offset, ..Self::default() }
    }

    /// Adds a token that has a log-probability. The likeliest tokens are given by their text;
    /// where two are spelled alike, the likelier one stands. The token itself is always among
    /// them.
    pub(super) fn push(&mut self, engine: &Engine, entry: &TokenLogprob) {
        let mut top = Map::new();
        for &(id, logprob) in entry.top.iter().chain([&(entry.token_id, entry.logprob)]) {
            top.entry(spell(engine, id)).or_insert_with(|| json!(finite(logprob)));
        }
        self.add(spell(engine, entry.token_id), Some(finite(entry.logprob)), Some(top));
    }

    /// Adds a token that has none: a prompt's first.
    pub(super) fn push_first(&mut self, engine: &Engine, id: u32) {
        self.add(spell(engine, id), None, None);
    }

    fn add(&mut self, token: String, logprob: Option<f32>, top: Option<Map<String, Value>>) {
        self.text_offset.push(self.offset);
        self.offset += token.chars().count();
        self.tokens.push(token);
        self.token_logprobs.push(logprob);
        self.top_logprobs.push(top);
    }

    /// `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`.
    pub(super) fn into_json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}
