//! Crafted safetensors files and indices.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::refused;
use crate::support::model_dir::{config_json, model, safetensors_of, write_json};

/// A directory with a valid `config.json`.
fn directory() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_json(dir.path(), "config.json", &config_json("llama"));
    dir
}

fn check(what: &str, bytes: &[u8], expected: &str) {
    let dir = directory();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    refused(dir.path(), what, expected);
}

/// A file with the header `header`, followed by `data_bytes` zeroes.
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length, header.as_bytes(), &vec![0; data_bytes]].concat()
}

fn tensor(shape: &str, start: u64, end: u64) -> String {
    format!(r#"{{"dtype": "F32", "shape": {shape}, "data_offsets": [{start}, {end}]}}"#)
}

/// Goal: lengths of headers are compared with the file and with the maximum.
#[test]
fn hostile_header_lengths_are_refused() {
    for length in [1 << 31, 1 << 63, u64::MAX, u64::MAX - 7, (32 << 20) + 1] {
        check("length", &length.to_le_bytes(), "expected a header of at most");
    }
    check("length", &1000_u64.to_le_bytes(), "truncated");
    check("empty", b"", "truncated");
}

/// Goal: headers that are not what they should be, or deeply nested, are refused.
#[test]
fn malformed_headers_are_refused() {
    let nested = "[".repeat(1 << 20);
    let objects = r#"{"a":"#.repeat(1 << 18);
    for header in [nested.as_str(), &objects, "", "null", "[]", "{\"a\": 1}", "\u{1}"] {
        check("header", &file(header, 0), "header");
    }
    let long = format!(r#"{{"a": {{"dtype": "{}"}}}}"#, "x".repeat(1 << 20));
    check("long type", &file(&long, 0), "header");
    let dimensions = vec!["1"; 100_000].join(",");
    let many = format!(r#"{{"a": {}}}"#, tensor(&format!("[{dimensions}]"), 0, 4));
    check("dimensions", &file(&many, 4), "at most 8 dimensions");
    let name = format!(r#"{{"{}": {}}}"#, "x".repeat(1 << 20), tensor("[1]", 0, 4));
    check("long name", &file(&name, 4), "a name of at most 1024 bytes");
}

/// Goal: offsets and shapes that overflow, overlap or lead out of the file are refused.
#[test]
fn hostile_ranges_are_refused() {
    let one =
        |shape: &str, start, end| file(&format!(r#"{{"a": {}}}"#, tensor(shape, start, end)), 8);
    let max = u64::MAX;
    check("overflow", &one("[4294967296, 4294967296]", 0, 8), "header");
    check("overflow", &one("[18446744073709551615, 2]", 0, 8), "header");
    check("end", &one("[1]", 0, max), "header");
    check("backwards", &one("[1]", 4, 0), "header");
    check("outside", &one("[4]", 0, 16), "truncated");
    check("large", &one("[1152921504606846976]", 0, 1 << 62), "header");
    check("negative", &one("[-1]", 0, 4), "header");
    check("fraction", &one("[1.5]", 0, 4), "header");
    check("zero", &one("[0]", 0, 0), "expected the tensors to end");
    let aliases = format!(r#"{{"a": {0}, "b": {0}}}"#, tensor("[2]", 0, 8));
    check("aliases", &file(&aliases, 8), "header");
    let overlap = format!(r#"{{"a": {}, "b": {}}}"#, tensor("[2]", 0, 8), tensor("[2]", 4, 12));
    check("overlap", &file(&overlap, 12), "header");
    let hole = format!(r#"{{"a": {}, "b": {}}}"#, tensor("[1]", 0, 4), tensor("[1]", 8, 12));
    check("hole", &file(&hole, 12), "header");
}

/// Goal: the same tensor twice is refused, in one file, in two, and under two names for the same.
#[test]
fn duplicate_tensors_are_refused() {
    let twice = format!(r#"{{"a": {}, "a": {}}}"#, tensor("[1]", 0, 4), tensor("[1]", 4, 8));
    check("twice", &file(&twice, 8), "header");
    let names = ["norm.weight", "model.norm.weight"];
    let aliases = format!(
        r#"{{"{}": {}, "{}": {}}}"#,
        names[0],
        tensor("[1]", 0, 4),
        names[1],
        tensor("[1]", 4, 8)
    );
    check("names", &file(&aliases, 8), "duplicate tensor `model.norm.weight`");

    let dir = directory();
    let (_, weights) = model(&config_json("llama"), 1);
    let bytes = safetensors_of(&weights, |name| Some(name.to_owned()));
    std::fs::write(dir.path().join("1.safetensors"), bytes).unwrap();
    std::fs::hard_link(dir.path().join("1.safetensors"), dir.path().join("2.safetensors")).unwrap();
    let map = json!({ "model.norm.weight": "1.safetensors", "lm_head.weight": "2.safetensors" });
    write_index(dir.path(), &map);
    refused(dir.path(), "the same shard twice", "duplicate tensor");
}

fn write_index(dir: &Path, map: &Value) {
    write_json(dir, "model.safetensors.index.json", &json!({ "weight_map": map }));
}

/// Goal: an index names files in its own directory, and nothing else is opened.
#[test]
fn indices_do_not_lead_out_of_the_directory() {
    for name in [
        json!("../../etc/passwd"),
        json!("/etc/passwd"),
        json!("a/../../b"),
        json!("./b"),
        json!(".."),
        json!(""),
        json!("a\\b"),
        json!("C:\\x"),
        json!(5),
        json!(null),
        json!(["a"]),
    ] {
        let dir = directory();
        write_index(dir.path(), &json!({ "t": name }));
        refused(dir.path(), &name.to_string(), "expected a file name");
    }
    for index in [json!([]), json!({}), json!({ "weight_map": [] }), json!({ "weight_map": {} })] {
        let dir = directory();
        write_json(dir.path(), "model.safetensors.index.json", &index);
        refused(dir.path(), "index", "`weight_map`");
    }
}

/// Goal: a sparse file of a size that never fits in memory is refused with the needed and the free
/// memory, before anything is packed.
#[test]
fn weights_that_do_not_fit_in_memory_are_refused() {
    let mut config = config_json("llama");
    config["vocab_size"] = (1 << 22).into();
    config["hidden_size"] = (1 << 17).into();
    config["num_hidden_layers"] = 1.into();
    let specs =
        stolon_checkpoint::DecoderConfig::from_json("config.json", &config).unwrap().tensors();
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for spec in specs {
        let start = end;
        end += 4 * spec.shape.iter().product::<usize>() as u64;
        let entry = json!({ "dtype": "F32", "shape": spec.shape, "data_offsets": [start, end] });
        header.insert(spec.name, entry);
    }
    let dir = directory();
    write_json(dir.path(), "config.json", &config);
    let bytes = file(&Value::from(header).to_string(), 0);
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    // Not every file system has sparse files of 4 TiB.
    if File::options().write(true).open(&path).unwrap().set_len(bytes.len() as u64 + end).is_ok() {
        // The embedding could stay in the file, so half of them are needed.
        refused(dir.path(), "sparse", "the packed weights: 2");
        refused(dir.path(), "sparse", "bytes of memory are needed, and ");
    }
}
