//! Tests `TextModel`, created from the data that a loader reads.

use serde_json::{Value, json};
use stolon_text::{
    ChatError, ChatMessage, ChatOptions, ChatTemplateError, GgufTokenizer, TextModel, TextSource,
    TokenizerSource,
};

use crate::vocabularies::{byte_level, byte_level_tokens};

fn source(config: Option<Value>, chat_template: Option<&str>) -> TextSource {
    TextSource {
        tokenizer: TokenizerSource::Json {
            file: "tokenizer.json".to_owned(),
            bytes: byte_level().to_string().into_bytes().into(),
        },
        tokenizer_config: config,
        chat_template: chat_template.map(str::to_owned),
    }
}

fn model(source: &TextSource) -> TextModel {
    TextModel::new(source, &[]).expect("a valid source")
}

/// Goal: an encoded conversation contains the special tokens of the template and no further ones.
#[test]
fn conversations_are_encoded_with_the_templates_special_tokens() {
    let config = json!({"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"});
    let template = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}";
    let model = model(&source(Some(config), Some(template)));
    let messages = [ChatMessage::user("the"), ChatMessage::assistant("er")];
    let tokens = model.encode_chat(&messages, &ChatOptions::default()).expect("encodes");
    let id = |spelling: &str| model.tokenizer().token_id(spelling).expect("known");
    let end = id("<|end|>");
    assert_eq!(tokens, [id("<|begin|>"), id("the"), end, id("er"), end]);
    assert_eq!(model.eos_token_ids(), [end]);
}

/// Goal: the named templates of `tokenizer_config.json` can be used, but the loader's choice
/// remains the default.
#[test]
fn named_templates_come_from_the_tokenizer_configuration() {
    let config = json!({"chat_template": [
        {"name": "default", "template": "from the list"},
        {"name": "tool_use", "template": "with tools"},
    ]});
    let model = model(&source(Some(config), Some("from the file")));
    let names: Vec<_> = model.chat_template().expect("the model has templates").names().collect();
    assert_eq!(names, ["default", "tool_use"]);
    let render = |options| model.render_chat(&[ChatMessage::user("x")], &options);
    assert_eq!(render(ChatOptions::default()).as_deref(), Ok("from the file"));
    let tools = ChatOptions { tools: vec![json!({})], ..ChatOptions::default() };
    assert_eq!(render(tools).as_deref(), Ok("with tools"));
}

/// Goal: a model with a missing or malformed template loads, and rendering returns the error.
#[test]
fn missing_and_malformed_templates_are_reported_on_use() {
    let chat = |template| {
        model(&source(None, template))
            .encode_chat(&[ChatMessage::user("x")], &ChatOptions::default())
    };
    let missing = chat(None).expect_err("no template");
    assert!(matches!(missing, ChatError::Template(ChatTemplateError::Missing)));
    let broken = chat(Some("{% for %}")).expect_err("not valid Jinja");
    assert!(matches!(broken, ChatError::Template(ChatTemplateError::Malformed { .. })));
}

/// Goal: the model's own list of end-of-sequence tokens takes precedence; for a GGUF file, the
/// tokens that end a turn are added to its single end-of-sequence token.
#[test]
fn end_of_sequence_tokens_come_from_the_model_or_the_tokenizer() {
    let config = json!({"eos_token": "<|end|>"});
    let model = TextModel::new(&source(Some(config), None), &[3, 7]).expect("a valid source");
    assert_eq!(model.eos_token_ids(), [3, 7]);

    let (mut tokens, merges) = byte_level_tokens();
    let count = tokens.len() as u32;
    let mut token_types = vec![1; tokens.len()];
    tokens.extend(["</s>", "<|im_end|>"].map(str::to_owned));
    token_types.extend([3, 3]);
    let metadata = GgufTokenizer {
        model: "gpt2".to_owned(),
        pre: Some("qwen2".to_owned()),
        tokens,
        token_types: Some(token_types),
        merges: Some(merges.iter().map(|[left, right]| format!("{left} {right}")).collect()),
        eos_token_id: Some(count),
        ..GgufTokenizer::default()
    };
    let gguf = TextSource {
        tokenizer: TokenizerSource::Gguf(Box::new(metadata)),
        tokenizer_config: None,
        chat_template: Some("{{ messages[0].content }}{{ eos_token }}".to_owned()),
    };
    let model = self::model(&gguf);
    assert_eq!(model.eos_token_ids(), [count, count + 1]);
    let text = model.render_chat(&[ChatMessage::user("x")], &ChatOptions::default());
    assert_eq!(text.as_deref(), Ok("x</s>"));
}
