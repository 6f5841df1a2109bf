//! Models that are split into several GGUF files: complete ones, and crafted ones.

use std::path::{Path, PathBuf};

use stolon_checkpoint::{LoadOptions, ModelSource, TensorType, load};
use tempfile::TempDir;

use crate::gguf::small;
use crate::gguf_model::gguf_of;
use crate::gguf_writer::{GgufWriter, Meta};
use crate::model_dir::{assert_same, config_json, model};
use crate::{refused, run_within};

fn name(number: usize, count: usize) -> String {
    format!("m-{number:05}-of-{count:05}.gguf")
}

/// Writes the parts and returns the path of the first one.
fn write(parts: &[GgufWriter]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for (index, part) in parts.iter().enumerate() {
        std::fs::write(dir.path().join(name(index + 1, parts.len())), part.bytes()).unwrap();
    }
    let first = dir.path().join(name(1, parts.len()));
    (dir, first)
}

/// Changes a model of three parts, and checks that it is refused.
fn check(what: &str, expected: &str, change: impl Fn(&mut Vec<GgufWriter>)) {
    let mut parts = small().split(3);
    change(&mut parts);
    let (_dir, first) = write(&parts);
    refused(&first, what, expected);
}

/// Goal: any part, or the directory, leads to all parts, and the model is the same as in one file.
/// A part may have no tensors.
#[test]
fn a_split_model_is_the_same_as_in_one_file() {
    let (config, weights) = model(&config_json("qwen3"), 3);
    let whole = gguf_of(&config, &weights, TensorType::F32);
    for count in [1, 2, 7, whole.tensors.len() + 3] {
        let (dir, _) = write(&whole.split(count));
        let mut sources: Vec<_> = (1..=count)
            .map(|number| ModelSource::Gguf(dir.path().join(name(number, count))))
            .collect();
        sources.push(ModelSource::Directory(dir.path().to_owned()));
        for source in sources {
            let loaded = load(&source, &LoadOptions::default()).unwrap();
            assert_same(&loaded.weights, &weights, &loaded.config);
        }
    }
    // A file may have the name of a part without being one.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(name(2, 3)), whole.bytes()).unwrap();
    load(&ModelSource::Gguf(dir.path().join(name(2, 3))), &LoadOptions::default()).unwrap();
}

/// Goal: a missing part is named, whichever part is given.
#[test]
fn missing_parts_are_named() {
    for missing in 1..=3 {
        let (dir, _) = write(&small().split(3));
        std::fs::remove_file(dir.path().join(name(missing, 3))).unwrap();
        let expected = format!("missing file: expected {} (a part", name(missing, 3));
        for given in (1..=3).filter(|given| *given != missing) {
            refused(&dir.path().join(name(given, 3)), "one part is missing", &expected);
        }
        refused(dir.path(), "one part is missing", &name(missing, 3));
    }
    let (dir, first) = write(&small().split(9));
    (2..10).for_each(|part| std::fs::remove_file(dir.path().join(name(part, 9))).unwrap());
    refused(
        &first,
        "all but one",
        "m-00002-of-00009.gguf (a part of the model), and 7 other parts",
    );
}

/// Goal: parts that contradict each other, or the names of their files, are refused.
#[test]
fn contradicting_parts_are_refused() {
    let set = |part: usize, key: &'static str, value: Meta| {
        move |parts: &mut Vec<GgufWriter>| parts[part].set(key, value.clone())
    };
    let count = "key `split.count`: expected";
    for value in [Meta::U16(2), Meta::U32(u32::MAX), Meta::I32(-3), Meta::Text("3".into())] {
        check("count", count, set(0, "split.count", value.clone()));
        check("count of another part", count, set(1, "split.count", value));
    }
    for value in [Meta::U16(2), Meta::I32(-1), Meta::Bool(true)] {
        check("number", "key `split.no`: expected 1", set(1, "split.no", value));
    }
    for value in [Meta::I32(5), Meta::I32(-1), Meta::F32(1.0)] {
        for part in 0..3 {
            let expected = "key `split.tensors.count`: expected";
            check("tensors", expected, set(part, "split.tensors.count", value.clone()));
        }
    }
    for key in ["split.no", "split.count", "split.tensors.count"] {
        check("no key", &format!("key `{key}`: expected"), |parts| {
            parts[2].metadata.retain(|(there, _)| there != key);
        });
    }
    check("swapped", "key `split.no`: expected 1, got 2", |parts| parts.swap(1, 2));
    check("twice", "key `split.no`: expected 2, got 1", |parts| parts[2] = parts[1].clone());
}

/// Goal: the same tensor in two parts, too few or too many tensors, and tensors outside of their
/// part are refused.
#[test]
fn tensors_of_other_parts_are_refused() {
    check("duplicate", "duplicate tensor", |parts| {
        let tensor = parts[0].tensors[0].clone();
        parts[2].tensors.push(tensor);
    });
    check("too few", "key `split.tensors.count`", |parts| drop(parts[2].tensors.pop()));
    check("too many", "key `split.tensors.count`", |parts| {
        parts[1].tensors.push(("x".into(), vec![1], 0, vec![0; 4]));
    });
    let (dir, first) = write(&small().split(3));
    let last = dir.path().join(name(3, 3));
    let bytes = std::fs::read(&last).unwrap();
    std::fs::write(&last, &bytes[..bytes.len() - 100]).unwrap();
    refused(&first, "truncated", "m-00003-of-00003.gguf: truncated");
    std::fs::write(&last, b"GGUF").unwrap();
    refused(&first, "no header", "m-00003-of-00003.gguf: truncated");
}

/// Goal: a part without its other parts' names, or with more parts than any model has, is refused
/// without looking for files.
#[test]
fn names_without_numbers_are_refused() {
    let parts = small().split(3);
    for name in ["m.gguf", "m-00001-of-00002.gguf", "m-00001-of-99999.gguf"] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(name), parts[0].bytes()).unwrap();
        refused(&dir.path().join(name), name, "the number of parts in the file's name");
    }
}

/// Goal: parts that are no regular files are refused, without waiting for one.
#[cfg(unix)]
#[test]
fn parts_are_regular_files() {
    let (dir, first) = write(&small().split(3));
    let second = dir.path().join(name(2, 3));
    std::fs::remove_file(&second).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &second).unwrap();
    refused(&first, "a device", "expected a regular file");
    std::fs::remove_file(&second).unwrap();
    std::fs::create_dir(&second).unwrap();
    refused(&first, "a directory", "expected a regular file");
}

/// Goal: a directory with several models is refused, and its models are listed.
#[test]
fn directories_with_several_models_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["b-Q8_0.gguf", "a-F16.gguf", "mmproj-a.gguf"] {
        std::fs::write(dir.path().join(name), small().bytes()).unwrap();
    }
    refused(dir.path(), "two", "several GGUF models, give one of them: a-F16.gguf, b-Q8_0.gguf");
    std::fs::remove_file(dir.path().join("a-F16.gguf")).unwrap();
    run_within(Path::new(dir.path()), crate::MEMORY_MAX).unwrap();
}
