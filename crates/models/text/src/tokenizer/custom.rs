//! A tokenizer of the program: its vocabulary as it was read once, and its spelled-out special
//! tokens, which are found here so that it does not have to know them.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};

use super::check::MAX_TOKENS;
use super::{Decoding, Inner, Kind, longest};
use crate::bounded::catch;
use crate::{CustomTokenizer, TokenizerError};

/// The name in error messages.
const NAME: &str = "the program's tokenizer";

pub(super) struct Custom {
    encoder: Arc<dyn CustomTokenizer>,
    /// The bytes of each token's text, by id. Special tokens have their spelling.
    texts: Vec<Vec<u8>>,
    special: Vec<(u32, String)>,
    ids: HashMap<String, u32>,
    /// Finds the spellings of `special`, by index.
    spellings: AhoCorasick,
    begin: Option<u32>,
}

impl fmt::Debug for Custom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Custom").field("tokens", &self.texts.len()).finish_non_exhaustive()
    }
}

/// Reads the vocabulary of `encoder`.
pub(super) fn build(encoder: Arc<dyn CustomTokenizer>) -> Result<Inner, TokenizerError> {
    let malformed = |reason: String| TokenizerError::malformed(NAME, reason);
    let read = || (encoder.tokens(), encoder.special_tokens(), encoder.begin_token());
    let (mut texts, special, begin) = catch(read).map_err(|stop| malformed(stop.to_string()))?;
    if texts.is_empty() || texts.len() > MAX_TOKENS {
        return Err(malformed(format!("expected 1 to {MAX_TOKENS} tokens, got {}", texts.len())));
    }
    let used = special.iter().map(|(id, _)| *id).chain(begin);
    if let Some(id) = used.max().filter(|&id| id as usize >= texts.len()) {
        return Err(malformed(format!("expected special tokens below {}, got {id}", texts.len())));
    }
    let mut ids = HashMap::new();
    for (id, spelling) in &special {
        if spelling.is_empty() {
            return Err(malformed(format!("expected a spelling of the special token {id}")));
        }
        if ids.insert(spelling.clone(), *id).is_some() {
            return Err(malformed(format!("expected one token with the spelling `{spelling}`")));
        }
        texts[*id as usize] = spelling.clone().into_bytes();
    }
    let spellings = AhoCorasick::builder()
        .match_kind(MatchKind::LeftmostLongest)
        .build(special.iter().map(|(_, spelling)| spelling))
        .map_err(|error| malformed(error.to_string()))?;
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    Ok(Inner {
        vocab_size: texts.len(),
        special: special.iter().map(|(id, _)| *id).collect::<HashSet<_>>(),
        decoding: Decoding::plain(),
        longest_token: longest.max(longest::ASSUMED),
        has_pairs: false,
        kind: Kind::Custom(Box::new(Custom { encoder, texts, special, ids, spellings, begin })),
    })
}

impl Custom {
    /// As [`Tokenizer::encode`](super::Tokenizer::encode), without catching panics.
    pub(super) fn encode(&self, text: &str, begin: bool) -> Result<Vec<u32>, TokenizerError> {
        let mut tokens: Vec<u32> = self.begin.filter(|_| begin).into_iter().collect();
        let mut start = 0;
        for found in self.spellings.find_iter(text) {
            self.append(&text[start..found.start()], &mut tokens)?;
            tokens.push(self.special[found.pattern().as_usize()].0);
            start = found.end();
        }
        self.append(&text[start..], &mut tokens)?;
        Ok(tokens)
    }

    /// Appends the tokens of a text without special tokens.
    fn append(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let encoded =
            self.encoder.encode(text).map_err(|error| TokenizerError::Encode(error.to_string()))?;
        if let Some(id) = encoded.iter().find(|&&id| id as usize >= self.texts.len()) {
            let reason = format!("expected ids below {} of {NAME}, got {id}", self.texts.len());
            return Err(TokenizerError::Encode(reason));
        }
        tokens.extend(encoded);
        Ok(())
    }

    /// The bytes of a token's text; `None` for an id without a text.
    pub(super) fn text(&self, token: u32) -> Option<&[u8]> {
        self.texts.get(token as usize).map(Vec::as_slice).filter(|text| !text.is_empty())
    }

    pub(super) fn token_id(&self, spelling: &str) -> Option<u32> {
        self.ids.get(spelling).copied()
    }

    /// The ids and spellings of the special tokens.
    pub(super) fn special(&self) -> &[(u32, String)] {
        &self.special
    }
}
