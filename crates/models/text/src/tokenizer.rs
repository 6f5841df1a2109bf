//! Converts text to token ids and back.
//!
//! A [`Tokenizer`] is read-only and cheap to clone. There is one per model, shared by all requests.
//! Text that arrives token by token is decoded by a [`Detokenizer`]. [`Tokenizer::decode`] uses a
//! `Detokenizer` too, so streamed and whole text are equal.

mod check;
mod custom;
mod decoding;
mod flags;
mod gguf;
mod longest;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokenizers::{PostProcessor, Tokenizer as Trained, TruncationDirection};

use crate::bounded::{Bounded, catch};
use crate::detokenizer::Detokenizer;
use crate::{TokenizerError, TokenizerSource};

pub(crate) use decoding::Decoding;

/// Processor time that reading a tokenizer may take. The largest ones take about a second.
const MAX_WORK: Duration = Duration::from_secs(60);
/// Maximum length in bytes of a text. See [`Tokenizer::max_bytes`] for a closer limit.
const MAX_TEXT: usize = 64 << 20;

/// Texts that every tokenizer has to encode in time when it is loaded.
const PROBES: [&str; 8] = [
    "",
    "Hello, world! It's 2024. naïve 漢字 😀\r\n\tx = y[1] + 2.5e-3;",
    concat!(
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"
    ),
    "                                                                                         !",
    "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567x",
    "................................................................................!!!!!!!!a",
    "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\na",
    "АБВГДабвгдαβγ가나다ありがとうمرحباשלום\u{200d}\u{301}\u{fdfa}\u{0}",
];

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
    /// Ids of special tokens, which mark structure such as the start of a turn and have no text.
    special: HashSet<u32>,
    decoding: Decoding,
    /// Maximum number of bytes of text that one token stands for.
    longest_token: usize,
    /// Whether pairs of texts can be encoded.
    has_pairs: bool,
}

#[derive(Debug)]
enum Kind {
    /// A trained tokenizer. Boxed because the type has a size of some kilobytes.
    Trained(Box<Trained>),
    /// The tokens 0 to 255 are the bytes of these values.
    Bytes,
    /// The program's own tokenizer.
    Custom(Box<custom::Custom>),
}

impl Tokenizer {
    /// Creates a model's tokenizer.
    ///
    /// # Errors
    /// [`TokenizerError::Malformed`] or [`TokenizerError::InvalidKey`] if the data is invalid,
    /// [`TokenizerError::Unsupported`] if the tokenizer cannot be decoded token by token or is of
    /// an unknown kind, and [`TokenizerError::Missing`] if the model has no tokenizer.
    pub fn new(source: &TokenizerSource) -> Result<Self, TokenizerError> {
        match source {
            TokenizerSource::Json { file, bytes } => Self::from_json(file, bytes),
            TokenizerSource::Gguf(metadata) => gguf::build(metadata),
            TokenizerSource::Bytes { .. } => Ok(Self::bytes()),
            TokenizerSource::Custom(tokenizer) => {
                Ok(Self { inner: Arc::new(custom::build(Arc::clone(tokenizer))?) })
            }
            TokenizerSource::Missing { directory } => {
                Err(TokenizerError::Missing { directory: directory.clone() })
            }
        }
    }

    /// Creates a model's tokenizer. `config` is the content of `tokenizer_config.json`, whose flags
    /// of tokens count for a `tokenizer.json`.
    pub(crate) fn with_config(
        source: &TokenizerSource,
        config: Option<&Value>,
    ) -> Result<Self, TokenizerError> {
        match (source, config) {
            (TokenizerSource::Json { file, bytes }, Some(config)) => {
                let mut document = check::parse(file, bytes)?;
                flags::apply(&mut document, config);
                Self::from_document(file, document)
            }
            _ => Self::new(source),
        }
    }

    /// Creates a tokenizer from the content of a `tokenizer.json`. `file` is the name of the file
    /// in error messages.
    ///
    /// # Errors
    /// [`TokenizerError::Malformed`] if the content is invalid, and [`TokenizerError::Unsupported`]
    /// if the tokenizer cannot be decoded token by token.
    pub fn from_json(file: &str, bytes: &[u8]) -> Result<Self, TokenizerError> {
        let document = check::parse(file, bytes)?;
        Self::from_document(file, document)
    }

    /// Creates a tokenizer from a parsed `tokenizer.json`. The library reads it on a separate
    /// thread, where it also has to encode some texts in time.
    fn from_document(file: &str, mut document: Value) -> Result<Self, TokenizerError> {
        check::check(file, &mut document)?;
        let name = file.to_owned();
        Bounded::default()
            .run(&None, MAX_WORK, Duration::MAX, move || Self::build(&name, document))
            .unwrap_or_else(|stopped| Err(TokenizerError::malformed(file, stopped)))
    }

    fn build(file: &str, document: Value) -> Result<Self, TokenizerError> {
        let limits = longest::Limits::of(&document);
        let has_pairs = check::has_pairs(&document["post_processor"]);
        let trained: Trained = serde_json::from_value(document)
            .map_err(|error| TokenizerError::malformed(file, error))?;
        let decoding = Decoding::of(&trained, file)?;
        let special = trained
            .get_added_tokens_decoder()
            .into_iter()
            // Some files mark the tokens of single bytes, which are a part of the text.
            .filter(|(_, token)| token.special && !decoding.is_byte(&token.content))
            .map(|(id, _)| id)
            .collect();
        let vocab_size =
            trained.get_vocab(true).into_values().max().map_or(0, |largest| largest as usize + 1);
        let longest_token = limits.longest_token(&trained);
        let kind = Kind::Trained(Box::new(trained));
        let inner = Inner { kind, vocab_size, special, decoding, longest_token, has_pairs };
        let tokenizer = Self { inner: Arc::new(inner) };
        tokenizer.probe(file)?;
        Ok(tokenizer)
    }

    /// Encodes texts that are slow for some regular expressions, and decodes all tokens. A panic or
    /// a missed deadline is noticed by the caller.
    fn probe(&self, file: &str) -> Result<(), TokenizerError> {
        for text in PROBES {
            for add_special in [false, true] {
                // A vocabulary that cannot represent a text is not malformed.
                let encoded = self.encode_trusting(text, add_special);
                let largest = encoded.into_iter().flatten().max().unwrap_or(0) as usize;
                if largest >= check::MAX_TOKENS {
                    let reason = format!("expected ids below {}, got {largest}", check::MAX_TOKENS);
                    return Err(TokenizerError::malformed(file, reason));
                }
            }
        }
        let _ = self
            .decode(&(0..u32::try_from(self.vocab_size()).unwrap_or(0)).collect::<Vec<_>>(), false);
        Ok(())
    }

    /// Creates a tokenizer without a trained vocabulary, for models with random weights. The token
    /// ids of a text are its UTF-8 bytes. No token is special, and ids from 256 on have no text.
    #[must_use]
    pub fn bytes() -> Self {
        let inner = Inner {
            kind: Kind::Bytes,
            vocab_size: 256,
            special: HashSet::new(),
            decoding: Decoding::plain(),
            longest_token: 1,
            has_pairs: true,
        };
        Self { inner: Arc::new(inner) }
    }

    /// One more than the largest id that has a text. The vocabulary size of the model may be
    /// larger, because it is often padded.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// The maximum number of bytes of a text that is encoded as at most `tokens` tokens. A longer
    /// text has more tokens for certain, so it can be refused before the work of encoding it.
    ///
    /// In some tokenizers, a token can stand for a text of any length: an unknown word, or a token
    /// with the whitespace next to it. For these, 1024 bytes per token are assumed, or the length
    /// of the longest token of the vocabulary if that is more.
    #[must_use]
    pub fn max_bytes(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.inner.longest_token)
    }

    /// The token ids of `text`. Special tokens that are spelled out in the text become their ids.
    /// With `add_special`, the special tokens that the model expects around any text, such as the
    /// beginning of the sequence, are added. A rendered chat template contains them already.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] if the vocabulary cannot represent the text, if the text has more
    /// than 64 MiB, or if the library panics.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        if text.len() > MAX_TEXT {
            let reason = format!("expected at most {MAX_TEXT} bytes, got {}", text.len());
            return Err(TokenizerError::Encode(reason));
        }
        catch(|| self.encode_trusting(text, add_special))
            .unwrap_or_else(|stopped| Err(TokenizerError::Encode(stopped.to_string())))
    }

    /// The token ids of a text, or of a pair of texts, with the special tokens that an encoder
    /// expects around them, and the type (segment) of each. With `tokens_max`, tokens at the end of
    /// the text, or of the longer one of the two, are left out until there are so many.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`], also if the tokenizer has no template of pairs, or if the special
    /// tokens alone are more than `tokens_max`.
    pub fn encode_typed(
        &self,
        first: &str,
        second: Option<&str>,
        tokens_max: Option<usize>,
    ) -> Result<Vec<(u32, u32)>, TokenizerError> {
        let bytes = first.len().saturating_add(second.map_or(0, str::len));
        if bytes > MAX_TEXT {
            let reason = format!("expected at most {MAX_TEXT} bytes, got {bytes}");
            return Err(TokenizerError::Encode(reason));
        }
        if second.is_some() && !self.inner.has_pairs {
            let reason = "expected one text, because the tokenizer has no template of pairs";
            return Err(TokenizerError::Encode(reason.to_owned()));
        }
        let Kind::Trained(trained) = &self.inner.kind else {
            let mut ids = self.encode(first, true)?;
            ids.extend(self.encode(second.unwrap_or_default(), false)?);
            ids.truncate(tokens_max.unwrap_or(usize::MAX));
            return Ok(ids.into_iter().map(|id| (id, 0)).collect());
        };
        catch(|| typed(trained, first, second, tokens_max))
            .unwrap_or_else(|stopped| Err(TokenizerError::Encode(stopped.to_string())))
    }

    /// As [`Tokenizer::encode`], without catching panics of the library.
    fn encode_trusting(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.inner.kind {
            Kind::Trained(trained) => trained
                .encode_fast(text, add_special)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|error| TokenizerError::Encode(error.to_string())),
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Custom(custom) => custom.encode(text, add_special),
        }
    }

    /// The text of `tokens`. Ids without a text are ignored, and bytes that are not valid UTF-8
    /// become U+FFFD. With `skip_special`, special tokens have no text.
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

    /// The id of the token, special or not, with this spelling in the vocabulary. `None` if there
    /// is none, and always for [`Tokenizer::bytes`]. Of a [`CustomTokenizer`](crate::CustomTokenizer),
    /// only special tokens have a spelling.
    #[must_use]
    pub fn token_id(&self, spelling: &str) -> Option<u32> {
        match &self.inner.kind {
            Kind::Trained(trained) => trained.token_to_id(spelling),
            Kind::Bytes => None,
            Kind::Custom(custom) => custom.token_id(spelling),
        }
    }

    /// The spelling of a token in the vocabulary. It may differ from the token's text, which
    /// [`Tokenizer::token_bytes`] returns. `None` for an id without a spelling, as in
    /// [`Tokenizer::token_id`].
    #[must_use]
    pub fn token_spelling(&self, token: u32) -> Option<String> {
        match &self.inner.kind {
            Kind::Trained(trained) => trained.id_to_token(token),
            Kind::Bytes => None,
            Kind::Custom(custom) => {
                let found = custom.special().iter().find(|(id, _)| *id == token);
                found.map(|(_, spelling)| spelling.clone())
            }
        }
    }

    /// The bytes of a token's text if it is not the first token of a text. They may be part of a
    /// character. `None` for an id without a text.
    #[must_use]
    pub fn token_bytes(&self, token: u32) -> Option<Vec<u8>> {
        self.piece(token, false)
    }

    /// Whether a token is special, that is, marks structure and has no text.
    #[must_use]
    pub fn is_special(&self, token: u32) -> bool {
        self.inner.special.contains(&token)
    }

    /// Whether a token is found in a text before the text is split into words.
    pub(crate) fn is_added(&self, token: u32) -> bool {
        match &self.inner.kind {
            Kind::Trained(trained) => {
                trained.get_added_vocabulary().simple_id_to_token(token).is_some()
            }
            Kind::Bytes => false,
            Kind::Custom(_) => self.is_special(token),
        }
    }

    /// The spellings of the tokens that are found in a text before it is split into words, and
    /// whether each is special.
    pub(crate) fn added_tokens(&self) -> Vec<(String, bool)> {
        match &self.inner.kind {
            Kind::Trained(trained) => trained
                .get_added_tokens_decoder()
                .into_values()
                .map(|token| (token.content, token.special))
                .collect(),
            Kind::Bytes => Vec::new(),
            Kind::Custom(custom) => {
                custom.special().iter().map(|(_, spelling)| (spelling.clone(), true)).collect()
            }
        }
    }

    /// The bytes of a token's text. `first` says whether it is the first token of the text.
    pub(crate) fn piece(&self, token: u32, first: bool) -> Option<Vec<u8>> {
        match &self.inner.kind {
            Kind::Trained(trained) => {
                Some(self.inner.decoding.piece(trained.id_to_token(token)?, first))
            }
            Kind::Bytes => u8::try_from(token).ok().map(|byte| vec![byte]),
            Kind::Custom(custom) => custom.text(token).map(<[u8]>::to_vec),
        }
    }

    pub(crate) fn decoding(&self) -> &Decoding {
        &self.inner.decoding
    }
}

/// [`Tokenizer::encode_typed`] with a trained tokenizer.
fn typed(
    trained: &Trained,
    first: &str,
    second: Option<&str>,
    tokens_max: Option<usize>,
) -> Result<Vec<(u32, u32)>, TokenizerError> {
    let failed = |error: tokenizers::Error| TokenizerError::Encode(error.to_string());
    let mut first = trained.encode_fast(first, false).map_err(failed)?;
    let mut second =
        second.map(|text| trained.encode_fast(text, false)).transpose().map_err(failed)?;
    if let Some(tokens_max) = tokens_max {
        let added =
            trained.get_post_processor().map_or(0, |post| post.added_tokens(second.is_some()));
        let Some(room) = tokens_max.checked_sub(added) else {
            let reason = format!("expected room for {added} special tokens, got {tokens_max}");
            return Err(TokenizerError::Encode(reason));
        };
        let lens = [first.len(), second.as_ref().map_or(0, |second| second.len())];
        let [of_first, of_second] = longest_first(lens, room);
        let right = TruncationDirection::Right;
        first.truncate(of_first, 0, right);
        if let Some(second) = &mut second {
            second.truncate(of_second, 0, right);
        }
    }
    let all = trained.post_process(first, second, true).map_err(failed)?;
    Ok(all.get_ids().iter().copied().zip(all.get_type_ids().iter().copied()).collect())
}

/// The lengths of two texts after tokens of the longer one were removed, one by one, until there are
/// at most `room` of both together. Of texts that have become equal, the one that was longer keeps
/// the last token, as in the library's `LongestFirst`.
fn longest_first([first, second]: [usize; 2], room: usize) -> [usize; 2] {
    if first + second <= room {
        return [first, second];
    }
    let (half, rest) = (room / 2, room % 2);
    if first <= half {
        [first, room - first]
    } else if second <= half {
        [room - second, second]
    } else {
        if first > second { [half + rest, half] } else { [half, half + rest] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: texts are shortened as if tokens of the longer one were removed one by one.
    #[test]
    fn the_longer_text_is_shortened() {
        let one_by_one = |mut lens: [usize; 2], room: usize| {
            let first_is_longer = lens[0] > lens[1];
            while lens[0] + lens[1] > room {
                let of_first = lens[0] > lens[1] || lens[0] == lens[1] && !first_is_longer;
                lens[usize::from(!of_first)] -= 1;
            }
            lens
        };
        for first in 0..9 {
            for second in 0..9 {
                for room in 0..12 {
                    let got = longest_first([first, second], room);
                    assert_eq!(got, one_by_one([first, second], room), "{first} {second} {room}");
                }
            }
        }
    }
}
