use std::path::Path;

use serde_json::{Map, Value};

use super::*;

/// Goal: each variant finds its own row.
#[test]
fn rows_are_in_the_order_of_the_variants() {
    for (index, row) in TABLE.iter().enumerate() {
        assert_eq!(row.architecture as usize, index, "{:?}", row.architecture);
    }
}

/// Goal: the README names all architectures and no others, in this order.
#[test]
fn the_readme_names_all_architectures() {
    let readme = include_str!("../../../README.md");
    let (_, list) = readme.split_once("by their `model_type`:").expect("a list");
    let (list, _) = list.split_once('.').expect("the end of the list");
    let listed: Vec<&str> = list.split('`').skip(1).step_by(2).collect();
    assert_eq!(listed, Architecture::all().map(Architecture::name).collect::<Vec<_>>());
}

/// The comments of the variants, each joined to one line.
fn descriptions() -> Vec<String> {
    let (_, list) =
        include_str!("../architecture.rs").split_once("pub enum Architecture {").expect("the enum");
    let (list, _) = list.split_once("\n}").expect("the end of the enum");
    let mut texts = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    for line in list.lines().map(str::trim).filter(|line| !line.is_empty()) {
        match line.strip_prefix("/// ") {
            Some(text) => comment.push(text),
            None => texts.push(std::mem::take(&mut comment).join(" ")),
        }
    }
    texts
}

/// The names in code formatting, separated by commas.
fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// The table of the book's page about models. `on_gpus` has the architectures that the GPU backend
/// supports.
fn table_of_the_book(on_gpus: &Map<String, Value>) -> String {
    let descriptions = descriptions();
    assert_eq!(descriptions.len(), TABLE.len(), "each variant has a comment");
    let mut table = "| models | `model_type` | GGUF | GPU |\n|---|---|---|---|\n".to_owned();
    for (row, description) in TABLE.iter().zip(descriptions) {
        let gpu = if on_gpus.contains_key(row.model_types[0]) { "yes" } else { "" };
        let [types, gguf] = [row.model_types, row.gguf.names].map(quoted);
        table += &format!("| {description} | {types} | {gguf} | {gpu} |\n");
    }
    table
}

/// Goal: the book's page about models has the current table of architectures. With
/// `STOLON_WRITE_BOOK=1` the test writes it. A published crate has no book, so the test checks
/// nothing there.
#[test]
fn the_book_names_all_architectures() {
    const BEGIN: &str = "<!-- begin of the table -->\n";
    const END: &str = "<!-- end of the table -->\n";
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = crates.join("../docs/src/models.md");
    let Ok(page) = std::fs::read_to_string(&path) else { return };
    let gpu = crates.join("serve/gpu_check/src/architectures.json");
    let gpu = std::fs::read_to_string(gpu).expect("the list of the checks of GPUs");
    let gpu: Map<String, Value> = serde_json::from_str(&gpu).expect("an object");
    let names: Vec<&str> = Architecture::all().map(Architecture::name).collect();
    assert!(gpu.keys().all(|name| names.contains(&name.as_str())), "{:?}", gpu.keys());

    let (head, rest) = page.split_once(BEGIN).expect("the begin of the table");
    let (_, tail) = rest.split_once(END).expect("the end of the table");
    let count = match gpu.len() == names.len() {
        true => format!("all {} architectures on GPUs", names.len()),
        false => format!("{} of the {} architectures on GPUs", gpu.len(), names.len()),
    };
    assert!(head.contains(&count), "the text before the table has to say: {count}");
    let expected = format!("{head}{BEGIN}\n{}\n{END}{tail}", table_of_the_book(&gpu));
    if std::env::var_os("STOLON_WRITE_BOOK").is_some() {
        std::fs::write(&path, &expected).expect("a writable page");
    } else {
        let how = "STOLON_WRITE_BOOK=1 cargo test --workspace --lib the_book_names";
        assert!(page == expected, "docs/src/models.md is out of date; to write it: {how}");
    }
}
