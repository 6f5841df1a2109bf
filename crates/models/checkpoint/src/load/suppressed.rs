//! Tokens that a model must not generate: `suppress_tokens`, `begin_suppress_tokens`,
//! `bad_words_ids` and `no_repeat_ngram_size` of `generation_config.json`.

use serde_json::Value;

use crate::config::Keys;
use crate::error::ModelError;

/// Maximum number of sequences in `bad_words_ids`.
const SEQUENCES_MAX: usize = 1 << 16;
/// Maximum number of tokens of such a sequence.
const SEQUENCE_TOKENS_MAX: usize = 256;
/// Maximum of `no_repeat_ngram_size`.
const NGRAM_MAX: usize = 1024;

/// Tokens that a model must not generate. All ids are below `vocab_size`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SuppressedTokens {
    /// Tokens that are never generated.
    pub always: Vec<u32>,
    /// Tokens that are not generated as the first token of an answer.
    pub at_begin: Vec<u32>,
    /// Sequences of at least two tokens. The last token is not generated after the others, which
    /// may be in the prompt.
    pub sequences: Vec<Vec<u32>>,
    /// No sequence of this number of tokens is generated if it already occurs in the prompt or in
    /// the answer. 0 has no effect.
    pub no_repeat_ngram: usize,
}

impl SuppressedTokens {
    /// The names of the keys that are read.
    pub(super) const KEYS: [&str; 4] =
        ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "no_repeat_ngram_size"];

    /// Whether every token may be generated.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Sets the fields whose keys are present.
    pub(super) fn read(&mut self, keys: &Keys<'_>) -> Result<(), ModelError> {
        if let Some(ids) = keys.token_ids("suppress_tokens")? {
            self.always = ids;
        }
        if let Some(ids) = keys.token_ids("begin_suppress_tokens")? {
            self.at_begin = ids;
        }
        if let Some(value) = keys.value("bad_words_ids") {
            self.sequences = sequences(value).ok_or_else(|| {
                let expected = format!(
                    "at most {SEQUENCES_MAX} lists of 1 to {SEQUENCE_TOKENS_MAX} token ids"
                );
                keys.invalid("bad_words_ids", &expected)
            })?;
        }
        if let Some(size) = keys.count("no_repeat_ngram_size")? {
            if size > NGRAM_MAX {
                let expected = format!("an integer from 0 to {NGRAM_MAX}");
                return Err(keys.invalid("no_repeat_ngram_size", &expected));
            }
            self.no_repeat_ngram = size;
        }
        Ok(())
    }

    /// Removes ids that are not in the vocabulary. Sequences of one token become tokens that are
    /// never generated, except for the end-of-sequence tokens `ends`, which are removed as in
    /// transformers.
    pub(super) fn tidy(&mut self, vocab_size: usize, ends: &[u32]) {
        let is_known = |id: &u32| (*id as usize) < vocab_size;
        self.sequences.retain(|sequence| sequence.iter().all(is_known));
        let (single, longer): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.sequences).into_iter().partition(|list| list.len() == 1);
        self.sequences = longer;
        self.always.extend(single.into_iter().flatten().filter(|id| !ends.contains(id)));
        for list in [&mut self.always, &mut self.at_begin] {
            list.retain(is_known);
            list.sort_unstable();
            list.dedup();
        }
    }
}

/// Parses a list of lists of token ids, if it is within the limits.
fn sequences(value: &Value) -> Option<Vec<Vec<u32>>> {
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    let list = |list: &Value| {
        let list = list.as_array()?;
        let fits = (1..=SEQUENCE_TOKENS_MAX).contains(&list.len());
        if fits { list.iter().map(id).collect::<Option<Vec<_>>>() } else { None }
    };
    let lists = value.as_array().filter(|lists| lists.len() <= SEQUENCES_MAX)?;
    lists.iter().map(list).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &Value) -> Result<SuppressedTokens, String> {
        let mut suppressed = SuppressedTokens::default();
        Keys::root("f", value)
            .and_then(|keys| suppressed.read(&keys))
            .map(|()| suppressed)
            .map_err(|error| error.to_string())
    }

    /// Goal: all keys are read. As in transformers, ids outside the vocabulary and end-of-sequence
    /// tokens among the bad words have no effect.
    #[test]
    fn keys_are_read() {
        let mut read = read(&json!({
            "suppress_tokens": [5, 3, 5, 99, -1], "begin_suppress_tokens": 4,
            "bad_words_ids": [[7], [2], [1, 6], [1, 99]], "no_repeat_ngram_size": 3,
        }))
        .unwrap();
        read.tidy(10, &[2]);
        let expected = SuppressedTokens {
            always: vec![3, 5, 7],
            at_begin: vec![4],
            sequences: vec![vec![1, 6]],
            no_repeat_ngram: 3,
        };
        assert_eq!(read, expected);
    }

    /// Goal: values that are too large or of another type are refused, with their key.
    #[test]
    fn other_values_are_refused() {
        for (key, value) in [
            ("suppress_tokens", json!(["a"])),
            ("begin_suppress_tokens", json!({})),
            ("bad_words_ids", json!([[]])),
            ("bad_words_ids", json!([1])),
            ("bad_words_ids", json!([[-1]])),
            ("bad_words_ids", json!([vec![1; 257]])),
            ("bad_words_ids", json!(vec![[1]; (1 << 16) + 1])),
            ("no_repeat_ngram_size", json!(1025)),
            ("no_repeat_ngram_size", json!("2")),
        ] {
            let error = read(&json!({ key: value })).expect_err(key);
            assert!(error.contains(&format!("`{key}`")), "{error}");
        }
    }
}
