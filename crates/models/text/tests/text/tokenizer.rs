//! Compares tokenizers and streaming with the crate `tokenizers`, which decodes whole lists.

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::Value;
use stolon_text::{Detokenizer, Tokenizer, TokenizerError};

use crate::vocabularies::{Spaces, byte_level, metaspace, words};

struct Pair {
    name: &'static str,
    ours: Tokenizer,
    reference: tokenizers::Tokenizer,
    /// Whether invalid UTF-8 is decoded to the same text as well. With byte fallback, the reference
    /// replaces a whole run of byte tokens if one is invalid, which is not possible in streaming.
    same_when_ill_formed: bool,
}

fn pair(name: &'static str, json: &Value, same_when_ill_formed: bool) -> Pair {
    let bytes = json.to_string().into_bytes();
    Pair {
        name,
        ours: Tokenizer::from_json("tokenizer.json", &bytes).expect("a valid tokenizer"),
        reference: tokenizers::Tokenizer::from_bytes(&bytes).expect("a valid tokenizer"),
        same_when_ill_formed,
    }
}

fn pairs() -> Vec<Pair> {
    vec![
        pair("byte-level BPE", &byte_level(), true),
        pair("BPE, cut", &metaspace(Spaces::Cut, false), false),
        pair("BPE, kept", &metaspace(Spaces::Kept, false), false),
        pair("unigram, cut", &metaspace(Spaces::Cut, true), false),
        pair("unigram, metaspace", &metaspace(Spaces::Metaspace, true), true),
        pair("unigram, both", &metaspace(Spaces::FallbackThenMetaspace, true), false),
        pair("words", &words(), true),
    ]
}

/// The pieces of text that streaming returns, including that of `finish`.
fn stream(tokenizer: &Tokenizer, tokens: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip_special);
    let mut pieces: Vec<String> = tokens.iter().map(|&token| detokenizer.push(token)).collect();
    pieces.push(detokenizer.finish());
    pieces
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Goal: for random tokens, the streamed pieces joined are the text that `tokenizers` decodes
    /// from the whole list.
    #[test]
    fn streamed_pieces_join_to_the_decoded_text(
        choices in vec((any::<prop::sample::Index>(), any::<bool>()), 0..20),
        skip_special: bool,
    ) {
        for pair in pairs() {
            // Includes two ids outside of the vocabulary, which have no text.
            let count = pair.ours.vocab_size() + 2;
            // Half of the tokens are among the last 23 ids, which are spaces and words.
            let first = |late: bool| if late { count.saturating_sub(23) } else { 0 };
            let tokens: Vec<u32> = choices
                .iter()
                .map(|(choice, late)| {
                    (first(*late) + choice.index(count - first(*late))) as u32
                })
                .collect();
            let joined = stream(&pair.ours, &tokens, skip_special).concat();
            prop_assert_eq!(&joined, &pair.ours.decode(&tokens, skip_special), "{}", pair.name);
            let whole = pair.reference.decode(&tokens, skip_special).expect("decodes");
            if pair.same_when_ill_formed || !whole.contains('\u{fffd}') {
                prop_assert_eq!(joined, whole, "{}: {:?}", pair.name, tokens);
            }
        }
    }

    /// Goal: no text is longer than the maximum for the number of its tokens, including runs of
    /// unknown characters and text that normalization shortens.
    #[test]
    fn no_text_is_longer_than_the_maximum_for_its_tokens(
        text in "[the and.é漢😀\n]{0,40}|\\PC{0,20}| {0,30}|(<\\|end\\|>|\u{1d400}|\u{1fbe}\u{308}\u{301}){0,9}",
    ) {
        let normalized = |normalizer: &str| {
            let mut json = byte_level();
            json["normalizer"] = serde_json::json!({"type": normalizer});
            pair("normalized", &json, true)
        };
        for pair in pairs().into_iter().chain(["NFC", "NFKC", "NFD"].map(normalized)) {
            if let Ok(tokens) = pair.ours.encode(&text, false) {
                let max = pair.ours.max_bytes(tokens.len());
                prop_assert!(pair.name == "words" || text.len() <= max, "{}: {max}", pair.name);
            }
        }
    }

    /// Goal: a text is encoded as by `tokenizers`, and when the tokens are streamed, no piece
    /// contains an incomplete character.
    #[test]
    fn texts_are_equal_after_encoding_and_streaming(text in "[the and.é漢😀\n]{0,20}|\\PC{0,12}") {
        for pair in pairs().iter().filter(|pair| pair.name != "words") {
            let tokens = pair.ours.encode(&text, false).expect("encodes");
            let expected = pair.reference.encode(text.as_str(), false).expect("encodes");
            prop_assert_eq!(&tokens, expected.get_ids(), "{}", pair.name);
            let whole = pair.reference.decode(&tokens, false).expect("decodes");
            let pieces = stream(&pair.ours, &tokens, false);
            let holds = |text: &str| text.contains('\u{fffd}');
            prop_assert!(holds(&whole) || !pieces.iter().any(|piece| holds(piece)));
            prop_assert_eq!(pieces.concat(), whole, "{}", pair.name);
        }
    }
}

/// Goal: a character that spans several tokens is returned with its last token; if it is never
/// completed, U+FFFD is returned at the end.
#[test]
fn incomplete_characters_are_held_back() {
    let tokenizer = Tokenizer::bytes();
    let tokens: Vec<u32> = "aé😀".bytes().map(u32::from).collect();
    let pieces = stream(&tokenizer, &tokens, true);
    assert_eq!(pieces, ["a", "", "é", "", "", "", "😀", ""]);
    assert_eq!(stream(&tokenizer, &tokens[..5], true), ["a", "", "é", "", "", "\u{fffd}"]);
    assert_eq!(stream(&tokenizer, &[0xe2, 0x82, 0x41], true), ["", "", "\u{fffd}A", ""]);
}

/// Goal: text that continues a prompt keeps its leading space; a new text loses it.
#[test]
fn continued_text_keeps_its_leading_space() {
    let json = metaspace(Spaces::Cut, false).to_string();
    let tokenizer =
        Tokenizer::from_json("tokenizer.json", json.as_bytes()).expect("a valid tokenizer");
    let the = tokenizer.token_id("\u{2581}the").expect("in the vocabulary");
    assert_eq!(tokenizer.decode(&[the, the], true), "the the");
    let spaces = tokenizer.token_id("\u{2581}\u{2581}").expect("in the vocabulary");
    assert_eq!(tokenizer.decode(&[spaces, the], true), "  the", "only one space is removed");
    let mut continuing = Detokenizer::continuing(tokenizer.clone(), true);
    assert_eq!(continuing.push(the), " the");
    assert_eq!(tokenizer.token_bytes(the), Some(b" the".to_vec()));
}

/// Goal: special tokens are recognized in text, added on request when encoding, and left out on
/// request when decoding.
#[test]
fn special_tokens_are_recognized_added_and_skipped() {
    let json = byte_level().to_string();
    let tokenizer =
        Tokenizer::from_json("tokenizer.json", json.as_bytes()).expect("a valid tokenizer");
    let id = |spelling: &str| tokenizer.token_id(spelling).expect("in the vocabulary");
    let (begin, end, tool) = (id("<|begin|>"), id("<|end|>"), id("<tool call>"));
    assert!(tokenizer.is_special(end) && !tokenizer.is_special(tool) && !tokenizer.is_special(0));
    let tokens = tokenizer.encode("the<|end|><tool call>", true).expect("encodes");
    assert_eq!(tokens, [begin, id("the"), end, tool]);
    assert_eq!(tokenizer.decode(&tokens, true), "the<tool call>");
    assert_eq!(tokenizer.decode(&tokens, false), "<|begin|>the<|end|><tool call>");
    assert_eq!(tokenizer.vocab_size(), tool as usize + 1);
    assert_eq!(tokenizer.token_bytes(tool + 1), None);
}

/// Goal: the maximum length of a text follows from the longest token, and is generous where a token
/// can stand for a text of any length.
#[test]
fn the_maximum_length_follows_from_the_longest_token() {
    let max = |json: &Value| {
        let json = json.to_string();
        Tokenizer::from_json("tokenizer.json", json.as_bytes()).expect("valid").max_bytes(10)
    };
    assert_eq!(Tokenizer::bytes().max_bytes(10), 10);
    let longest = "<tool call>".len();
    assert_eq!(max(&byte_level()), 10 * longest);
    assert_eq!(max(&metaspace(Spaces::Cut, true)), 10 * "\u{2581}and".len());
    let mut composed = byte_level();
    composed["normalizer"] = serde_json::json!({"type": "NFC"});
    assert_eq!(max(&composed), 40 * longest);
    let mut stripping = byte_level();
    stripping["added_tokens"][1]["rstrip"] = true.into();
    let mut incomplete = byte_level();
    incomplete["model"]["vocab"].as_object_mut().expect("a map").remove("!");
    let mut removing = byte_level();
    removing["normalizer"] = serde_json::json!({"type": "Strip", "strip_left": true,
                                                "strip_right": true});
    for unlimited in [stripping, incomplete, removing, words()] {
        assert_eq!(max(&unlimited), 10 * 1024);
    }
    assert_eq!(Tokenizer::bytes().max_bytes(usize::MAX), usize::MAX);
}

/// Goal: padding and truncation in a `tokenizer.json` have no effect.
#[test]
fn padding_and_truncation_are_ignored() {
    let mut json = byte_level();
    json["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    });
    json["padding"] = serde_json::json!({
        "strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    });
    let tokenizer = Tokenizer::from_json("tokenizer.json", json.to_string().as_bytes())
        .expect("a valid tokenizer");
    assert_eq!(tokenizer.encode("xyzzy", false).expect("encodes").len(), 5);
}

/// Goal: a tokenizer that is malformed or cannot be decoded token by token is an error that names
/// the file.
#[test]
fn unusable_tokenizers_are_refused() {
    let error = Tokenizer::from_json("dir/tokenizer.json", b"{").expect_err("not valid JSON");
    assert!(
        matches!(&error, TokenizerError::Malformed { file, .. } if file == "dir/tokenizer.json")
    );
    let mut json = words();
    json["decoder"] = serde_json::json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|",
                                         "cleanup": true});
    let error = Tokenizer::from_json("t.json", json.to_string().as_bytes())
        .expect_err("cannot be streamed");
    assert!(error.to_string().contains("t.json: key `decoder`"), "{error}");
}
