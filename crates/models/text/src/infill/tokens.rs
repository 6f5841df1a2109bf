//! The special tokens of a model for filling in the middle, and the prompts that they make.
//!
//! ```text
//! one text            <prefix> before <suffix> after <middle>
//! suffix first        <suffix> after <prefix> before <middle>
//! with other files    <repository> project  <file> name text ..  <file> name, then as above
//! ```
//!
//! The order of prefix and suffix is the one that a model was trained with. The other files come
//! first, because they change least while somebody types. Most models have the prefix first, so
//! after each key all that precedes the cursor is found in the prefix cache, and the text after the
//! cursor is computed again. Models with the suffix first, such as Seed-Coder, compute only what
//! was typed.
//!
//! The format with other files is that of StarCoder 2 and Qwen2.5-Coder (technical report,
//! arXiv:2409.12186). llama.cpp's server uses it for all models.

use crate::infill::Infill;
use crate::spellings::Spellings;
use crate::{Tokenizer, TokenizerError};

/// The spellings of the tokens around the texts, and their order.
struct Family {
    prefix: &'static str,
    suffix: &'static str,
    /// `None` if the answer follows the second text.
    middle: Option<&'static str>,
    /// Whether the text after the gap comes first.
    suffix_first: bool,
}

impl Family {
    const fn new(prefix: &'static str, suffix: &'static str, middle: &'static str) -> Self {
        Self { prefix, suffix, middle: Some(middle), suffix_first: false }
    }
}

/// All spellings, the most common first.
const FAMILIES: [Family; 9] = [
    // Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 3.3 and 4.
    Family::new("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    // StarCoder, Granite Code.
    Family::new("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    // SantaCoder.
    Family::new("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    // DeepSeek-Coder, DeepSeek-V2 and V3.
    Family::new(
        "<\u{ff5c}fim\u{2581}begin\u{ff5c}>",
        "<\u{ff5c}fim\u{2581}hole\u{ff5c}>",
        "<\u{ff5c}fim\u{2581}end\u{ff5c}>",
    ),
    // CodeLlama, in both spellings.
    Family::new("\u{2581}<PRE>", "\u{2581}<SUF>", "\u{2581}<MID>"),
    Family::new("<PRE>", "<SUF>", "<MID>"),
    // GLM-4.5.
    Family::new("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    // Seed-Coder.
    Family {
        suffix_first: true,
        ..Family::new("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>")
    },
    // Codestral.
    Family { prefix: "[PREFIX]", suffix: "[SUFFIX]", middle: None, suffix_first: true },
];

/// Tokens before the name of a repository.
const REPOSITORY: [&str; 4] = ["<|repo_name|>", "<|reponame|>", "<repo_name>", "<reponame>"];

/// Tokens before the name of a file.
const FILE: [&str; 3] = ["<|file_sep|>", "<|file_separator|>", "<file_sep>"];

/// Further tokens with which models end the text of a gap.
const ENDS: [&str; 5] = ["<|fim_pad|>", "<fim_pad>", "<fim-pad>", "\u{2581}<EOT>", "<EOT>"];

/// The name of the repository, and of the file with the gap, which clients do not send.
const UNNAMED: [&str; 2] = ["project\n", "filename\n"];

/// The special tokens of a model for filling in the middle.
#[derive(Clone, Debug)]
pub struct InfillTokens {
    tokenizer: Tokenizer,
    /// The tokens that begin any text.
    first: Vec<u32>,
    prefix: u32,
    suffix: u32,
    middle: Option<u32>,
    suffix_first: bool,
    repository: Option<u32>,
    file: Option<u32>,
    ends: Vec<u32>,
    /// The spellings that the texts of a client must not turn into control tokens.
    reserved: Option<Spellings>,
}

impl InfillTokens {
    /// The tokens of a model; `None` if its tokenizer has none.
    pub(crate) fn of(tokenizer: &Tokenizer, eos_token_ids: &[u32]) -> Option<Self> {
        let id = |spelling: &str| tokenizer.token_id(spelling);
        let find = |spellings: &[&str]| spellings.iter().find_map(|spelling| id(spelling));
        let (family, prefix, suffix, middle) = FAMILIES.iter().find_map(|family| {
            let middle = family.middle.map(id);
            let middle = if let Some(middle) = middle { Some(middle?) } else { None };
            Some((family, id(family.prefix)?, id(family.suffix)?, middle))
        })?;
        let (repository, file) = (find(&REPOSITORY), find(&FILE));
        let mut ends = vec![prefix, suffix];
        ends.extend(middle.into_iter().chain(repository).chain(file));
        ends.extend(ENDS.iter().filter_map(|end| id(end)));
        let special = tokenizer.added_tokens().into_iter().filter(|(_, special)| *special);
        let own = ends.iter().filter_map(|&token| tokenizer.token_spelling(token));
        let reserved = Spellings::new(special.map(|(spelling, _)| spelling).chain(own));
        // A tokenizer may also add a token that ends a text.
        let around = tokenizer.encode("", true).unwrap_or_default();
        let first = around.into_iter().take_while(|token| !eos_token_ids.contains(token)).collect();
        let (suffix_first, tokenizer) = (family.suffix_first, tokenizer.clone());
        Some(Self {
            tokenizer,
            first,
            prefix,
            suffix,
            middle,
            suffix_first,
            repository,
            file,
            ends,
            reserved,
        })
    }

    /// The tokens that end the text of a gap, in addition to those that end every answer.
    #[must_use]
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The prompt for a gap. Special tokens that are spelled out in a text are ordinary text. Files
    /// that would make the prompt longer than `limit` tokens are left out, from the first one on.
    /// Without them, the prompt may be longer than `limit`.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] if the vocabulary cannot represent a text.
    pub fn encode(&self, infill: &Infill, limit: usize) -> Result<Vec<u32>, TokenizerError> {
        let [before, after] = [&infill.prefix, &infill.suffix].map(|text| self.literal(text));
        let before = [&[self.prefix][..], &before?].concat();
        let after = [&[self.suffix][..], &after?].concat();
        let mut gap = if self.suffix_first { [after, before] } else { [before, after] }.concat();
        gap.extend(self.middle);
        let files = self.files(infill, limit.saturating_sub(self.first.len() + gap.len()))?;
        Ok([&self.first[..], &files, &gap].concat())
    }

    /// The last files that have room in `limit` tokens, with what separates them from each other
    /// and from the text with the gap. Without a file, there are no tokens.
    fn files(&self, infill: &Infill, limit: usize) -> Result<Vec<u32>, TokenizerError> {
        let [repository, file] = UNNAMED;
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        if let Some(token) = self.repository {
            head = [&[token][..], &self.literal(repository)?].concat();
        }
        if let Some(token) = self.file {
            tail = [&[token][..], &self.literal(file)?].concat();
        }
        let mut room = limit.saturating_sub(head.len() + tail.len());
        let mut fitting = Vec::new();
        for file in infill.files.iter().rev() {
            let tokens = match self.file {
                Some(token) => {
                    let text = format!("{}\n{}", file.name, file.text);
                    [&[token][..], &self.literal(&text)?].concat()
                }
                None => self.literal(&format!("\n--- {} ---\n{}\n", file.name, file.text))?,
            };
            let Some(left) = room.checked_sub(tokens.len()) else { break };
            room = left;
            fitting.push(tokens);
        }
        if fitting.is_empty() {
            return Ok(Vec::new());
        }
        fitting.push(head);
        fitting.reverse();
        fitting.push(tail);
        Ok(fitting.concat())
    }

    /// The tokens of a client's text, none of which is special.
    fn literal(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let pieces = match &self.reserved {
            Some(reserved) => reserved.cut(text),
            None => vec![text],
        };
        let mut tokens = Vec::new();
        for piece in pieces {
            tokens.extend(self.tokenizer.encode(piece, false)?);
        }
        Ok(tokens)
    }
}
