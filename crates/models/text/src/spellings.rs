//! Keeps special tokens that are spelled out in a conversation from becoming control tokens.
//!
//! A separator, a character that occurs nowhere in the conversation, is put into each spelling
//! before the template is rendered. The rendered text is then encoded in pieces, without the
//! separators, so no piece contains the spelling. A separator is also put after a text that ends
//! with the beginning of a spelling, because the template may join it with another text. Special
//! tokens that begin in the template's own text are not changed.

use std::collections::HashSet;

use aho_corasick::AhoCorasick;
use serde_json::{Map, Value};

/// The first character that may become a separator. The whole plane is for private use.
const FIRST_SEPARATOR: u32 = 0x10_0000;
/// The last character that may become a separator.
const LAST_SEPARATOR: u32 = 0x10_fffd;

/// The spellings of tokens that a conversation must not contain.
#[derive(Clone, Debug)]
pub(crate) struct Spellings {
    automaton: AhoCorasick,
    sorted: Vec<String>,
    /// Length in bytes of the longest spelling.
    longest: usize,
}

impl Spellings {
    /// Returns `None` if there are no spellings.
    pub(crate) fn new(spellings: impl IntoIterator<Item = String>) -> Option<Self> {
        // A spelling of one character cannot be interrupted.
        let mut sorted: Vec<String> =
            spellings.into_iter().filter(|spelling| spelling.chars().nth(1).is_some()).collect();
        sorted.sort_unstable();
        sorted.dedup();
        let longest = sorted.iter().map(String::len).max()?;
        let automaton = AhoCorasick::new(&sorted).ok()?;
        Some(Self { automaton, sorted, longest })
    }

    /// The places in `text` where a separator belongs, in bytes, in order.
    fn places(&self, text: &str) -> Vec<usize> {
        let mut places: Vec<usize> = self
            .automaton
            .find_overlapping_iter(text)
            .filter_map(|found| {
                let first = text[found.start()..].chars().next()?;
                Some(found.start() + first.len_utf8())
            })
            .collect();
        let tail = text.len().saturating_sub(self.longest);
        let begins = |start: usize| {
            let end = &text[start..];
            let next = self.sorted.partition_point(|spelling| spelling.as_str() <= end);
            self.sorted.get(next).is_some_and(|spelling| spelling.starts_with(end))
        };
        if (tail..text.len()).any(|start| text.is_char_boundary(start) && begins(start)) {
            places.push(text.len());
        }
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The pieces of a text that is cut within each spelling, so that no piece contains one.
    pub(crate) fn cut<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let (mut pieces, mut start) = (Vec::new(), 0);
        for place in self.places(text).into_iter().chain([text.len()]) {
            if start < place {
                pieces.push(&text[start..place]);
            }
            start = place;
        }
        pieces
    }

    /// Whether a text in `value` needs a separator.
    pub(crate) fn occur_in(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => !self.places(text).is_empty(),
            Value::Array(items) => items.iter().any(|item| self.occur_in(item)),
            Value::Object(fields) => fields
                .iter()
                .any(|(name, value)| !self.places(name).is_empty() || self.occur_in(value)),
            _ => false,
        }
    }

    /// Puts separators into all texts of `value`.
    pub(crate) fn separate(&self, value: &mut Value, separator: char) {
        match value {
            Value::String(text) => self.separate_text(text, separator),
            Value::Array(items) => {
                items.iter_mut().for_each(|item| self.separate(item, separator));
            }
            Value::Object(fields) => {
                let mut changed = Map::new();
                for (mut name, mut value) in std::mem::take(fields) {
                    self.separate_text(&mut name, separator);
                    self.separate(&mut value, separator);
                    changed.insert(name, value);
                }
                *fields = changed;
            }
            _ => {}
        }
    }

    fn separate_text(&self, text: &mut String, separator: char) {
        for place in self.places(text).into_iter().rev() {
            text.insert(place, separator);
        }
    }
}

/// A character that occurs in none of `values`. `None` if all of them occur.
pub(crate) fn unused_character<'a>(values: impl Iterator<Item = &'a Value>) -> Option<char> {
    let mut used = HashSet::new();
    values.for_each(|value| collect(value, &mut used));
    (FIRST_SEPARATOR..=LAST_SEPARATOR)
        .filter_map(char::from_u32)
        .find(|candidate| !used.contains(candidate))
}

/// Adds the characters of `value` that may become separators.
fn collect(value: &Value, used: &mut HashSet<char>) {
    let candidates = |text: &str| -> Vec<char> {
        text.chars().filter(|&character| u32::from(character) >= FIRST_SEPARATOR).collect()
    };
    match value {
        Value::String(text) => used.extend(candidates(text)),
        Value::Array(items) => items.iter().for_each(|item| collect(item, used)),
        Value::Object(fields) => {
            for (name, value) in fields {
                used.extend(candidates(name));
                collect(value, used);
            }
        }
        _ => {}
    }
}
