//! A model with the tokens of StarCoder 2 for filling in the middle.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::SCRIPTED;

/// Tokens of the scripted model, and the spellings that they get. A gap is filled with
/// `Hello, wor`, which ends with `<fim_pad>`.
const SPELLINGS: [(&str, &str); 6] = [
    ("script:plain", "<fim_middle>"),
    ("ld.", "<fim_pad>"),
    ("script:kimi", "<fim_prefix>"),
    ("script:so", "<fim_suffix>"),
    ("script:json", "<file_sep>"),
    ("script:lost", "<repo_name>"),
];

/// Writes the model into a directory.
pub(crate) fn write_model(directory: &Path) {
    for name in ["config.json", "model.safetensors", "chat_template.jinja", "tokenizer.json"] {
        fs::copy(Path::new(SCRIPTED).join(name), directory.join(name)).expect("a copy");
    }
    let path = directory.join("tokenizer.json");
    let text = fs::read_to_string(&path).expect("a tokenizer");
    let mut document: Value = serde_json::from_str(&text).expect("JSON");
    for token in document["added_tokens"].as_array_mut().expect("tokens") {
        let spelling = SPELLINGS.iter().find(|(own, _)| token["content"] == *own);
        if let Some((_, spelling)) = spelling {
            token["content"] = (*spelling).into();
        }
    }
    fs::write(path, document.to_string()).expect("written");
}
