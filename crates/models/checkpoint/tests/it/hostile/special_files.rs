//! Files that are not regular, or too large.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::model_dir::{config_json, write_model};
use crate::{refused, run_within};

/// The files of a model directory that are read.
const NAMES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors",
];

/// Replaces each file of a model, in turn, by what `make` creates at its path. Each must be
/// refused.
fn each_file(make: impl Fn(&Path)) {
    for name in NAMES.into_iter().chain(["model.safetensors.index.json"]) {
        let dir = tempfile::tempdir().unwrap();
        write_model(dir.path(), &config_json("llama"), 1);
        if name == "model.safetensors.index.json" {
            std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
        }
        let path = dir.path().join(name);
        let _ = std::fs::remove_file(&path);
        make(&path);
        refused(dir.path(), name, "expected a regular file");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    make(&path);
    refused(&path, "m.gguf", "expected a regular file");
}

/// Goal: a pipe, which blocks its reader, is refused.
#[test]
fn pipes_are_refused() {
    each_file(|path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()));
}

/// Goal: a device without end is refused, also behind a symbolic link.
#[test]
fn devices_are_refused() {
    each_file(|path| symlink("/dev/zero", path).unwrap());
}

/// Goal: a directory is refused.
#[test]
fn directories_are_refused() {
    each_file(|path| std::fs::create_dir(path).unwrap());
}

/// Goal: a socket is refused.
#[test]
fn sockets_are_refused() {
    each_file(|path| drop(std::os::unix::net::UnixListener::bind(path).unwrap()));
}

/// Goal: a symbolic link to itself is an error.
#[test]
fn circular_links_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    symlink("config.json", dir.path().join("config.json")).unwrap();
    run_within(dir.path(), crate::MEMORY_MAX).unwrap_err();
}

/// Goal: a small file that is very large is refused before it is in memory.
#[test]
fn large_files_are_refused() {
    for name in NAMES.into_iter().filter(|name| *name != "model.safetensors") {
        let dir = tempfile::tempdir().unwrap();
        write_model(dir.path(), &config_json("llama"), 1);
        let file = File::options().create(true).append(true).open(dir.path().join(name)).unwrap();
        file.set_len(1 << 34).unwrap();
        let error = run_within(dir.path(), crate::MEMORY_MAX).expect_err(name);
        assert!(error.contains("bytes, got more"), "{name}: {error}");
    }
}
