//! Refused requests, and the behavior of an overloaded server and of one that is shut down.

use std::time::Duration;

use futures::future::join_all;
use serde_json::{Value, json};

use crate::support::{Server, TINY, fail};

/// Goal: each wrong request is refused with status 400 and the parameter at fault, and leaves
/// nothing allocated.
#[tokio::test]
async fn wrong_requests_are_refused_by_parameter() {
    let server = Server::tiny();
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": 7}), "prompt"),
        (json!({"prompt": [97, 320]}), "prompt"),
        (json!({"prompt": [97, -1]}), "prompt"),
        (json!({"prompt": Vec::<u32>::new()}), "prompt"),
        (json!({"prompt": [Vec::<u32>::new()]}), "prompt"),
        (json!({"prompt": vec![97; 9_000]}), "prompt"),
        (json!({"prompt": "x", "temperature": -1}), "temperature"),
        (json!({"prompt": "x", "temperature": "hot"}), "temperature"),
        (json!({"prompt": "x", "top_p": 1.5}), "top_p"),
        (json!({"prompt": "x", "min_p": -0.5}), "min_p"),
        (json!({"prompt": "x", "presence_penalty": 3}), "presence_penalty"),
        (json!({"prompt": "x", "repetition_penalty": 0}), "repetition_penalty"),
        (json!({"prompt": "x", "logit_bias": {"320": 1}}), "logit_bias"),
        (json!({"prompt": "x", "logit_bias": {"a": 1}}), "logit_bias"),
        (json!({"prompt": "x", "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "x", "max_tokens": -3}), "max_tokens"),
        (json!({"prompt": "x", "n": 0}), "n"),
        (json!({"prompt": ["x", "y"], "n": 100}), "prompt"),
        (json!({"prompt": "x", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "x", "best_of": 0}), "best_of"),
        (json!({"prompt": "x", "best_of": 129}), "best_of"),
        (json!({"prompt": "x", "n": 3, "best_of": 2}), "best_of"),
        (json!({"prompt": "x", "best_of": 2, "stream": true}), "best_of"),
        (json!({"prompt": "x", "best_of": 2, "max_tokens": 0, "echo": true}), "best_of"),
        (json!({"prompt": ["x", "y"], "best_of": 65}), "prompt"),
        (json!({"prompt": "x", "suffix": "y"}), "suffix"),
        (json!({"prompt": "x", "stop": [1]}), "stop"),
        (json!({"prompt": "x", "stream_options": {"x": 1}}), "stream_options.x"),
        (json!({"prompt": "x", "prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
        (json!({"prompt": "x", "prompt_logprobs": -1}), "prompt_logprobs"),
        (json!({"prompt": "x", "logprob_token_ids": [1]}), "logprob_token_ids"),
        (
            json!({"prompt": "x", "logprobs": 1, "logprob_token_ids": [1_000_000]}),
            "logprob_token_ids",
        ),
        (json!({"prompt": "x", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
        (json!({"prompt": "x", "allowed_token_ids": []}), "allowed_token_ids"),
        (json!({"prompt": "x", "allowed_token_ids": [1_000_000]}), "allowed_token_ids"),
        (json!({"prompt": "x", "thinking_token_budget": 1}), "thinking_token_budget"),
        (json!({"prompt": "x", "thinking_token_budget": -2}), "thinking_token_budget"),
        (json!({"prompt": "x", "temprature": 1}), "temprature"),
    ] {
        let (status, reply) = server.post("/v1/completions", body.clone()).await;
        assert_eq!(status, 400, "{body}: {reply}");
        assert_eq!(reply["error"]["type"], "invalid_request_error");
        assert_eq!(reply["error"]["param"], param, "{body}: {reply}");
    }
    let audit = server.settled_audit().await;
    assert_eq!(audit["blocks_free"], audit["blocks_total"], "nothing was computed: {audit}");
}

/// Goal: a prompt that is too long is refused with its length, with status 400 even if the reply
/// was to be streamed.
#[tokio::test]
async fn a_prompt_that_is_too_long_is_refused_with_its_length() {
    let server = Server::start(TINY, &["--num-blocks", "8"]);
    let body = json!({"prompt": vec![97; 200], "stream": true});
    let (status, reply) = server.post("/v1/completions", body).await;
    assert_eq!(status, 400);
    assert_eq!(reply["error"]["code"], "context_length_exceeded");
    assert!(reply["error"]["message"].as_str().is_some_and(|text| text.contains("200")), "{reply}");
}

/// Goal: unknown paths, methods and models, and bodies that are too large or not JSON, get their
/// status code and an error object in OpenAI's form.
#[tokio::test]
async fn http_errors_have_openais_form() {
    let names = ["--served-model-name", "one", "--served-model-name", "two"];
    let server = Server::start(TINY, &[&["--body-limit", "10K"], &names[..]].concat());
    let (status, reply) = server.post("/v1/nothing", json!({})).await;
    assert_eq!((status, &reply["error"]["type"]), (404, &json!("not_found_error")));
    let (status, reply) = server.post("/v1/embeddings", json!({})).await;
    assert_eq!((status, &reply["error"]["type"]), (400, &json!("invalid_request_error")));
    assert_eq!(server.get("/v1/completions").await.0, 405);
    let (status, reply) =
        server.post("/v1/completions", json!({"model": "gpt-4", "prompt": "x"})).await;
    assert_eq!((status, &reply["error"]["code"]), (404, &json!("model_not_found")));
    let (status, reply) =
        server.post("/v1/completions", json!({"prompt": "x".repeat(20_000)})).await;
    assert_eq!(status, 413, "{reply}");
    for body in ["", "{", "[]", "\"x\"", "{\"prompt\": \"\u{1}\"}"] {
        let response = server.send("/v1/completions", body).await;
        assert_eq!(response.status(), 400, "{body}");
        let reply: Value = response.json().await.expect("JSON");
        assert!(reply["error"]["message"].is_string());
    }
}

/// Goal: a call for more answers than the queue can ever hold is refused with status 400, because
/// repeating it does not help.
#[tokio::test]
async fn more_answers_than_the_queue_holds_are_refused_for_good() {
    let server = Server::start(TINY, &["--max-queued", "3"]);
    for body in [
        json!({"prompt": "x", "n": 4}),
        json!({"prompt": "x", "best_of": 4}),
        json!({"prompt": ["x", "y"], "n": 2}),
    ] {
        let (status, reply) = server.post("/v1/completions", body).await;
        assert_eq!(status, 400, "{reply}");
        assert!(reply["error"]["message"].as_str().is_some_and(|m| m.contains("at most 3")));
    }
    server.complete(json!({"prompt": "x", "n": 3, "max_tokens": 1})).await;
}

/// Goal: impossible values of options are refused before a model is loaded, with the accepted
/// range.
#[test]
fn impossible_options_are_refused() {
    for (option, value, range) in [
        ("--step-timeout", "0", "1..=1000000"),
        ("--threads", "0", "1..=1024"),
        ("--threads", "1000000", "1..=1024"),
        ("--body-timeout", "0", "1..=1000000"),
        ("--header-timeout", "0", "1..=1000000"),
        ("--max-connections", "0", "1..=1000000"),
        ("--body-limit", "0", "a size"),
    ] {
        let message = fail(&["serve", "--model", TINY, option, value]);
        assert!(message.contains(option) && message.contains(range), "{message}");
    }
    for option in
        ["--max-running", "--max-queued", "--max-batched-tokens", "--num-blocks", "--block-size"]
    {
        let message = fail(&["generate", "--prompt", "x", "--model", TINY, option, "0"]);
        assert!(message.contains("got 0") || message.contains("is not in"), "{option}: {message}");
    }
}

/// Goal: a server with a full queue refuses with status 429 and `Retry-After`; accepted requests
/// are answered.
#[tokio::test]
async fn a_full_queue_refuses_with_retry_after() {
    for limit in [["--max-queued", "2"], ["--max-queued-tokens", "20"]] {
        let server = Server::start(TINY, &[&["--max-running", "1"][..], &limit].concat());
        let ask = async |index: usize| {
            let body = json!({"prompt": format!("request {index}"), "max_tokens": 200,
                              "ignore_eos": true, "temperature": 0});
            let response = server.send("/v1/completions", body.to_string()).await;
            (response.status().as_u16(), response.headers().get("retry-after").cloned())
        };
        let replies = join_all((0..24).map(ask)).await;
        let count = |wanted: u16| replies.iter().filter(|(status, _)| *status == wanted).count();
        assert!(count(200) >= 1 && count(429) >= 1, "{limit:?}: {replies:?}");
        assert_eq!(count(200) + count(429), 24, "{limit:?}: {replies:?}");
        for (status, hint) in &replies {
            let seconds = hint.as_ref().and_then(|hint| hint.to_str().ok()?.parse::<u64>().ok());
            assert_eq!(seconds.is_some_and(|seconds| seconds >= 1), *status == 429);
        }
        server.settled_audit().await;
    }
}

/// Goal: after SIGTERM the server finishes running requests, accepts no new ones, and exits with
/// success.
#[tokio::test]
async fn sigterm_lets_running_requests_finish() {
    let server = Server::tiny();
    let body = json!({"prompt": "last words", "max_tokens": 300, "ignore_eos": true,
                      "temperature": 0, "stream": true});
    let response = server.send("/v1/completions", body.to_string()).await;
    server.terminate();
    let text = response.text().await.expect("the whole stream");
    assert!(text.trim_end().ends_with("data: [DONE]"), "the stream was cut: {text}");
    let url = server.url("/health");
    let status = tokio::task::spawn_blocking(|| server.wait()).await.expect("waited");
    assert!(status.success(), "{status}");
    let refused = reqwest::Client::builder().timeout(Duration::from_secs(5)).build();
    assert!(refused.expect("a client").get(url).send().await.is_err());
}

/// Goal: KV that exceeds the limit on the size of files (`ulimit -f`) is not stored, and ends
/// neither the server nor a request.
#[cfg(unix)]
#[tokio::test]
async fn a_limit_on_the_size_of_files_does_not_end_the_server() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("UTF-8");
    let server = Server::start_limited(TINY, &["--kv-cache-dir", path], "-f 1");
    let body = json!({"prompt": vec![97; 200], "max_tokens": 2});
    server.complete(body.clone()).await;
    let failed = async || server.get("/v1/cache/tiers").await.1["disk"]["writes_failed"].clone();
    while failed().await == json!(0) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.complete(body).await;
    server.settled_audit().await;
}
