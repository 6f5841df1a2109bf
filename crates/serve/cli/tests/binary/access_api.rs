//! API keys, the administrator's key, and the rights of web pages and other tenants.

use serde_json::{Value, json};

use crate::support::{Server, TINY, fail, prompt};

async fn status(request: reqwest::RequestBuilder) -> u16 {
    let reply = request.send().await.expect("a reply");
    let status = reply.status().as_u16();
    if status >= 400 {
        let reply: Value = reply.json().await.expect("JSON");
        assert!(reply["error"]["message"].is_string(), "{reply}");
    }
    status
}

/// Goal: the administrator's routes can be used from this machine, but not by web pages, by clients
/// of a proxy, or by a name that was rebound to this machine; nothing shows prompts unasked.
#[tokio::test]
async fn admin_routes_are_closed_to_web_pages_and_proxies() {
    let server = Server::start(TINY, &["--pin-budget", "4"]);
    let client = reqwest::Client::new();
    let paths = ["/admin/stats", "/admin/audit", "/admin/tree", "/admin/pins"];
    for path in paths {
        let get = || client.get(server.url(path));
        assert_eq!(status(get()).await, 200, "{path}");
        assert_eq!(status(get().header("host", "rebound.example")).await, 403, "{path}");
        assert_eq!(status(get().header("origin", "https://evil.example")).await, 403, "{path}");
        assert_eq!(status(get().header("sec-fetch-site", "cross-site")).await, 403, "{path}");
        assert_eq!(status(get().header("x-forwarded-for", "203.0.113.9")).await, 403, "{path}");
    }
    let form = client.post(server.url("/admin/pins")).header("content-type", "text/plain");
    assert_eq!(status(form.body(r#"{"prompt": "x"}"#)).await, 415);
}

/// Goal: with an administrator's key, its routes need it, from this machine too, and everything
/// else does not.
#[tokio::test]
async fn an_admin_key_is_needed_for_admin_routes_alone() {
    let server = Server::start(TINY, &["--admin-key", "sesame"]);
    let client = reqwest::Client::new();
    let stats = || client.get(server.url("/admin/stats"));
    assert_eq!(status(stats()).await, 401);
    assert_eq!(status(stats().bearer_auth("sesam")).await, 401);
    assert_eq!(status(stats().bearer_auth("sesame")).await, 200);
    server.complete(json!({"prompt": "x", "max_tokens": 1})).await;
    assert_eq!(server.get("/health").await.0, 200);
}

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

/// Goal: tenants that are told apart by their keys share no cached prefixes, whatever salt they
/// choose; the requests of one tenant do.
#[tokio::test]
async fn tenants_share_no_prefixes() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("keys");
    std::fs::write(&file, "a key-1\na key-2\nb key-3\n").expect("written");
    let file = file.to_str().expect("UTF-8");
    let server = Server::start(TINY, &["--api-key-file", file, "--isolate-tenants"]);
    let client = reqwest::Client::new();
    let cached = async |key: &str, salt: Option<&str>| {
        let body = json!({"prompt": prompt(40, 1), "max_tokens": 1, "cache_salt": salt});
        let request = client.post(server.url("/v1/completions")).bearer_auth(key).json(&body);
        let reply: Value = request.send().await.expect("a reply").json().await.expect("JSON");
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
    };
    assert_eq!(cached("key-1", None).await, 0);
    assert!(cached("key-2", None).await > 0);
    assert_eq!(cached("key-3", None).await, 0);
    assert_eq!(cached("key-3", Some("1:a")).await, 0);
    assert_eq!(cached("key-1", Some("own")).await, 0);
    assert!(cached("key-1", Some("own")).await > 0);

    let server = Server::start(TINY, &["--tenant-by", "header:x-tenant"]);
    let models = client.get(server.url("/v1/models"));
    assert_eq!(status(models.try_clone().expect("a copy")).await, 400);
    assert_eq!(status(models.header("x-tenant", "a")).await, 200);
}

/// Goal: an operator can hide how much of a prompt was cached.
#[tokio::test]
async fn cached_tokens_can_be_hidden() {
    let server = Server::start(TINY, &["--hide-cached-tokens"]);
    let reply = server.complete(json!({"prompt": prompt(40, 1), "max_tokens": 1})).await;
    assert_eq!(reply["usage"]["prompt_tokens"], 48);
    assert!(reply["usage"]["prompt_tokens_details"].is_null(), "{reply}");
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
