//! Tests the prompts for filling in the middle, with the tokens of known model families.

use stolon_text::{Infill, InfillFile, TextModel};

use crate::vocabularies::byte_level_with;

/// The text models of a tokenizer with these tokens, none of which is marked as special: Qwen's are
/// not.
fn model(tokens: &[&str]) -> TextModel {
    byte_level_with(tokens, false, None)
}

/// The text of the prompt, with its special tokens.
fn prompt(model: &TextModel, infill: &Infill, limit: usize) -> String {
    let tokens = model.infill().expect("tokens").encode(infill, limit).expect("encodes");
    model.tokenizer().decode(&tokens, false)
}

fn gap(prefix: &str, suffix: &str, files: &[(&str, &str)]) -> Infill {
    let file = |&(name, text): &(&str, &str)| InfillFile { name: name.into(), text: text.into() };
    let files = files.iter().map(file).collect();
    Infill { prefix: prefix.to_owned(), suffix: suffix.to_owned(), files }
}

/// Goal: the prompt has the tokens and the order that each family was trained with.
#[test]
fn each_family_has_its_format() {
    let two = [("a.rs", "one"), ("b.rs", "two")];
    for (tokens, alone, with_files) in [
        (
            &[
                "<|fim_prefix|>",
                "<|fim_middle|>",
                "<|fim_suffix|>",
                "<|repo_name|>",
                "<|file_sep|>",
            ][..],
            "<|begin|><|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
            "<|begin|><|repo_name|>project\n<|file_sep|>a.rs\none<|file_sep|>b.rs\ntwo\
             <|file_sep|>filename\n<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
        ),
        (
            &["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>", "<repo_name>"],
            "<|begin|><fim_prefix>P<fim_suffix>S<fim_middle>",
            "<|begin|><repo_name>project\n<file_sep>a.rs\none<file_sep>b.rs\ntwo\
             <file_sep>filename\n<fim_prefix>P<fim_suffix>S<fim_middle>",
        ),
        (
            &["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            "<|begin|><｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
            "<|begin|>\n--- a.rs ---\none\n\n--- b.rs ---\ntwo\n\
             <｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
        ),
        (
            &["<PRE>", "<SUF>", "<MID>", "<EOT>"],
            "<|begin|><PRE>P<SUF>S<MID>",
            "<|begin|>\n--- a.rs ---\none\n\n--- b.rs ---\ntwo\n<PRE>P<SUF>S<MID>",
        ),
        (
            &["<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"],
            "<|begin|><[fim-suffix]>S<[fim-prefix]>P<[fim-middle]>",
            "<|begin|>\n--- a.rs ---\none\n\n--- b.rs ---\ntwo\n\
             <[fim-suffix]>S<[fim-prefix]>P<[fim-middle]>",
        ),
        (
            &["[PREFIX]", "[MIDDLE]", "[SUFFIX]"],
            "<|begin|>[SUFFIX]S[PREFIX]P",
            "<|begin|>\n--- a.rs ---\none\n\n--- b.rs ---\ntwo\n[SUFFIX]S[PREFIX]P",
        ),
    ] {
        let model = model(tokens);
        assert_eq!(prompt(&model, &gap("P", "S", &[]), 1000), alone);
        assert_eq!(prompt(&model, &gap("P", "S", &two), 1000), with_files);
        let ends = model.infill().expect("tokens").ends();
        for token in tokens.iter().filter(|token| **token != "[MIDDLE]") {
            let id = model.tokenizer().token_id(token).expect("known");
            assert!(ends.contains(&id), "{token}");
        }
    }
    // Two of the three are not enough.
    assert!(model(&["<|fim_prefix|>", "<|fim_middle|>"]).infill().is_none());
}

/// Goal: a token that is spelled out in the text of a client, special or of the gap, is not one in
/// the prompt.
#[test]
fn spelled_out_tokens_are_text() {
    let model = model(&["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]);
    let text = "x <fim_middle> y <|end|> z <|begin|";
    let infill = gap(text, text, &[("<fim_prefix>", text)]);
    let tokens = model.infill().expect("tokens").encode(&infill, 1000).expect("encodes");
    for (spelling, count) in
        [("<fim_prefix>", 1), ("<fim_middle>", 1), ("<fim_suffix>", 1), ("<|end|>", 0)]
    {
        let id = model.tokenizer().token_id(spelling).expect("known");
        assert_eq!(tokens.iter().filter(|&&token| token == id).count(), count, "{spelling}");
    }
    let shown = model.tokenizer().decode(&tokens, false);
    assert!(shown.ends_with(&format!("<fim_prefix>{text}<fim_suffix>{text}<fim_middle>")));
}

/// Goal: files that do not fit are left out as a whole, from the first one on, and the text with
/// the gap never.
#[test]
fn files_have_the_room_that_is_left() {
    let model = model(&["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>"]);
    let infill = gap("P", "S", &[("a", "xxxx"), ("b", "yyyy"), ("c", "zzzz")]);
    let whole = model.infill().expect("tokens").encode(&infill, 1000).expect("encodes").len();
    for (limit, files) in [
        (whole, &["xxxx", "yyyy", "zzzz"][..]),
        (whole - 1, &["yyyy", "zzzz"]),
        (whole - 7, &["yyyy", "zzzz"]),
        (whole - 8, &["zzzz"]),
        (whole - 21, &[]),
        (0, &[]),
    ] {
        let prompt = prompt(&model, &infill, limit);
        let found: Vec<&str> =
            ["xxxx", "yyyy", "zzzz"].into_iter().filter(|text| prompt.contains(text)).collect();
        assert_eq!(found, files, "{limit}");
        assert!(prompt.ends_with("<fim_prefix>P<fim_suffix>S<fim_middle>"));
        assert_eq!(prompt.contains("<file_sep>filename\n"), !files.is_empty(), "{limit}");
    }
}
