//! Converts tokens to bytes, one at a time. Created once per tokenizer from the decoder in its
//! `tokenizer.json`, and used by [`Tokenizer`](super::Tokenizer) and the detokenizer.
//!
//! The decoders of `tokenizers` decode a whole list of tokens. In the decoders of language models,
//! however, the text of a token depends only on the token and on whether it is the first one, apart
//! from spaces that are removed at the start of the text. This makes exact streaming possible. All
//! other decoders are refused.

use serde_json::Value;
use tokenizers::Tokenizer as Trained;

use crate::TokenizerError;

/// The rules by which a decoder converts one token to bytes.
#[derive(Debug)]
pub(crate) struct Decoding {
    /// Applied to a token's spelling, in order.
    rules: Vec<Rule>,
    spelling: Spelling,
    /// Inserted between two tokens: a space for vocabularies of words, which have no decoder.
    separator: &'static str,
    /// Maximum number of spaces that are removed at the start of the whole text.
    leading_spaces_cut: usize,
}

#[derive(Debug)]
enum Rule {
    Replace {
        pattern: String,
        content: String,
    },
    /// Replaces SentencePiece's mark for a space by a space.
    Metaspace {
        mark: char,
        /// Whether marks are removed from the first token, because encoding prepends one.
        drop_in_first: bool,
    },
    /// The tokens of WordPiece: the prefix of tokens that continue a word is removed, and there is a
    /// space before all others but the first.
    WordPiece {
        prefix: String,
        /// Whether spaces before punctuation are removed, and contractions are joined.
        cleanup: bool,
    },
}

/// What the clean-up of WordPiece replaces, in order.
const CLEANUP: [(&str, &str); 11] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

/// How the characters of a token's spelling encode bytes.
#[derive(Debug, PartialEq)]
enum Spelling {
    /// As UTF-8.
    Plain,
    /// As UTF-8, except that the spelling `<0x41>` is the byte 0x41.
    ByteFallback,
    /// Each character is one byte, by GPT-2's table.
    ByteLevel,
}

impl Decoding {
    /// Creates a decoding in which the text of each token is its spelling.
    pub(super) fn plain() -> Self {
        Self { rules: Vec::new(), spelling: Spelling::Plain, separator: "", leading_spaces_cut: 0 }
    }

    /// Converts the decoder of `trained`. `file` is the name of the file in error messages.
    ///
    /// Returns [`TokenizerError::Unsupported`] for a decoder that cannot decode token by token.
    pub(super) fn of(trained: &Trained, file: &str) -> Result<Self, TokenizerError> {
        let mut decoding = Self::plain();
        let Some(decoder) = trained.get_decoder() else {
            decoding.separator = " ";
            return Ok(decoding);
        };
        // The fields of some decoders are private, but their serialized form is public.
        let decoder = serde_json::to_value(decoder)
            .map_err(|error| TokenizerError::malformed(file, error))?;
        let mut fused = false;
        let steps = match decoder["decoders"].as_array() {
            Some(steps) => steps.as_slice(),
            None => std::slice::from_ref(&decoder),
        };
        for step in steps {
            decoding.add_step(step, &mut fused).ok_or_else(|| {
                TokenizerError::unsupported(
                    file,
                    "decoder",
                    "a chain of ByteLevel, WordPiece, or of Replace, ByteFallback, Metaspace, \
                     Fuse and a Strip of leading spaces",
                    &decoder,
                )
            })?;
        }
        Ok(decoding)
    }

    /// Adds one step of the decoder. Returns `None` for a step, or an order of steps, that cannot
    /// be applied token by token. `fused` says whether the previous steps have joined the tokens to
    /// one text.
    fn add_step(&mut self, step: &Value, fused: &mut bool) -> Option<()> {
        match (step["type"].as_str()?, *fused) {
            ("ByteLevel", false) if self.spelling == Spelling::Plain => {
                self.spelling = Spelling::ByteLevel;
                *fused = true;
            }
            ("ByteFallback", false) => self.spelling = Spelling::ByteFallback,
            ("Replace", false) => self.rules.push(Rule::Replace {
                pattern: step["pattern"]["String"].as_str()?.to_owned(),
                content: step["content"].as_str()?.to_owned(),
            }),
            ("Metaspace", false) => self.rules.push(Rule::Metaspace {
                mark: step["replacement"].as_str()?.chars().next()?,
                drop_in_first: step["prepend_scheme"].as_str() != Some("never"),
            }),
            ("WordPiece", false) => self.rules.push(Rule::WordPiece {
                prefix: step["prefix"].as_str()?.to_owned(),
                cleanup: step["cleanup"].as_bool()?,
            }),
            ("Strip", true) if step["content"] == " " && step["stop"] == 0 => {
                self.leading_spaces_cut += usize::try_from(step["start"].as_u64()?).ok()?;
            }
            ("Fuse", _) => *fused = true,
            _ => return None,
        }
        Some(())
    }

    /// The bytes of the token with the spelling `text`. `first` says whether it is the first token
    /// of the text.
    pub(super) fn piece(&self, text: String, first: bool) -> Vec<u8> {
        if self.spelling == Spelling::ByteFallback
            && let Some(byte) = fallback_byte(&text)
        {
            return vec![byte];
        }
        let mut text = text;
        for rule in &self.rules {
            text = rule.apply(text, first);
        }
        if !first && !self.separator.is_empty() {
            text.insert_str(0, self.separator);
        }
        match self.spelling {
            Spelling::ByteLevel => byte_level(&text).unwrap_or_else(|| text.into_bytes()),
            Spelling::Plain | Spelling::ByteFallback => text.into_bytes(),
        }
    }

    /// Whether the token with the spelling `text` stands for a single byte.
    pub(super) fn is_byte(&self, text: &str) -> bool {
        self.spelling == Spelling::ByteFallback && fallback_byte(text).is_some()
    }

    /// Maximum number of spaces that are removed at the start of the whole text.
    pub(crate) fn leading_spaces_cut(&self) -> usize {
        self.leading_spaces_cut
    }
}

impl Rule {
    fn apply(&self, text: String, first: bool) -> String {
        match self {
            Self::Replace { pattern, content } => text.replace(pattern.as_str(), content),
            Self::Metaspace { mark, drop_in_first } => {
                text.replace(*mark, if first && *drop_in_first { "" } else { " " })
            }
            Self::WordPiece { prefix, cleanup } => {
                let text = match text.strip_prefix(prefix.as_str()) {
                    _ if first => text,
                    Some(rest) => rest.to_owned(),
                    None => format!(" {text}"),
                };
                let clean = |text: String, (from, to): &(&str, &str)| text.replace(from, to);
                if *cleanup { CLEANUP.iter().fold(text, clean) } else { text }
            }
        }
    }
}

/// The byte of a token with a spelling like `<0x41>`.
fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The bytes of a spelling by GPT-2's table. `None` if a character is not in the table, as in added
/// tokens, whose spelling is plain text.
fn byte_level(text: &str) -> Option<Vec<u8>> {
    text.chars().map(char_to_byte).collect()
}

/// GPT-2's table: printable Latin-1 characters encode the byte of their own code, and the
/// characters from U+0100 on encode the other 68 bytes in order.
fn char_to_byte(char: char) -> Option<u8> {
    match char as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8), // 0x00 to 0x20
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8), // 0x7f to 0xa0
        0x143 => Some(0xad),
        _ => None,
    }
}
