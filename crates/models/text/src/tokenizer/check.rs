//! Checks a `tokenizer.json` before the library `tokenizers` reads it. The library trusts the file:
//! some files make it panic, allocate without a limit, or take exponential time.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use crate::TokenizerError;

/// Maximum size of a file in bytes. The largest published files have about 35 MB.
const MAX_FILE: usize = 64 << 20;
/// Maximum number of values in the file, counted by the characters that separate them.
const MAX_VALUES: usize = 4 << 20;
/// Maximum number of tokens, and one more than the largest id.
pub(super) const MAX_TOKENS: usize = 1 << 22;
/// Maximum length in bytes of a token's spelling.
pub(super) const MAX_SPELLING: usize = 1024;
/// Maximum length in bytes of all added tokens together. They become one automaton.
const MAX_ADDED: usize = 4 << 20;
/// Maximum length in bytes of any other text, such as a regular expression.
const MAX_TEXT: usize = 8 << 10;
/// Maximum length in bytes of the table of the normalizer `Precompiled`.
const MAX_TABLE: usize = 2 << 20;
/// Maximum number of steps of a normalizer, pre-tokenizer, post-processor or decoder.
const MAX_STEPS: usize = 64;
/// Maximum depth of nested steps. The time of reading them doubles with each level.
const MAX_NESTING: usize = 3;
/// Maximum factor by which the steps may lengthen a text.
const MAX_GROWTH: usize = 256;

/// Parses the file, after a check of its size.
pub(super) fn parse(file: &str, bytes: &[u8]) -> Result<Value, TokenizerError> {
    if bytes.len() > MAX_FILE {
        let got = bytes.len();
        let reason = format!("expected at most {MAX_FILE} bytes, got {got}");
        return Err(TokenizerError::malformed(file, reason));
    }
    let values = bytes.iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count();
    if values > MAX_VALUES {
        let reason = format!("expected at most {MAX_VALUES} values, got {values}");
        return Err(TokenizerError::malformed(file, reason));
    }
    serde_json::from_slice(bytes).map_err(|error| TokenizerError::malformed(file, error))
}

/// Checks the parts of the file on which the library relies, and removes padding and truncation:
/// both are for batches of equal length, and would change the tokens of a single text.
pub(super) fn check(file: &str, document: &mut Value) -> Result<(), TokenizerError> {
    let Some(fields) = document.as_object_mut() else {
        return Err(TokenizerError::malformed(file, "expected an object"));
    };
    fields.remove("padding");
    fields.remove("truncation");
    let check = Check { file };
    check.model(&document["model"])?;
    check.added_tokens(&document["added_tokens"])?;
    for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        let mut steps = Steps { part, count: 0, growth: 1 };
        check.step(&document[part], 1, &mut steps)?;
    }
    Ok(())
}

/// Whether a post-processor can be used for pairs of texts: its template has each of them once, and
/// few other pieces. Other templates are not refused, because most models have no use for them.
pub(super) fn has_pairs(post_processor: &Value) -> bool {
    match post_processor["type"].as_str() {
        Some("Sequence") => {
            post_processor["processors"].as_array().is_some_and(|all| all.iter().all(has_pairs))
        }
        Some("TemplateProcessing") => {
            let pieces = post_processor["pair"].as_array().map_or(&[][..], Vec::as_slice);
            let count = |id: &str| pieces.iter().filter(|p| p["Sequence"]["id"] == id).count();
            let added = post_processor["special_tokens"].as_object();
            let few = added.is_none_or(|tokens| {
                tokens
                    .values()
                    .all(|token| token["ids"].as_array().is_some_and(|ids| ids.len() <= MAX_STEPS))
            });
            pieces.len() <= MAX_STEPS && count("A") == 1 && count("B") == 1 && few
        }
        _ => true,
    }
}

struct Check<'a> {
    /// Name of the file in error messages.
    file: &'a str,
}

/// The steps of one part of the tokenizer, so far.
struct Steps {
    part: &'static str,
    count: usize,
    /// Factor by which the steps may lengthen a text.
    growth: usize,
}

impl Check<'_> {
    fn fail<T>(
        &self,
        key: &str,
        expected: impl ToString,
        got: impl ToString,
    ) -> Result<T, TokenizerError> {
        Err(TokenizerError::key(self.file, key, expected, got))
    }

    fn model(&self, model: &Value) -> Result<(), TokenizerError> {
        let Some(fields) = model.as_object() else {
            return self.fail("model", "an object", kind(model));
        };
        for (name, value) in fields.iter().filter(|(name, _)| *name != "vocab" && *name != "merges")
        {
            self.text(&format!("model.{name}"), value, MAX_SPELLING)?;
        }
        let id = match &fields.get("vocab").unwrap_or(&Value::Null) {
            Value::Object(vocabulary) => self.vocabulary(vocabulary)?,
            Value::Array(pieces) => {
                for piece in pieces {
                    self.text("model.vocab", &piece[0], MAX_SPELLING)?;
                    if piece[1].as_f64().is_none_or(|score| !score.is_finite()) {
                        return self.fail("model.vocab", "a score", &piece[1]);
                    }
                }
                pieces.len()
            }
            other => return self.fail("model.vocab", "a vocabulary", kind(other)),
        };
        if id > MAX_TOKENS {
            return self.fail("model.vocab", format!("ids below {MAX_TOKENS}"), id);
        }
        self.merges(fields)
    }

    /// Returns one more than the largest id.
    fn vocabulary(&self, vocabulary: &Map<String, Value>) -> Result<usize, TokenizerError> {
        let mut end = 0;
        for (token, id) in vocabulary {
            self.spelling("model.vocab", token)?;
            let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
            let Some(id) = id.filter(|&id| id < MAX_TOKENS) else {
                let expected = format!("ids below {MAX_TOKENS}");
                return self.fail("model.vocab", expected, &vocabulary[token]);
            };
            end = end.max(id + 1);
        }
        Ok(end)
    }

    /// Merges must join tokens of the vocabulary to a token of the vocabulary.
    fn merges(&self, model: &Map<String, Value>) -> Result<(), TokenizerError> {
        let merges = model.get("merges").and_then(Value::as_array);
        let vocabulary = model.get("vocab").and_then(Value::as_object);
        let (Some(merges), Some(vocabulary)) = (merges, vocabulary) else { return Ok(()) };
        let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or("");
        for merge in merges {
            let pair = match merge {
                Value::String(line) if line.starts_with("#version") => continue,
                Value::String(line) => line.split_once(' '),
                pair => pair[0].as_str().zip(pair[1].as_str()),
            };
            let known = pair.is_some_and(|(left, right)| {
                let joined = right
                    .get(prefix.len()..)
                    .map(|right| vocabulary.contains_key(&format!("{left}{right}")));
                vocabulary.contains_key(left)
                    && vocabulary.contains_key(right)
                    && joined == Some(true)
            });
            if !known {
                let expected = "two tokens of the vocabulary that join to a third one";
                return self.fail("model.merges", expected, merge);
            }
        }
        Ok(())
    }

    fn added_tokens(&self, tokens: &Value) -> Result<(), TokenizerError> {
        let tokens = match tokens {
            Value::Null => return Ok(()),
            Value::Array(tokens) => tokens,
            other => return self.fail("added_tokens", "a list", kind(other)),
        };
        let mut bytes = 0;
        for token in tokens {
            let Some(content) = token["content"].as_str() else {
                return self.fail("added_tokens", "tokens with content", token);
            };
            self.spelling("added_tokens", content)?;
            bytes += content.len();
        }
        if bytes > MAX_ADDED || tokens.len() > MAX_TOKENS {
            let expected = format!("tokens of at most {MAX_ADDED} bytes in all");
            return self.fail("added_tokens", expected, bytes);
        }
        Ok(())
    }

    /// Checks a step, and the steps of a sequence.
    fn step(&self, step: &Value, depth: usize, steps: &mut Steps) -> Result<(), TokenizerError> {
        let part = steps.part;
        steps.count += 1;
        if depth > MAX_NESTING || steps.count > MAX_STEPS {
            let expected = format!("at most {MAX_STEPS} steps in {MAX_NESTING} levels");
            return self.fail(part, expected, "more");
        }
        let Some(fields) = step.as_object() else {
            return match step {
                Value::Null => Ok(()),
                other => self.fail(part, "an object", kind(other)),
            };
        };
        for (name, value) in fields {
            match (name.as_str(), value) {
                (
                    "normalizers" | "pretokenizers" | "processors" | "decoders",
                    Value::Array(inner),
                ) => inner.iter().try_for_each(|step| self.step(step, depth + 1, steps))?,
                ("precompiled_charsmap", table) => self.table(part, table)?,
                ("single", pieces) => self.template(part, pieces)?,
                // These have no effect on a single text.
                ("pair" | "special_tokens", _) => {}
                (_, value) => self.value(part, value, depth)?,
            }
        }
        match fields.get("type").and_then(Value::as_str) {
            Some("Replace") => {
                let content = step["content"].as_str().map_or(0, str::len);
                let pattern = step["pattern"]["String"].as_str().map_or(0, str::len);
                let growth = if pattern > 0 { content.div_ceil(pattern) } else { content + 1 };
                steps.growth = steps.growth.saturating_mul(growth.max(1));
            }
            Some("ByteLevel") => steps.growth = steps.growth.saturating_mul(2),
            Some("FixedLength") if step["length"] == 0 => {
                return self.fail(part, "a length of at least 1", 0);
            }
            _ => {}
        }
        if steps.growth > MAX_GROWTH {
            let expected = format!("steps that lengthen a text by at most {MAX_GROWTH} times");
            return self.fail(part, expected, steps.growth);
        }
        Ok(())
    }

    /// The table of the normalizer `Precompiled`, in base64: the length of a trie in bytes as a
    /// `u32`, the trie, and texts. The library allocates the length before it reads the trie.
    fn table(&self, part: &str, table: &Value) -> Result<(), TokenizerError> {
        self.text(part, table, MAX_TABLE)?;
        let bytes = STANDARD.decode(table.as_str().unwrap_or_default()).unwrap_or_default();
        let Some((len, rest)) = bytes.split_first_chunk() else {
            return self.fail(part, "a table in base64 that begins with a length", kind(table));
        };
        let len = u32::from_le_bytes(*len);
        if len < 4 || usize::try_from(len).is_ok_and(|len| len > rest.len()) {
            let expected = format!("a table with a trie of 4 to {} bytes", rest.len());
            return self.fail(part, expected, len);
        }
        Ok(())
    }

    /// The template of a post-processor may contain the text once.
    fn template(&self, part: &str, pieces: &Value) -> Result<(), TokenizerError> {
        let pieces = pieces.as_array().map_or(&[][..], Vec::as_slice);
        let texts = pieces.iter().filter(|piece| piece.get("Sequence").is_some());
        let others = texts.clone().filter(|piece| piece["Sequence"]["id"] != "A");
        if pieces.len() > MAX_STEPS || texts.count() != 1 || others.count() != 0 {
            let expected = format!("a template of at most {MAX_STEPS} pieces with the text once");
            return self.fail(part, expected, pieces.len());
        }
        Ok(())
    }

    /// Checks the texts in a value. Its depth is limited by the parser.
    fn value(&self, key: &str, value: &Value, depth: usize) -> Result<(), TokenizerError> {
        match value {
            Value::Array(items) if items.len() <= MAX_TEXT => {
                items.iter().try_for_each(|item| self.value(key, item, depth + 1))
            }
            Value::Object(fields) if fields.len() <= MAX_STEPS && depth <= MAX_NESTING + 2 => {
                fields.values().try_for_each(|field| self.value(key, field, depth + 1))
            }
            Value::Array(_) | Value::Object(_) => self.fail(key, "fewer values", "too many"),
            text => self.text(key, text, MAX_TEXT),
        }
    }

    fn text(&self, key: &str, value: &Value, limit: usize) -> Result<(), TokenizerError> {
        match value.as_str() {
            Some(text) if text.len() > limit => {
                let expected = format!("a text of at most {limit} bytes");
                self.fail(key, expected, format!("{} bytes", text.len()))
            }
            _ => Ok(()),
        }
    }

    fn spelling(&self, key: &str, token: &str) -> Result<(), TokenizerError> {
        if token.len() > MAX_SPELLING {
            let expected = format!("tokens of at most {MAX_SPELLING} bytes");
            return self.fail(key, expected, format!("{} bytes", token.len()));
        }
        Ok(())
    }
}

/// The kind of a value, for error messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
