//! What a client is told when a request fails: a status code and OpenAI's error object.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::fields::brief;

/// A failed request, as its client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    /// The parameter at fault, where it is one parameter.
    param: Option<String>,
    /// A word programs can match on.
    code: Option<&'static str>,
    /// When another try makes sense.
    retry_after: Option<Duration>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400: the request is at fault, and so is every repetition of it.
    pub(super) fn invalid(param: Option<&str>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, message);
        Self { param: param.map(str::to_owned), ..error }
    }

    /// 400: a parameter's value is not what it has to be.
    pub(super) fn expected(param: &str, expected: &str, got: &Value) -> Self {
        let message = format!("`{param}`: expected {expected}, got {}", brief(got));
        Self::invalid(Some(param), message).code("invalid_value")
    }

    /// 400: a parameter this server does not know, or not with this value.
    pub(super) fn unsupported(param: &str, value: Option<&Value>) -> Self {
        let message = match value {
            Some(value) => format!("`{param}`: {} is not supported here", brief(value)),
            None => format!("`{param}` is not a parameter this server supports"),
        };
        Self::invalid(Some(param), message).code("unsupported_parameter")
    }

    /// 404: the model asked for is not the one that is served.
    pub(super) fn unknown_model(got: &str, served: &str) -> Self {
        let message = format!("the model `{got}` is not served here; this server has `{served}`");
        let error = Self::new(StatusCode::NOT_FOUND, message).code("model_not_found");
        Self { param: Some("model".to_owned()), ..error }
    }

    fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// OpenAI's word for the class of the status.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_FOUND => "not_found_error",
            status if status.is_client_error() => "invalid_request_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            _ => "server_error",
        }
    }

    /// The error object: `{"error": {"message", "type", "param", "code"}}`.
    pub(super) fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.to_json())).into_response();
        if let Some(wait) = self.retry_after {
            // Whole seconds, and never 0, which clients take for "at once".
            let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
