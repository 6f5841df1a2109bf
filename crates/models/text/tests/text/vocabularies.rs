//! Small tokenizers of the kinds that language models use, in the format of `tokenizer.json`.

use serde_json::{Map, Value, json};
use stolon_text::{TextModel, TextSource, TokenizerSource};

/// The character that encodes a byte in GPT-2's table.
pub(crate) fn byte_char(byte: u8) -> char {
    let is_own = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if is_own(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|&other| !is_own(other)).count();
    char::from_u32(0x100 + place as u32).expect("a letter of Latin Extended-A")
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({
        "id": id, "content": content, "special": special, "normalized": false,
        "single_word": false, "lstrip": false, "rstrip": false,
    })
}

fn numbered(tokens: &[String]) -> Map<String, Value> {
    tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect()
}

/// Tokens and merges of [`byte_level`]: all bytes, some words, and some parts of characters.
pub(crate) fn byte_level_tokens() -> (Vec<String>, Vec<[String; 2]>) {
    let mut tokens: Vec<String> = (0..=255).map(|byte| byte_char(byte).to_string()).collect();
    let mut merges = Vec::new();
    let texts: [&[u8]; 9] =
        [b"th", b"the", b" t", b" the", b"er", b"\xc3\xa9", b"\xf0\x9f", b"\xe2\x82", b"  "];
    for text in texts {
        let spelled: String = text.iter().map(|&byte| byte_char(byte)).collect();
        // The longest prefix that is a token already and whose rest is a token as well.
        let cut = (1..spelled.chars().count())
            .rev()
            .map(|count| spelled.char_indices().nth(count).expect("inside").0)
            .find(|&cut| {
                let (left, right) = spelled.split_at(cut);
                let known = |part: &str| tokens.iter().any(|token| token == part);
                known(left) && known(right)
            })
            .expect("single bytes are tokens");
        let (left, right) = spelled.split_at(cut);
        merges.push([left.to_owned(), right.to_owned()]);
        tokens.push(spelled.clone());
    }
    (tokens, merges)
}

/// Byte-level BPE as used by GPT-2, Llama 3 and Qwen: every byte is a character of GPT-2's table.
pub(crate) fn byte_level() -> Value {
    let (tokens, merges) = byte_level_tokens();
    let count = tokens.len();
    json!({
        "version": "1.0",
        "added_tokens": [
            added(count, "<|begin|>", true), added(count + 1, "<|end|>", true),
            added(count + 2, "<tool call>", false),
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                          "use_regex": true},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [count],
                                             "tokens": ["<|begin|>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                    "use_regex": true},
        "model": {"type": "BPE", "vocab": numbered(&tokens), "merges": merges},
    })
}

/// The text model of [`byte_level`] with more tokens, all of them special or none.
pub(crate) fn byte_level_with(tokens: &[&str], special: bool, template: Option<&str>) -> TextModel {
    let mut document = byte_level();
    let list = document["added_tokens"].as_array_mut().expect("tokens");
    let first = list.last().expect("a token")["id"].as_u64().expect("an id") as usize + 1;
    list.extend((first..).zip(tokens).map(|(id, token)| added(id, token, special)));
    let bytes = document.to_string().into_bytes().into();
    let source = TextSource {
        named_templates: Vec::new(),
        tokenizer: TokenizerSource::Json { file: "tokenizer.json".to_owned(), bytes },
        tokenizer_config: None,
        chat_template: template.map(str::to_owned),
    };
    TextModel::new(&source, &[]).expect("a valid tokenizer")
}

/// The tokens of the SentencePiece vocabularies with their scores: three special tokens, then 256
/// bytes, then the pieces.
pub(crate) fn sentence_pieces() -> Vec<(String, f32)> {
    let mut tokens: Vec<(String, f32)> =
        ["<unk>", "<s>", "</s>"].map(|token| (token.to_owned(), 0.0)).to_vec();
    tokens.extend((0..=255).map(|byte: u8| (format!("<0x{byte:02X}>"), 0.0)));
    let pieces = [
        "\u{2581}t",
        "he",
        "\u{2581}the",
        "er",
        "\u{2581}a",
        "\u{2581}\u{2581}",
        "an",
        "and",
        "\u{2581}and",
        "the",
        "\u{2581}",
        "a",
        "d",
        "e",
        "h",
        "n",
        "r",
        "s",
        "t",
        ".",
        "é",
    ];
    let scored = pieces.iter().enumerate().map(|(rank, piece)| (piece.to_string(), -(rank as f32)));
    tokens.extend(scored);
    tokens
}

/// The decoder of a SentencePiece vocabulary.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Spaces {
    /// A chain of decoders that removes one leading space, as in Llama 2.
    Cut,
    /// The same chain without the last step, as in Gemma.
    Kept,
    /// The decoder `Metaspace`.
    Metaspace,
    /// Byte fallback, then `Metaspace`.
    FallbackThenMetaspace,
}

/// As in Llama 2, Mistral and Gemma: spaces are replaced by a mark, and characters outside of the
/// vocabulary are encoded as bytes.
pub(crate) fn metaspace(spaces: Spaces, unigram: bool) -> Value {
    let pieces = sentence_pieces();
    let replace = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
    let (fallback, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
    let cut = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let mark = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first",
                      "split": false});
    let decoder = match spaces {
        Spaces::Cut => json!({"type": "Sequence", "decoders": [replace, fallback, fuse, cut]}),
        Spaces::Kept => json!({"type": "Sequence", "decoders": [replace, fallback, fuse]}),
        Spaces::Metaspace => mark.clone(),
        Spaces::FallbackThenMetaspace => {
            json!({"type": "Sequence", "decoders": [fallback, mark]})
        }
    };
    let model = if unigram {
        let vocabulary: Vec<Value> =
            pieces.iter().map(|(piece, score)| json!([piece, f64::from(*score)])).collect();
        json!({"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": true})
    } else {
        let tokens: Vec<String> = pieces.into_iter().map(|(piece, _)| piece).collect();
        json!({"type": "BPE", "vocab": numbered(&tokens), "merges": [], "unk_token": "<unk>",
               "byte_fallback": true, "fuse_unk": true})
    };
    json!({
        "version": "1.0",
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": null, "pre_tokenizer": mark, "post_processor": null,
        "decoder": decoder, "model": model,
    })
}

/// A vocabulary of whole words without a decoder. Words are joined with spaces.
pub(crate) fn words() -> Value {
    let tokens = ["<unk>", "one", "two", "drei", "vier"].map(str::to_owned);
    json!({
        "version": "1.0", "added_tokens": [added(0, "<unk>", true)], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": numbered(&tokens), "unk_token": "<unk>"},
    })
}
