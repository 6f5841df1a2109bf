//! How many bytes of text one token can stand for. Used by
//! [`Tokenizer::max_bytes`](super::Tokenizer::max_bytes) only.

use serde_json::Value;
use tokenizers::Tokenizer as Trained;
use tokenizers::{NormalizedString, Normalizer};

/// Assumed for tokenizers in which a token has no maximum length, for example because any unknown
/// word becomes one token. Tokens of real vocabularies have at most a few hundred bytes.
pub(super) const ASSUMED: usize = 1024;

/// The limits in a `tokenizer.json` on the length of the text that a token stands for.
pub(super) struct Limits {
    byte_level: bool,
    /// Maximum number of bytes of text that can become one byte when it is normalized.
    shrinks: usize,
    /// Whether every token stands for a text of limited length.
    limited: bool,
}

impl Limits {
    pub(super) fn of(document: &Value) -> Self {
        let shrinks = shrink_factor(&document["normalizer"]);
        let limited = shrinks.is_some()
            && keeps_all(&document["pre_tokenizer"])
            && covers_all(document)
            && steps(&document["added_tokens"]).all(|token| {
                // A token with one of these flags includes all whitespace on that side.
                token["lstrip"] != true && token["rstrip"] != true
            });
        let byte_level = is_byte_level(document);
        Self { byte_level, shrinks: shrinks.unwrap_or(1), limited }
    }

    /// The maximum number of bytes of text that one token of `trained` stands for. [`ASSUMED`], or
    /// more if the vocabulary has a longer token, if there is no maximum.
    pub(super) fn longest_token(&self, trained: &Trained) -> usize {
        let longest = longest_spelling(self.byte_level, trained).saturating_mul(self.shrinks);
        if self.limited { longest } else { longest.max(ASSUMED) }
    }
}

/// The length in bytes of the longest normalized text that a token of the vocabulary matches.
fn longest_spelling(byte_level: bool, trained: &Trained) -> usize {
    let model = trained
        .get_vocab(false)
        .into_keys()
        // In byte-level vocabularies, each character of a spelling is one byte.
        .map(|token| if byte_level { token.chars().count() } else { token.len() })
        .max();
    let added = trained
        .get_added_tokens_decoder()
        .into_values()
        .map(|token| {
            let mut text = NormalizedString::from(token.content.as_str());
            if let (true, Some(normalizer)) = (token.normalized, trained.get_normalizer()) {
                let _ = normalizer.normalize(&mut text);
            }
            text.get().len().max(token.content.len())
        })
        .max();
    model.max(added).unwrap_or(0).max(1)
}

/// How many bytes of text can become one byte when it is normalized. `None` if there is no
/// maximum, because the normalizer removes text.
fn shrink_factor(normalizer: &Value) -> Option<usize> {
    match normalizer["type"].as_str() {
        None => Some(1),
        Some("Prepend" | "ByteLevel") => Some(1),
        // Each of these replaces up to four bytes by one: `𝐀` becomes `A` under NFKC. Sequences of
        // characters that are composed lose fewer.
        Some("NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase") => Some(4),
        Some("Replace") => {
            let pattern = normalizer["pattern"]["String"].as_str()?;
            let content = normalizer["content"].as_str().filter(|content| !content.is_empty())?;
            Some(pattern.len().div_ceil(content.len()).max(1))
        }
        Some("Sequence") => steps(&normalizer["normalizers"])
            .map(shrink_factor)
            .try_fold(1_usize, |product, factor| Some(product.saturating_mul(factor?))),
        Some(_) => None,
    }
}

/// Whether the words that a text is split into contain all of it.
fn keeps_all(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None | Some("ByteLevel" | "Metaspace" | "Digits" | "FixedLength" | "UnicodeScripts") => {
            true
        }
        Some("Split" | "Punctuation") => pre_tokenizer["behavior"] != "Removed",
        Some("Sequence") => steps(&pre_tokenizer["pretokenizers"]).all(keeps_all),
        Some(_) => false,
    }
}

/// Whether every byte of a word becomes part of a token of limited length: the vocabulary has a
/// token for each byte, so no text is unknown.
fn covers_all(document: &Value) -> bool {
    let model = &document["model"];
    let known = |token: &str| match &model["vocab"] {
        Value::Object(ids) => ids.contains_key(token),
        _ => false,
    };
    match model["type"].as_str() {
        // The type of old files is missing.
        None | Some("BPE") if is_byte_level(document) => {
            (0..=255).all(|byte| known(byte_char(byte).encode_utf8(&mut [0; 4])))
        }
        None | Some("BPE") => {
            model["byte_fallback"] == true && (0..=255).all(|byte| known(&fallback(byte)))
        }
        Some("Unigram") => {
            let pieces: std::collections::HashSet<&str> =
                steps(&model["vocab"]).filter_map(|piece| piece[0].as_str()).collect();
            model["byte_fallback"] == true
                && (0..=255).all(|byte| pieces.contains(fallback(byte).as_str()))
        }
        _ => false,
    }
}

/// Whether texts are converted to GPT-2's byte characters.
fn is_byte_level(document: &Value) -> bool {
    fn any(step: &Value) -> bool {
        step["type"] == "ByteLevel"
            || steps(&step["normalizers"]).chain(steps(&step["pretokenizers"])).any(any)
    }
    any(&document["normalizer"]) || any(&document["pre_tokenizer"])
}

fn steps(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn fallback(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

/// The character that encodes a byte in GPT-2's table.
fn byte_char(byte: u8) -> char {
    let code = u32::from(byte);
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0..=0x20 => 0x100 + code,
        0x7f..=0xa0 => 0x121 + code - 0x7f,
        0xad => 0x143,
    };
    char::from_u32(code).unwrap_or_default()
}
