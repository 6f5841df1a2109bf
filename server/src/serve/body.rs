//! From a request's body to a typed request, and from serde's errors to replies that name the
//! parameter at fault, what was expected and what was received.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use super::error::ApiError;
use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::api::fields::UnknownFields;
use crate::api::options::GenerationOptions;

/// A body as axum's extractor returns it: an error if it is too large or was cut off.
pub(super) type Body = Result<Bytes, BytesRejection>;

/// Parses the body of a request without shared generation options.
pub(super) fn parse<T: DeserializeOwned>(body: Body) -> Result<T, ApiError> {
    let body = object(body)?;
    typed(&body).map_err(|error| refusal(&error, &body))
}

/// A request that has generation options in a flattened field.
pub(super) trait GenerationRequest: DeserializeOwned {
    /// What the request contains beyond its fields.
    fn unknown(&self) -> &UnknownFields;
}

impl GenerationRequest for CompletionRequest {
    fn unknown(&self) -> &UnknownFields {
        &self.unknown
    }
}

impl GenerationRequest for ChatRequest {
    fn unknown(&self) -> &UnknownFields {
        &self.unknown
    }
}

/// Parses the body of a request with generation options.
pub(super) fn parse_generation<T: GenerationRequest>(body: Body) -> Result<T, ApiError> {
    let body = object(body)?;
    let request: T = typed(&body).map_err(|error| {
        // serde buffers the members of a flattened struct, and with that the path of an error
        // inside it is lost. Parsing the options on their own gives the path.
        let options = typed::<GenerationOptions>(&body);
        refusal(&options.err().unwrap_or(error), &body)
    })?;
    refuse_unknown("", request.unknown())?;
    Ok(request)
}

/// Refuses fields that the server does not know. `prefix` is what their path begins with.
pub(super) fn refuse_unknown(prefix: &str, unknown: &UnknownFields) -> Result<(), ApiError> {
    match unknown.first() {
        Some(name) => Err(ApiError::unsupported(&format!("{prefix}{name}"), None)),
        None => Ok(()),
    }
}

/// Refuses a parameter that the server does not implement, unless its value requests nothing.
pub(super) fn accept_only(
    name: &str,
    value: Option<&Value>,
    neutral: &[Value],
) -> Result<(), ApiError> {
    match value {
        Some(value) if !neutral.contains(value) => Err(ApiError::unsupported(name, Some(value))),
        _ => Ok(()),
    }
}

fn object(body: Body) -> Result<Value, ApiError> {
    let body =
        body.map_err(|rejection| ApiError::new(rejection.status(), rejection.body_text()))?;
    match serde_json::from_slice(&body) {
        Ok(object @ Value::Object(_)) => Ok(object),
        Ok(other) => Err(ApiError::invalid(
            None,
            format!("the body must be a JSON object, got {}", brief(&other)),
        )),
        Err(error) => Err(ApiError::invalid(None, format!("the body is not JSON: {error}"))),
    }
}

type PathError = serde_path_to_error::Error<serde_json::Error>;

fn typed<T: DeserializeOwned>(body: &Value) -> Result<T, PathError> {
    serde_path_to_error::deserialize(body)
}

/// The reply for a body that does not have a request's shape.
fn refusal(error: &PathError, body: &Value) -> ApiError {
    let message = error.inner().to_string();
    let path = match error.path().iter().next() {
        Some(_) => error.path().to_string(),
        None => String::new(),
    };
    let missing = message.strip_prefix("missing field `").and_then(|name| name.strip_suffix('`'));
    if let Some(name) = missing {
        let separator = if path.is_empty() { "" } else { "." };
        let path = format!("{path}{separator}{name}");
        return ApiError::missing(&path);
    }
    // serde's texts end with what was expected. They also quote the value that was received,
    // which may be of any length, so that it is quoted here instead.
    match message.rsplit_once("expected ") {
        Some((_, expected)) => {
            let expected = match expected {
                "a sequence" => "a list",
                "a map" => "an object",
                other => other,
            };
            ApiError::expected(&path, expected, value_at(body, error.path()))
        }
        None => ApiError::invalid(Some(&path), format!("`{path}`: {message}")),
    }
}

/// The value that a path leads to, as far as it can be followed.
fn value_at<'a>(body: &'a Value, path: &Path) -> &'a Value {
    path.iter().fold(body, |value, segment| {
        let inner = match segment {
            Segment::Seq { index } => value.get(index),
            Segment::Map { key } => value.get(key),
            _ => None,
        };
        inner.unwrap_or(value)
    })
}

/// A value as it is shown in an error: cut to 80 characters.
pub(super) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::options::StopStrings;

    fn completion(body: &Value) -> Result<CompletionRequest, ApiError> {
        parse_generation(Ok(Bytes::from(body.to_string())))
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
        assert_eq!((options.n, options.priority), (Some(3), Some(-7)));
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
            (
                "priority",
                json!(1_u64 << 31),
                "priority",
                ["-2147483648 to 2147483647", "2147483648"],
            ),
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

    /// Goal: a value that requests nothing is accepted, any other is refused and shown.
    #[test]
    fn neutral_values_are_accepted() {
        accept_only("tools", None, &[json!([])]).expect("absent");
        accept_only("tools", Some(&json!([])), &[json!([])]).expect("neutral");
        let refused = accept_only("tools", Some(&json!([1])), &[json!([])]);
        let error = refused.expect_err("a tool").reply().error;
        assert_eq!(error.param.as_deref(), Some("tools"));
        assert!(error.message.contains("[1]"), "{error:?}");
    }

    /// Goal: a body that is not JSON, or not an object, is refused; a long value is cut between
    /// two characters.
    #[test]
    fn bodies_that_are_not_objects_are_refused() {
        for body in ["[1]", "{", "", "\"x\"", "{\"prompt\": \"\u{1}\"}"] {
            let parsed = parse_generation::<CompletionRequest>(Ok(Bytes::from(body)));
            assert!(parsed.is_err(), "{body}");
        }
        let long = Value::String("\u{e9}".repeat(200));
        assert_eq!(brief(&long).chars().count(), 83);
    }
}
