//! From text to token ids and back.
//!
//! A [`Tokenizer`] is read-only and cheap to clone: one a model, shared by every request. Text
//! that arrives token by token goes through a [`Detokenizer`];
//! [`Tokenizer::decode`] is the same machine run to its end, so streamed and whole text agree.

mod decoding;
mod gguf;

use std::collections::HashSet;
use std::sync::Arc;

use tokenizers::Tokenizer as Trained;

use crate::detokenizer::Detokenizer;
use crate::{TokenizerError, TokenizerSource};

pub(crate) use decoding::Decoding;

/// Turns text into token ids and token ids into text.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    kind: Kind,
    /// One more than the largest id that has a text.
    vocab_size: usize,
    /// Ids that carry structure, no text: turns, beginnings, ends.
    special: HashSet<u32>,
    decoding: Decoding,
}

#[derive(Debug)]
enum Kind {
    /// Boxed: it is some kilobytes even when empty.
    Trained(Box<Trained>),
    /// Token 0 to 255 is the byte of that value.
    Bytes,
}

impl Tokenizer {
    /// Makes the tokenizer that a model came with.
    ///
    /// # Errors
    /// [`TokenizerError::Malformed`] when it cannot be read, [`TokenizerError::Unsupported`] when it is of
    /// a kind that cannot be decoded token by token, [`TokenizerError::Missing`] when the model
    /// came without one.
    pub fn new(source: &TokenizerSource) -> Result<Self, TokenizerError> {
        match source {
            TokenizerSource::Json { file, bytes } => Self::from_json(file, bytes),
            TokenizerSource::Gguf(metadata) => gguf::build(metadata),
            TokenizerSource::Bytes { .. } => Ok(Self::bytes()),
            TokenizerSource::Missing { directory } => {
                Err(TokenizerError::Missing { directory: directory.clone() })
            }
        }
    }

    /// Makes one from the content of a `tokenizer.json`; `file` is its name for messages.
    ///
    /// # Errors
    /// As [`Tokenizer::new`].
    pub fn from_json(file: &str, bytes: &[u8]) -> Result<Self, TokenizerError> {
        let mut trained =
            Trained::from_bytes(bytes).map_err(|error| TokenizerError::malformed(file, error))?;
        // A file may ask for either, for batches of equal length; here every text stands alone.
        trained.with_padding(None);
        trained.with_truncation(None).map_err(|error| TokenizerError::malformed(file, error))?;
        let decoding = Decoding::of(&trained, file)?;
        let special = trained
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| id)
            .collect();
        let vocab_size =
            trained.get_vocab(true).into_values().max().map_or(0, |largest| largest as usize + 1);
        let kind = Kind::Trained(Box::new(trained));
        Ok(Self { inner: Arc::new(Inner { kind, vocab_size, special, decoding }) })
    }

    /// One without a vocabulary to learn: every byte is the token of its value, and the text is
    /// its UTF-8 bytes. For random models. No token is special; ids from 256 on stand for nothing.
    #[must_use]
    pub fn bytes() -> Self {
        let (special, decoding) = (HashSet::new(), Decoding::plain());
        Self { inner: Arc::new(Inner { kind: Kind::Bytes, vocab_size: 256, special, decoding }) }
    }

    /// One more than the largest id that has a text. The model's own vocabulary may be larger: it
    /// is often padded.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// The ids of `text`. Special tokens spelled out in the text become their ids. With
    /// `add_special` the tokens that the model wants around any text, such as a beginning, are
    /// added; a rendered chat template has them already.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.inner.kind {
            Kind::Trained(trained) => trained
                .encode_fast(text, add_special)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|error| TokenizerError::Encode(error.to_string())),
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
        }
    }

    /// The text of `tokens`. Ids without a text give nothing; bytes that are no UTF-8 give U+FFFD.
    /// `skip_special` leaves special tokens out.
    #[must_use]
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(self.clone(), skip_special);
        let mut text = String::new();
        for &token in tokens {
            text.push_str(&detokenizer.push(token));
        }
        text.push_str(&detokenizer.finish());
        text
    }

    /// The id of a token by its spelling in the vocabulary, special ones included.
    #[must_use]
    pub fn token_id(&self, spelling: &str) -> Option<u32> {
        match &self.inner.kind {
            Kind::Trained(trained) => trained.token_to_id(spelling),
            Kind::Bytes => None,
        }
    }

    /// A token's spelling in the vocabulary, which may stand for other bytes: see
    /// [`Tokenizer::token_bytes`]. `None` for an id without a text, and for every one of
    /// [`Tokenizer::bytes`].
    #[must_use]
    pub fn token_spelling(&self, token: u32) -> Option<String> {
        match &self.inner.kind {
            Kind::Trained(trained) => trained.id_to_token(token),
            Kind::Bytes => None,
        }
    }

    /// The bytes that a token stands for in the middle of a text; they may be part of a character.
    /// `None` for an id without a text.
    #[must_use]
    pub fn token_bytes(&self, token: u32) -> Option<Vec<u8>> {
        self.piece(token, false)
    }

    /// True for tokens that carry structure and no text.
    #[must_use]
    pub fn is_special(&self, token: u32) -> bool {
        self.inner.special.contains(&token)
    }

    /// The bytes of a token; `first` when no other token stands before it in the text.
    pub(crate) fn piece(&self, token: u32, first: bool) -> Option<Vec<u8>> {
        match &self.inner.kind {
            Kind::Trained(trained) => {
                Some(self.inner.decoding.piece(trained.id_to_token(token)?, first))
            }
            Kind::Bytes => u8::try_from(token).ok().map(|byte| vec![byte]),
        }
    }

    pub(crate) fn decoding(&self) -> &Decoding {
        &self.inner.decoding
    }
}
