//! Boundaries between the crates that Cargo and the compiler do not enforce. The tests read the
//! sources and manifests of a checkout; in a published crate, which has no neighbors, they pass
//! without checking anything.
//!
//! Most crates have `#![forbid(unsafe_code)]`, so the compiler keeps `unsafe` out of them. For the
//! other folders, the files that may use it are listed here.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Folders in which not every target forbids `unsafe`.
const FOLDERS_WITH_UNSAFE: [&str; 6] = [
    "benches",
    "crates/engine/kvcache",
    "crates/models/checkpoint",
    "crates/models/cuda",
    "crates/models/kernels",
    "loom_tests",
];

/// Files in these folders, and whole folders ending in `/`, that use `unsafe`.
const UNSAFE_FILES: &[&str] = &[
    "benches/rivals/src/bin/linear.rs",
    "crates/models/cuda/src/attention/split/cuda.rs",
    "crates/models/cuda/src/bits/cuda.rs",
    "crates/models/cuda/src/gate/cuda.rs",
    "crates/models/cuda/src/kv_write/cuda.rs",
    "crates/models/cuda/src/memory/pool.rs",
    "crates/models/cuda/src/draw/cuda.rs",
    "crates/models/cuda/src/recurrence/cuda.rs",
    "crates/models/kernels/",
    "crates/engine/kvcache/src/core.rs",
    "crates/engine/kvcache/src/node.rs",
    "crates/engine/kvcache/src/reclaim.rs",
    "crates/engine/kvcache/src/writer/arena.rs",
    "crates/engine/kvcache/src/writer/arena/read.rs",
    "crates/models/checkpoint/src/mmap.rs",
];

/// Crates of the engine that no crate about models needs.
const ENGINE: [&str; 4] = ["ractor", "tokio", "stolon-scheduler", "stolon-actors"];
/// Crates about models, which no crate of the engine needs.
const MODELS: [&str; 6] = [
    "stolon-checkpoint",
    "stolon-cpu",
    "stolon-cuda",
    "stolon-kernels",
    "stolon-text",
    "stolon-vision",
];

/// Crates with the prefixes of crate names that must not be among their direct dependencies.
const FORBIDDEN_DEPENDENCIES: [(&str, &[&[&str]]); 18] = [
    ("crates/engine/kvcache", &[&["tokio", "ractor", "candle", "stolon-"]]),
    ("crates/engine/backend", &[&ENGINE, &MODELS]),
    ("crates/engine/scheduler", &[&["tokio", "ractor", "stolon-actors"], &MODELS]),
    // With its feature `object-store` it needs tokio.
    (
        "crates/engine/tiers",
        &[&["tokio.workspace", "ractor", "stolon-backend", "stolon-actors"], &MODELS],
    ),
    ("actors", &[&["stolon-tiers"], &MODELS]),
    ("crates/models/kernels", &[&ENGINE, &["stolon-backend"], &MODELS]),
    ("crates/models/text", &[&ENGINE, &["stolon-checkpoint", "stolon-cpu"]]),
    ("crates/models/vision", &[&ENGINE, &["stolon-kernels", "stolon-cpu"]]),
    // The description of a model does not depend on the code that runs it.
    ("crates/models/checkpoint", &[&ENGINE, &["stolon-cpu", "stolon-cuda", "stolon-kvcache"]]),
    ("crates/models/cpu", &[&ENGINE, &["stolon-cuda", "stolon-text"]]),
    ("crates/models/cuda", &[&ENGINE, &["stolon-cpu", "stolon-text"]]),
    ("crates/models/demo_model", &[&["stolon-", "serde"]]),
    (
        "crates/serve/http",
        &[&[
            "clap",
            "indicatif",
            "rustyline",
            "stolon-cli",
            "stolon-loadgen",
            "stolon-gpu",
            "reqwest",
        ]],
    ),
    ("crates/serve/loadgen", &[&["axum", "indicatif", "stolon-cli", "stolon-http", "stolon-gpu"]]),
    (
        "crates/serve/fleet",
        &[&["axum", "ractor", "stolon-actors", "stolon-scheduler", "stolon-http"]],
    ),
    ("crates/serve/gpu_check", &[&["axum", "indicatif", "stolon-cli", "stolon-http"]]),
    // This crate is the first build in a checkout, so it has only what the demonstration needs.
    ("crates/serve/demo", &[&["clap", "hyper", "rustls", "tracing-subscriber", "stolon-", "ureq"]]),
    ("crates/serve/cli", &[&["axum", "stolon-scheduler"], &MODELS]),
];

/// Crates whose folders in `src` are layers, lowest first.
const LAYERS: [(&str, &[&str]); 1] =
    [("crates/serve/http", &["api", "wire", "guard", "handlers", "routes"])];

/// The root of the checkout, or `None` in a published crate.
fn checkout() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("crates/engine/kvcache/Cargo.toml").exists().then(|| root.to_owned())
}

/// The paths of all Rust files of the crate `name`, relative to `root`, with their text.
fn sources(root: &Path, name: &str) -> Vec<(String, String)> {
    let mut folders = vec![root.join(name)];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a readable folder") {
            let path = entry.expect("a readable folder").path();
            if path.is_dir() {
                if path.file_name().is_none_or(|name| name != "target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root).expect("below the root").display().to_string();
                let text = std::fs::read_to_string(&path).expect("a readable file");
                sources.push((name, text));
            }
        }
    }
    sources
}

/// Whether the code outside of comments contains the word.
fn has_word(text: &str, word: &str) -> bool {
    text.lines().map(|line| line.split("//").next().unwrap_or("")).any(|line| {
        // A word with a hyphen is part of a string.
        line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-')
            .any(|found| found == word)
    })
}

/// Goal: where the compiler permits `unsafe`, it is used in the listed files only, and every listed
/// file uses it.
#[test]
fn unsafe_is_used_in_the_listed_files_only() {
    let Some(root) = checkout() else { return };
    let mut unused = UNSAFE_FILES.to_vec();
    for name in FOLDERS_WITH_UNSAFE {
        for (file, text) in sources(&root, name) {
            if !has_word(&text, "unsafe") {
                continue;
            }
            let is_listed = |entry: &&&str| {
                file == **entry || entry.ends_with('/') && file.starts_with(**entry)
            };
            let entry = UNSAFE_FILES.iter().find(is_listed);
            let entry = entry.unwrap_or_else(|| panic!("{file} uses `unsafe` but is not listed"));
            unused.retain(|other| other != entry);
        }
    }
    assert!(unused.is_empty(), "listed, but without `unsafe`: {unused:?}");
}

/// Goal: the compiler keeps `unsafe` out of every other library, so the list above is complete.
#[test]
fn all_other_libraries_forbid_unsafe() {
    let Some(root) = checkout() else { return };
    for name in [
        "actors",
        "crates/engine/backend",
        "crates/engine/scheduler",
        "crates/engine/tiers",
        "crates/models/cpu",
        "crates/models/demo_model",
        "crates/models/text",
        "crates/models/vision",
        "crates/serve/cli",
        "crates/serve/demo",
        "crates/serve/gpu_check",
        "crates/serve/http",
        "crates/serve/loadgen",
        "crates/serve/python",
        ".",
    ] {
        let path = root.join(name).join("src/lib.rs");
        let text = std::fs::read_to_string(&path).expect("a readable file");
        assert!(text.contains("#![forbid(unsafe_code)]"), "{}", path.display());
    }
}

/// Goal: crates of the engine do not depend on crates about models, nor these on the engine, and
/// the crates that make decisions depend on neither the async runtime nor the actor library.
#[test]
fn no_crate_depends_on_a_layer_above_it() {
    let Some(root) = checkout() else { return };
    for (name, forbidden) in FORBIDDEN_DEPENDENCIES {
        let manifest = std::fs::read_to_string(root.join(name).join("Cargo.toml"))
            .expect("a readable manifest");
        let dependencies = manifest
            .split("\n[")
            .filter(|section| {
                let header = section.lines().next().unwrap_or("");
                header.ends_with("dependencies]") && !header.contains("dev-dependencies")
            })
            .flat_map(|section| section.lines().skip(1));
        for dependency in dependencies {
            for prefix in forbidden.iter().copied().flatten() {
                assert!(!dependency.starts_with(prefix), "{name} depends on {dependency}");
            }
        }
    }
}

/// Goal: a file of a layer names nothing of a higher one, nor of the crate's root, which is above
/// all. Unit tests may.
#[test]
fn no_folder_depends_on_a_layer_above_it() {
    let Some(root) = checkout() else { return };
    for (name, layers) in LAYERS {
        let mut seen = HashSet::new();
        for (file, text) in sources(&root, &format!("{name}/src")) {
            let path = file.strip_prefix(&format!("{name}/src/")).expect("a file of the crate");
            let layer = layers.iter().position(|layer| {
                path.strip_prefix(layer).is_some_and(|rest| rest.starts_with(['/', '.']))
            });
            let (Some(layer), false) = (layer, path.ends_with("tests.rs")) else { continue };
            seen.insert(layer);
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
            for line in lines {
                for imported in line.split("crate::").skip(1) {
                    let end = imported.find(|c: char| !c.is_alphanumeric() && c != '_');
                    let imported = &imported[..end.unwrap_or(imported.len())];
                    let below = layers[..=layer].contains(&imported);
                    assert!(below, "{file} is in layer {}: {line}", layers[layer]);
                }
            }
        }
        assert_eq!(seen.len(), layers.len(), "a layer has no file");
    }
}

/// Goal: the documentation of the facade lists every feature, and which ones are on by default.
#[test]
fn the_documentation_lists_all_features() {
    let (manifest, library) = (include_str!("../../Cargo.toml"), include_str!("../../src/lib.rs"));
    let (_, features) = manifest.split_once("\n[features]\n").expect("a list of features");
    let (features, _) = features.split_once("\n[").expect("another section");
    let features: Vec<(&str, &str)> =
        features.lines().filter_map(|line| line.split_once(" = ")).collect();
    let default = features.iter().find(|(name, _)| *name == "default").expect("defaults").1;
    let expected = features.iter().filter(|(name, _)| *name != "default").map(|(name, _)| {
        let on = if default.contains(&format!("\"{name}\"")) { "yes" } else { "no" };
        format!("//! | `{name}` | {on} |")
    });
    let (_, table) = library.split_once("//! # Features\n").expect("a table");
    let (table, _) = table.split_once("//! # ").expect("the next heading");
    for row in expected {
        assert!(table.contains(&row), "{row} is missing");
    }
    let rows = table.lines().filter(|line| line.starts_with("//! | `")).count();
    assert_eq!(rows, features.len() - 1, "the table has a feature that does not exist");
}
