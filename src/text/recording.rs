//! Records the answer to a request while it is read, for the history of its conversation.

use std::sync::Arc;

use stolon_scheduler::FinishReason;
use stolon_text::{Answer, AnswerFormat, Detokenizer, Tokenizer};

use super::history::{Exchange, StoredHistory, normalized};

/// An answer that is being read. Each answer to a request begins with a clone of its recording.
#[derive(Clone, Debug)]
pub(crate) struct Recording {
    exchange: Arc<Exchange>,
    /// Where the answer is stored, too.
    stored: Option<Arc<StoredHistory>>,
    tokenizer: Tokenizer,
    format: AnswerFormat,
    /// The tokens so far.
    tokens: Vec<u32>,
    /// The text so far, as the client gets it.
    text: String,
}

impl Recording {
    /// Records an answer of this `format` to a request.
    pub(super) fn new(
        exchange: Arc<Exchange>,
        tokenizer: Tokenizer,
        format: AnswerFormat,
        stored: Option<Arc<StoredHistory>>,
    ) -> Self {
        let (tokens, text) = (Vec::new(), String::new());
        Self { exchange, stored, tokenizer, format, tokens, text }
    }

    /// Adds a token that does not end the answer.
    pub(crate) fn push_token(&mut self, id: u32) {
        self.tokens.push(id);
    }

    /// Adds text that the client gets.
    pub(crate) fn push_text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Ends the answer. It is kept if the client gets all of it: an answer that is cut at a stop
    /// string has tokens that are not. Returns what it says if it is kept.
    pub(crate) fn finish(self, reason: &FinishReason) -> Option<Answer> {
        if !matches!(reason, FinishReason::Stop | FinishReason::StopToken(_) | FinishReason::Length)
        {
            return None;
        }
        let mut detokenizer = Detokenizer::continuing(self.tokenizer, false);
        let mut text: String = self.tokens.iter().map(|&token| detokenizer.push(token)).collect();
        text.push_str(&detokenizer.finish());
        let said = normalized(Answer::parse(&self.format, &self.text));
        let answer = self.exchange.answered(self.tokens, text, said.clone());
        if let Some((stored, answer)) = self.stored.zip(answer) {
            stored.add(&self.exchange, &answer);
        }
        Some(said)
    }
}
