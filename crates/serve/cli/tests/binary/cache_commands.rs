//! `stolon cache export`, `import` and `query`, and a directory with KV that survives a restart.

use serde_json::json;

use crate::support::{Server, TINY, fail, prompt};

/// Goal: a prompt that one server has exported is imported by another, which then serves it from
/// its cache with the same answer; damaged files and those of other models are refused.
#[tokio::test]
async fn prefixes_are_exported_and_imported() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("prefix.kv");
    let path = file.to_str().expect("UTF-8");
    let (first, second) = (Server::tiny(), Server::tiny());
    let tokens = prompt(100, 1);
    let ids = tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let cache = |server: &Server, args: &[&str]| {
        let url = server.url("");
        [&["cache", "--url", &url], args]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let run = |args: Vec<String>| async move {
        let args =
            move || crate::support::run(&args.iter().map(String::as_str).collect::<Vec<_>>(), "");
        let output = tokio::task::spawn_blocking(args).await.expect("no panic");
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let (done, _, errors) = run(cache(&first, &["export", path, "--token-ids", &ids])).await;
    assert!(done, "{errors}");
    let (done, shown, errors) = run(cache(&second, &["import", path])).await;
    assert!(done && shown.contains("96 tokens"), "{shown} {errors}");
    let body = json!({"prompt": tokens, "max_tokens": 12});
    let (cold, warm) = (first.complete(body.clone()).await, second.complete(body).await);
    assert_eq!(cold["choices"], warm["choices"]);
    assert_eq!(warm["usage"]["prompt_tokens_details"]["cached_tokens"], json!(96));
    let other = Server::start("random:tiny@3", &[]);
    let (done, _, errors) = run(cache(&other, &["import", path])).await;
    assert!(!done && errors.contains("another model"), "{errors}");
    let mut bytes = std::fs::read(&file).expect("a file");
    bytes[300] ^= 1;
    std::fs::write(&file, bytes).expect("written");
    let (done, _, errors) = run(cache(&second, &["import", path])).await;
    assert!(!done && errors.contains("checksum"), "{errors}");
    for (content_type, status) in [("application/json", 415), ("application/octet-stream", 400)] {
        let request = reqwest::Client::new().post(second.url("/v1/cache/import"));
        let request = request.header("content-type", content_type).body("GIF89a");
        assert_eq!(request.send().await.expect("a response").status().as_u16(), status);
    }
    let (status, refused) =
        second.post("/v1/cache/export", json!({"prompt": [1, 2, 3], "tenant": "x"})).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("cache_salt")));
    second.settled_audit().await;
}

/// Goal: with a directory for KV, a restarted server reads the KV that the first one has computed,
/// reports it, and gives the same answer; a second server on the directory is refused, and so is a
/// size as a multiple of the KV pool without a directory.
#[tokio::test]
async fn stored_kv_survives_a_restart() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("kv");
    let path = path.to_str().expect("UTF-8");
    let ratio = ["serve", "--model", TINY, "--port", "0", "--kv-cache-dir-size", "4x"];
    let refused = crate::support::run(&ratio, "");
    let reason = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && reason.contains("expected --kv-cache-dir"), "{reason}");
    let args = ["--kv-cache-dir", path, "--kv-cache-dir-size", "4x", "--num-blocks", "128"];
    let body = json!({"prompt": prompt(150, 1), "max_tokens": 12});
    let server = Server::start(TINY, &args);
    let first = server.complete(body.clone()).await;
    let second = ["serve", "--model", TINY, "--port", "0", "--kv-cache-dir", path];
    let refused = crate::support::run(&second, "");
    let reason = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && reason.contains("another engine"), "{reason}");
    let written = async || server.get("/v1/cache/tiers").await.1["disk"]["records"].clone();
    while written().await != json!(2) {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let pool = server.get("/v1/cache/stats").await.1["kv_bytes"].as_u64().expect("a number");
    let disk = server.get("/v1/cache/tiers").await.1["disk"]["budget_bytes"].clone();
    assert_eq!(disk, json!(4 * pool));
    drop(server);
    let server = Server::start(TINY, &args);
    let found = server.ok("/v1/cache/query", json!({"prompt": prompt(150, 1)})).await;
    let expected = json!({"prompt_tokens": 158, "cached_tokens": 0, "resume_tokens": 0,
                          "disk_tokens": 128});
    assert_eq!(found["results"], json!([expected]));
    let (url, ids) =
        (server.url(""), prompt(150, 1).iter().map(u32::to_string).collect::<Vec<_>>());
    let shown = tokio::task::spawn_blocking(move || {
        let ids = ids.join(",");
        crate::support::succeed(&["cache", "--url", &url, "query", "--token-ids", &ids])
    });
    let shown = shown.await.expect("no panic");
    assert_eq!(shown, "0 of 158 tokens are cached, 128 are on disk\n");
    let again = server.complete(body).await;
    assert_eq!(first["choices"], again["choices"]);
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], json!(128));
    let (_, tiers) = server.get("/v1/cache/tiers").await;
    assert_eq!(
        (&tiers["loaded_tokens"], &tiers["disk"]["read_tokens"]),
        (&json!(128), &json!(128))
    );
    let url = server.url("");
    let shown = tokio::task::spawn_blocking(move || {
        crate::support::succeed(&["cache", "--url", &url, "tiers"])
    });
    let shown = shown.await.expect("no panic");
    assert!(shown.contains("128 tokens") && shown.contains("in 2 records"), "{shown}");
    let url = server.url("");
    let flushed = tokio::task::spawn_blocking(move || {
        crate::support::succeed(&["cache", "--url", &url, "flush", "--disk"])
    });
    assert_eq!(flushed.await.expect("no panic"), "the cache is empty\n");
    let (_, tiers) = server.get("/v1/cache/tiers").await;
    assert_eq!((&tiers["disk"]["records"], &tiers["disk"]["bytes"]), (&json!(0), &json!(0)));
    let (status, _) = server.post("/v1/cache/flush?disks=true", json!({})).await;
    assert_eq!(status, 400, "no other parameter is ignored");
}

/// Goal: the error for a policy that does not exist names those that do.
#[test]
fn unknown_policies_are_refused() {
    let message = fail(&["serve", "--model", TINY, "--eviction-policy", "newest"]);
    assert!(message.contains("newest") && message.contains("cost-aware"), "{message}");
}

/// Goal: `explain` takes the body of a request of any API and says in words what was lost and why,
/// and `misses` lists the requests that lost most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn misses_are_explained_in_words() {
    let server = Server::start("demo", &["--num-blocks", "1024"]);
    let text = "The room is on the left. ".repeat(20);
    let chat = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 2});
    server.ok("/v1/chat/completions", chat.clone()).await;
    server.settled_audit().await;
    let explain = |body: &serde_json::Value| {
        let args = ["cache", "--url", &server.url(""), "explain", "-"];
        crate::support::succeed_with(&args, &body.to_string())
    };
    let same = explain(&chat);
    assert!(same.contains("no more can be"), "{same}");
    let mut salted = chat.clone();
    salted["cache_salt"] = json!("other");
    let lost = explain(&salted);
    assert!(lost.contains("computed with another cache salt"), "{lost}");
    let changed = text.replace("left", "right");
    let blocks = json!([{"type": "text", "text": changed}]);
    let claude = json!({"system": "Be brief.", "max_tokens": 2,
                        "messages": [{"role": "user", "content": blocks}]});
    let lost = explain(&claude);
    assert!(lost.contains("tokens are cached"), "{lost}");
    server.ok("/v1/chat/completions", salted).await;
    let misses = crate::support::succeed(&["cache", "--url", &server.url(""), "misses"]);
    assert!(misses.contains("127.0.0.1: 0 of"), "{misses}");
    assert!(misses.contains("other_salt: 1 requests"), "{misses}");
}
