//! The requests in the READMEs work as they stand, against the server that they start.

use std::process::Command;

use serde_json::Value;

use crate::adapters_api::write_adapter;
use crate::support::Server;

const READMES: [&str; 3] = [
    include_str!("../../../../../README.md"),
    include_str!("../../README.md"),
    include_str!("../../../http/README.md"),
];

/// Goal: every request that a README sends with curl is answered, and the model names of the Python
/// examples are served.
#[tokio::test]
async fn requests_of_the_readmes_are_answered() {
    let dir = tempfile::tempdir().expect("a directory");
    write_adapter(dir.path(), 1);
    let adapter = format!("sql={}", dir.path().display());
    let server = Server::start("demo", &["--lora-modules", &adapter]);
    let mut sent = 0;
    for readme in READMES {
        for example in readme.split("curl ").skip(1) {
            let Some((_, rest)) = example.split_once("-d '") else { continue };
            let (body, _) = rest.split_once('\'').expect("the end of the body");
            let body: Value = serde_json::from_str(body).expect("JSON");
            if body["lora_path"].is_string() {
                continue; // It names a file of the reader.
            }
            let (_, path) = example.split_once(":8080").expect("the server's address");
            let path = path.split_whitespace().next().expect("a path");
            server.ok(path, body).await;
            sent += 1;
        }
        for example in readme.split("model=\"").skip(1) {
            let (name, _) = example.split_once('"').expect("the end of the name");
            assert_eq!(server.get(&format!("/v1/models/{name}")).await.0, 200, "{name}");
        }
    }
    assert!(sent >= 2, "the READMEs show requests");
}

/// Goal: every `stolon generate` of the README succeeds as it stands, in the root of the checkout.
#[test]
fn generate_works_as_in_the_readme() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let mut tried = 0;
    for line in READMES[0].lines().filter(|line| line.starts_with("stolon generate ")) {
        let command = line.replacen("stolon", "\"$STOLON\"", 1);
        let output = Command::new("sh")
            .args(["-c", &command])
            .env("STOLON", env!("CARGO_BIN_EXE_stolon"))
            .current_dir(root)
            .output()
            .expect("a shell");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !output.stdout.is_empty(), "{line}: {errors}");
        tried += 1;
    }
    assert!(tried >= 3, "the README shows how to generate");
}
