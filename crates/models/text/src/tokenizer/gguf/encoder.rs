//! The tokenizers of text encoders: WordPiece, and SentencePiece's Unigram.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::{CONTROL, Parts, SPACE_MARK, spelling, token_type};
use crate::{GgufTokenizer, TokenizerError};

/// What a piece within a word begins with.
const CONTINUES: &str = "##";
/// Maximum number of bytes of the table of SentencePiece's normalizer. Known ones have 316 KB.
const CHARSMAP_BYTES_MAX: usize = 4 << 20;
/// The value of UNKNOWN in `tokenizer.ggml.token_type`.
const UNKNOWN: i32 = 2;

/// WordPiece, as used by BERT. In the file, pieces that begin a word have the mark of a space, and
/// pieces within a word have none.
///
/// The file does not say whether a text is converted to lower case. It is if no piece has a capital
/// letter.
pub(super) fn word_piece(metadata: &GgufTokenizer) -> Result<Parts, TokenizerError> {
    let mut vocabulary = Map::new();
    let mut is_cased = false;
    for (id, token) in metadata.tokens.iter().enumerate() {
        let kind = token_type(metadata, id);
        let piece = match token.strip_prefix(SPACE_MARK) {
            _ if kind == CONTROL => token.clone(),
            Some(first) => first.to_owned(),
            None if is_special(token) => token.clone(),
            None => format!("{CONTINUES}{token}"),
        };
        is_cased |= kind != CONTROL && !is_special(&piece) && piece.contains(char::is_uppercase);
        vocabulary.insert(piece, json!(id));
    }
    let unknown = match metadata.unknown_token_id {
        Some(id) => spelling(metadata, "tokenizer.ggml.unknown_token_id", id)?,
        None => "[UNK]",
    };
    Ok(Parts {
        normalizer: json!({
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": !is_cased,
        }),
        pre_tokenizer: json!({"type": "BertPreTokenizer"}),
        decoder: json!({"type": "WordPiece", "prefix": CONTINUES, "cleanup": true}),
        model: json!({
            "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": 100, "vocab": vocabulary,
        }),
        adds_bos_by_default: true,
        adds_eos_by_default: true,
    })
}

/// Whether a token has no text, as `[CLS]`.
fn is_special(token: &str) -> bool {
    token.len() > 2 && token.starts_with('[') && token.ends_with(']')
}

/// SentencePiece's Unigram, as used by XLM-RoBERTa and T5.
pub(super) fn unigram(metadata: &GgufTokenizer) -> Result<Parts, TokenizerError> {
    let file = metadata.file.as_str();
    let count = metadata.tokens.len();
    let scores = metadata.scores.as_deref().unwrap_or_default();
    if scores.len() != count {
        let expected = format!("{count} scores, one per token");
        return Err(TokenizerError::key(file, "tokenizer.ggml.scores", expected, scores.len()));
    }
    let pieces: Vec<Value> =
        metadata.tokens.iter().zip(scores).map(|(token, score)| json!([token, score])).collect();
    let unknown = metadata.unknown_token_id.or_else(|| {
        let is_unknown = |id: &usize| token_type(metadata, *id) == UNKNOWN;
        (0..count).find(is_unknown).and_then(|id| u32::try_from(id).ok())
    });
    let mut normalizers = Vec::new();
    if let Some(table) = metadata.precompiled_charsmap.as_ref().filter(|table| !table.is_empty()) {
        if table.len() > CHARSMAP_BYTES_MAX {
            let expected = format!("at most {CHARSMAP_BYTES_MAX} bytes");
            let key = "tokenizer.ggml.precompiled_charsmap";
            return Err(TokenizerError::key(file, key, expected, table.len()));
        }
        normalizers
            .push(json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(table)}));
    }
    if metadata.remove_extra_whitespaces.unwrap_or(false) {
        normalizers.push(json!({"type": "Strip", "strip_left": true, "strip_right": true}));
        normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}));
    }
    let scheme = if metadata.add_space_prefix.unwrap_or(true) { "always" } else { "never" };
    let space = json!({
        "type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": scheme, "split": true,
    });
    Ok(Parts {
        normalizer: match normalizers.is_empty() {
            true => Value::Null,
            false => json!({"type": "Sequence", "normalizers": normalizers}),
        },
        pre_tokenizer: space.clone(),
        decoder: space,
        model: json!({
            "type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": false,
        }),
        adds_bos_by_default: false,
        adds_eos_by_default: true,
    })
}

/// How two texts become one sequence between the tokens `first` and `last`, which are around each
/// text: as in BERT, where the second text has the type 1, or as in RoBERTa, where two separators are
/// between the texts.
pub(super) fn pair(metadata: &GgufTokenizer, first: &str, last: &str) -> Value {
    let token = |id: &str, type_id: u32| json!({"SpecialToken": {"id": id, "type_id": type_id}});
    let text = |id: &str, type_id: u32| json!({"Sequence": {"id": id, "type_id": type_id}});
    let is_roberta = metadata.model == "t5" || metadata.pre.as_deref() == Some("roberta-bpe");
    if is_roberta {
        return json!([
            token(first, 0),
            text("A", 0),
            token(last, 0),
            token(last, 0),
            text("B", 0),
            token(last, 0),
        ]);
    }
    json!([token(first, 0), text("A", 0), token(last, 0), text("B", 1), token(last, 1)])
}
