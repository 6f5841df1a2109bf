//! Traces of requests in OpenTelemetry's form, exported to a collector by OTLP over HTTP.
//!
//! Nothing is measured here. The server's log has a `tracing` span of each HTTP request, and in it
//! one of each answer that the engine computes, whose fields are the engine's own times and
//! numbers. The layer in `layer.rs` collects both. When an HTTP request has ended, `spans.rs` makes
//! one span of kind `server` with the phases of each answer below it, and `export.rs` sends it. The
//! text of prompts and answers is never part of it.
//!
//! Without the feature `otel` there are only empty functions, and without a collector no layer.

use axum::body::Body;
use axum::http::Request;
use axum::response::Response;
use stolon::SamplingParams;
use tracing::Span;

#[cfg(feature = "otel")]
mod export;
#[cfg(feature = "otel")]
mod layer;
#[cfg(feature = "otel")]
mod spans;

#[cfg(feature = "otel")]
pub use export::Export;
#[cfg(feature = "otel")]
pub use layer::SpanLayer;

/// The options of a request that are part of its trace.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "otel"), allow(dead_code, reason = "read only by traces"))]
pub(crate) struct Asked<'a> {
    /// The model's name as the client wrote it.
    pub(crate) requested_model: &'a str,
    /// The model's id.
    pub(crate) model: &'a str,
    /// Maximum number of tokens of an answer.
    pub(crate) max_tokens: usize,
    /// Answers to each prompt.
    pub(crate) choices: usize,
    /// Whether the reply is sent in pieces.
    pub(crate) stream: bool,
    /// The sampling parameters.
    pub(crate) sampling: &'a SamplingParams,
}

/// Numbers of spans since the start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpanCounts {
    /// Spans that the collector has accepted.
    pub(crate) exported: u64,
    /// Spans that were dropped because too many waited for the collector.
    pub(crate) queue_full: u64,
    /// Spans that the collector did not accept.
    pub(crate) failed: u64,
}

/// Begins the export of traces: to `endpoint`, or to the collector that the variables of
/// OpenTelemetry name. `None` if there is neither, or if the variables switch traces off.
///
/// Variables may be set for all programs of a machine or of a pod, so a value that cannot be used
/// is not an error: `warn` gets a sentence, and there are no traces.
///
/// # Errors
/// If `endpoint` is not an address of HTTP, or the exporter cannot be made.
#[cfg(feature = "otel")]
pub fn start(
    endpoint: Option<&str>,
    warn: impl FnOnce(String),
) -> anyhow::Result<Option<(SpanLayer, Export)>> {
    if export::is_disabled() {
        return Ok(None);
    }
    if let Some(endpoint) = endpoint {
        return export::start(endpoint).map(Some);
    }
    let Some((variable, endpoint)) = export::endpoint_of_environment() else { return Ok(None) };
    match export::start(&endpoint) {
        Ok(started) => Ok(Some(started)),
        Err(error) => {
            warn(format!("no traces are exported: {variable}: {error:#}"));
            Ok(None)
        }
    }
}

/// Begins the trace of a request, whose span in the log has just been made.
#[cfg(feature = "otel")]
pub(crate) fn begin(span: &Span, request: &Request<Body>, request_id: &str) {
    layer::begin(span, request, request_id);
}

/// Adds the name of a request's operation to its trace.
#[cfg(feature = "otel")]
pub(crate) fn operation(name: &'static str) {
    layer::operation(name);
}

/// Adds the request's options to its trace.
#[cfg(feature = "otel")]
pub(crate) fn describe(asked: Asked<'_>) {
    layer::describe(asked);
}

/// Adds the status of the reply, and its error code, to a request's trace.
#[cfg(feature = "otel")]
pub(crate) fn replied(span: &Span, response: &Response, error: Option<&'static str>) {
    layer::replied(span, response.status(), error);
}

/// The numbers of spans; `None` if no traces are exported.
#[cfg(feature = "otel")]
pub(crate) fn counts() -> Option<SpanCounts> {
    layer::counts()
}

#[cfg(not(feature = "otel"))]
mod disabled {
    use super::*;

    pub(crate) fn begin(_: &Span, _: &Request<Body>, _: &str) {}

    pub(crate) fn operation(_: &'static str) {}

    pub(crate) fn describe(_: Asked<'_>) {}

    pub(crate) fn replied(_: &Span, _: &Response, _: Option<&'static str>) {}

    pub(crate) fn counts() -> Option<SpanCounts> {
        None
    }
}

#[cfg(not(feature = "otel"))]
pub(crate) use disabled::*;
