//! Crafted GGUF files.

use std::path::PathBuf;

use tempfile::TempDir;

use crate::gguf_model::gguf_of;
use crate::gguf_writer::{GgufWriter, Meta};
use crate::model_dir::{config_json, model};
use crate::{refused, run_within};

use stolon_checkpoint::TensorType;

fn write(bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn check(what: &str, bytes: &[u8], expected: &str) {
    let (_dir, path) = write(bytes);
    refused(&path, what, expected);
}

/// A small valid file, with a vocabulary.
pub(crate) fn small() -> GgufWriter {
    let (config, weights) = model(&config_json("llama"), 21);
    let mut file = gguf_of(&config, &weights, TensorType::Q8_0);
    file.set("tokenizer.ggml.model", Meta::Text("llama".into()));
    let tokens: Vec<_> = (0..config.vocab_size).map(|id| format!("t{id}")).collect();
    file.set("tokenizer.ggml.scores", Meta::Floats(vec![0.0; tokens.len()]));
    file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
    file
}

/// The start of a header with these counts.
fn head(tensors: u64, entries: u64) -> Vec<u8> {
    let counts = [tensors, entries].map(u64::to_le_bytes).concat();
    [b"GGUF".as_slice(), &3_u32.to_le_bytes(), &counts].concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A metadata entry of the type `type_id` with the value `value`.
fn entry(key: &str, type_id: u32, value: &[u8]) -> Vec<u8> {
    [&text(key), type_id.to_le_bytes().as_slice(), value].concat()
}

fn array(type_id: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [type_id.to_le_bytes().as_slice(), &count.to_le_bytes(), elements].concat()
}

/// A tensor's entry, with its sizes as in the file: innermost first.
fn info(name: &str, sizes: &[u64], type_id: u32, offset: u64) -> Vec<u8> {
    let sizes = sizes.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    let count = (sizes.len() as u32 / 8).to_le_bytes();
    [&text(name), count.as_slice(), &sizes, &type_id.to_le_bytes(), &offset.to_le_bytes()].concat()
}

/// Goal: the valid file that others are made from is accepted.
#[test]
fn the_unchanged_file_is_accepted() {
    let (_dir, path) = write(&small().bytes());
    run_within(&path, crate::MEMORY_MAX).unwrap();
}

/// Goal: counts and lengths are compared with the file and with maxima before they are used.
#[test]
fn counts_beyond_the_file_are_refused() {
    for huge in [1 << 31, 1 << 40, 1 << 63, u64::MAX] {
        check("tensors", &head(huge, 0), "truncated");
        check("entries", &head(0, huge), "truncated");
        for type_id in 0..13 {
            let values = array(type_id, huge, &[0; 100]);
            let expected = if type_id == 9 { "unknown type" } else { "truncated" };
            check("array", &[head(0, 1), entry("a", 9, &values)].concat(), expected);
        }
        let string = huge.to_le_bytes();
        check("string", &[head(0, 1), entry("a", 8, &string)].concat(), "truncated");
        check("key", &[head(0, 1), huge.to_le_bytes().to_vec()].concat(), "truncated");
        check("name", &[head(1, 0), huge.to_le_bytes().to_vec()].concat(), "truncated");
    }
    let many = [head(0, 70_000), entry("", 0, &[0]).repeat(70_000)].concat();
    check("many entries", &many, "expected at most 65536 metadata entries, got 70000");
    let many = [head(140_000, 0), info("", &[], 0, 0).repeat(140_000)].concat();
    check("many tensors", &many, "expected at most 131072 tensors, got 140000");
    let bytes = array(0, 9 << 20, &vec![0; 9 << 20]);
    let expected = "expected at most 8388608 elements";
    check("many elements", &[head(0, 1), entry("a", 9, &bytes)].concat(), expected);
    let name = "x".repeat(2000);
    check("long key", &[head(0, 1), entry(&name, 0, &[0])].concat(), "expected at most 1024 bytes");
    check("long name", &[head(1, 0), info(&name, &[], 0, 0)].concat(), "at most 1024 bytes");
}

/// Goal: arrays in arrays are refused, however deep.
#[test]
fn nested_arrays_are_refused() {
    let mut nested = array(0, 1, &[0]);
    for _ in 0..100_000 {
        nested.splice(..0, array(9, 1, &[]));
    }
    check("nested", &[head(0, 1), entry("a", 9, &nested)].concat(), "unknown type 9");
}

/// Goal: shapes and offsets that overflow, or lead out of the file, are refused.
#[test]
fn ranges_outside_of_the_file_are_refused() {
    let one = |sizes: &[u64], type_id, offset| {
        [head(1, 0), info("t", sizes, type_id, offset), vec![0; 64]].concat()
    };
    check("product", &one(&[1 << 32, 1 << 32], 0, 0), "overflows");
    check("product", &one(&[u64::MAX, u64::MAX, 2], 0, 0), "overflows");
    check("bytes", &one(&[1 << 62], 0, 0), "overflows");
    check("bytes", &one(&[1 << 60], 0, 0), "truncated");
    check("offset", &one(&[1], 0, u64::MAX - 31), "overflows");
    check("offset", &one(&[1], 0, 1 << 62), "truncated");
    check("unaligned", &one(&[1], 0, 1), "not a multiple");
    check("unknown type", &one(&[1 << 62], 99, 1 << 62), "truncated");
    check("dimensions", &one(&[1; 5], 0, 0), "at most 4 dimensions");
    check("dimensions", &[head(1, 0), text("t"), vec![0xff; 40]].concat(), "at most 4 dimensions");
}

/// Goal: sizes of 0 in shapes and in the configuration are refused.
#[test]
fn sizes_of_zero_are_refused() {
    let mut file = small();
    for (_, shape, _, bytes) in &mut file.tensors {
        shape.fill(0);
        bytes.clear();
    }
    check("all shapes", &file.bytes(), "expected");
    for key in [
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "context_length",
    ] {
        for value in [0, u32::MAX] {
            let mut file = small();
            file.set(&format!("llama.{key}"), Meta::U32(value));
            check(key, &file.bytes(), &format!("key `llama.{key}`"));
        }
    }
    for (key, values) in [
        ("llama.rope.freq_base", [f32::NAN, 0.0, -1.0, f32::INFINITY, 1e-44]),
        ("llama.attention.layer_norm_rms_epsilon", [f32::NAN, 0.0, -1.0, f32::INFINITY, -0.0]),
    ] {
        for value in values {
            let mut file = small();
            file.set(key, Meta::F32(value));
            check(key, &file.bytes(), "expected");
        }
    }
}

/// Goal: tensors that share bytes are refused. Each would be packed separately, so that a small
/// file would need much memory.
#[test]
fn overlapping_tensors_are_refused() {
    let (config, weights) = model(&config_json("llama"), 22);
    let file = gguf_of(&config, &weights, TensorType::F32);
    let mut out = head(file.tensors.len() as u64, file.metadata.len() as u64);
    let metadata = GgufWriter { metadata: file.metadata.clone(), tensors: Vec::new() }.bytes();
    out.extend(&metadata[out.len()..]);
    for (name, shape, type_id, _) in &file.tensors {
        let sizes: Vec<_> = shape.iter().rev().map(|n| *n as u64).collect();
        out.extend(info(name, &sizes, *type_id, 0));
    }
    out.resize(out.len().next_multiple_of(32) + (1 << 20), 0);
    check("all at 0", &out, "overlap");
}

/// Goal: the same name twice, or the same key twice, is refused.
#[test]
fn duplicates_are_refused() {
    let mut file = small();
    let first = file.tensors[0].clone();
    file.tensors.push(first);
    check("tensor", &file.bytes(), "duplicate tensor");
    let mut file = small();
    let first = file.metadata[0].clone();
    file.metadata.push(first);
    check("key", &file.bytes(), "duplicate metadata key");
}

/// Goal: vocabularies that would take quadratic time or much memory are refused.
#[test]
fn hostile_vocabularies_are_refused() {
    let vocabulary = |tokens: Vec<String>, merges: Option<Vec<String>>| {
        let mut file = small();
        let model = if merges.is_some() { "gpt2" } else { "llama" };
        file.set("tokenizer.ggml.model", Meta::Text(model.into()));
        file.set("tokenizer.ggml.scores", Meta::Floats(vec![0.0; tokens.len()]));
        file.set("tokenizer.ggml.tokens", Meta::Texts(tokens));
        if let Some(merges) = merges {
            file.set("tokenizer.ggml.merges", Meta::Texts(merges));
        }
        file.bytes()
    };
    let check = |what: &str, bytes: &[u8], expected: &str| {
        let (_dir, path) = write(bytes);
        let error = run_within(&path, 1 << 30).expect_err(what);
        assert!(error.contains(expected), "{what}: {error}");
    };
    let long = "a".repeat(1 << 20);
    check("long token", &vocabulary(vec![long.clone()], None), "at most 1024 bytes per token");
    let merges = Some(vec![format!("{long} {long}")]);
    check("long merge", &vocabulary(vec!["a".into()], merges), "at most 1025 bytes per merge");
    let many = vec![String::new(); (1 << 20) + 1];
    check("many tokens", &vocabulary(many, None), "at most 1048576 tokens");
    let large = (0..40_000).map(|id| format!("{id:0500}")).collect();
    check("large vocabulary", &vocabulary(large, None), "bytes in all tokens");
    // All prefixes of 40 words: every split of each token is a merge.
    let words = ('a'..='z').chain('A'..='N');
    let chains = words.flat_map(|c| (1..=500).map(move |n| c.to_string().repeat(n))).collect();
    check("chains of tokens", &vocabulary(chains, None), "at most 2097152 merges");
}

/// Goal: text from a file is cut off in errors, and its control characters are escaped.
#[test]
fn errors_do_not_repeat_hostile_text() {
    let mut file = small();
    file.set("general.architecture", Meta::Text("\x1b[2J".repeat(1000)));
    let (_dir, path) = write(&file.bytes());
    let error = run_within(&path, crate::MEMORY_MAX).unwrap_err();
    assert!(!error.contains('\x1b') && error.contains("\\u{1b}[2J"), "{error}");
}
