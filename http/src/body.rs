//! Parses a request's body into a typed request. serde's errors become replies that name the
//! parameter at fault, what was expected and what was received.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};
use stolon::Engine;

use super::advice::{Ignored, UnknownParameters};
use super::error::ApiError;
use super::receive::Received;
use super::scan;
use crate::api::adapters::{LoadAdapter, UnloadAdapter};
use crate::api::cache::{CachePrompt, CacheRequest, PinRequest, PolicyRequest, UnpinRequest};
use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::api::embeddings::EmbeddingsRequest;
use crate::api::fields::UnknownFields;
use crate::api::messages::MessagesRequest;
use crate::api::neutral::{self, Meaning, Scope};
use crate::api::options::{ChoiceOptions, GenerationOptions};
use crate::api::responses::ResponsesRequest;
use crate::api::sessions::{
    ForkSession, OpenSession, RewindSession, SglangCloseSession, SglangOpenSession,
};
use crate::api::skills::{CaptionRequest, QueryRequest, RegionsRequest, SkillOptions};
use crate::api::tokenize::{DetokenizeRequest, TokenizeRequest};

/// Bodies of up to this many bytes are parsed on the thread that received them.
const INLINE_BYTES: usize = 32 << 10;

/// Up to this many tokens are converted to text on the thread that received them.
const INLINE_TOKENS: usize = 4096;

/// Parses bodies within a limit on their number of values. Large ones, and long lists of tokens, are
/// long work of the engine.
#[derive(Debug)]
pub(super) struct Parser {
    max_values: usize,
    engine: Engine,
}

impl Parser {
    /// A parser for bodies of at most `max_values` JSON values.
    pub(super) fn new(max_values: usize, engine: Engine) -> Self {
        Self { max_values, engine }
    }

    /// Parses a body. The body and its share of the memory for bodies are dropped before this
    /// returns.
    pub(super) async fn parse<T: RequestBody>(&self, body: Received) -> Result<T, ApiError> {
        let (length, max_values) = (body.bytes.len(), self.max_values);
        let client = body.client.clone();
        let work = move || {
            let Received { bytes, ignored, client: _, memory: _held } = body;
            parse(&bytes.join(), max_values, &ignored)
        };
        if length <= INLINE_BYTES { work() } else { self.engine.long_work(client, work).await? }
    }

    /// Runs a client's work on `count` tokens: a few on the calling thread, many elsewhere.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        client: Option<Arc<str>>,
        count: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        if count <= INLINE_TOKENS {
            return Ok(work());
        }
        Ok(self.engine.long_work(client, work).await?)
    }
}

/// The type of a request's body.
pub(super) trait RequestBody: DeserializeOwned + Send + 'static {
    /// The object whose parameters without an effect are accepted; see [`Scope`].
    const SCOPE: Scope;

    /// Members of the request that have no field.
    fn unknown(&self) -> &UnknownFields;

    /// serde buffers the members of a flattened struct, and with that the path of an error inside
    /// it is lost. Parsing the flattened part on its own gives the path.
    fn flattened_error(body: &Value) -> Option<PathError>;
}

/// Implements [`RequestBody`] for a type with the field `unknown`: its scope, and the types that it
/// flattens.
macro_rules! request_body {
    ($body:ty, $scope:ident $(, $flattened:ty)*) => {
        impl RequestBody for $body {
            const SCOPE: Scope = Scope::$scope;

            fn unknown(&self) -> &UnknownFields {
                &self.unknown
            }

            fn flattened_error(_body: &Value) -> Option<PathError> {
                None $(.or_else(|| typed::<$flattened>(_body).err()))*
            }
        }
    };
}

request_body!(CompletionRequest, Completions, GenerationOptions, ChoiceOptions);
request_body!(ChatRequest, Chat, GenerationOptions, ChoiceOptions);
request_body!(ResponsesRequest, Responses, GenerationOptions);
request_body!(MessagesRequest, Messages, GenerationOptions);
request_body!(EmbeddingsRequest, Embeddings);
request_body!(QueryRequest, None, SkillOptions);
request_body!(CaptionRequest, None, SkillOptions);
request_body!(RegionsRequest, None);
request_body!(TokenizeRequest, Tokenize);
request_body!(DetokenizeRequest, None);
request_body!(CacheRequest, None, CachePrompt);
request_body!(PinRequest, None, CachePrompt);
request_body!(UnpinRequest, None, CachePrompt);
request_body!(PolicyRequest, None);
request_body!(LoadAdapter, None);
request_body!(UnloadAdapter, None);
request_body!(OpenSession, None);
request_body!(ForkSession, None);
request_body!(RewindSession, None);
request_body!(SglangOpenSession, SglangSession);
request_body!(SglangCloseSession, None);

/// Parses a body of at most `max_values` JSON values. All of its members must be known, or request
/// nothing.
pub(super) fn parse<T: RequestBody>(
    body: &[u8],
    max_values: usize,
    ignored: &Ignored,
) -> Result<T, ApiError> {
    let body = object(body, max_values)?;
    let request: T = typed(&body).map_err(|error| {
        let error = T::flattened_error(&body).unwrap_or(error);
        refusal(&error, &body)
    })?;
    refuse_unknown("", request.unknown(), T::SCOPE, ignored)?;
    Ok(request)
}

/// Refuses fields that the server does not implement, unless their values request nothing or are
/// only advice, which is noted. `prefix` is the beginning of their paths.
pub(super) fn refuse_unknown(
    prefix: &str,
    unknown: &UnknownFields,
    scope: Scope,
    ignored: &Ignored,
) -> Result<(), ApiError> {
    for (name, value) in unknown.iter() {
        let path = format!("{prefix}{name}");
        match neutral::meaning(scope, name, value) {
            Meaning::Nothing => {}
            Meaning::Advice => ignored.note(&path),
            Meaning::Unsupported => return Err(ApiError::unsupported(&path, Some(value))),
            Meaning::Unknown if ignored.unknown == UnknownParameters::Warn => ignored.note(&path),
            Meaning::Unknown => return Err(ApiError::unsupported(&path, None)),
        }
    }
    Ok(())
}

fn object(body: &[u8], max_values: usize) -> Result<Value, ApiError> {
    if !scan::has_at_most(body, max_values) {
        let message = format!("the body has too many JSON values: expected at most {max_values}");
        return Err(ApiError::invalid(None, message));
    }
    match serde_json::from_slice(body) {
        Ok(object @ Value::Object(_)) => Ok(object),
        Ok(other) => Err(ApiError::invalid(
            None,
            format!("the body must be a JSON object, got {}", brief(&other)),
        )),
        Err(error) => Err(ApiError::invalid(None, format!("the body is not JSON: {error}"))),
    }
}

/// An error of serde with the path to the value.
pub(super) type PathError = serde_path_to_error::Error<serde_json::Error>;

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

/// The value at a path, or the deepest one on it that exists.
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
        for (name, value) in [("length_penalty", json!(2)), ("suffix", json!("y"))] {
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
            let parsed =
                parse::<CompletionRequest>(body.as_bytes(), MAX_VALUES, &Ignored::default());
            assert!(parsed.is_err(), "{body}");
        }
        let long = Value::String("\u{e9}".repeat(200));
        assert_eq!(brief(&long).chars().count(), 83);
    }
}
