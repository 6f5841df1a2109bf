//! The reply to a request that failed: a status code and OpenAI's error object.
//!
//! The engine's errors are mapped to replies in one place, `From<stolon::Error> for ApiError`.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use stolon::{EngineError, Error, LengthBound, PinError, SessionError, TierError};

use crate::api::error::{ErrorObject, ErrorReply};
use crate::wire::body::brief;

/// Maximum length of an error's message, in bytes. Messages quote what a client has sent.
const MAX_MESSAGE: usize = 2000;
/// Maximum length of the path of a parameter, in bytes.
const MAX_PARAM: usize = 200;

/// A failed request, as its client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    /// Path of the parameter at fault, if it is one parameter.
    param: Option<String>,
    /// A code that programs can compare.
    code: Option<&'static str>,
    /// Time after which the request may succeed.
    retry_after: Option<Duration>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message = cut(message.into(), MAX_MESSAGE);
        Self { status, message, param: None, code: None, retry_after: None }
    }

    /// 400: the request is wrong; repeating it does not help.
    pub(crate) fn invalid(param: Option<&str>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, message);
        Self { param: param.map(|param| cut(param.to_owned(), MAX_PARAM)), ..error }
    }

    /// 400: a parameter has a wrong type or value.
    pub(crate) fn expected(param: &str, expected: &str, got: &Value) -> Self {
        let message = format!("`{param}`: expected {expected}, got {}", brief(got));
        Self::invalid(Some(param), message).code("invalid_value")
    }

    /// 400: a required parameter is missing.
    pub(crate) fn missing(param: &str) -> Self {
        let message = format!("`{param}` is required");
        Self::invalid(Some(param), message).code("invalid_value")
    }

    /// 400: the server does not know this parameter, or does not support this value of it.
    pub(crate) fn unsupported(param: &str, value: Option<&Value>) -> Self {
        let message = match value {
            Some(value) => format!("`{param}`: this server does not support {}", brief(value)),
            None => format!("`{param}` is not a parameter that this server supports"),
        };
        Self::invalid(Some(param), message).code("unsupported_parameter")
    }

    /// 404: the requested model is not the one that is served.
    pub(crate) fn unknown_model(got: &str, served: &str) -> Self {
        let message = format!("the model `{got}` is not served here; this server has `{served}`");
        Self::model_not_found(message)
    }

    /// 404: the model of a request does not exist.
    pub(crate) fn model_not_found(message: String) -> Self {
        let error = Self::new(StatusCode::NOT_FOUND, message).code("model_not_found");
        Self { param: Some("model".to_owned()), ..error }
    }

    /// 401: a key is missing or wrong.
    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message).code("invalid_api_key")
    }

    /// 500: a defect of the server.
    pub(crate) fn internal() -> Self {
        let message = "the server failed while it handled this request";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 504: the time for the answer has passed.
    pub(crate) fn timed_out(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, message).code("timeout")
    }

    /// 429: the request may succeed after `wait`.
    fn too_many(message: String, code: &'static str, wait: Duration) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, message).code(code);
        Self { retry_after: Some(wait), ..error }
    }

    /// 503: the request may succeed after `wait`.
    pub(crate) fn unavailable(message: impl Into<String>, wait: Duration) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        Self { retry_after: Some(wait), ..error }
    }

    pub(crate) fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The same error with `name` as its parameter, if the parameter is `prompt`.
    pub(crate) fn of_prompt(self, name: &str) -> Self {
        match self.param.as_deref() {
            Some("prompt") => {
                let message = format!("`{name}`: {}", self.message);
                Self { message, param: Some(name.to_owned()), ..self }
            }
            _ => self,
        }
    }

    /// The same error with more words at the end of its message.
    pub(crate) fn with_hint(self, hint: &str) -> Self {
        Self { message: format!("{}{hint}", self.message), ..self }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The code, or the class of the status code if there is none.
    pub(crate) fn label(&self) -> &'static str {
        self.code.unwrap_or_else(|| self.kind())
    }

    /// OpenAI's name for the class of the status code.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            status if status.is_client_error() => "invalid_request_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            _ => "server_error",
        }
    }

    /// The body of the reply.
    pub(crate) fn reply(&self) -> ErrorReply {
        ErrorReply {
            error: ErrorObject {
                message: self.message.clone(),
                kind: self.kind(),
                param: self.param.clone(),
                code: self.code,
            },
        }
    }
}

/// The text, cut to at most `max` bytes and an ellipsis.
pub(crate) fn cut(mut text: String, max: usize) -> String {
    if text.len() > max {
        let end = (0..=max).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push_str("...");
    }
    text
}

/// The time for `Retry-After`: whole seconds, at least 1, because clients read 0 as "immediately".
fn whole_seconds(wait: Duration) -> u64 {
    wait.as_secs_f64().ceil().max(1.0) as u64
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.reply())).into_response();
        if let Some(wait) = self.retry_after {
            let seconds = HeaderValue::from(whole_seconds(wait));
            response.headers_mut().insert(header::RETRY_AFTER, seconds);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        // Middleware of other APIs changes errors into their own form.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Engine(error) => Self::from_engine(error, message),
            Error::Adapter(error) => Self::from_adapter(&error, message),
            Error::Busy(_) => Self::unavailable(message, Duration::from_secs(1)),
            Error::Grammar(_) => {
                Self::invalid(None, message).code("invalid_json_schema_or_grammar")
            }
            Error::Image { .. } => Self::invalid(Some("messages"), message),
            Error::Tokenizer(_) | Error::NoTokenizer => Self::invalid(Some("prompt"), message),
            Error::ChatTemplate(_) => Self::invalid(Some("messages"), message),
            Error::NoInfill => Self::invalid(Some("suffix"), message).code("unsupported_endpoint"),
            Error::NotForEmbeddings { .. }
            | Error::EmbeddingsOnly { .. }
            | Error::NotForScores { .. }
            | Error::ScoresOnly { .. } => Self::invalid(None, message).code("unsupported_endpoint"),
            Error::Tier(TierError::StoredKv(_)) => {
                Self::invalid(None, message).code("stored_kv_refused")
            }
            Error::Tier(TierError::NotCached { .. }) => Self::new(StatusCode::CONFLICT, message),
            Error::Tier(TierError::NoKvCopies) => Self::new(StatusCode::NOT_IMPLEMENTED, message),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}

/// The reply for a handler that panicked. The panic has been logged on standard error.
pub(crate) fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    ApiError::internal().into_response()
}

impl ApiError {
    fn from_session(error: &SessionError, message: String) -> Self {
        let (status, code) = match error {
            SessionError::Unknown { .. } => (StatusCode::NOT_FOUND, "session_not_found"),
            SessionError::Busy { .. } => (StatusCode::CONFLICT, "session_busy"),
            SessionError::Exists { .. } => (StatusCode::CONFLICT, "session_exists"),
            SessionError::OtherNamespace { .. } => (StatusCode::BAD_REQUEST, "invalid_value"),
            _ => return Self::too_many_sessions(message),
        };
        Self { param: Some("session_id".to_owned()), ..Self::new(status, message).code(code) }
    }

    /// A session can be opened as soon as the turn of any other one ends.
    fn too_many_sessions(message: String) -> Self {
        let error = Self::too_many(message, "too_many_sessions", Duration::from_secs(1));
        Self { param: Some("session_id".to_owned()), ..error }
    }

    /// The error of a pin in a KV pool of `pool_blocks` blocks, with what the operator can do.
    pub(crate) fn of_pin(error: Error, pool_blocks: usize) -> Self {
        let needed = match &error {
            Error::Engine(EngineError::Pin(PinError::OverBudget { pinned, requested, .. })) => {
                pinned.saturating_add(*requested)
            }
            _ => return error.into(),
        };
        let hint = match needed < pool_blocks {
            true => format!("start the server with --pin-budget {needed} or more"),
            // The pool has to be larger than the budget.
            false => format!(
                "unpin prompts, or start the server with --pin-budget {needed} or more and a larger \
                 KV pool than the {pool_blocks} blocks that it has (--kv-memory or --num-blocks)"
            ),
        };
        Self::from(error).with_hint(&format!(": {hint}"))
    }

    fn from_pin(error: &PinError, message: String) -> Self {
        let (message, code) = match error {
            PinError::NotCached => (message, "prompt_not_cached"),
            PinError::OverBudget { .. } => (message, "pin_budget_exceeded"),
            _ => return Self::new(StatusCode::CONFLICT, message),
        };
        Self::new(StatusCode::CONFLICT, message).code(code)
    }

    fn from_engine(error: EngineError, message: String) -> Self {
        match error {
            EngineError::EmptyPrompt | EngineError::TokenOutOfRange { .. } => {
                Self::invalid(Some("prompt"), message)
            }
            // The room next to pins is not a property of the model: the same prompt may fit later.
            EngineError::PromptTooLong { limit, bound, .. }
                if !matches!(bound, LengthBound::Pins { .. }) =>
            {
                // Clients look for these words to find out that they have to shorten the prompt.
                let message =
                    format!("This model's maximum context length is {limit} tokens: {message}");
                Self::invalid(Some("prompt"), message).code("context_length_exceeded")
            }
            EngineError::InvalidParameter { name, .. } => {
                Self::invalid(Some(&name), message).code("invalid_value")
            }
            EngineError::Session(error) => Self::from_session(&error, message),
            EngineError::Pin(error) => Self::from_pin(&error, message),
            EngineError::Overloaded { retry_after, queued_requests, queued_tokens } => {
                let message = format!(
                    "overloaded: {queued_requests} requests with {queued_tokens} uncached tokens \
                     are waiting; try again in {} s",
                    whole_seconds(retry_after)
                );
                Self::too_many(message, "overloaded", retry_after)
            }
            EngineError::ImagesOverloaded { retry_after, .. } => {
                Self::too_many(message, "overloaded", retry_after)
            }
            EngineError::QuotaExceeded {
                retry_after,
                tokens_in_flight,
                tokens,
                running_tokens,
                queued_tokens,
            } => {
                let message = format!(
                    "the requests with this API key have {tokens_in_flight} tokens, and this one \
                     {tokens} more: max-running-tokens is {running_tokens}, and max-queued-tokens \
                     is {queued_tokens}; try again in {} s",
                    whole_seconds(retry_after)
                );
                Self::too_many(message, "key_limit", retry_after)
            }
            error if error.is_retryable() => {
                let refused = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
                Self { retry_after: error.retry_after(), ..refused }
            }
            EngineError::Stopped | EngineError::GaveUp { .. } | EngineError::Draining => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
            }
            EngineError::LogitsProcessor { .. } => Self::invalid(None, message),
            EngineError::Timeout { .. } => Self::timed_out(message),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stolon::Pinned;

    /// Goal: each error of the engine is mapped to the status, type and code a client can act on.
    #[test]
    fn engine_errors_have_their_status() {
        let overloaded = EngineError::Overloaded {
            retry_after: Duration::from_millis(1_200),
            queued_requests: 9,
            queued_tokens: 99,
        };
        let too_long =
            EngineError::PromptTooLong { got: 9, limit: 8, bound: LengthBound::Context(8) };
        let parameter = EngineError::invalid("temperature", "at least 0", -1);
        let unavailable = "service_unavailable_error";
        for (error, status, kind, code) in [
            (EngineError::EmptyPrompt, 400, "invalid_request_error", None),
            (too_long, 400, "invalid_request_error", Some("context_length_exceeded")),
            (parameter, 400, "invalid_request_error", Some("invalid_value")),
            (overloaded, 429, "rate_limit_error", Some("overloaded")),
            (EngineError::Interrupted { reason: "x".to_owned() }, 503, unavailable, None),
            (EngineError::ProcessorBusy { reason: "x".to_owned() }, 503, unavailable, None),
            (EngineError::StepFailed { reason: "x".to_owned() }, 500, "server_error", None),
            (EngineError::InvalidLogits { reason: "x".to_owned() }, 500, "server_error", None),
            (
                EngineError::LogitsProcessor { reason: "x".to_owned() },
                400,
                "invalid_request_error",
                None,
            ),
            (EngineError::Stopped, 503, "service_unavailable_error", None),
            (EngineError::Draining, 503, "service_unavailable_error", None),
            (EngineError::Audit("x".to_owned()), 500, "server_error", None),
        ] {
            let error = ApiError::from(Error::from(error));
            assert_eq!(error.status.as_u16(), status);
            let body = error.reply().error;
            assert_eq!((body.kind, body.code), (kind, code));
            assert!(!body.message.is_empty());
        }
    }

    /// Goal: programs learn from the code why a prompt was not pinned, and people what would help.
    #[test]
    fn refused_pins_have_a_code() {
        let over_budget = PinError::OverBudget { budget: 8, pinned: 6, requested: 4 };
        let larger =
            "a larger KV pool than the 10 blocks that it has (--kv-memory or --num-blocks)";
        for (error, pool_blocks, code, words) in [
            (PinError::NotCached, 40, "prompt_not_cached", "got none"),
            (over_budget, 40, "pin_budget_exceeded", "--pin-budget 10 or more"),
            // The budget has to be smaller than the pool.
            (over_budget, 11, "pin_budget_exceeded", "--pin-budget 10 or more"),
            (over_budget, 10, "pin_budget_exceeded", larger),
        ] {
            let error = Error::from(EngineError::Pin(error));
            let error = ApiError::of_pin(error, pool_blocks).reply().error;
            assert_eq!(error.code, Some(code));
            assert!(error.message.ends_with(words), "{}", error.message);
        }
    }

    /// Goal: the error of a prompt that does not fit next to pins does not name the model's context
    /// length, and says that the prompt may be sent again.
    #[test]
    fn pins_do_not_make_a_prompt_invalid() {
        let pinned = Pinned { blocks: 3, pins: 1 };
        let bound = LengthBound::Pins { blocks: 1, block_size: 16, pinned };
        let error = EngineError::PromptTooLong { got: 40, limit: 16, bound };
        let error = ApiError::from(Error::from(error));
        assert_eq!(error.status, StatusCode::SERVICE_UNAVAILABLE);
        let message = error.message();
        assert!(message.contains("3 are pinned") && !message.contains("context"), "{message}");
        assert!(error.into_response().headers().contains_key(header::RETRY_AFTER));
    }

    /// Goal: an overloaded server sends `Retry-After`, in whole seconds rounded up.
    #[test]
    fn overload_sets_retry_after() {
        for (wait_ms, header) in [(10, "1"), (1_200, "2"), (5_000, "5")] {
            let error = EngineError::Overloaded {
                retry_after: Duration::from_millis(wait_ms),
                queued_requests: 1,
                queued_tokens: 1,
            };
            let error = ApiError::from(Error::from(error));
            assert!(error.message().ends_with(&format!("in {header} s")), "{}", error.message());
            let response = error.into_response();
            assert_eq!(response.headers()[header::RETRY_AFTER], header);
        }
    }

    /// Goal: a client that cannot open a session because all are in use learns when to try again.
    #[test]
    fn too_many_sessions_set_retry_after() {
        let error = EngineError::Session(SessionError::TooMany { max: 3 });
        let error = ApiError::from(Error::from(error));
        let body = error.reply().error;
        assert_eq!(
            (body.code, body.param.as_deref()),
            (Some("too_many_sessions"), Some("session_id"))
        );
        let response = error.into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }
}
