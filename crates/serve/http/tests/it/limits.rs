//! Refused requests, and the behavior of an overloaded server.

use futures::future::join_all;
use serde_json::{Value, json};

use crate::support::{Server, TINY};

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
    let server = Server::with(TINY, |engine, _| engine.num_blocks(8));
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
    let server = Server::with(TINY, |engine, options| {
        options.served_names = ["one", "two"].map(String::from).to_vec();
        options.body_limit = Some(10 << 10);
        engine
    });
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
    let server = Server::with(TINY, |engine, options| {
        options.max_answers = 3;
        engine.max_queued_requests(3)
    });
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

/// Goal: a server with a full queue refuses with status 429 and `Retry-After`; accepted requests
/// are answered.
#[tokio::test]
async fn a_full_queue_refuses_with_retry_after() {
    for limit in ["requests", "tokens"] {
        let server = Server::with(TINY, |engine, _| match limit {
            "requests" => engine.max_running(1).max_queued_requests(2),
            _ => engine.max_running(1).max_queued_tokens(20),
        });
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
