//! Converts the engine's log-probabilities to the forms of completions and of chat completions.

use indexmap::IndexMap;
use stolon::{Engine, TokenLogprob};

use crate::api::logprobs::{
    ChatTokenLogprob, ChatTokenLogprobs, CompletionLogprobs, PromptLogprobs, PromptTokenLogprob,
};

/// The value reported for a token that cannot occur: JSON has no infinity.
const LOWEST: f32 = -9999.0;

/// A token's text; empty for an engine without a tokenizer.
pub(crate) fn token_text(engine: &Engine, id: u32) -> String {
    engine.detokenize(&[id], false).unwrap_or_default()
}

/// A token as it is spelled in the vocabulary, or its text if the tokens are bytes.
pub(crate) fn token_piece(engine: &Engine, id: u32) -> String {
    let spelling = engine.token_spelling(id).ok().flatten();
    spelling.unwrap_or_else(|| token_text(engine, id))
}

/// The value without infinities, which JSON cannot represent.
fn finite(logprob: f32) -> f64 {
    f64::from(if logprob.is_nan() { LOWEST } else { logprob.max(LOWEST) })
}

/// How a request wants log-probabilities.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogprobForm {
    /// Whether tokens are named by their ids instead of their texts.
    pub(crate) names_ids: bool,
    /// Whether a chat lists the generated token among the others, even if it is not one of the most
    /// likely ones.
    pub(crate) lists_chosen: bool,
}

impl LogprobForm {
    /// The name of a token whose text this is.
    fn name(self, id: u32, text: String) -> String {
        if self.names_ids { format!("token_id:{id}") } else { text }
    }

    /// The form of chat completions.
    pub(crate) fn chat(self, engine: &Engine, entry: &TokenLogprob) -> ChatTokenLogprobs {
        let token = |&(id, logprob): &(u32, f32)| self.chat_token(engine, id, logprob);
        let chosen = (entry.token_id, entry.logprob);
        let is_listed = entry.top.iter().any(|&(id, _)| id == entry.token_id);
        let unlisted = (self.lists_chosen && !is_listed).then_some(&chosen);
        ChatTokenLogprobs {
            chosen: token(&chosen),
            top_logprobs: unlisted.into_iter().chain(&entry.top).map(token).collect(),
        }
    }

    fn chat_token(self, engine: &Engine, id: u32, logprob: f32) -> ChatTokenLogprob {
        let text = token_text(engine, id);
        // A token that is only part of a character is decoded to the replacement character.
        let bytes = (!text.contains(char::REPLACEMENT_CHARACTER)).then(|| text.as_bytes().to_vec());
        ChatTokenLogprob { token: self.name(id, text), logprob: finite(logprob), bytes }
    }
}

/// The log-probabilities of a prompt, one entry per token.
pub(crate) fn prompt(engine: &Engine, entries: &[Option<TokenLogprob>]) -> PromptLogprobs {
    let token = |id: u32, logprob: f32, rank: u32| {
        let decoded_token = token_text(engine, id);
        (id.to_string(), PromptTokenLogprob { logprob: finite(logprob), rank, decoded_token })
    };
    let of_position = |entry: &TokenLogprob| {
        let top = (1_u32..).zip(&entry.top).map(|(rank, &(id, logprob))| token(id, logprob, rank));
        let own = token(entry.token_id, entry.logprob, entry.rank);
        // The token itself comes first, as it is the one that clients look for.
        std::iter::once(own).chain(top).collect::<IndexMap<_, _>>()
    };
    entries.iter().map(|entry| entry.as_ref().map(of_position)).collect()
}

/// Computes the offset of each token's text, in characters. All tokens of one character have the
/// offset of the character.
#[derive(Clone, Debug, Default)]
pub(crate) struct TextOffsets {
    /// Number of complete characters so far.
    characters: usize,
    /// The tokens of the last complete character, then the tokens of an incomplete one.
    window: Vec<u32>,
    /// Number of tokens of the complete character in the window.
    decoded: usize,
    /// Whether the tokens are at the beginning of a text, where tokenizers may leave out a space.
    at_start: bool,
    /// Whether special tokens have a text.
    shows_special: bool,
}

impl TextOffsets {
    /// Offsets of a whole text from its beginning. `shows_special`: special tokens are part of it.
    pub(crate) fn of_prompt(shows_special: bool) -> Self {
        Self { at_start: true, shows_special, ..Self::default() }
    }

    /// Continues with generated tokens after a text of this many characters.
    pub(crate) fn continue_after(&mut self, characters: usize) {
        (self.characters, self.shows_special) = (characters, false);
    }

    /// The offset of the next token.
    fn push(&mut self, engine: &Engine, id: u32) -> usize {
        let offset = self.characters;
        if self.window.is_empty() && !self.at_start {
            // The text of a token depends on whether another token precedes it.
            self.window.push(id);
            self.decoded = 1;
        }
        self.window.push(id);
        let decode = |ids: &[u32]| engine.detokenize(ids, !self.shows_special).unwrap_or_default();
        let text = decode(&self.window);
        let pending = self.window.len() - self.decoded;
        // A character has at most four bytes, and a token at least one.
        if !text.ends_with(char::REPLACEMENT_CHARACTER) || pending >= 4 {
            let before = decode(&self.window[..self.decoded]).chars().count();
            self.characters += text.chars().count().saturating_sub(before);
            self.window.drain(..self.decoded);
            self.decoded = self.window.len();
        }
        offset
    }
}

/// Builds the lists of the completions form token by token.
#[derive(Clone, Debug, Default)]
pub(crate) struct CompletionLists {
    lists: CompletionLogprobs,
    form: LogprobForm,
}

impl CompletionLists {
    pub(crate) fn new(form: LogprobForm) -> Self {
        Self { form, ..Self::default() }
    }

    /// Adds a token with its log-probability. The token itself is always among the most likely
    /// ones that are listed.
    pub(crate) fn push(
        &mut self,
        engine: &Engine,
        entry: &TokenLogprob,
        offsets: &mut TextOffsets,
    ) {
        let mut top = IndexMap::new();
        for &(id, logprob) in entry.top.iter().chain([&(entry.token_id, entry.logprob)]) {
            top.entry(self.form.name(id, token_text(engine, id)))
                .or_insert_with(|| finite(logprob));
        }
        let (id, logprob) = (entry.token_id, Some(finite(entry.logprob)));
        self.add(engine, id, logprob, Some(top), offsets);
    }

    /// Adds a token without a log-probability: the first of a prompt.
    pub(crate) fn push_first(&mut self, engine: &Engine, id: u32, offsets: &mut TextOffsets) {
        self.add(engine, id, None, None, offsets);
    }

    fn add(
        &mut self,
        engine: &Engine,
        id: u32,
        logprob: Option<f64>,
        top: Option<IndexMap<String, f64>>,
        offsets: &mut TextOffsets,
    ) {
        let Self { lists, form } = self;
        lists.text_offset.push(offsets.push(engine, id));
        lists.tokens.push(form.name(id, token_text(engine, id)));
        lists.token_logprobs.push(logprob);
        lists.top_logprobs.push(top);
    }

    pub(crate) fn finish(self) -> CompletionLogprobs {
        self.lists
    }
}
