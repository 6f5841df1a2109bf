//! Keys of flags and files, which are read again on SIGHUP, and the flags of tenants.

use serde_json::{Value, json};

use crate::support::{Server, TINY, fail, prompt, status};

/// Goal: with API keys, `/v1` needs one of them; health does not. Keys are not shown in errors.
#[tokio::test]
async fn api_keys_are_needed_for_v1() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("keys");
    std::fs::write(&file, "# clients\nada key-of-ada\n").expect("written");
    let file = file.to_str().expect("UTF-8");
    let server = Server::start(TINY, &["--api-key", "shared", "--api-key-file", file]);
    let client = reqwest::Client::new();
    let models = || client.get(server.url("/v1/models"));
    for (key, expected) in [("shared", 200), ("key-of-ada", 200), ("ada", 401), ("", 401)] {
        assert_eq!(status(models().bearer_auth(key)).await, expected, "{key}");
    }
    let (refused, reply) = server.post("/v1/completions", json!({"prompt": "x"})).await;
    assert_eq!((refused, &reply["error"]["code"]), (401, &json!("invalid_api_key")));
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).await, (200, json!({"status": "ok"})), "{path}");
    }
    let message = fail(&["serve", "--model", TINY, "--api-key", "two words"]);
    assert!(message.contains("expected a key") && !message.contains("two"), "{message}");
    let message = fail(&["serve", "--model", TINY, "--tenant-by", "key"]);
    assert!(message.contains("expected API keys"), "{message}");
}

/// Goal: a server warns if other machines can use it without a key; one with keys, or on this
/// machine alone, does not.
#[test]
fn an_open_server_warns() {
    for (args, warns) in [
        (&["--host", "0.0.0.0"][..], true),
        (&["--host", "0.0.0.0", "--api-key", "k"], false),
        (&[], false),
    ] {
        let errors = Server::errors_at_start(TINY, args);
        assert_eq!(errors.contains("WARNING"), warns, "{args:?}: {errors}");
        assert!(!errors.contains("panicked"), "{errors}");
    }
}

/// Goal: after SIGHUP, the keys of the file are those that it has now; a file that cannot be read
/// changes nothing, and a key that stays keeps its requests.
#[cfg(unix)]
#[tokio::test]
async fn keys_are_read_again_on_sighup() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("keys");
    std::fs::write(&file, "ada key-of-ada\nbob key-of-bob\n").expect("written");
    let args = ["--api-key-file", file.to_str().expect("UTF-8")];
    let server = Server::start(TINY, &args);
    let client = reqwest::Client::new();
    let models = |key: &str| client.get(server.url("/v1/models")).bearer_auth(key);
    let replaced = async |old: &str, new: &str| {
        server.hang_up();
        while status(models(old)).await != 401 {}
        assert_eq!(status(models(new)).await, 200);
        assert_eq!(status(models("key-of-ada")).await, 200);
    };
    std::fs::write(&file, "ada key-of-ada\neve key-of-eve\n").expect("written");
    replaced("key-of-bob", "key-of-eve").await;
    std::fs::write(&file, "malformed\n").expect("written");
    server.hang_up();
    std::fs::write(&file, "ada key-of-ada\nfay key-of-fay\n").expect("written");
    replaced("key-of-eve", "key-of-fay").await;
    // A pipe is not read again: nothing else would be answered until its other end is opened.
    std::fs::remove_file(&file).expect("removed");
    make_pipe(&file);
    server.hang_up();
    let other = dir.path().join("other");
    std::fs::write(&other, "ada key-of-ada\ngus key-of-gus\n").expect("written");
    std::fs::rename(&other, &file).expect("renamed");
    replaced("key-of-fay", "key-of-gus").await;
}

/// Goal: a server that waits for the other end of a pipe says so, and reads the keys that arrive.
#[cfg(unix)]
#[tokio::test]
async fn a_pipe_with_keys_is_waited_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let pipe = dir.path().join("keys");
    make_pipe(&pipe);
    let writer = pipe.clone();
    let writing = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(2));
        std::fs::write(writer, "ada key-of-ada\n").expect("written");
    });
    let path = pipe.to_str().expect("UTF-8");
    let server = Server::with_log(TINY, &["--api-key-file", path]);
    writing.join().expect("written");
    let client = reqwest::Client::new();
    let models = client.get(server.url("/v1/models"));
    assert_eq!(status(models.bearer_auth("key-of-ada")).await, 200);
    let log = server.stop_and_read_errors();
    assert!(log.contains(&format!("waiting for {path}")), "{log}");
}

#[cfg(unix)]
fn make_pipe(path: &std::path::Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status().expect("a command");
    assert!(made.success());
}

/// Goal: the flags of tenants and of hidden counts reach the router.
#[tokio::test]
async fn flags_set_the_rules_of_tenants() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("keys");
    std::fs::write(&file, "a key-1\nb key-2\n").expect("written");
    let file = file.to_str().expect("UTF-8");
    let server = Server::start(TINY, &["--api-key-file", file, "--isolate-tenants"]);
    let client = reqwest::Client::new();
    for (key, is_cached) in [("key-1", false), ("key-1", true), ("key-2", false)] {
        let body = json!({"prompt": prompt(40, 1), "max_tokens": 1});
        let request = client.post(server.url("/v1/completions")).bearer_auth(key).json(&body);
        let reply: Value = request.send().await.expect("a reply").json().await.expect("JSON");
        let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(cached > Some(0), is_cached, "{key}: {reply}");
    }
    let flags = ["--tenant-by", "header:x-tenant", "--hide-cached-tokens"];
    let server = Server::start(TINY, &flags);
    let post = || client.post(server.url("/v1/completions"));
    let body = json!({"prompt": prompt(40, 1), "max_tokens": 1});
    assert_eq!(status(post().json(&body)).await, 400);
    let reply = post().header("x-tenant", "a").json(&body).send().await.expect("a reply");
    let reply: Value = reply.json().await.expect("JSON");
    assert!(reply["usage"]["prompt_tokens_details"].is_null(), "{reply}");
}
