//! Tokenizers that the program brings itself.

use std::error::Error;
use std::sync::Arc;

use stolon_text::{CustomTokenizer, Tokenizer, TokenizerError, TokenizerSource};

/// A vocabulary of single bytes and of the special tokens, which come after them.
#[derive(Clone)]
struct Own {
    special: Vec<(u32, &'static str)>,
    begin: Option<u32>,
    tokens: usize,
}

impl Own {
    fn new(special: &[(u32, &'static str)]) -> Own {
        Own { special: special.to_vec(), begin: None, tokens: 260 }
    }

    fn build(self) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::new(&TokenizerSource::Custom(Arc::new(self)))
    }
}

impl CustomTokenizer for Own {
    fn tokens(&self) -> Vec<Vec<u8>> {
        assert!(self.tokens != 13, "no luck");
        (0..self.tokens).map(|id| u8::try_from(id).into_iter().collect()).collect()
    }

    fn special_tokens(&self) -> Vec<(u32, String)> {
        self.special.iter().map(|(id, spelling)| (*id, (*spelling).to_owned())).collect()
    }

    fn begin_token(&self) -> Option<u32> {
        self.begin
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, Box<dyn Error + Send + Sync>> {
        match text {
            "panic" => panic!("of the program"),
            "error" => Err("not in the vocabulary".into()),
            "wrong" => Ok(vec![1, 260]),
            text => Ok(text.bytes().map(u32::from).collect()),
        }
    }
}

/// Goal: the longest special token at a place counts, the token that begins a text is added only on
/// request, and characters of several tokens are put together.
#[test]
fn special_tokens_are_found_in_texts() {
    let own = Own { begin: Some(258), ..Own::new(&[(256, "<a>"), (257, "<a><b>"), (258, "<s>")]) };
    let tokenizer = own.build().expect("it is valid");
    assert_eq!(tokenizer.encode("x<a><b><a>", true), Ok(vec![258, 120, 257, 256]));
    assert_eq!(tokenizer.encode("<s>é", false), Ok(vec![258, 0xc3, 0xa9]));
    assert_eq!(tokenizer.decode(&[258, 0xc3, 0xa9, 259, 300], true), "é");
    assert_eq!(tokenizer.decode(&[258, 0xc3, 0xa9], false), "<s>é");
    assert_eq!(tokenizer.token_id("<a>"), Some(256));
    assert_eq!(tokenizer.token_spelling(257).as_deref(), Some("<a><b>"));
    let typed = tokenizer.encode_typed("<a>x", None, None);
    assert_eq!(typed, Ok(vec![(258, 0), (256, 0), (120, 0)]));
    assert!(tokenizer.encode_typed("x", Some("y"), None).is_err(), "there are no pairs");
}

/// Goal: a vocabulary that cannot be right is refused by name, and so is a prompt for which the
/// program's code fails.
#[test]
fn what_cannot_be_right_is_refused() {
    let refused = |own: Own| own.build().expect_err("it is refused").to_string();
    for (own, expected) in [
        (Own { tokens: 0, ..Own::new(&[]) }, "expected 1 to 4194304 tokens, got 0"),
        (Own { tokens: (1 << 22) + 1, ..Own::new(&[]) }, "tokens, got 4194305"),
        (Own { tokens: 13, ..Own::new(&[]) }, "no luck"),
        (Own::new(&[(260, "<a>")]), "expected special tokens below 260, got 260"),
        (Own { begin: Some(999), ..Own::new(&[]) }, "below 260, got 999"),
        (Own::new(&[(256, "")]), "a spelling of the special token 256"),
        (Own::new(&[(256, "<a>"), (257, "<a>")]), "one token with the spelling `<a>`"),
    ] {
        let error = refused(own);
        assert!(error.contains("the program's tokenizer: malformed: "), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let tokenizer = Own::new(&[]).build().expect("it is valid");
    for (text, expected) in [
        ("panic", "of the program"),
        ("error", "not in the vocabulary"),
        ("wrong", "expected ids below 260 of the program's tokenizer, got 260"),
    ] {
        let error = tokenizer.encode(text, false).expect_err("it fails").to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(tokenizer.encode("panics no more", false).map(|ids| ids.len()), Ok(14));
}
