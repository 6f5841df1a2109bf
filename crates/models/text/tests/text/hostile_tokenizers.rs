//! Cut, corrupted and crafted `tokenizer.json` files: each is refused or usable, and nothing
//! panics.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};
use stolon_text::{GgufTokenizer, Tokenizer, TokenizerSource};

use crate::vocabularies::{Spaces, byte_level, metaspace, words};

const TEXT: &str = "the and <|end|> Hello, 漢字 é 😀 123\n  ";

/// Loads the file and uses the tokenizer. Returns whether it was refused.
fn check(bytes: &[u8]) -> bool {
    let Ok(tokenizer) = Tokenizer::from_json("tokenizer.json", bytes) else { return true };
    for add_special in [false, true] {
        if let Ok(tokens) = tokenizer.encode(TEXT, add_special) {
            let _ = tokenizer.decode(&tokens, false);
        }
    }
    let _ = tokenizer.decode(&[0, 1, u32::MAX], true);
    false
}

fn fixtures() -> [Value; 4] {
    [byte_level(), metaspace(Spaces::Cut, false), metaspace(Spaces::Metaspace, true), words()]
}

/// Goal: a file that ends too early is refused, wherever it ends.
#[test]
fn cut_files_are_refused() {
    for fixture in fixtures() {
        let bytes = fixture.to_string().into_bytes();
        for end in (0..bytes.len()).step_by(37) {
            assert!(check(&bytes[..end]), "{end} of {} bytes", bytes.len());
        }
    }
}

/// Goal: files with changed bytes are refused or usable.
#[test]
fn corrupted_files_are_refused_or_usable() {
    let files = fixtures().map(|fixture| fixture.to_string().into_bytes());
    let changes = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    let config = Config::with_cases(150);
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(config, random)
        .run(&(0..files.len(), changes), |(file, changes)| {
            let mut bytes = files[file].clone();
            for (place, byte) in changes {
                let place = place.index(bytes.len());
                // Half of the changes keep the file valid JSON more often.
                bytes[place] =
                    if byte < 128 { b"0123456789"[usize::from(byte) % 10] } else { byte };
            }
            check(&bytes);
            Ok(())
        })
        .expect("nothing panics");
}

/// All paths to values outside of the vocabulary, and to some inside.
fn paths(value: &Value, path: &str, found: &mut Vec<String>) {
    found.push(path.to_owned());
    match value {
        Value::Object(fields) => {
            for (name, value) in fields.iter().take(12) {
                let name = name.replace('~', "~0").replace('/', "~1");
                paths(value, &format!("{path}/{name}"), found);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate().take(3) {
                paths(item, &format!("{path}/{index}"), found);
            }
        }
        _ => {}
    }
}

/// Goal: files in which a value is missing or replaced by an unexpected one are refused or usable.
#[test]
fn files_with_unexpected_values_are_refused_or_usable() {
    let replacements = [
        json!(null),
        json!(-1),
        json!(4_294_967_296_u64),
        json!(18_446_744_073_709_551_615_u64),
        json!(1e300),
        json!(""),
        json!("\u{0}"),
        json!("é".repeat(100)),
        json!([]),
        json!({}),
        json!([[[]]]),
        json!(true),
    ];
    for fixture in fixtures() {
        let mut found = Vec::new();
        paths(&fixture, "", &mut found);
        for (index, path) in found.iter().enumerate() {
            // Two replacements of each value, so that all are used but not each everywhere.
            for shift in [0, 5] {
                let mut changed = fixture.clone();
                let replacement = &replacements[(index + shift) % replacements.len()];
                *changed.pointer_mut(path).expect("the path exists") = replacement.clone();
                check(changed.to_string().as_bytes());
            }
        }
    }
}

/// Goal: crafted files that make the library panic, allocate without a limit or take exponential
/// time are refused.
#[test]
fn crafted_files_are_refused() {
    let with = |path: &str, value: Value| {
        let mut file = byte_level();
        *file.pointer_mut(path).expect("the path exists") = value;
        file
    };
    let a = json!({"Sequence": {"id": "A", "type_id": 0}});
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let nested = |name: &str, depth: usize| {
        (0..depth)
            .fold(json!({"type": "Nothing"}), |step, _| json!({"type": "Sequence", name: [step]}))
    };
    let double = replace(json!({"String": "a"}), "aa");
    let cases = [
        ("a huge id", with("/model/vocab/the", json!(4_294_967_295_u64))),
        ("a long token", {
            let mut file = byte_level();
            file["model"]["vocab"]["a".repeat(100_000)] = json!(7);
            file
        }),
        ("a merge of unknown tokens", with("/model/merges/0", json!(["nothing", "at all"]))),
        ("a prefix within a character", {
            let mut file = byte_level();
            file["model"]["continuing_subword_prefix"] = json!("ab");
            file
        }),
        ("a post-processor without the special token", {
            with("/post_processor/special_tokens", json!({}))
        }),
        ("a template with the second text", {
            with("/post_processor/single", json!([{"Sequence": {"id": "B", "type_id": 0}}]))
        }),
        ("a template with the text many times", {
            with("/post_processor/single", Value::Array(vec![a.clone(); 50]))
        }),
        ("nested normalizers", with("/normalizer", nested("normalizers", 40))),
        ("nested pre-tokenizers", with("/pre_tokenizer", nested("pretokenizers", 40))),
        ("nested decoders", with("/decoder", nested("decoders", 40))),
        ("nested post-processors", with("/post_processor", nested("processors", 40))),
        ("a text that doubles", {
            with(
                "/normalizer",
                json!({"type": "Sequence", "normalizers": vec![double.clone(); 40]}),
            )
        }),
        ("a token that doubles", {
            with("/decoder", json!({"type": "Sequence", "decoders": vec![double; 40]}))
        }),
        ("long text for nothing", {
            with("/normalizer", replace(json!({"String": ""}), &"a".repeat(4000)))
        }),
        ("words of length 0", with("/pre_tokenizer", json!({"type": "FixedLength", "length": 0}))),
        ("a large regular expression", {
            let regex = json!({"Regex": "(?:\\p{L}{1000}){1000}"});
            with("/normalizer", replace(regex, "a"))
        }),
        ("an invalid table", {
            with("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "////"}))
        }),
        ("a table that is shorter than its length says", {
            let table = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
            with("/normalizer", table)
        }),
        ("no model", with("/model", json!(null))),
        ("a list", json!([1])),
    ];
    for (name, file) in cases {
        assert!(check(file.to_string().as_bytes()), "{name}");
    }
    assert!(check("[".repeat(5_000_000).as_bytes()), "many values");
    assert!(check("[".repeat(100_000).as_bytes()), "deep values");
    assert!(check(&vec![b' '; 65 << 20]), "a large file");
}

/// Goal: an id beyond the vocabulary, as some published files have in their post-processor, and an
/// unusual truncation do not matter.
#[test]
fn irrelevant_parts_are_not_read() {
    let mut file = byte_level();
    file["truncation"] = json!({"max_length": 1, "stride": 5, "direction": "Up"});
    file["padding"] = json!("nonsense");
    assert!(!check(file.to_string().as_bytes()));
}

/// Goal: a token of a megabyte in a GGUF vocabulary is refused before its merges are computed.
#[test]
fn long_tokens_of_gguf_files_are_refused() {
    let metadata = GgufTokenizer {
        file: "model.gguf".to_owned(),
        model: "llama".to_owned(),
        tokens: vec!["a".to_owned(), "a".repeat(1 << 20)],
        scores: Some(vec![0.0, 1.0]),
        ..GgufTokenizer::default()
    };
    let error = Tokenizer::new(&TokenizerSource::Gguf(Box::new(metadata))).expect_err("refused");
    assert!(error.to_string().contains("tokenizer.ggml.tokens"), "{error}");
}
