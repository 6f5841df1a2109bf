//! Compares tokenizers from GGUF metadata with the tokenizers that the metadata was converted from.

use proptest::prelude::*;
use stolon_text::{GgufTokenizer, Tokenizer, TokenizerError, TokenizerSource};

use crate::vocabularies::{byte_level, byte_level_tokens, sentence_pieces};

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

fn build(metadata: GgufTokenizer) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::new(&TokenizerSource::Gguf(Box::new(metadata)))
}

/// The metadata to which a converter would convert [`byte_level`].
fn byte_level_metadata() -> GgufTokenizer {
    let (mut tokens, merges) = byte_level_tokens();
    let mut token_types = vec![NORMAL; tokens.len()];
    let begin = tokens.len() as u32;
    for (token, token_type) in
        [("<|begin|>", CONTROL), ("<|end|>", CONTROL), ("<tool call>", USER_DEFINED)]
    {
        tokens.push(token.to_owned());
        token_types.push(token_type);
    }
    GgufTokenizer {
        file: "m.gguf".to_owned(),
        model: "gpt2".to_owned(),
        pre: Some("gpt-2".to_owned()),
        tokens,
        token_types: Some(token_types),
        merges: Some(merges.iter().map(|[left, right]| format!("{left} {right}")).collect()),
        bos_token_id: Some(begin),
        eos_token_id: Some(begin + 1),
        add_bos_token: Some(true),
        ..GgufTokenizer::default()
    }
}

fn sentence_piece_metadata() -> GgufTokenizer {
    let pieces = sentence_pieces();
    let token_types = (0..pieces.len())
        .map(|id| match id {
            0 => UNKNOWN,
            1 | 2 => CONTROL,
            3..259 => BYTE,
            _ => NORMAL,
        })
        .collect();
    GgufTokenizer {
        file: "m.gguf".to_owned(),
        model: "llama".to_owned(),
        tokens: pieces.iter().map(|(piece, _)| piece.clone()).collect(),
        scores: Some(pieces.iter().map(|(_, score)| *score).collect()),
        token_types: Some(token_types),
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        unknown_token_id: Some(0),
        ..GgufTokenizer::default()
    }
}

/// SentencePiece's BPE by its definition: join the two adjacent pieces that form the token with the
/// best score (the leftmost ones if there are several) until there are none, and encode the other
/// characters as bytes.
fn naive_sentence_piece(text: &str) -> Vec<u32> {
    let pieces = sentence_pieces();
    let find = |text: &str| pieces[259..].iter().position(|(piece, _)| piece == text);
    let marked = format!(" {text}").replace(' ', "\u{2581}");
    let mut parts: Vec<String> =
        if text.is_empty() { Vec::new() } else { marked.chars().map(String::from).collect() };
    loop {
        // The pieces are in order of decreasing score.
        let best = (1..parts.len())
            .filter_map(|index| Some((find(&parts[index - 1..=index].concat())?, index)))
            .min();
        let Some((_, index)) = best else { break };
        let right = parts.remove(index);
        parts[index - 1].push_str(&right);
    }
    parts
        .iter()
        .flat_map(|part| match find(part) {
            Some(place) => vec![259 + place as u32],
            None => part.bytes().map(|byte| 3 + u32::from(byte)).collect(),
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Goal: byte-level BPE from metadata encodes like the tokenizer.json it was converted from.
    #[test]
    fn byte_level_encodes_like_the_original(text in "[the ré😀.\n]{0,20}|\\PC{0,12}") {
        let original = byte_level().to_string();
        let original = Tokenizer::from_json("t.json", original.as_bytes()).expect("valid metadata");
        let converted = build(byte_level_metadata()).expect("valid metadata");
        for add_special in [false, true] {
            let tokens = converted.encode(&text, add_special).expect("encodes");
            prop_assert_eq!(&tokens, &original.encode(&text, add_special).expect("encodes"));
            prop_assert_eq!(converted.decode(&tokens, true), text.as_str());
        }
    }

    /// Goal: SentencePiece's BPE joins pieces by score and encodes other characters as bytes.
    #[test]
    fn sentence_piece_follows_the_scores(text in "[ thernads.éx漢]{0,24}") {
        let tokenizer = build(sentence_piece_metadata()).expect("valid metadata");
        let tokens = tokenizer.encode(&text, false).expect("encodes");
        prop_assert_eq!(&tokens, &naive_sentence_piece(&text));
        prop_assert_eq!(tokenizer.decode(&tokens, true), text.as_str());
    }
}

/// Goal: by default, SentencePiece adds the token for the begin of the sequence and prepends a
/// space to the text. The metadata can change both.
#[test]
fn tokens_added_at_the_start_follow_the_metadata() {
    let encode = |metadata: GgufTokenizer| {
        let tokenizer = build(metadata).expect("valid metadata");
        let tokens = tokenizer.encode("the</s>", true).expect("encodes");
        tokens
            .iter()
            .map(|&token| tokenizer.token_spelling(token).expect("known"))
            .collect::<Vec<_>>()
    };
    assert_eq!(encode(sentence_piece_metadata()), ["<s>", "\u{2581}the", "</s>"]);
    let other = GgufTokenizer {
        add_bos_token: Some(false),
        add_eos_token: Some(true),
        add_space_prefix: Some(false),
        ..sentence_piece_metadata()
    };
    assert_eq!(encode(other), ["the", "</s>", "</s>"]);
}

/// Goal: files of Gemma 4 list merges in place of scores. Those that follow from the scores lead to
/// the same tokens, with spaces as in the text and bytes for other characters.
#[test]
fn listed_merges_replace_scores() {
    let pieces = sentence_pieces();
    let known = |text: &str| pieces[259..].iter().any(|(piece, _)| piece == text);
    let splits = |piece: &String| {
        let middles = piece.char_indices().skip(1).map(|(middle, _)| piece.split_at(middle));
        let known = middles.filter(|(left, right)| known(left) && known(right));
        known.map(|(left, right)| format!("{left} {right}")).collect::<Vec<_>>()
    };
    let merges = pieces[259..].iter().flat_map(|(piece, _)| splits(piece)).collect();
    let scores = GgufTokenizer { add_space_prefix: Some(false), ..sentence_piece_metadata() };
    let listed = GgufTokenizer {
        model: "gemma4".to_owned(),
        merges: Some(merges),
        scores: None,
        add_space_prefix: None,
        ..sentence_piece_metadata()
    };
    let [scored, listed] = [scores, listed].map(|metadata| build(metadata).expect("valid"));
    for text in ["", " ", "the", " and  the\nend.", "thethe er and", "\u{6f22} \u{1f600}"] {
        let tokens = listed.encode(text, true).expect("encodes");
        assert_eq!(tokens, scored.encode(text, true).expect("encodes"), "{text:?}");
        assert_eq!(listed.decode(&tokens, true), text);
    }
    let missing = GgufTokenizer { model: "gemma4".to_owned(), ..sentence_piece_metadata() };
    let error = build(missing).expect_err("no merges").to_string();
    assert!(error.contains("tokenizer.ggml.merges"), "{error}");
}

/// The byte-level tokenizer of the family `pre` with further merges, and the id of the last one's
/// token.
fn with_merges(pre: &str, further: &[[&str; 2]]) -> (Tokenizer, usize) {
    let (mut tokens, mut merges) = byte_level_tokens();
    for [left, right] in further {
        merges.push([(*left).to_owned(), (*right).to_owned()]);
        tokens.push(format!("{left}{right}"));
    }
    let last = tokens.len() - 1;
    let metadata = GgufTokenizer {
        pre: Some(pre.to_owned()),
        tokens,
        token_types: None,
        merges: Some(merges.iter().map(|[left, right]| format!("{left} {right}")).collect()),
        bos_token_id: None,
        eos_token_id: None,
        ..byte_level_metadata()
    };
    (build(metadata).expect(pre), last)
}

/// Goal: each family's split pattern is a valid regular expression and splits numbers as
/// documented.
#[test]
fn each_family_splits_numbers_as_documented() {
    let check = |pre: &str, expected: &[&str]| {
        let (tokenizer, _) = with_merges(pre, &[["1", "2"], ["12", "3"], ["123", "4"]]);
        let tokens = tokenizer.encode("1234", false).expect("encodes");
        let spelled: Vec<_> =
            tokens.iter().map(|&token| tokenizer.token_spelling(token).expect("known")).collect();
        assert_eq!(spelled, expected, "{pre}");
    };
    check("gpt-2", &["1234"]);
    check("llama-bpe", &["123", "4"]);
    check("qwen2", &["1", "2", "3", "4"]);
    check("qwen35", &["1", "2", "3", "4"]);
    check("tekken", &["1", "2", "3", "4"]);
    check("gpt-4o", &["123", "4"]);
    check("smollm", &["1", "2", "3", "4"]);
    check("glm4", &["123", "4"]);
    check("deepseek-v3", &["123", "4"]);
    check("kimi-k2", &["123", "4"]);
    check("exaone4", &["1234"]);
    check("dbrx", &["123", "4"]);
    for pre in ["deepseek-llm", "deepseek-coder", "youtu"] {
        check(pre, &["1", "2", "3", "4"]);
    }
}

/// Goal: among the families with Llama 3's pattern, only some add a first token if the file does
/// not say whether to add one.
#[test]
fn only_some_families_add_the_first_token_by_default() {
    for (pre, adds) in [("llama-bpe", true), ("dbrx", false), ("smaug-bpe", false)] {
        let (pre, add_bos_token) = (Some(pre.to_owned()), None);
        let metadata = GgufTokenizer { pre, add_bos_token, ..byte_level_metadata() };
        let begin = metadata.bos_token_id;
        let tokens = build(metadata).expect("valid").encode("x", true).expect("encodes");
        assert_eq!(tokens.first().copied() == begin, adds);
    }
}

/// Goal: only families that keep Chinese characters apart split a word before one.
#[test]
fn some_families_split_words_before_chinese_characters() {
    for (pre, apart) in [
        ("gpt-4o", false),
        ("deepseek-v3", true),
        ("kimi-k2", true),
        ("exaone4", false),
        ("deepseek-llm", true),
        ("youtu", true),
    ] {
        // The first byte of the character, in GPT-2's spelling of bytes.
        let (tokenizer, joined) = with_merges(pre, &[["a", "\u{e4}"]]);
        let tokens = tokenizer.encode("a\u{4e2d}", false).expect("encodes");
        assert_eq!(tokens[0] as usize != joined, apart, "{pre}");
    }
}

/// Goal: invalid metadata is an error that names the file and the key.
#[test]
fn invalid_metadata_is_refused() {
    let check = |metadata: GgufTokenizer, key: &str| {
        let error = build(metadata).expect_err(key).to_string();
        assert!(error.contains("m.gguf") && error.contains(key), "{error}");
    };
    let byte_level = byte_level_metadata;
    check(GgufTokenizer { model: "rwkv".to_owned(), ..byte_level() }, "tokenizer.ggml.model");
    check(GgufTokenizer { pre: Some("new".to_owned()), ..byte_level() }, "tokenizer.ggml.pre");
    check(GgufTokenizer { merges: None, ..byte_level() }, "tokenizer.ggml.merges");
    let merges = Some(vec!["ab".to_owned()]);
    check(GgufTokenizer { merges, ..byte_level() }, "tokenizer.ggml.merges");
    let bos_token_id = Some(9999);
    check(GgufTokenizer { bos_token_id, ..byte_level() }, "tokenizer.ggml.bos_token_id");
    check(GgufTokenizer { scores: None, ..sentence_piece_metadata() }, "tokenizer.ggml.scores");
}
