//! `stolon model inspect`.

use std::path::Path;

use serde_json::{Value, json};

use crate::gguf_writer::{GgufWriter, Meta};
use crate::support::{EMBEDDING, fail, run, succeed};

/// The directory of the built-in model.
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo_model/text");

/// Runs the command on a model that would be refused. Returns its standard output.
fn refused(args: &[&str]) -> String {
    let output = run(&[&["model", "inspect"], args].concat(), "");
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// A GGUF file of an architecture that the engine does not support.
fn unknown_architecture(dir: &Path) -> String {
    let mut file = GgufWriter::default();
    file.set("general.architecture", Meta::Text("mamba\x1b[2J".into()));
    file.set("tokenizer.chat_template", Meta::Text("first\nsecond \x1b[2J".into()));
    file.tensors.push(("token_embd.weight".into(), vec![5, 64], 8, vec![0; 340]));
    file.tensors.push(("x\x1b[2J".into(), vec![64], 0, vec![0; 256]));
    file.tensors.push(("unknown".into(), vec![64], 99, vec![]));
    let path = dir.join("m.gguf");
    std::fs::write(&path, file.bytes()).expect("a file");
    path.to_str().expect("UTF-8").to_owned()
}

/// Goal: the sizes, types, memory, tokenizer and template of a model are printed, as text and as
/// JSON with the same values.
#[test]
fn a_model_is_described() {
    let text = succeed(&["model", "inspect", DEMO, "--tensors", "--template"]);
    let json = succeed(&["model", "inspect", DEMO, "--tensors", "--template", "--json"]);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).expect(name);
    for (name, value) in [
        ("architecture", &json["outline"]["architecture"]),
        ("parameters", &json["parameters"]),
        ("context", &json["outline"]["context_length"]),
        ("vocabulary", &json["outline"]["vocab_size"]),
        ("layers", &json["outline"]["layers"]),
        ("heads", &json["outline"]["heads"]),
        ("KV heads", &json["outline"]["kv_heads"]),
        ("KV layers", &json["outline"]["kv_layers"]),
        ("head size", &json["outline"]["head_dim"]),
        ("tokenizer", &json["tokenizer"]),
    ] {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        assert!(line(name).contains(&value) && value != "null", "{name}: {value}");
    }
    assert_eq!(json["refusals"], Value::Array(vec![]));
    assert_eq!(json["has_chat_template"], true);
    let template = json["chat_template"].as_str().expect("a template");
    assert!(text.contains(template.lines().next().expect("a line")), "{text}");
    let tensors = json["tensors"].as_array().expect("a list");
    assert!(tensors.iter().all(|tensor| text.contains(tensor["name"].as_str().expect("a name"))));
    let sum = |key: &str, list: &Value| -> u64 {
        list.as_array().expect("a list").iter().map(|entry| entry[key].as_u64().expect(key)).sum()
    };
    assert_eq!(sum("bytes", &json["types"]), sum("bytes", &json["tensors"]));
    assert_eq!(sum("tensors", &json["types"]), tensors.len() as u64);
    assert!(text.contains("KV cache per token") && text.contains("The model can be loaded."));
    let plain = succeed(&["model", "inspect", DEMO, "--json"]);
    let plain: Value = serde_json::from_str(&plain).expect("JSON");
    assert!(plain["tensors"].is_null() && plain["chat_template"].is_null());
    assert_eq!(plain["memory"], json["memory"]);
}

/// Goal: the settings that change the memory needed are taken into account.
#[test]
fn memory_depends_on_the_settings() {
    let memory = |args: &[&str]| {
        let output = succeed(&[&["model", "inspect", DEMO, "--json"], args].concat());
        let json: Value = serde_json::from_str(&output).expect("JSON");
        ["weights", "kv_per_token"].map(|key| json["memory"][key].as_u64().expect(key))
    };
    let [weights, kv] = memory(&["--kv-dtype", "f32"]);
    assert_eq!(memory(&["--kv-dtype", "bf16"]), [weights, kv / 2]);
    assert!(memory(&["--weights", "q8_0"])[0] < weights);
    let fixture = stolon_fixtures::path("gpt_oss");
    let fixture = fixture.to_str().expect("UTF-8");
    let windows = |place: &str| {
        let output = succeed(&["model", "inspect", fixture, "--json", "--window-kv", place]);
        let json: Value = serde_json::from_str(&output).expect("JSON");
        ["kv_per_token", "windows"].map(|key| json["memory"][key].as_u64().expect(key))
    };
    // Half of the layers have windows of 13 positions: 34 blocks of 16 with those of a step.
    let [per_token, none] = windows("blocks");
    assert_eq!((windows("states"), none), ([per_token / 2, per_token / 2 * 34 * 16], 0));
    let text = succeed(&["model", "inspect", fixture, "--window-kv", "states"]);
    assert!(text.contains("windows of a request"), "{text}");
}

/// Goal: a model that would be refused is described as far as possible, with the reasons and its
/// own exit status, and without control characters from the file.
#[test]
fn refused_models_are_described_with_the_reasons() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = unknown_architecture(dir.path());
    let text = refused(&[&path, "--tensors", "--template"]);
    for part in ["unknown architecture", "type unknown type 99", "Q8_0", "[5, 64]", "second"] {
        assert!(text.contains(part), "expected `{part}` in {text}");
    }
    assert!(!text.contains('\x1b'), "{text}");
    let json: Value = serde_json::from_str(&refused(&[&path, "--json"])).expect("JSON");
    assert_eq!(json["refusals"].as_array().map(Vec::len), Some(2), "{json}");
    assert!(json["memory"].is_null());
    assert_eq!(json["parameters"], 5 * 64 + 64 + 64);

    std::fs::write(&path, b"GGUF").expect("a file");
    assert!(refused(&[&path]).contains("truncated"));
    let json: Value = serde_json::from_str(&refused(&[&path, "--json"])).expect("JSON");
    assert_eq!(json["refusals"].as_array().map(Vec::len), Some(1), "{json}");
}

/// Goal: a model that is not there is an ordinary error.
#[test]
fn missing_models_are_errors() {
    for (model, word) in
        [("/nowhere/m.gguf", "/nowhere/m.gguf"), ("random:tiny", "files"), ("a/b/c", "a/b/c")]
    {
        let message = fail(&["model", "inspect", model]);
        assert!(message.contains(word), "{message}");
    }
}

/// Goal: `model inspect` says that a model is for embeddings, and what it cannot do.
#[test]
fn inspect_shows_how_embeddings_are_made() {
    let text = succeed(&["model", "inspect", EMBEDDING]);
    assert!(text.contains("last pooling, normalized"), "{text}");
    let json: Value =
        serde_json::from_str(&succeed(&["model", "inspect", EMBEDDING, "--json"])).expect("JSON");
    assert_eq!(json["embedding"]["pooling"], "last");
    assert_eq!(json["refusals"], json!([]));
    for (name, tasks) in [
        ("jina_v3", "retrieval.query, retrieval.passage, text-matching"),
        ("jina_v5_nano", "retrieval, text-matching, clustering"),
        ("jina_v5_small", "retrieval, text-matching, clustering"),
    ] {
        let model = stolon_fixtures::path("encoders").join(name);
        let text = succeed(&["model", "inspect", model.to_str().expect("UTF-8")]);
        assert!(text.contains(tasks), "{name}: {text}");
    }
}
