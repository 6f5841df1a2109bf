//! Tests of parsing bodies, and of the replies for those that are wrong.

use serde_json::json;

use super::*;
use crate::api::options::{MAX_TOKEN_IDS, StopStrings};

const MAX_VALUES: usize = 1_000;

fn completion(body: &Value) -> Result<CompletionRequest, ApiError> {
    parse(body.to_string().as_bytes(), MAX_VALUES, &Ignored::default())
}

/// Goal: every form of a value is accepted, `null` counts as absent, and so does a field that
/// is unknown but `null`.
#[test]
fn all_forms_of_values_are_accepted() {
    let request = completion(&json!({
        "prompt": "x", "model": "m", "stream": true, "temperature": 0.5, "top_p": 1, "n": 3,
        "stop": ["p", "q"], "echo": null, "logit_bias": {"7": -100, "9": 1.5},
        "stop_token_ids": [1, 2], "seed": -1, "user": "someone", "metadata": {"a": 1},
        "never_heard_of": null, "priority": -7,
    }));
    let request = request.expect("a request");
    let options = request.options;
    assert_eq!(options.model.as_deref(), Some("m"));
    assert_eq!((options.stream, request.echo), (Some(true), None));
    assert_eq!((options.temperature, options.top_p), (Some(0.5), Some(1.0)));
    assert_eq!((request.choices.n, options.priority), (Some(3), Some(-7)));
    assert_eq!(options.stop, Some(StopStrings::Many(vec!["p".to_owned(), "q".to_owned()])));
    assert_eq!(options.logit_bias, Some(vec![(7, -100.0), (9, 1.5)]));
    assert_eq!(options.stop_token_ids, Some(vec![1, 2]));
    assert_eq!(options.seed, Some(u64::MAX));
    let one = completion(&json!({"prompt": "x", "stop": "solo"})).expect("a request");
    assert_eq!(one.options.stop, Some(StopStrings::One("solo".to_owned())));
}

/// Goal: each wrong value is refused with its path, what was expected and what was received.
#[test]
fn wrong_values_are_refused_by_their_path() {
    for (name, value, path, words) in [
        ("model", json!(3), "model", ["a string", "got 3"]),
        ("stream", json!("yes"), "stream", ["a boolean", "yes"]),
        ("temperature", json!("1"), "temperature", ["a finite number", "\"1\""]),
        ("temperature", json!(1e300), "temperature", ["a finite number", "1e+300"]),
        ("n", json!(129), "n", ["a whole number from 1 to 128", "129"]),
        ("n", json!(1.5), "n", ["a whole number from 1 to 128", "1.5"]),
        ("max_tokens", json!(-3), "max_tokens", ["a whole number, 0 or above", "-3"]),
        ("priority", json!(1_u64 << 31), "priority", ["-2147483648 to 2147483647", "2147483648"]),
        ("seed", json!("s"), "seed", ["64 bits", "\"s\""]),
        ("stop", json!(["a", 7]), "stop", ["a string or a list of strings", "7"]),
        ("stop_token_ids", json!([3, -1]), "stop_token_ids[1]", ["from 0 to", "got -1"]),
        ("stop_token_ids", json!(3), "stop_token_ids", ["a list", "got 3"]),
        ("logit_bias", json!({"seven": 1}), "logit_bias", ["token ids", "seven"]),
        ("logit_bias", json!({"7": 101}), "logit_bias", ["from -100 to 100", "101"]),
        ("logit_bias", json!([]), "logit_bias", ["an object", "[]"]),
        ("stream_options", json!([]), "stream_options", ["an object", "[]"]),
        (
            "stream_options",
            json!({"include_usage": 1}),
            "stream_options.include_usage",
            ["a boolean", "got 1"],
        ),
        ("prompt", json!(null), "prompt", ["a string, a list of strings", "got null"]),
    ] {
        let mut body = json!({"prompt": "x"});
        body[name] = value;
        let error = completion(&body).expect_err("a wrong value").reply().error;
        assert_eq!(error.param.as_deref(), Some(path), "{error:?}");
        assert_eq!(error.code, Some("invalid_value"), "{error:?}");
        assert!(error.message.contains("expected"), "{error:?}");
        for word in words {
            assert!(error.message.contains(word), "expected `{word}` in {error:?}");
        }
    }
}

/// Goal: an unknown parameter is refused by its name, a missing one too.
#[test]
fn unknown_and_missing_parameters_are_refused() {
    let unknown = completion(&json!({"prompt": "x", "temprature": 1}));
    let unknown = unknown.expect_err("a misspelt parameter").reply().error;
    assert_eq!(unknown.param.as_deref(), Some("temprature"));
    assert_eq!(unknown.code, Some("unsupported_parameter"));
    let missing = completion(&json!({})).expect_err("no prompt").reply().error;
    assert_eq!(missing.param.as_deref(), Some("prompt"));
    assert!(missing.message.contains("required"), "{missing:?}");
}

/// Goal: a parameter that the server does not implement is accepted with a value that requests
/// nothing, and refused with any other, which is shown.
#[test]
fn neutral_values_are_accepted() {
    for neutral in [
        json!({"min_tokens": 0, "top_k": -1, "suffix": "", "logprobs": false, "n": 1}),
        json!({"best_of": 1, "stream_options": null, "store": false, "logit_bias": {}}),
        json!({"skip_special_tokens": true, "length_penalty": 1, "service_tier": "auto"}),
        json!({"use_beam_search": false, "stop": [], "user": "someone", "echo": false}),
    ] {
        let mut body = neutral.clone();
        body["prompt"] = json!("x");
        completion(&body).unwrap_or_else(|error| panic!("{neutral}: {error:?}"));
    }
    for (name, value) in [("length_penalty", json!(2)), ("bad_words", json!(["y"]))] {
        let mut body = json!({"prompt": "x"});
        body[name] = value.clone();
        let error = completion(&body).expect_err("not implemented").reply().error;
        assert_eq!(error.param.as_deref(), Some(name));
        assert!(error.message.contains(&value.to_string()), "{error:?}");
    }
}

/// Goal: long lists and objects are refused before any part of them is stored.
#[test]
fn too_many_values_are_refused() {
    for (body, param) in [
        (json!({"prompt": vec![1; 2 * MAX_VALUES]}), None),
        (json!({"prompt": "x", "anything": vec![json!({}); MAX_VALUES]}), None),
        (json!({"prompt": "x", "logit_bias": {"1": 1, "01": 1}}), Some("logit_bias")),
        (json!({"prompt": "x", "logit_bias": {"+1": 1}}), Some("logit_bias")),
    ] {
        let error = completion(&body).expect_err("too many").reply().error;
        assert_eq!(error.param.as_deref(), param, "{error:?}");
    }
    let ids: Vec<usize> = (0..=MAX_TOKEN_IDS).collect();
    let long = "z".repeat(100_000);
    for body in [json!({"prompt": "x", (&long): 1}), json!({"prompt": "x", "seed": &long})] {
        let error = completion(&body).expect_err("refused").reply().error;
        assert!(error.message.len() < 3_000, "a client's text is not repeated in full");
        assert!(error.param.is_some_and(|param| param.len() < 300));
    }
    let body = json!({"prompt": "x", "stop_token_ids": ids}).to_string();
    let error = parse::<CompletionRequest>(body.as_bytes(), usize::MAX, &Ignored::default())
        .expect_err("too many");
    let error = error.reply().error;
    assert_eq!(error.param.as_deref(), Some("stop_token_ids"));
    assert!(error.message.contains(&MAX_TOKEN_IDS.to_string()), "{error:?}");
}

/// Goal: a body that is not JSON, or not an object, is refused; a long value is cut between
/// two characters.
#[test]
fn bodies_that_are_not_objects_are_refused() {
    for body in ["[1]", "{", "", "\"x\"", "{\"prompt\": \"\u{1}\"}"] {
        let parsed = parse::<CompletionRequest>(body.as_bytes(), MAX_VALUES, &Ignored::default());
        assert!(parsed.is_err(), "{body}");
    }
    let long = Value::String("\u{e9}".repeat(200));
    assert_eq!(brief(&long).chars().count(), 83);
}
