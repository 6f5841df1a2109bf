//! `stolon verify` against servers that answer right, and against servers that do not.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::support::{Server, TINY, run};

/// Flags for a short run.
const SHORT: [&str; 7] = ["--json", "--rounds", "1", "--words", "20", "--unrelated-prompts", "2"];

/// Runs `stolon verify` and returns its exit status, its report, and its standard error.
fn verify(flags: &[&str]) -> (i32, Value, String) {
    let output = run(&[&["verify"], &SHORT[..], flags].concat(), "");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!errors.contains("panicked"), "{errors}");
    let report = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code().expect("an exit status"), report, errors)
}

/// The number of a field of the report's totals.
fn total(report: &Value, name: &str) -> u64 {
    report["total"][name].as_u64().unwrap_or_else(|| panic!("{name} in {report}"))
}

/// Checks that all of a round was compared and found equal.
fn assert_equal(status: i32, report: &Value) {
    assert_eq!((status, &report["result"]), (0, &json!("equal")), "{report}");
    assert_eq!(total(report, "equal"), total(report, "compared"), "{report}");
    assert_eq!(total(report, "compared"), 136, "{report}");
    for none in ["text_flips", "leaks", "failed"] {
        assert_eq!(total(report, none), 0, "{none}: {report}");
    }
}

/// Goal: a Stolon answers the same in all states, in chats and in completions, with log-probabilities
/// and token ids, and its cache was used.
#[tokio::test(flavor = "multi_thread")]
async fn stolon_answers_the_same_in_all_states() {
    for (model, flags) in [("demo", &[][..]), (TINY, &["--backend", "openai"])] {
        let server = Server::start(model, &["--num-blocks", "600", "--max-running", "5"]);
        let (status, report, _) = verify(&[&["--url", &server.url("")], flags].concat());
        assert_equal(status, &report);
        assert_eq!(total(&report, "logprobs_compared"), 136, "{report}");
        assert_eq!(report["total"]["max_logprob_difference"], 0.0, "{report}");
        assert_eq!(report["token_ids_given"], true);
        assert!(total(&report, "cached_tokens") > total(&report, "prompt_tokens") / 3, "{report}");
        if model == "demo" {
            assert!(report["answers_with_own_secret"].as_u64() > Some(20), "{report}");
        }
        server.settled_audit().await;
    }
}

/// Goal: without an address, an engine is started with the given flags, and stops at the end. The
/// table says what was compared, and the seed that repeats it.
#[test]
fn an_engine_is_started_and_checked() {
    let flags = ["verify", "--rounds", "1", "--words", "20", "--seed", "77"];
    let output = run(&[&flags[..], &["--no-prefix-caching", "--max-tokens", "4"]].concat(), "");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    for part in [
        "model stolon-demo, seed 77",
        "evicted",
        "136 of 136 answers are equal (text, token ids and log-probabilities)",
        "No secret word leaked",
        "The server reports that no prompt came from a cache",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

/// What is wrong with a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Nothing.
    None,
    /// Every seventh answer to a prompt that it knows has another last word.
    Flips,
    /// Every seventh answer to a prompt that it knows has other log-probabilities.
    Logprobs,
    /// All answers name what one prompt asked for.
    Leaks,
    /// It knows neither chats nor any optional field, and sends neither tokens nor
    /// log-probabilities.
    Plain,
    /// It refuses every third request because it is overloaded.
    Overloaded,
    /// It fails after 50 answers.
    Fails,
    /// Its answers have no text.
    Empty,
    /// It stops in the middle of all answers after 50.
    Hangs,
}

struct Broken {
    fault: Fault,
    /// How often each prompt was asked.
    asked: Mutex<HashMap<String, usize>>,
}

/// The text of the prompt of a request, in either API.
fn prompt_of(body: &Value) -> String {
    let messages = body["messages"].as_array().into_iter().flatten();
    let texts = messages.filter_map(|message| message["content"].as_str());
    body["prompt"].as_str().map_or_else(|| texts.collect(), str::to_owned)
}

async fn answer(State(server): State<Arc<Broken>>, is_chat: bool, body: String) -> Response {
    let body: Value = serde_json::from_str(&body).expect("JSON");
    let prompt = prompt_of(&body);
    let (times, total, warm) = {
        let mut asked = server.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let times = *asked.entry(prompt.clone()).and_modify(|times| *times += 1).or_insert(0);
        let total: usize = asked.values().map(|times| times + 1).sum();
        (times, total, asked.values().sum::<usize>())
    };
    let refused = |status: StatusCode, text: &str| {
        (status, [(header::RETRY_AFTER, "0")], json!({"error": {"message": text}}).to_string())
            .into_response()
    };
    let fault = server.fault;
    let has_extra = !body["logprobs"].is_null() || !body["return_token_ids"].is_null();
    match fault {
        Fault::Plain if is_chat => return refused(StatusCode::NOT_FOUND, "no chats"),
        Fault::Plain if has_extra => return refused(StatusCode::BAD_REQUEST, "unknown field"),
        Fault::Overloaded if total % 3 == 0 => {
            return refused(StatusCode::TOO_MANY_REQUESTS, "too much");
        }
        Fault::Fails if total > 50 => {
            return refused(StatusCode::INTERNAL_SERVER_ERROR, "no memory");
        }
        _ => {}
    }
    let is_wrong = times > 0 && warm % 7 == 0;
    let checksum = prompt.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31) + u32::from(byte));
    let last = match fault {
        Fault::Flips if is_wrong => " different".to_owned(),
        Fault::Leaks => " Quillon".to_owned(),
        _ => format!(" {checksum}"),
    };
    let mut events = String::new();
    for (index, token) in ["The", " number", " is", &last].into_iter().enumerate() {
        let token = if fault == Fault::Empty { "" } else { token };
        let noise = if fault == Fault::Logprobs && is_wrong { 1e-3 } else { 0.0 };
        let logprob = f64::from(checksum % 100) / -100.0 - index as f64 - noise;
        let mut choice = match is_chat {
            true => json!({"delta": {"content": token}}),
            false => json!({"text": token}),
        };
        if fault != Fault::Plain {
            choice["logprobs"] = json!({"content": [{"token": token, "logprob": logprob}]});
        }
        if index == 3 {
            choice["finish_reason"] = json!("stop");
        }
        events.push_str(&format!("data: {}\n\n", json!({"choices": [choice]})));
    }
    if fault == Fault::Hangs && total > 50 {
        std::future::pending::<()>().await;
    }
    ([(header::CONTENT_TYPE, "text/event-stream")], events + "data: [DONE]\n\n").into_response()
}

/// Starts a server with this fault, and returns its address.
async fn broken(fault: Fault) -> String {
    let server = Arc::new(Broken { fault, asked: Mutex::default() });
    let models = json!({"data": [{"id": "broken"}]}).to_string();
    let chat = |state: State<_>, body: String| answer(state, true, body);
    let completion = |state: State<_>, body: String| answer(state, false, body);
    let api = Router::new()
        .route("/models", get(async move || models))
        .route("/chat/completions", post(chat))
        .route("/completions", post(completion))
        .with_state(server);
    let router = Router::new().nest("/v1", api.clone()).nest("/v3", api);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}

/// Verifies a server with this fault.
async fn verify_broken(fault: Fault, flags: &[&str]) -> (i32, Value, String) {
    let url = broken(fault).await;
    verify(&[&["--url", &url], flags].concat())
}

/// Goal: a server that answers right in its own way is found to be equal, and what it does not send
/// is not called equal. One that is overloaded is asked again, and one with another version of the
/// API is asked at its paths.
#[tokio::test(flavor = "multi_thread")]
async fn right_servers_pass() {
    let (status, report, _) = verify_broken(Fault::None, &[]).await;
    assert_equal(status, &report);
    assert_eq!(total(&report, "logprobs_compared"), 136);
    assert_eq!(report["token_ids_given"], false);
    assert_eq!(report["total"]["cached_tokens"], Value::Null);
    let (status, report, _) = verify_broken(Fault::Plain, &[]).await;
    assert_equal(status, &report);
    assert!(report["url"].as_str().expect("a URL").ends_with("/v1/completions"), "{report}");
    assert_eq!(total(&report, "logprobs_compared"), 0);
    for name in ["logprob_differences", "max_logprob_difference", "cached_tokens"] {
        assert_eq!(report["total"][name], Value::Null, "{name}");
    }
    let (status, report, _) = verify_broken(Fault::Overloaded, &[]).await;
    assert_equal(status, &report);
    let url = broken(Fault::None).await;
    let (status, report, _) = verify(&["--url", &format!("{url}/v3/")]);
    assert_equal(status, &report);
    assert_eq!(report["url"], format!("{url}/v3/chat/completions"));
}

/// Goal: answers that change are found, with the place and both texts.
#[tokio::test(flavor = "multi_thread")]
async fn answers_that_change_are_found() {
    let (status, report, _) = verify_broken(Fault::Flips, &[]).await;
    assert_eq!((status, &report["result"]), (1, &json!("different")), "{report}");
    let (flips, compared) = (total(&report, "text_flips"), total(&report, "compared"));
    assert_eq!((compared, total(&report, "equal"), flips), (136, 136 - flips, flips));
    // The requests that are canceled count for the server, too.
    assert!((10..30).contains(&flips), "{report}");
    assert_eq!(total(&report, "leaks"), 0);
    let first = &report["first_differences"][0];
    assert_eq!((&first["token"], &first["character"]), (&json!(3), &json!(14)), "{report}");
    let texts = [&first["reference"], &first["text"]];
    assert!(texts.contains(&&json!("The number is different")), "{report}");
    let url = broken(Fault::Flips).await;
    let output = run(&["verify", "--url", &url, "--rounds", "1"], "");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{text}");
    let shown = ["differs after 3 equal tokens (14 characters)", "\"The number is different\""];
    assert!(shown.iter().all(|part| text.contains(part)), "{text}");
}

/// Goal: log-probabilities that change are found, though the texts are the same.
#[tokio::test(flavor = "multi_thread")]
async fn logprobs_that_change_are_found() {
    let (status, report, _) = verify_broken(Fault::Logprobs, &[]).await;
    assert_eq!((status, total(&report, "text_flips")), (1, 0), "{report}");
    assert!(total(&report, "logprob_differences") >= 10, "{report}");
    let largest = report["total"]["max_logprob_difference"].as_f64().expect("a number");
    assert!((largest - 1e-3).abs() < 1e-9, "{largest}");
    let first = &report["first_differences"][0];
    assert_eq!((&first["token"], &first["logprob"]), (&Value::Null, &json!(0)), "{report}");
}

/// Goal: the secret word of another prompt in an answer is a leak, also if every answer is always
/// the same.
#[tokio::test(flavor = "multi_thread")]
async fn leaks_are_found() {
    let (status, report, _) = verify_broken(Fault::Leaks, &[]).await;
    assert_eq!((status, &report["result"]), (1, &json!("different")), "{report}");
    assert_eq!(total(&report, "equal"), 136, "{report}");
    assert!(total(&report, "leaks") > 100, "{report}");
    let first = &report["first_leaks"][0];
    assert_eq!(
        (&first["secret"], &first["text"]),
        (&json!("Quillon"), &json!("The number is Quillon"))
    );
}

/// Goal: a run that could not compare everything says so, with the exit status for it, and ends.
#[tokio::test(flavor = "multi_thread")]
async fn runs_that_fail_are_not_called_equal() {
    for (fault, flags, part) in [
        (Fault::Fails, &[][..], "status 500: no memory"),
        (Fault::Hangs, &["--timeout", "1"], "timeout: there was no complete answer within 1 s"),
    ] {
        let (status, report, _) = verify_broken(fault, flags).await;
        assert_eq!((status, &report["result"]), (2, &json!("incomplete")), "{report}");
        assert!((5..30).contains(&total(&report, "failed")), "{report}");
        let message = report["failures"][0]["message"].as_str().expect("a message");
        assert!(message.starts_with(part), "{message}");
    }
    let (status, report, _) = verify_broken(Fault::Empty, &[]).await;
    assert_eq!((status, &report["result"]), (2, &json!("incomplete")), "{report}");
}

/// Goal: a server that cannot be asked at all is an error with its reason, and not a difference.
#[tokio::test(flavor = "multi_thread")]
async fn servers_that_cannot_be_asked_are_errors() {
    let server = Server::start(TINY, &["--api-key", "sesame-sesame-sesame"]);
    let url = server.url("");
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        format!("http://{}", listener.local_addr().expect("an address"))
    };
    for (flags, part) in [
        (vec!["--url", &url], "status 401"),
        (vec!["--url", &url, "--model", "x", "--api-key", "wrong-wrong-wrong"], "status 401"),
        (vec!["--url", &closed], "cannot connect"),
        (vec!["--url", "ftp://x"], "expected a URL"),
        (vec!["--model", "random:enormous"], "enormous"),
    ] {
        let (status, report, errors) = verify(&flags);
        assert_eq!((status, report), (2, Value::Null), "{flags:?}: {errors}");
        assert!(errors.starts_with("error: ") && errors.contains(part), "{flags:?}: {errors}");
    }
    let (status, report, _) = verify(&["--url", &url, "--api-key", "sesame-sesame-sesame"]);
    assert_equal(status, &report);
}
