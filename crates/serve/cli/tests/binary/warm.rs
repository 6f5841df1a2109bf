//! `stolon serve --warm FILE`: prompts that are computed before the server is ready.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Server, TINY, fail, run};

const CHAT: &str = "/v1/chat/completions";

/// A conversation with a tool, whose prompt has some hundred tokens.
fn chat() -> Value {
    let parameters = json!({"type": "object", "properties": {"path": {"type": "string"}}});
    let function =
        json!({"name": "read", "description": "Reads a file.", "parameters": parameters});
    let rules = "The lighthouse keeper answers in short sentences. ".repeat(8);
    json!({
        "messages": [{"role": "system", "content": rules}, {"role": "user", "content": "Hello."}],
        "tools": [{"type": "function", "function": function}],
        "stream": true,
        "max_completion_tokens": 9,
    })
}

fn write(dir: &Path, lines: &[String]) -> String {
    let file = dir.join("warm.jsonl");
    std::fs::write(&file, lines.join("\n")).expect("written");
    file.to_str().expect("UTF-8").to_owned()
}

async fn cached(server: &Server, path: &str, mut body: Value) -> (u64, u64) {
    body.as_object_mut().expect("an object").retain(|name, _| name != "stream");
    let usage = server.ok(path, body).await["usage"].take();
    let number = |value: &Value| value.as_u64().expect("a number");
    (number(&usage["prompt_tokens"]), number(&usage["prompt_tokens_details"]["cached_tokens"]))
}

/// Goal: the first request of a client finds all of its prompt cached, with its tools and its salt,
/// and that of another salt finds nothing. After a restart, the prompts are read from the disk.
#[tokio::test]
async fn prompts_are_cached_before_the_server_is_ready() {
    let dir = tempfile::tempdir().expect("a directory");
    let text = json!({"prompt": "The lighthouse stands on a rock. ".repeat(20), "cache_salt": "s"});
    let file = write(dir.path(), &[chat().to_string(), String::new(), text.to_string()]);
    let kv = dir.path().join("kv");
    let flags = ["--warm", &file, "--kv-cache-dir", kv.to_str().expect("UTF-8")];
    for is_restart in [false, true] {
        let server = Server::start("demo", &flags);
        let (_, tiers) = server.get("/v1/cache/tiers").await;
        let loaded = tiers["loaded_tokens"].as_u64().expect("a number");
        assert_eq!(loaded > 128, is_restart, "{tiers}");
        for (path, body) in [(CHAT, chat()), ("/v1/completions", text.clone())] {
            let (prompt, cached) = cached(&server, path, body).await;
            assert!(prompt > 128 && cached + 4 > prompt, "{path}: {cached} of {prompt}");
        }
        let mut other = text.clone();
        other["cache_salt"] = json!(format!("t{is_restart}"));
        assert_eq!(cached(&server, "/v1/completions", other).await.1, 0);
        server.terminate();
        assert!(server.wait().success());
    }
}

/// Goal: on a server with tenants, a prompt is cached for the clients of its tenant and no others,
/// and a prompt that no client could find is refused.
#[tokio::test]
async fn prompts_belong_to_their_tenant() {
    let dir = tempfile::tempdir().expect("a directory");
    let text = json!({"prompt": "The lighthouse stands on a rock. ".repeat(20)});
    let of = |tenant: Value| {
        let mut line = text.clone();
        line["tenant"] = tenant;
        line.to_string()
    };
    let file = write(dir.path(), &[of(json!("guests"))]);
    let by_header = ["--warm", &file, "--tenant-by", "header:x-tenant"];
    let server = Server::start("demo", &by_header);
    let client = reqwest::Client::new();
    for (tenant, is_warm) in [("others", false), ("guests", true)] {
        let post = client.post(server.url("/v1/completions")).header("x-tenant", tenant);
        let reply = post.json(&text).send().await.expect("a reply");
        let usage = reply.json::<Value>().await.expect("JSON")["usage"].take();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
        assert_eq!(cached > 128, is_warm, "{tenant}: {usage}");
    }
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "guests a-key-of-the-guests\n").expect("written");
    let keys = keys.to_str().expect("UTF-8");
    let by_key = ["--api-key-file", keys, "--tenant-by", "key"];
    for (line, flags, expected) in [
        (text.to_string(), &by_header[2..], "`tenant` is required with --tenant-by"),
        (of(json!("guests")), &[], "`tenant`: expected none without --tenant-by"),
        (of(json!("others")), &by_key, "`tenant`: expected the name of an API key, got `others`"),
        (of(json!(7)), &by_key, "`tenant`: expected a string, got 7"),
    ] {
        let file = write(dir.path(), &[line]);
        let args = ["serve", "--port", "0", "--model", TINY, "--warm", &file];
        let output = run(&[&args, flags].concat(), "");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{errors}");
        assert!(errors.contains(&format!("warm.jsonl:1: {expected}")), "{errors}");
    }
}

/// Goal: what is wrong in the file is named with its line: its form before the model is loaded, and
/// a prompt that does not fit after that. The server does not start.
#[test]
fn wrong_files_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let serve = |file: &str| {
        ["serve", "--port", "0", "--model", TINY, "--num-blocks", "16", "--warm", file]
            .map(str::to_owned)
    };
    let good = json!({"prompt": [1, 2, 3]}).to_string();
    let mut other = chat();
    other["messages"] = json!(7);
    for (lines, expected) in [
        (vec![good.clone(), "{\"prompt\": ".to_owned()], "warm.jsonl:2: the body is not JSON"),
        (vec![String::new(), "[]".to_owned()], "warm.jsonl:2: the body must be a JSON object"),
        (vec![other.to_string()], "warm.jsonl:1: `messages`: expected a list"),
        (vec!["{}".to_owned()], "warm.jsonl:1: `messages` is required"),
        (vec![String::new()], "warm.jsonl: expected at least one request"),
        (vec![good.clone(); 4097], "warm.jsonl: expected at most 4096 requests"),
    ] {
        let args = serve(&write(dir.path(), &lines));
        let errors = fail(&args.each_ref().map(String::as_str));
        assert!(errors.contains(expected), "{errors}");
    }
    let long = json!({"prompt": vec![1; 300]}).to_string();
    let args = serve(&write(dir.path(), &[good, long]));
    let output = run(&args.each_ref().map(String::as_str), "");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("warm.jsonl:2: "), "{errors}");
    assert!(errors.contains("got 300"), "{errors}");
    let missing = dir.path().join("none.jsonl");
    assert!(
        fail(&serve(missing.to_str().expect("UTF-8")).each_ref().map(String::as_str))
            .contains("none.jsonl")
    );
}
