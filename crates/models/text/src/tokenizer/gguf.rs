//! Creates a tokenizer from the vocabulary in a GGUF file's metadata. It is equal to the
//! `tokenizer.json` that the file was converted from. Used by [`Tokenizer::new`] only.
//!
//! The metadata is first converted to a `tokenizer.json`, because this format is public and stable,
//! and the rest of the crate reads it too.

mod encoder;
mod patterns;

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::Tokenizer;
use crate::{GgufTokenizer, TokenizerError};
use patterns::{
    DEEPSEEK, DEEPSEEK_CODER_FIRST, DEEPSEEK_FIRST, DEEPSEEK_LLM_FIRST, DIGIT, GPT4O, KIMI, LLAMA3,
    QWEN2, QWEN35, TEKKEN, YOUTU, YOUTU_FIRST,
};

/// SentencePiece's mark for a space.
const SPACE_MARK: &str = "\u{2581}";

/// The values of `tokenizer.ggml.token_type` that are used here.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// Maximum number of tokens. Known vocabularies have up to 262,208.
const TOKENS_MAX: usize = 1 << 20;
/// Maximum length of a token in bytes. The longest known one, of Command R, has 1,024. The time
/// to find the merges of a token grows with the square of its length.
const TOKEN_BYTES_MAX: usize = 1024;
/// Maximum length of all tokens together in bytes. Known vocabularies have up to 3 MB.
const VOCABULARY_BYTES_MAX: usize = 16 << 20;
/// Maximum number of merges. Known tokenizers have up to 580,604.
const MERGES_MAX: usize = 1 << 21;

/// Builds the tokenizer that `metadata` describes.
pub(super) fn build(metadata: &GgufTokenizer) -> Result<Tokenizer, TokenizerError> {
    check_sizes(metadata)?;
    let file = metadata.file.as_str();
    let parts = match metadata.model.as_str() {
        "gpt2" => byte_level(metadata)?,
        "llama" => sentence_piece(metadata, merges_by_score(metadata)?, true)?,
        // Converters write the merges of Gemma 4, whose words are not split otherwise.
        "gemma4" => sentence_piece(metadata, listed_merges(metadata)?, false)?,
        "bert" => encoder::word_piece(metadata)?,
        "t5" => encoder::unigram(metadata)?,
        other => {
            let (key, expected) = ("tokenizer.ggml.model", "gpt2, llama, gemma4, bert or t5");
            return Err(TokenizerError::unsupported(file, key, expected, other));
        }
    };
    let document = json!({
        "version": "1.0",
        "added_tokens": added_tokens(metadata),
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": post_processor(metadata, &parts)?,
        "decoder": parts.decoder,
        "model": parts.model,
    });
    Tokenizer::from_document(file, document)
}

/// Checks the sizes that bound the time and the memory of the conversion.
fn check_sizes(metadata: &GgufTokenizer) -> Result<(), TokenizerError> {
    let tokens = &metadata.tokens;
    let longest = tokens.iter().map(String::len).max().unwrap_or(0);
    let total = tokens.iter().map(String::len).sum::<usize>();
    let merges = metadata.merges.as_deref().unwrap_or_default();
    let longest_merge = merges.iter().map(String::len).max().unwrap_or(0);
    let sizes = [
        ("tokens", "tokens", tokens.len(), TOKENS_MAX),
        ("tokens", "bytes per token", longest, TOKEN_BYTES_MAX),
        ("tokens", "bytes in all tokens", total, VOCABULARY_BYTES_MAX),
        ("merges", "merges", merges.len(), MERGES_MAX),
        ("merges", "bytes per merge", longest_merge, TOKEN_BYTES_MAX + 1),
    ];
    for (key, unit, got, max) in sizes {
        if got > max {
            let key = format!("tokenizer.ggml.{key}");
            let expected = format!("at most {max} {unit}");
            return Err(TokenizerError::key(&metadata.file, &key, expected, got));
        }
    }
    Ok(())
}

/// The parts of a `tokenizer.json` that differ between the two kinds of tokenizer.
struct Parts {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Value,
    /// The value of `add_bos_token` for files that lack it.
    adds_bos_by_default: bool,
    /// The value of `add_eos_token` for files that lack it.
    adds_eos_by_default: bool,
}

/// Byte-level BPE, as used by GPT-2, Llama 3 and Qwen.
fn byte_level(metadata: &GgufTokenizer) -> Result<Parts, TokenizerError> {
    let file = metadata.file.as_str();
    let merges = listed_merges(metadata)?;
    let split = Split::named(metadata.pre.as_deref(), file)?;
    let mut pre_tokenizers = Vec::new();
    if split.single_digits {
        pre_tokenizers.push(json!({"type": "Digits", "individual_digits": true}));
    }
    for pattern in split.first.iter().copied().chain(split.pattern) {
        pre_tokenizers.push(json!({
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
        }));
    }
    pre_tokenizers.push(json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
        "use_regex": split.pattern.is_none(),
    }));
    Ok(Parts {
        normalizer: if split.composes { json!({"type": "NFC"}) } else { Value::Null },
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": pre_tokenizers}),
        decoder: json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
            "use_regex": false,
        }),
        model: bpe(metadata, merges, None, split.whole_words_first),
        adds_bos_by_default: split.adds_bos,
        adds_eos_by_default: false,
    })
}

/// The merges in the metadata.
fn listed_merges(metadata: &GgufTokenizer) -> Result<Vec<Value>, TokenizerError> {
    let (file, key) = (metadata.file.as_str(), "tokenizer.ggml.merges");
    let merges = metadata
        .merges
        .as_deref()
        .ok_or_else(|| TokenizerError::key(file, key, "a list of merges", "nothing"))?;
    let pair = |merge: &String| {
        let (left, right) = merge.split_once(' ').ok_or_else(|| {
            let expected = "two tokens separated by a space";
            TokenizerError::key(file, key, expected, format!("`{merge}`"))
        })?;
        Ok(json!([left, right]))
    };
    merges.iter().map(pair).collect()
}

/// SentencePiece's BPE with byte fallback, as used by Llama 2, Mistral and Gemma. `prefix` says
/// whether a space is added before a text if the metadata do not.
fn sentence_piece(
    metadata: &GgufTokenizer,
    merges: Vec<Value>,
    prefix: bool,
) -> Result<Parts, TokenizerError> {
    let prefix = metadata.add_space_prefix.unwrap_or(prefix);
    let mut normalizers = Vec::new();
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.push(json!({"type": "Prepend", "prepend": SPACE_MARK}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    normalizers.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}));
    let unknown = match metadata.unknown_token_id {
        Some(id) => Some(spelling(metadata, "tokenizer.ggml.unknown_token_id", id)?),
        None => None,
    };
    Ok(Parts {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: bpe(metadata, merges, unknown, false),
        adds_bos_by_default: true,
        adds_eos_by_default: false,
    })
}

fn bpe(
    metadata: &GgufTokenizer,
    merges: Vec<Value>,
    unknown: Option<&str>,
    whole_words_first: bool,
) -> Value {
    let vocabulary: Map<String, Value> =
        (0_u32..).zip(&metadata.tokens).map(|(id, token)| (token.clone(), json!(id))).collect();
    json!({
        "type": "BPE", "dropout": null, "unk_token": unknown,
        "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": true, "byte_fallback": metadata.model != "gpt2",
        "ignore_merges": whole_words_first,
        "vocab": vocabulary, "merges": merges,
    })
}

/// Converts SentencePiece's scores to merges. SentencePiece repeatedly joins the two adjacent
/// pieces that form the token with the best score. The equivalent merges are all splits of each
/// token into two tokens, in order of decreasing score.
fn merges_by_score(metadata: &GgufTokenizer) -> Result<Vec<Value>, TokenizerError> {
    let count = metadata.tokens.len();
    let scores = metadata.scores.as_deref().unwrap_or_default();
    if scores.len() != count {
        let expected = format!("{count} scores, one per token");
        let key = "tokenizer.ggml.scores";
        return Err(TokenizerError::key(&metadata.file, key, expected, scores.len()));
    }
    let ids: HashMap<&str, usize> = metadata
        .tokens
        .iter()
        .enumerate()
        .filter(|(id, _)| token_type(metadata, *id) == NORMAL)
        .map(|(id, token)| (token.as_str(), id))
        .collect();
    let mut merges = Vec::new();
    for (&token, &id) in &ids {
        for (middle, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(middle);
            if let Some(&left_id) = ids.get(left)
                && let Some(&right_id) = ids.get(right)
            {
                merges.push((id, left_id, right_id));
            }
        }
        if merges.len() > MERGES_MAX {
            let expected = format!("tokens with at most {MERGES_MAX} merges");
            let key = "tokenizer.ggml.tokens";
            return Err(TokenizerError::key(&metadata.file, key, expected, "more"));
        }
    }
    merges.sort_unstable_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(a.cmp(b)));
    let tokens = &metadata.tokens;
    Ok(merges.into_iter().map(|(_, left, right)| json!([tokens[left], tokens[right]])).collect())
}

/// The tokens that are found in a text before it is split: control tokens, which are special, and
/// user-defined tokens.
fn added_tokens(metadata: &GgufTokenizer) -> Vec<Value> {
    (0_u32..)
        .zip(&metadata.tokens)
        .filter_map(|(id, token)| {
            let special = match token_type(metadata, id as usize) {
                CONTROL => true,
                USER_DEFINED => false,
                _ => return None,
            };
            Some(json!({
                "id": id, "content": token, "special": special, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            }))
        })
        .collect()
}

/// The post-processor that adds the tokens for begin and end of sequence around a text, if the
/// metadata or the default of the tokenizer's kind says so.
fn post_processor(metadata: &GgufTokenizer, parts: &Parts) -> Result<Value, TokenizerError> {
    // Files of Gemma 4 may say that nothing is added, which is wrong. llama.cpp corrects this, too.
    let adds_bos =
        metadata.add_bos_token.unwrap_or(parts.adds_bos_by_default) || metadata.model == "gemma4";
    let adds_eos = metadata.add_eos_token.unwrap_or(parts.adds_eos_by_default);
    // Encoders may end a text with the token that separates two.
    let last = metadata.eos_token_id.or(metadata.separator_token_id);
    let around = [("bos", adds_bos, metadata.bos_token_id), ("eos", adds_eos, last)];
    let mut single = vec![json!({"Sequence": {"id": "A", "type_id": 0}})];
    let mut special_tokens = Map::new();
    let mut names = Vec::new();
    for (name, wanted, id) in around {
        let (true, Some(id)) = (wanted, id) else { continue };
        let token = spelling(metadata, &format!("tokenizer.ggml.{name}_token_id"), id)?;
        let place = if name == "bos" { 0 } else { single.len() };
        single.insert(place, json!({"SpecialToken": {"id": token, "type_id": 0}}));
        let entry = json!({"id": token, "ids": [id], "tokens": [token]});
        special_tokens.insert(token.to_owned(), entry);
        names.push(token);
    }
    if special_tokens.is_empty() {
        return Ok(Value::Null);
    }
    let pair = match names[..] {
        [first, last] => encoder::pair(metadata, first, last),
        _ => json!([
            {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}},
        ]),
    };
    Ok(json!({
        "type": "TemplateProcessing", "single": single, "pair": pair,
        "special_tokens": special_tokens,
    }))
}

fn spelling<'a>(
    metadata: &'a GgufTokenizer,
    key: &str,
    id: u32,
) -> Result<&'a str, TokenizerError> {
    metadata.tokens.get(id as usize).map(String::as_str).ok_or_else(|| {
        let expected = format!("an id below the {} tokens", metadata.tokens.len());
        TokenizerError::key(&metadata.file, key, expected, id)
    })
}

fn token_type(metadata: &GgufTokenizer, id: usize) -> i32 {
    metadata.token_types.as_ref().and_then(|types| types.get(id)).copied().unwrap_or(NORMAL)
}

/// How a family of byte-level tokenizers splits a text into words before BPE.
#[derive(Default)]
struct Split {
    /// Regular expression that matches one word; `None` for GPT-2's pattern.
    pattern: Option<&'static str>,
    /// Regular expressions of words that are found first, one after the other. The pattern is
    /// applied to the rest.
    first: &'static [&'static str],
    /// Whether every digit becomes a word before that.
    single_digits: bool,
    /// Whether the text is first normalized to composed characters (Unicode NFC).
    composes: bool,
    /// Whether a word that is a token is used as it is, without merges.
    whole_words_first: bool,
    /// The value of `add_bos_token` for files that lack it.
    adds_bos: bool,
}

impl Split {
    fn named(pre: Option<&str>, file: &str) -> Result<Self, TokenizerError> {
        let split = match pre {
            // Files that were converted before the key existed lack it.
            None
            | Some(
                "default" | "gpt-2" | "gpt2" | "phi-2" | "olmo" | "exaone4" | "modern-bert"
                | "roberta-bpe" | "jina-v2-es" | "jina-v2-de" | "jina-v2-code",
            ) => Self::default(),
            Some(
                "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "lfm2"
                | "jina-v5-nano",
            ) => Self {
                pattern: Some(LLAMA3),
                whole_words_first: true,
                adds_bos: true,
                ..Self::default()
            },
            Some("qwen2" | "deepseek-r1-qwen" | "megrez" | "stablelm2") => {
                Self { pattern: Some(QWEN2), composes: true, ..Self::default() }
            }
            Some("glm4" | "chatglm-bpe" | "dbrx" | "smaug-bpe") => {
                Self { pattern: Some(LLAMA3), ..Self::default() }
            }
            Some("deepseek-llm") => {
                Self { first: &DEEPSEEK_LLM_FIRST, pattern: Some(DIGIT), ..Self::default() }
            }
            Some("deepseek-coder") => {
                Self { first: &DEEPSEEK_CODER_FIRST, pattern: Some(DIGIT), ..Self::default() }
            }
            Some("youtu") => Self {
                first: &YOUTU_FIRST,
                pattern: Some(YOUTU),
                whole_words_first: true,
                ..Self::default()
            },
            Some("deepseek-v3") => {
                Self { first: &DEEPSEEK_FIRST, pattern: Some(DEEPSEEK), ..Self::default() }
            }
            Some("kimi-k2") => Self { pattern: Some(KIMI), ..Self::default() },
            Some("qwen35") => Self { pattern: Some(QWEN35), composes: true, ..Self::default() },
            Some("tekken" | "pixtral") => Self {
                pattern: Some(TEKKEN),
                whole_words_first: true,
                adds_bos: true,
                ..Self::default()
            },
            Some("gpt-4o" | "llama4") => Self { pattern: Some(GPT4O), ..Self::default() },
            Some("smollm" | "starcoder" | "refact" | "command-r") => {
                Self { single_digits: true, ..Self::default() }
            }
            Some(other) => {
                let expected = "gpt-2, llama-bpe, qwen2, qwen35, gpt-4o, tekken, smollm, glm4, \
                                exaone4, deepseek-llm, deepseek-v3, youtu or kimi-k2; or copy the \
                                model's tokenizer.json to the directory of the file";
                return Err(TokenizerError::unsupported(
                    file,
                    "tokenizer.ggml.pre",
                    expected,
                    other,
                ));
            }
        };
        Ok(split)
    }
}
