//! The log of `stolon serve`.

use serde_json::{Value, json};

use crate::support::{Server, TINY, fail};

fn ask(text: &str) -> Value {
    json!({"prompt": text, "max_tokens": 3, "ignore_eos": true, "temperature": 0})
}

/// Goal: in JSON, each line is an object. Each HTTP request and each answer have a line, which an
/// operator finds by the request's id and which has its numbers and times but not its text.
#[tokio::test]
async fn requests_are_logged_as_json_without_their_texts() {
    let server = Server::with_log(TINY, &["--log-level", "info", "--log-format", "json"]);
    for id in ["first", "second"] {
        let body = ask("a secret of some twenty bytes");
        let (status, _) = server.post_with("/v1/completions", ("x-request-id", id), body).await;
        assert_eq!(status, 200);
    }
    let refused = json!({"prompt": "another secret", "max_tokens": -1});
    server.post_with("/v1/completions", ("x-request-id", "third"), refused).await;
    let log = server.stop_and_read_errors();
    assert!(!log.contains("secret") && !log.contains('\u{1b}'), "{log}");
    let lines: Vec<Value> =
        log.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    let of = |id: &str, message: &str| {
        let mut found = lines.iter().filter(|line| {
            let spans = line["spans"].as_array().into_iter().flatten();
            line["message"] == message && spans.clone().any(|span| span["request_id"] == id)
        });
        let line = found.next().unwrap_or_else(|| panic!("no {message:?} of {id} in {log}"));
        assert!(found.next().is_none(), "twice: {log}");
        line
    };
    for (id, cached) in [("first", 0), ("second", 16)] {
        let request = of(id, "finished processing request");
        assert_eq!((&request["status"], &request["level"]), (&json!(200), &json!("INFO")));
        assert_eq!(request["spans"][0]["path"], "/v1/completions");
        let answer = of(id, "request ended")["spans"][1].clone();
        assert_eq!(answer["outcome"], "finished", "{answer}");
        assert_eq!(answer["reason"], "Length");
        assert_eq!(answer["prompt_tokens"], 29);
        assert_eq!(
            (&answer["cached_tokens"], &answer["completion_tokens"]),
            (&json!(cached), &json!(3))
        );
        let (queue, ttft) = (answer["queue_ms"].as_f64(), answer["ttft_ms"].as_f64());
        assert!(queue.is_some_and(|queue| queue <= ttft.unwrap_or(0.0)), "{answer}");
    }
    assert_eq!(of("third", "finished processing request")["status"], 400);
}

/// Goal: without options, a run without problems logs nothing, and a filter that is not one is
/// refused.
#[tokio::test]
async fn the_log_is_quiet_by_default() {
    let server = Server::with_log(TINY, &[]);
    server.ok("/v1/completions", ask("a prompt")).await;
    assert_eq!(server.stop_and_read_errors(), "");
    let error = fail(&["serve", "--model", TINY, "--log-level", "stolon=loud"]);
    assert!(error.contains("--log-level") && error.contains("stolon=loud"), "{error}");
}
