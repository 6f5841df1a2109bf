//! Compares the tokenizers and chat templates of well-known models with transformers and llama.cpp.
//!
//! The files are too large for the repository. `fetch_vocabularies.py` downloads them and generates
//! the expected results:
//!
//! ```sh
//! python crates/models/checkpoint/tests/fetch_vocabularies.py target/vocabularies
//! STOLON_VOCABULARIES=$PWD/target/vocabularies \
//!     cargo test -p stolon-checkpoint --test real_vocabularies -- --ignored
//! ```

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use stolon_checkpoint::read_gguf_tokenizer;
use stolon_text::{
    ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError, Detokenizer, TextModel, TextSource,
    Tokenizer, TokenizerSource, ToolCallFormat,
};

fn directory() -> PathBuf {
    std::env::var_os("STOLON_VOCABULARIES").expect("STOLON_VOCABULARIES names the directory").into()
}

fn json(path: PathBuf) -> Value {
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).expect("JSON")
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("token ids")
}

/// The text of the tokens when they are streamed.
fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), false);
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text.push_str(&detokenizer.finish());
    text
}

fn text_model(name: &str) -> TextModel {
    let directory = directory().join("tokenizers").join(name);
    let config = json(directory.join("tokenizer_config.json"));
    let source = TextSource {
        named_templates: Vec::new(),
        tokenizer: TokenizerSource::Json {
            file: name.to_owned(),
            bytes: std::fs::read(directory.join("tokenizer.json"))
                .expect("run fetch_vocabularies.py first")
                .into(),
        },
        chat_template: config["chat_template"].as_str().map(str::to_owned),
        tokenizer_config: Some(config),
    };
    TextModel::new(&source, &[]).expect("a tokenizer")
}

/// Goal: every text is encoded as by transformers, and streaming the tokens leads to the same text
/// as decoding them at once.
#[test]
#[ignore = "needs the vocabularies that fetch_vocabularies.py fetches"]
fn tokenizers_agree_with_transformers() {
    let expected = json(directory().join("expected.json"));
    let texts: Vec<String> = serde_json::from_value(expected["texts"].clone()).expect("texts");
    for (name, entry) in expected["tokenizers"].as_object().expect("by name") {
        let model = text_model(name);
        let tokenizer = model.tokenizer();
        for (text, expected) in texts.iter().zip(entry["ids"].as_array().expect("a list")) {
            let got = tokenizer.encode(text, true).expect("it encodes");
            assert_eq!(got, ids(expected), "{name}: {text:?}");
            let (streamed, whole) = (streamed(tokenizer, &got), tokenizer.decode(&got, false));
            assert_eq!(streamed, whole, "{name}: {text:?}");
        }
    }
}

/// Goal: tokenizers from GGUF vocabularies return the ids that llama.cpp's own tests expect.
#[test]
#[ignore = "needs the vocabularies that fetch_vocabularies.py fetches"]
fn gguf_vocabularies_agree_with_llama_cpp() {
    let mut files = 0;
    for entry in
        std::fs::read_dir(directory().join("gguf")).expect("run fetch_vocabularies.py first")
    {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        files += 1;
        let metadata = read_gguf_tokenizer(&path).expect("a vocabulary");
        let tokenizer = Tokenizer::new(&TokenizerSource::Gguf(Box::new(metadata))).expect("known");
        let path_of = |end: &str| {
            let path = format!("{}.{end}", path.display());
            std::fs::read_to_string(path).expect("run fetch_vocabularies.py first")
        };
        let (inputs, outputs) = (path_of("inp"), path_of("out"));
        let inputs: Vec<&str> = inputs.split_terminator("\n__ggml_vocab_test__\n").collect();
        let outputs: Vec<&str> = outputs.lines().collect();
        assert_eq!(inputs.len(), outputs.len(), "{}", path.display());
        for (text, expected) in inputs.iter().zip(outputs) {
            let expected: Vec<u32> =
                expected.split_whitespace().map(|id| id.parse().expect("an id")).collect();
            let got = tokenizer.encode(text, false).expect("it encodes");
            assert_eq!(got, expected, "{}: {text:?}", path.display());
            let (streamed, whole) = (streamed(&tokenizer, &got), tokenizer.decode(&got, false));
            assert_eq!(streamed, whole, "{}: {text:?}", path.display());
        }
    }
    assert!(files > 0, "the directory has no vocabularies");
}

/// A template that joins text marked as safe with other text. Jinja2 escapes the other text for
/// HTML, including the quotes of a JSON object; minijinja does not.
const MARKED_SAFE: &str = "meetkai-functionary-medium-v3.1.jinja";

/// Compares the rendered conversations with those of transformers. If the template rejects one, or
/// does not show the arguments of a call, any result is accepted: the conversation gets another form
/// here, which is tested in the crate `stolon-text`.
fn check_chats(
    name: &str,
    now: SystemTime,
    conversations: &Value,
    expected: &Value,
    render: impl Fn(&[ChatMessage], &ChatOptions) -> Result<String, ChatTemplateError>,
) -> Vec<String> {
    let conversations = conversations.as_array().expect("a list");
    let expected = expected.as_array().expect("a list");
    let mut differences = Vec::new();
    for (index, (conversation, expected)) in conversations.iter().zip(expected).enumerate() {
        let messages: Vec<ChatMessage> =
            serde_json::from_value(conversation["messages"].clone()).expect("messages");
        let tools = conversation["tools"].as_array().cloned().unwrap_or_default();
        let has_tools = !tools.is_empty();
        // Otherwise tools are described in the messages if the format of calls is not known.
        let tool_calls = Some(ToolCallFormat::Hermes);
        let options = ChatOptions { tools, tool_calls, now: Some(now), ..ChatOptions::default() };
        match (render(&messages, &options), expected["text"].as_str()) {
            (Ok(got), Some(text)) if got == text => {}
            (_, None) => {}
            // The template ignores tools, so they are described in the messages.
            (Ok(_), Some(text)) if has_tools && !text.contains("a place") => {}
            (Ok(_), Some(text)) if calls(conversation) && text.matches("Bonn").count() < 2 => {}
            (got, _) => differences.push(format!("{name}, {index}: {got:?}\nfor {expected}")),
        }
    }
    differences
}

/// Whether a conversation has a call, whose argument is in the question, too.
fn calls(conversation: &Value) -> bool {
    let messages = conversation["messages"].as_array().expect("a list");
    messages.iter().any(|message| message["tool_calls"].is_array())
}

/// Goal: conversations are rendered byte for byte as by transformers, with the models' own
/// templates and with those of the collection.
#[test]
#[ignore = "needs the vocabularies that fetch_vocabularies.py fetches"]
fn chat_templates_agree_with_transformers() {
    let expected = json(directory().join("expected.json"));
    let conversations = &expected["conversations"];
    let now = UNIX_EPOCH + Duration::from_secs(expected["now"].as_u64().expect("a time"));
    let mut differences = Vec::new();
    for (name, entry) in expected["tokenizers"].as_object().expect("by name") {
        let Some(chats) = entry.get("chats") else { continue };
        let model = text_model(name);
        let render = |messages: &[_], options: &_| model.render_chat(messages, options);
        differences.extend(check_chats(name, now, conversations, chats, render));
    }
    let mut special_tokens = Map::new();
    special_tokens.insert("bos_token".to_owned(), "<s>".into());
    special_tokens.insert("eos_token".to_owned(), "</s>".into());
    let templates = expected["templates"].as_object().expect("by name");
    for (name, chats) in templates.iter().filter(|(name, _)| *name != MARKED_SAFE) {
        let source = std::fs::read_to_string(directory().join("templates").join(name));
        let source = source.expect("run fetch_vocabularies.py first");
        let template = ChatTemplate::new([("default", source)], special_tokens.clone());
        let render = |messages: &[_], options: &_| match &template {
            Ok(template) => template.render(messages, options),
            Err(error) => Err(error.clone()),
        };
        differences.extend(check_chats(name, now, conversations, chats, render));
    }
    let count = differences.len();
    assert!(differences.is_empty(), "{count} differ:\n{}", differences.join("\n"));
}
