//! LoRA adapters: the flags that load and choose them.

use serde_json::json;

use crate::adapters::write_adapter;
use crate::support::{fail, json_lines, succeed};

/// Goal: `stolon generate` answers with an adapter, and a wrong flag is an error that says what is
/// expected.
#[test]
fn generate_answers_with_an_adapter() {
    let dir = tempfile::tempdir().expect("a directory");
    write_adapter(dir.path(), 1);
    let path = dir.path().to_str().expect("UTF-8");
    let module = json!({"name": "x", "path": path, "base_model_name": "demo"}).to_string();
    let args = ["generate", "--prompt", "The violet tent", "--json", "--max-tokens", "8"];
    let with = |more: &[&str]| {
        let output = succeed(&[&args[..], &["--lora-modules", &module], more].concat());
        json_lines(&output)[0]["text"].clone()
    };
    assert_ne!(with(&[]), with(&["--lora", "x"]));
    let error = fail(&[&args[..], &["--lora", "x"]].concat());
    assert!(error.contains("no adapter `x` is loaded"), "{error}");
    let error = fail(&[&args[..], &["--lora-modules", "x"]].concat());
    assert!(error.contains("expected NAME=PATH"), "{error}");
    let error = fail(&[&args[..], &["--lora-modules", "x=/nowhere"]].concat());
    assert!(error.contains("adapter_config.json"), "{error}");
}
