//! Parses a request's body into a typed request. serde's errors become replies that name the
//! parameter at fault, what was expected and what was received.

mod parts;

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};
use stolon::{Engine, replace_lone_surrogates};

use crate::api::adapters::{LoadAdapter, UnloadAdapter};
use crate::api::cache::{CachePrompt, CacheRequest, PinRequest, PolicyRequest, UnpinRequest};
use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::api::embeddings::EmbeddingsRequest;
use crate::api::fields::UnknownFields;
use crate::api::llama_cpp::{InfillRequest, LlamaCompletionRequest, LlamaOptions};
use crate::api::messages::MessagesRequest;
use crate::api::models::NamedModel;
use crate::api::neutral::{self, Meaning, Scope};
use crate::api::ollama::{
    OllamaChat, OllamaCommon, OllamaEmbed, OllamaEmbeddings, OllamaGenerate, OllamaModel,
};
use crate::api::options::{ChoiceOptions, GenerationOptions};
use crate::api::responses::{InputMessage, ResponsesRequest, TypedItem};
use crate::api::scores::{
    ClassifyRequest, GenerativeScoringRequest, RerankRequest, ScoreRequest, ScoringOptions,
};
use crate::api::sessions::{
    ForkSession, OpenSession, RewindSession, SglangCloseSession, SglangOpenSession,
};
use crate::api::skills::{CaptionRequest, QueryRequest, RegionsRequest, SkillOptions};
use crate::api::tokenize::{DetokenizeRequest, TokenizeRequest};
use crate::wire::advice::{Ignored, UnknownParameters};
use crate::wire::error::ApiError;
use crate::wire::receive::{Held, Received};
use crate::wire::{history, scan};

/// Bodies of up to this many bytes are parsed on the thread that received them.
const INLINE_BYTES: usize = 32 << 10;

/// Up to this many tokens are converted to text on the thread that received them.
const INLINE_TOKENS: usize = 4096;

/// Parses bodies within a limit on their number of values. Large ones, and long lists of tokens, are
/// long work of the engine.
#[derive(Debug)]
pub(crate) struct Parser {
    max_values: usize,
    engine: Engine,
}

impl Parser {
    /// A parser for bodies of at most `max_values` JSON values.
    pub(crate) fn new(max_values: usize, engine: Engine) -> Self {
        Self { max_values, engine }
    }

    /// Parses a body whose request is small or short-lived, and drops it.
    pub(crate) async fn parse<T: RequestBody>(&self, body: Received) -> Result<T, ApiError> {
        Ok(self.parse_held(body).await?.0)
    }

    /// As `parse`, for a body with prompts or the files of images. Also returns the body's share of
    /// the memory for bodies, to be kept until prompts have been tokenized and images decoded.
    pub(crate) async fn parse_held<T: RequestBody>(
        &self,
        body: Received,
    ) -> Result<(T, Held), ApiError> {
        let (length, client, max_values) = (body.bytes.len(), body.client.clone(), self.max_values);
        let work = move || {
            let Received { bytes, ignored, memory, .. } = body;
            // Drop the bytes before the second copy of their content is made.
            let body = object(&mut bytes.join(), max_values)?;
            Ok((request(body, &ignored)?, memory))
        };
        if length <= INLINE_BYTES { work() } else { self.engine.long_work(client, work).await? }
    }

    /// Runs a client's work on `count` tokens: a few on the calling thread, many elsewhere.
    pub(crate) async fn run<T: Send + 'static>(
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
pub(crate) trait RequestBody: DeserializeOwned + Send + 'static {
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
request_body!(LlamaCompletionRequest, LlamaCpp, GenerationOptions, LlamaOptions);
request_body!(InfillRequest, LlamaCpp, GenerationOptions, LlamaOptions);
request_body!(OllamaChat, Ollama, OllamaCommon);
request_body!(OllamaGenerate, Ollama, OllamaCommon);
request_body!(OllamaEmbed, Ollama);
request_body!(OllamaEmbeddings, Ollama);
request_body!(OllamaModel, Ollama);
request_body!(EmbeddingsRequest, Embeddings);
request_body!(RerankRequest, Embeddings, ScoringOptions);
request_body!(ScoreRequest, Embeddings, ScoringOptions);
request_body!(ClassifyRequest, Embeddings, ScoringOptions);
request_body!(GenerativeScoringRequest, Embeddings, ScoringOptions);
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
request_body!(NamedModel, None);
request_body!(OpenSession, None);
request_body!(ForkSession, None);
request_body!(RewindSession, None);
request_body!(SglangOpenSession, SglangSession);
request_body!(SglangCloseSession, None);

/// Parses a body of at most `max_values` JSON values, which stays as it is.
pub(crate) fn parse<T: RequestBody>(
    body: &[u8],
    max_values: usize,
    ignored: &Ignored,
) -> Result<T, ApiError> {
    // A copy, because halves of surrogate pairs are replaced in place.
    request(object(&mut body.to_vec(), max_values)?, ignored)
}

/// The request of a JSON object. Each member must be known, or request nothing. Old messages may
/// have any shape.
pub(crate) fn request<T: RequestBody>(mut body: Value, ignored: &Ignored) -> Result<T, ApiError> {
    history::settle(T::SCOPE, &mut body, ignored)?;
    let request: T = typed(&body).map_err(|error| {
        if let Some(error) = item_error(T::SCOPE, &body) {
            return error;
        }
        let error = T::flattened_error(&body).unwrap_or(error);
        let (path, value) = (path_of(&error), value_at(&body, error.path()));
        parts::refusal(T::SCOPE, &path, value).unwrap_or_else(|| refusal("", &error, &body))
    })?;
    refuse_unknown("", request.unknown(), T::SCOPE, ignored)?;
    Ok(request)
}

/// Refuses fields that the server does not implement, unless their values request nothing or are
/// only advice, which is noted. `prefix` is the beginning of their paths.
pub(crate) fn refuse_unknown(
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

/// Notes the members of a message that have no effect. An earlier message cannot be taken back, so
/// a member that the server does not know must not make the request fail.
pub(crate) fn note_unknown(unknown: &UnknownFields, scope: Scope, ignored: &Ignored) {
    for (name, value) in unknown.iter() {
        if neutral::meaning(scope, name, value) != Meaning::Nothing {
            ignored.note(&format!("messages.{name}"));
        }
    }
}

pub(crate) fn object(body: &mut [u8], max_values: usize) -> Result<Value, ApiError> {
    if !scan::has_at_most(body, max_values) {
        let message = format!("the body has too many JSON values: expected at most {max_values}");
        return Err(ApiError::invalid(None, message));
    }
    let parsed = serde_json::from_slice(body).or_else(|error| {
        // Most bodies have no halves of surrogate pairs, so they are only searched for if parsing
        // fails.
        match replace_lone_surrogates(body) {
            0 => Err(error),
            _ => serde_json::from_slice(body),
        }
    });
    match parsed {
        Ok(object @ Value::Object(_)) => Ok(object),
        Ok(other) => Err(ApiError::invalid(
            None,
            format!("the body must be a JSON object, got {}", brief(&other)),
        )),
        Err(error) => Err(ApiError::invalid(None, format!("the body is not JSON: {error}"))),
    }
}

/// An error of serde with the path to the value.
pub(crate) type PathError = serde_path_to_error::Error<serde_json::Error>;

fn typed<T: DeserializeOwned>(body: &Value) -> Result<T, PathError> {
    serde_path_to_error::deserialize(body)
}

/// The error of the first item of a conversation that is wrong. The list of items is one of two
/// forms of a member, and serde reports only that neither fits.
fn item_error(scope: Scope, body: &Value) -> Option<ApiError> {
    let items = body["input"].as_array().filter(|_| scope == Scope::Responses)?;
    items.iter().enumerate().find_map(|(index, item)| {
        let error = match item.get("type") {
            None | Some(Value::Null) => typed::<InputMessage>(item).err()?,
            Some(_) => typed::<TypedItem>(item).err()?,
        };
        let path = format!("input[{index}]");
        let named = parts::refusal(scope, &path, item);
        Some(named.unwrap_or_else(|| refusal(&path, &error, item)))
    })
}

/// The reply for a value at the path `prefix` that does not have the shape of its type.
fn refusal(prefix: &str, error: &PathError, body: &Value) -> ApiError {
    let (inner, message) = (path_of(error), error.inner().to_string());
    let separator = if prefix.is_empty() || inner.is_empty() { "" } else { "." };
    let path = format!("{prefix}{separator}{inner}");
    let missing = message.strip_prefix("missing field `").and_then(|name| name.strip_suffix('`'));
    if let Some(name) = missing {
        let separator = if path.is_empty() { "" } else { "." };
        let path = format!("{path}{separator}{name}");
        return ApiError::missing(&path);
    }
    // serde's messages end with the expected value. They also quote the received value, which may
    // be of any length. So it is quoted here instead, cut to a bounded length.
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

/// The path to the value of an error, empty for the body itself.
fn path_of(error: &PathError) -> String {
    match error.path().iter().next() {
        Some(_) => error.path().to_string(),
        None => String::new(),
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
pub(crate) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

#[cfg(test)]
mod tests;
