//! The walls between the rooms, as far as the text of the sources shows them. In a checkout only:
//! a published crate does not have its neighbours beside it.

use std::path::{Path, PathBuf};

/// Files, and folders ending in `/`, that may use `unsafe`.
const UNSAFE: [&str; 7] = [
    "benches/rivals/src/bin/linear.rs",
    "kvcache/src/core.rs",
    "kvcache/src/node.rs",
    "kvcache/src/reclaim.rs",
    "kvcache/src/writer/arena.rs",
    "kernels/",
    "model/src/weights/mmap.rs",
];

/// Files that may know the actor library: the shells, and the handles through which they are told.
const ACTORS: [&str; 9] = [
    "actors/src/admission.rs",
    "actors/src/block_allocator.rs",
    "actors/src/executor.rs",
    "actors/src/executor/thread.rs",
    "actors/src/handle.rs",
    "actors/src/memory/actors.rs",
    "actors/src/prefix_tree.rs",
    "actors/src/stream.rs",
    "actors/src/supervisor.rs",
];

/// All sources of the workspace's rooms, with their text.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rooms = [
        "actors",
        "benches",
        "kernels",
        "kvcache",
        "loom_tests",
        "model",
        "server",
        "src",
        "tests",
    ];
    let mut folders: Vec<PathBuf> = rooms.iter().map(|room| root.join(room)).collect();
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries {
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

/// The files that match but are not allowed to, and the allowed ones that do not match.
fn check(allowed: &[&str], matches: impl Fn(&str) -> bool) {
    let sources = sources();
    if !sources.iter().any(|(name, _)| name.starts_with("kvcache/")) {
        return;
    }
    let is_allowed = |name: &str, entry: &&&str| {
        name == **entry || (entry.ends_with('/') && name.starts_with(**entry))
    };
    let mut unused: Vec<&&str> = allowed.iter().collect();
    for (name, text) in &sources {
        if !matches(text) || name == "tests/unsafe_files.rs" {
            continue;
        }
        let entry = allowed.iter().find(|entry| is_allowed(name, entry));
        let entry = entry.unwrap_or_else(|| panic!("{name} is not on the list"));
        unused.retain(|other| other != &entry);
    }
    assert!(unused.is_empty(), "on the list without need: {unused:?}");
}

/// Whether code, not a comment, has this word in it.
fn has_word(text: &str, word: &str) -> bool {
    text.lines().map(|line| line.split("//").next().unwrap_or("")).any(|line| {
        line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|found| found == word)
    })
}

/// Goal: `unsafe` stays where it is looked after.
#[test]
fn unsafe_stands_in_the_listed_files_only() {
    check(&UNSAFE, |text| has_word(text, "unsafe"));
}

/// Goal: decisions know no actor.
#[test]
fn the_actor_library_appears_in_the_shells_only() {
    check(&ACTORS, |text| has_word(text, "ractor"));
}

/// Goal: the tree can be used without the engine.
#[test]
fn the_tree_depends_on_nothing_of_the_engine() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("kvcache/Cargo.toml");
    let Ok(manifest) = std::fs::read_to_string(manifest) else { return };
    for name in ["tokio", "ractor", "candle", "stolon-model", "stolon-actors"] {
        let dependencies = manifest.split("[dev-dependencies]").next().unwrap_or("");
        assert!(!dependencies.contains(name), "kvcache depends on {name}");
    }
}
