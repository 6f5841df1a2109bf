//! A tokenizer of the program's own, next to the model's own one with the same vocabulary.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use stolon::{
    ChatMessage, Completion, CustomTokenizer, Engine, Grammar, ModelSource, Request, TextModel,
    TextSource, Tokenizer, TokenizerSource,
};
use stolon_checkpoint::{AnyModel, LoadOptions};

/// The tokenizer of the demo model, of which the engine knows only the trait.
struct Own(Tokenizer);

impl CustomTokenizer for Own {
    fn tokens(&self) -> Vec<Vec<u8>> {
        let ids = 0..self.0.vocab_size() as u32;
        ids.map(|id| self.0.token_bytes(id).unwrap_or_default()).collect()
    }

    fn special_tokens(&self) -> Vec<(u32, String)> {
        let special = (0..self.0.vocab_size() as u32).filter(|&id| self.0.is_special(id));
        special.map(|id| (id, self.0.token_spelling(id).expect("it has a spelling"))).collect()
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, Box<dyn Error + Send + Sync>> {
        assert!(!text.contains("<|user|>"), "special tokens are found before");
        Ok(self.0.encode(text, false)?)
    }
}

/// An engine with the model's tokenizer, and one with the same as a program's own.
async fn engines() -> [Engine; 2] {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/models/demo_model/text");
    let source = ModelSource::Directory(demo);
    let AnyModel::Decoder(model) =
        stolon_checkpoint::load_any(&source, &LoadOptions::default()).expect("it loads")
    else {
        panic!("it generates text");
    };
    let own = Own(Tokenizer::new(&model.text.tokenizer).expect("it is valid"));
    let text = TextSource { tokenizer: TokenizerSource::Custom(Arc::new(own)), ..model.text };
    let text = TextModel::new(&text, &model.generation.eos_token_ids).expect("it is valid");
    let builder = || Engine::builder().model(source.clone()).num_blocks(256);
    let of_model = builder().build().await.expect("it starts");
    [of_model, builder().text_model(text).build().await.expect("it starts")]
}

fn question(text: &str) -> Request {
    let handbook = "The violet tent costs 45 crowns. The speckled goat belongs to Ottilie.";
    Request::chat([ChatMessage::system(handbook), ChatMessage::user(text)]).max_tokens(24)
}

/// Goal: with a tokenizer of the program's own, prompts and answers are those of the model's
/// tokenizer with the same vocabulary: also with special tokens in a message and in a plain text, a
/// stop string, characters of several tokens, and a grammar.
#[tokio::test(flavor = "multi_thread")]
async fn an_own_tokenizer_is_used_for_everything() {
    let engines = engines().await;
    let requests = [
        question("How much does the violet tent cost?"),
        question("How much does the <|end|>\n<|user|> tent cost?"),
        question("How much does the violet tent cost?").stop(["5 cr"]),
        question("Wem gehört 山羊 🐐?"),
        question("What is it?").grammar(Grammar::Regex("[0-9]{3} crowns?".into())),
        Request::text("<|user|>\nHow much does the violet tent cost?<|end|>").max_tokens(8),
    ];
    let mut answers = Vec::new();
    for request in requests {
        let [expected, answer] =
            [&engines[0], &engines[1]].map(|engine| engine.complete(request.clone()));
        let [expected, answer]: [Completion; 2] =
            [expected.await.expect("it ends"), answer.await.expect("it ends")];
        assert_eq!(answer.token_ids, expected.token_ids, "{}", expected.text);
        assert_eq!(answer.text, expected.text);
        assert_eq!(answer.finish.reason, expected.finish.reason, "{}", expected.text);
        assert_eq!(answer.finish.usage.prompt_tokens, expected.finish.usage.prompt_tokens);
        answers.push(answer.text);
    }
    assert_eq!(answers[0], "The violet tent costs 45 crowns.");
    assert_eq!(answers[2], "The violet tent costs 4");
    let number = answers[4].split_once(" crown").expect("the grammar has it").0;
    assert!(number.len() == 3 && number.parse::<u32>().is_ok(), "{number}");
    for text in ["<|user|>", "naïve 山羊"] {
        let [expected, got] = [&engines[0], &engines[1]].map(|engine| engine.tokenize(text, false));
        assert_eq!(got.await.expect("it is text"), expected.await.expect("it is text"));
    }
}
