//! The requests in the READMEs and the book work as they stand, against the server that they start.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::adapters::write_adapter;
use crate::support::Server;

/// The root of the checkout.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");

/// The READMEs with examples, and all pages of the book's guide, with their paths.
fn documents() -> Vec<(PathBuf, String)> {
    let root = Path::new(ROOT);
    let readmes = ["README.md", "crates/serve/cli/README.md", "crates/serve/http/README.md"];
    let mut paths: Vec<PathBuf> = readmes.map(|name| root.join(name)).into();
    for folder in ["docs/src", "docs/src/agents"] {
        let entries = std::fs::read_dir(root.join(folder)).expect("the book");
        let files = entries.map(|entry| entry.expect("a file").path());
        paths.extend(files.filter(|path| path.extension().is_some_and(|end| end == "md")));
    }
    paths.sort();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("a text");
        (path, text)
    };
    paths.into_iter().map(read).collect()
}

/// Goal: every request that a README or a page sends with curl is answered, and the model names of
/// the Python examples are served.
#[tokio::test]
async fn requests_of_the_documents_are_answered() {
    let dir = tempfile::tempdir().expect("a directory");
    write_adapter(dir.path(), 1);
    let adapter = format!("sql={}", dir.path().display());
    let server = Server::start("demo", &["--lora-modules", &adapter]);
    // The page about encoders sends its requests to two servers of its own.
    let model = |name: &str| stolon_fixtures::path("encoders").join(name).display().to_string();
    let encoders = ["bert", "bert_reranker"].map(|name| Server::start(&model(name), &[]));
    // And so does the page about several models.
    let named_model = |name: &str, folder: &str| format!("{name}={}", model(folder));
    let several = [named_model("embed", "bert"), named_model("rerank", "bert_reranker")];
    let several = Server::start("chat=demo", &["--model", &several[0], "--model", &several[1]]);
    let (mut sent, mut named) = (0, 0);
    for (page, text) in documents() {
        let is_of_several = page.ends_with("several-models.md");
        let is_of_encoders = page.ends_with("encoders.md");
        for example in text.split("curl ").skip(1) {
            let Some((_, rest)) = example.split_once("-d '") else { continue };
            let (body, _) = rest.split_once('\'').expect("the end of the body");
            let body: Value = serde_json::from_str(body).expect("JSON");
            if body["lora_path"].is_string() {
                continue; // It names a file of the reader.
            }
            let (_, path) = example.split_once(":8080").expect("the server's address");
            let path = path.split_whitespace().next().expect("a path");
            let server = match (is_of_encoders, path) {
                (false, _) if is_of_several => &several,
                (false, _) => &server,
                (true, "/v1/embeddings") => &encoders[0],
                (true, _) if body["labels"].is_array() => &server,
                (true, _) => &encoders[1],
            };
            server.ok(path, body).await;
            sent += 1;
        }
        for example in text.split("model=\"").skip(1) {
            let (name, _) = example.split_once('"').expect("the end of the name");
            let server = if is_of_several || is_of_encoders { &several } else { &server };
            assert_eq!(server.get(&format!("/v1/models/{name}")).await.0, 200, "{name}");
            named += 1;
        }
    }
    assert!(sent >= 7 && named >= 1, "the documents show requests");
}

/// Goal: every `stolon generate` of the READMEs and of the book succeeds as it stands, in the root
/// of the checkout.
#[test]
fn generate_works_as_in_the_documents() {
    let mut tried = 0;
    for (path, text) in documents() {
        for line in text.lines().filter(|line| line.starts_with("stolon generate ")) {
            let command = line.replacen("stolon", "\"$STOLON\"", 1);
            let output = Command::new("sh")
                .args(["-c", &command])
                .env("STOLON", env!("CARGO_BIN_EXE_stolon"))
                .current_dir(ROOT)
                .output()
                .expect("a shell");
            let errors = String::from_utf8_lossy(&output.stderr);
            let succeeds = output.status.success() && !output.stdout.is_empty();
            assert!(succeeds, "{}: {line}: {errors}", path.display());
            tried += 1;
        }
    }
    assert!(tried >= 4, "the documents show how to generate");
}

/// Goal: every metric that the operators' page names is in `/metrics`.
#[tokio::test]
async fn metrics_of_the_book_exist() {
    let dir = tempfile::tempdir().expect("a directory");
    let stored = dir.path().display().to_string();
    let server = Server::start("demo", &["--kv-cache-dir", &stored]);
    let reply = reqwest::get(server.url("/metrics")).await.expect("a reply");
    let metrics = reply.error_for_status().expect("success").text().await.expect("a text");
    let page = Path::new(ROOT).join("docs/src/operators.md");
    let page = std::fs::read_to_string(page).expect("a text");
    let mut found = 0;
    for rest in page.split("stolon:").skip(1) {
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let (name, _) = rest.split_at(rest.find(|c| !is_name(c)).unwrap_or(rest.len()));
        if !name.is_empty() {
            assert!(metrics.contains(&format!("stolon:{name}")), "{name}");
            found += 1;
        }
    }
    assert!(found >= 10, "the book names metrics");
}

/// Goal: every long flag of `stolon serve` that a page shows exists.
#[test]
fn flags_of_the_book_exist() {
    let stolon = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_stolon")).args(arguments).output();
        String::from_utf8(output.expect("a command").stdout).expect("a text")
    };
    let help = stolon(&["serve", "--help"]);
    let is_of_flag = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let known: HashSet<&str> = help.split(|c| !is_of_flag(c)).collect();
    let mut found = 0;
    for (path, text) in documents() {
        let commands = text.split("stolon serve").skip(1);
        for command in commands.filter_map(|rest| rest.split("\n").next()) {
            for flag in command.split_whitespace().filter(|word| word.starts_with("--")) {
                let flag = flag.trim_end_matches(|c: char| !c.is_ascii_lowercase());
                assert!(known.contains(flag), "{}: {flag}", path.display());
                found += 1;
            }
        }
    }
    assert!(found >= 10, "the documents show how to serve");
}
