//! Streaming detokenization of one sequence.
//!
//! A character may span several tokens, and the first token may lose the space that encoding has
//! prepended. A [`Detokenizer`] returns only text that no later token can change. Its pieces joined
//! are the text of all tokens, and no piece ends within a character.

use std::sync::Arc;

use crate::Tokenizer;

/// Turns the tokens of one sequence into text piece by piece: [`Detokenizer::push`] is called with
/// each token in order, and [`Detokenizer::finish`] at the end.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special tokens that have a text although others are skipped.
    shown: Arc<[u32]>,
    /// Whether no token with a text was pushed yet.
    first: bool,
    /// Number of spaces that may still be removed from the start of the text; 0 after the first
    /// other character.
    leading_spaces_cut: usize,
    /// The first bytes of an incomplete character, at most 3.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Starts a new text. With `skip_special`, special tokens have no text.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let leading_spaces_cut = tokenizer.decoding().leading_spaces_cut();
        let shown = Arc::default();
        Self {
            tokenizer,
            skip_special,
            shown,
            first: true,
            leading_spaces_cut,
            pending: Vec::new(),
        }
    }

    /// Starts in the middle of a text, so that the first token keeps its leading space. Used for
    /// output that follows a prompt.
    #[must_use]
    pub fn continuing(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let mut detokenizer = Self::new(tokenizer, skip_special);
        detokenizer.first = false;
        detokenizer.leading_spaces_cut = 0;
        detokenizer
    }

    /// Gives these special tokens a text although others are skipped: those of tool calls, for
    /// example.
    #[must_use]
    pub fn showing(mut self, tokens: impl IntoIterator<Item = u32>) -> Self {
        self.shown = tokens.into_iter().collect();
        self
    }

    /// Adds the next token and returns the text that is complete now, which is empty while a
    /// character is incomplete. Bytes that are not valid UTF-8 become U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(token) && !self.shown.contains(&token) {
            return String::new();
        }
        let Some(bytes) = self.tokenizer.piece(token, self.first) else { return String::new() };
        self.first = false;
        let mut bytes = bytes.as_slice();
        while self.leading_spaces_cut > 0
            && let [byte, rest @ ..] = bytes
        {
            if *byte == b' ' {
                bytes = rest;
                self.leading_spaces_cut -= 1;
            } else {
                self.leading_spaces_cut = 0;
            }
        }
        self.pending.extend_from_slice(bytes);
        self.take_complete()
    }

    /// Ends the text and returns the rest: U+FFFD if the last character is incomplete, else
    /// nothing.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }

    /// Removes all text from `pending` except an incomplete character at its end.
    fn take_complete(&mut self) -> String {
        let mut text = String::with_capacity(self.pending.len());
        let mut rest = self.pending.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            rest = invalid;
            let Some(invalid_len) = error.error_len() else { break };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[invalid_len..];
        }
        // The rest is either valid or an incomplete character.
        if let Ok(valid) = std::str::from_utf8(rest) {
            text.push_str(valid);
            rest = &[];
        }
        let incomplete = rest.len();
        self.pending.drain(..self.pending.len() - incomplete);
        text
    }
}
