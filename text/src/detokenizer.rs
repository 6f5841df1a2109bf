//! Text from tokens as they come. Owned by whoever streams one sequence.
//!
//! A character may be spread over several tokens, and the first token may lose the space that
//! encoding had put before it. A [`Detokenizer`] gives out only what no later token can change:
//! its pieces, joined, are the text of all tokens, and none ends in the middle of a character.

use crate::Tokenizer;

/// Turns one sequence's tokens into text piece by piece. Life: made for the sequence's output,
/// fed with every token in order, finished once.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// No token with a text has come yet.
    first: bool,
    /// Spaces that may still be cut off the text's start; 0 once other text has come.
    leading_spaces_cut: usize,
    /// The beginning of a character whose other bytes have not come: at most 3 bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Starts a text. `skip_special` leaves special tokens out of it.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let leading_spaces_cut = tokenizer.decoding().leading_spaces_cut();
        Self { tokenizer, skip_special, first: true, leading_spaces_cut, pending: Vec::new() }
    }

    /// Starts in the middle of a text: the first token keeps its space. For output that follows a
    /// prompt, where the space is part of what the model said.
    #[must_use]
    pub fn continuing(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let mut detokenizer = Self::new(tokenizer, skip_special);
        detokenizer.first = false;
        detokenizer.leading_spaces_cut = 0;
        detokenizer
    }

    /// Takes the next token and returns the text that is certain now, often its own; empty while
    /// a character is incomplete. Bytes that cannot become a character give U+FFFD.
    pub fn push(&mut self, token: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(token) {
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

    /// Ends the text: a character left incomplete gives U+FFFD.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }

    /// Moves out of `pending` all but an incomplete character at its end.
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
        // What is left is all valid, or the incomplete character alone.
        if let Ok(valid) = std::str::from_utf8(rest) {
            text.push_str(valid);
            rest = &[];
        }
        let incomplete = rest.len();
        self.pending.drain(..self.pending.len() - incomplete);
        text
    }
}
