//! Tests the prompts of rerankers that answer with a token.

use stolon_text::{PairPrompts, TextModel};

use crate::vocabularies::byte_level_with;

/// The text model of a byte-level tokenizer with these special tokens.
fn model(special: &[&str], template: Option<&str>) -> TextModel {
    byte_level_with(special, true, template)
}

/// The text of the prompt, with its special tokens.
fn prompt(model: &TextModel, template: Option<&str>, pair: [&str; 2]) -> String {
    let prompts = PairPrompts::new(model, template).expect("valid").expect("a template");
    let tokens = prompts.encode(pair, None, None).expect("encodes");
    model.tokenizer().decode(&tokens, false)
}

const PAIR: [&str; 2] = ["what?", "this"];

/// Goal: a given template comes before the roles of the chat template, and these before the published
/// template, which needs its tokens.
#[test]
fn templates_have_an_order() {
    let roles = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n\
                 {% endfor %}answer:";
    let chat = "{% for message in messages if message.role == 'user' %}{{ message.content }}\
                {% endfor %}";
    let own = Some("Q {query} D {document} A");
    for template in [None, Some(roles), Some(chat)] {
        assert_eq!(prompt(&model(&[], template), own, PAIR), "Q what? D this A");
    }
    let of_roles = prompt(&model(&["<|im_start|>"], Some(roles)), None, PAIR);
    assert_eq!(of_roles, "[query] what?\n[document] this\nanswer:");
    for template in [None, Some(chat)] {
        let published = prompt(&model(&["<|im_start|>", "<|im_end|>"], template), None, PAIR);
        assert!(published.starts_with("<|im_start|>system\nJudge whether"), "{published}");
        assert!(published.contains("\n<Query>: what?\n<Document>: this<|im_end|>\n"));
        assert!(published.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
        assert!(PairPrompts::new(&model(&[], template), None).expect("valid").is_none());
    }
    for template in ["", "{query}", "{document} {query}", "{query} {document} {query}"] {
        let error = PairPrompts::new(&model(&[], None), Some(template)).expect_err(template);
        assert!(error.to_string().contains("{query} and, after it, {document}"), "{error}");
    }
}

/// Goal: special tokens that a text spells out, also across the place where the template joins it, are
/// no tokens of the prompt, and the texts are unchanged.
#[test]
fn spelled_out_tokens_are_text() {
    let model = model(&["<|im_start|>", "<|im_end|>"], None);
    let end = model.tokenizer().token_id("<|im_end|>").expect("a token");
    let template = "{query}|im_end|> {document}<|im_end|>";
    let prompts = PairPrompts::new(&model, Some(template)).expect("valid").expect("a template");
    for pair in [["a", "b"], ["<|im_end|>", "<|im_end|><|im_end|>"], ["<|im_", "end|>"]] {
        let tokens = prompts.encode(pair, None, None).expect("encodes");
        let text = format!("{}|im_end|> {}<|im_end|>", pair[0], pair[1]);
        assert_eq!(model.tokenizer().decode(&tokens, false), text);
        assert_eq!(tokens.iter().filter(|token| **token == end).count(), 1, "{pair:?}");
    }
}

/// Goal: an instruction replaces the one of each kind of template, and its special tokens are text; a
/// template without a place for it says so.
#[test]
fn instructions_replace_those_of_templates() {
    let system =
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}";
    let variable = "{{ instruction | default('Find it') }}: {{ messages | selectattr('role', 'eq', \
                    'query') | map(attribute='content') | first }} ? {{ messages | selectattr('role', \
                    'eq', 'document') | map(attribute='content') | first }}";
    let special = ["<|im_start|>", "<|im_end|>"];
    for (chat, own, without, with) in [
        (
            None,
            Some("T {instruction} Q {query} D {document}"),
            "T Given a web search",
            "T <|im_end|> Q what? D this",
        ),
        (
            Some(system),
            None,
            "[query] what?",
            "[system] <|im_end|>\n[query] what?\n[document] this\n",
        ),
        (Some(variable), None, "Find it: what? ? this", "<|im_end|>: what? ? this"),
        (
            None,
            None,
            "<|im_start|>system",
            "\n<Instruct>: <|im_end|>\n<Query>: what?\n<Document>: this",
        ),
    ] {
        let model = model(&special, chat);
        let prompts = PairPrompts::new(&model, own).expect("valid").expect("a template");
        assert!(prompts.takes_instruction());
        let text = |instruction| {
            let tokens = prompts.encode(PAIR, instruction, None).expect("encodes");
            let end = model.tokenizer().token_id("<|im_end|>").expect("a token");
            let ends = tokens.iter().filter(|token| **token == end).count();
            (model.tokenizer().decode(&tokens, false), ends)
        };
        let (plain, ends) = text(None);
        assert!(plain.starts_with(without), "{plain}");
        let (instructed, ends_with) = text(Some("<|im_end|>"));
        assert!(instructed.contains(with), "{instructed}");
        assert_eq!(ends, ends_with, "{instructed}");
    }
    let model = model(&special, None);
    let prompts = PairPrompts::new(&model, Some("{query} {document}")).expect("valid");
    assert!(!prompts.expect("a template").takes_instruction());
    for wrong in ["{query}{instruction}{document}", "{instruction}{instruction}{query}{document}"] {
        assert!(PairPrompts::new(&model, Some(wrong)).is_err(), "{wrong}");
    }
}

/// Goal: the end of the document is cut, then that of the query, never the template's end.
#[test]
fn long_documents_are_cut() {
    let model = model(&["<|im_end|>"], None);
    let template = Some("Q{query}D{document}<|im_end|>");
    let prompts = PairPrompts::new(&model, template).expect("valid").expect("a template");
    let cut = |most| {
        let tokens = prompts.encode(["1234", "5678"], None, Some(most));
        tokens.map(|tokens| model.tokenizer().decode(&tokens, false))
    };
    assert_eq!(cut(11).expect("fits"), "Q1234D5678<|im_end|>");
    assert_eq!(cut(9).expect("fits"), "Q1234D56<|im_end|>");
    assert_eq!(cut(4).expect("fits"), "Q12<|im_end|>");
    let error = cut(1).expect_err("the template alone is longer").to_string();
    assert!(error.contains("at least 2 tokens") && error.contains("got 1"), "{error}");
}
