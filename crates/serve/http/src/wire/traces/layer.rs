//! Collects the fields of the log's spans for each HTTP request.
//!
//! 1. [`begin`] adds an [`HttpCall`] to the span of a request.
//! 2. The engine makes a span of each answer in it; the layer adds an [`Answer`] to that span,
//!    which takes the fields as they are recorded.
//! 3. When the span of an answer closes, the answer moves to its request. The span of the request
//!    closes after those in it, once the reply has been sent or the client has disconnected.
//! 4. The request is exported.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use axum::extract::MatchedPath;
use axum::http::{Method, Request, StatusCode};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracer;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Span, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterFn, LevelFilter, filter_fn};
use tracing_subscriber::layer::Context as LayerContext;
use tracing_subscriber::registry::{LookupSpan, Registry};

use super::export::Counts;
use super::{Asked, SpanCounts, spans};

/// Names of the two kinds of spans.
const HTTP_REQUEST: &str = "http_request";
const ANSWER: &str = "request";

/// The layer of the log that makes traces.
#[derive(Debug)]
pub struct SpanLayer {
    tracer: SdkTracer,
    counts: Arc<Counts>,
}

/// An HTTP request in progress.
#[derive(Debug)]
pub(super) struct HttpCall {
    /// Time of arrival on two clocks. All other times are measured from here by the monotonic one.
    pub(super) arrived: (SystemTime, Instant),
    /// The client's span, if it sent one.
    pub(super) parent: Context,
    pub(super) name: String,
    pub(super) attributes: Vec<KeyValue>,
    /// Status of the reply; `None` if the client disconnected before it.
    pub(super) status: Option<StatusCode>,
    /// The code of the error, if there was one.
    pub(super) error: Option<&'static str>,
    pub(super) answers: Vec<Answer>,
}

/// An answer that the engine has computed or has begun. The fields are those of its span.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) id: u64,
    /// Number of this answer among those to the same prompt, from 0.
    pub(super) choice: u64,
    pub(super) submitted: Instant,
    pub(super) ended: Instant,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) completion_tokens: u64,
    /// From the submission until it left the queue; `None` if it never did.
    pub(super) queue: Option<Duration>,
    /// From the submission to the first token; `None` if there was none.
    pub(super) first_token: Option<Duration>,
    /// `finished`, `canceled` or `failed`.
    pub(super) outcome: String,
    /// Why it ended: the engine's finish reason, or the error of a failed answer.
    pub(super) reason: String,
}

impl SpanLayer {
    pub(super) fn new(tracer: SdkTracer, counts: Arc<Counts>) -> Self {
        Self { tracer, counts }
    }

    /// A filter with the spans that the layer needs, independent of the log's level.
    #[must_use]
    pub fn filter() -> FilterFn<fn(&Metadata<'_>) -> bool> {
        let needed: fn(&Metadata<'_>) -> bool = |metadata| {
            metadata.is_span()
                && matches!(metadata.name(), HTTP_REQUEST | ANSWER)
                && metadata.target().starts_with("stolon")
        };
        filter_fn(needed).with_max_level_hint(LevelFilter::INFO)
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: LayerContext<'_, S>) {
        if attributes.metadata().name() != ANSWER {
            return;
        }
        let Some(span) = context.span(id) else { return };
        let mut answer = Answer::new();
        attributes.record(&mut answer);
        span.extensions_mut().replace(answer);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: LayerContext<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(answer) = span.extensions_mut().get_mut::<Answer>() {
            values.record(answer);
        }
    }

    fn on_close(&self, id: Id, context: LayerContext<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let answer = span.extensions_mut().remove::<Answer>();
        if let Some(mut answer) = answer {
            answer.ended = Instant::now();
            for around in span.scope().skip(1) {
                if let Some(call) = around.extensions_mut().get_mut::<HttpCall>() {
                    return call.answers.push(answer);
                }
            }
            return;
        }
        let call = span.extensions_mut().remove::<HttpCall>();
        if let Some(call) = call {
            spans::export(&self.tracer, &self.counts, call, Instant::now());
        }
    }
}

/// Begins the trace of a request. Only requests with the method POST and a known path are traced;
/// probes and pages are not.
pub(super) fn begin(span: &Span, request: &Request<Body>, request_id: &str) {
    let Some(route) = request.extensions().get::<MatchedPath>() else { return };
    if request.method() != Method::POST {
        return;
    }
    let arrived = (SystemTime::now(), Instant::now());
    span.with_subscriber(|(id, log)| {
        if log.downcast_ref::<SpanLayer>().is_none() {
            return;
        }
        let Some(span) = log.downcast_ref::<Registry>().and_then(|log| log.span(id)) else {
            return;
        };
        let client = HeaderExtractor(request.headers());
        let route = route.as_str();
        let attributes = vec![
            KeyValue::new("http.request.method", request.method().as_str().to_owned()),
            KeyValue::new("http.route", route.to_owned()),
            KeyValue::new("url.path", request.uri().path().to_owned()),
            // vLLM's name for it.
            KeyValue::new("gen_ai.request.id", request_id.to_owned()),
        ];
        span.extensions_mut().replace(HttpCall {
            arrived,
            parent: TraceContextPropagator::new().extract_with_context(&Context::new(), &client),
            name: format!("{} {route}", request.method()),
            attributes,
            status: None,
            error: None,
            answers: Vec::new(),
        });
    });
}

/// Adds the name of the operation of the current request.
pub(super) fn operation(name: &'static str) {
    with_call(&Span::current(), |call| {
        call.attributes.push(KeyValue::new("gen_ai.operation.name", name));
    });
}

/// Adds the options of the current request.
pub(super) fn describe(asked: Asked<'_>) {
    with_call(&Span::current(), |call| call.attributes.extend(spans::asked(asked)));
}

/// Adds the status of the reply.
pub(super) fn replied(span: &Span, status: StatusCode, error: Option<&'static str>) {
    with_call(span, |call| (call.status, call.error) = (Some(status), error));
}

/// Changes the trace of a request, if there is one.
fn with_call(span: &Span, change: impl FnOnce(&mut HttpCall)) {
    span.with_subscriber(|(id, log)| {
        let Some(span) = log.downcast_ref::<Registry>().and_then(|log| log.span(id)) else {
            return;
        };
        for span in span.scope() {
            if let Some(call) = span.extensions_mut().get_mut::<HttpCall>() {
                return change(call);
            }
        }
    });
}

/// The numbers of spans of this process.
pub(super) fn counts() -> Option<SpanCounts> {
    tracing::dispatcher::get_default(|log| {
        log.downcast_ref::<SpanLayer>().map(|layer| layer.counts.read())
    })
}

impl Answer {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            id: 0,
            choice: 0,
            submitted: now,
            ended: now,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            queue: None,
            first_token: None,
            outcome: String::new(),
            reason: String::new(),
        }
    }
}

impl Visit for Answer {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "id" => self.id = value,
            "choice" => self.choice = value,
            "prompt_tokens" => self.prompt_tokens = value,
            "cached_tokens" => self.cached_tokens = value,
            "completion_tokens" => self.completion_tokens = value,
            _ => {}
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        let time = Duration::try_from_secs_f64(value / 1e3).ok();
        match field.name() {
            "queue_ms" => self.queue = time,
            "ttft_ms" => self.first_token = time,
            _ => {}
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "outcome" {
            value.clone_into(&mut self.outcome);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "reason" {
            self.reason = format!("{value:?}");
        }
    }
}
