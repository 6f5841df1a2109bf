//! Sends spans to a collector: OTLP over HTTP, from a separate thread.
//!
//! Spans wait in a queue of bounded length. If the collector is slow or down, they are dropped and
//! counted, and requests notice nothing.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use async_trait::async_trait;
use axum::http::Uri;
use opentelemetry::trace::TracerProvider;
use opentelemetry::{InstrumentationScope, Key};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider, SpanData,
};

use super::SpanCounts;
use super::layer::SpanLayer;
use crate::wire::certificates::Authorities;

/// Maximum number of spans that wait for the collector, unless `OTEL_BSP_MAX_QUEUE_SIZE` sets
/// another.
const MAX_QUEUED: usize = 2048;
/// Maximum time of one attempt to send spans, unless `OTEL_EXPORTER_OTLP_TIMEOUT` sets another.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a collector's reply, in bytes.
const MAX_REPLY_BYTES: u64 = 64 << 10;
/// Maximum time for sending the last spans at the end of the process.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);

/// The export of this process.
#[derive(Debug)]
pub struct Export(SdkTracerProvider);

/// Counts spans, and bounds how many wait.
#[derive(Debug)]
pub(super) struct Counts {
    max_queued: usize,
    queued: AtomicUsize,
    exported: AtomicU64,
    queue_full: AtomicU64,
    failed: AtomicU64,
}

/// Whether the variables of OpenTelemetry turn traces off.
pub(super) fn is_disabled() -> bool {
    let is = |name, value: &str| variable(name).is_some_and(|is| is.eq_ignore_ascii_case(value));
    is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none")
}

/// The collector that the variables of OpenTelemetry name, and the variable.
pub(super) fn endpoint_of_environment() -> Option<(&'static str, String)> {
    let (own, common) = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT");
    if let Some(endpoint) = variable(own) {
        return Some((own, endpoint));
    }
    let base = variable(common)?;
    Some((common, format!("{}/v1/traces", base.trim_end_matches('/'))))
}

/// The value of a variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// Starts the thread that sends spans.
pub(super) fn start(endpoint: &str) -> anyhow::Result<(SpanLayer, Export)> {
    let endpoint = checked(endpoint)?;
    for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
        if let Some(protocol) = variable(name) {
            let message = "this program supports the protocol http/protobuf, to which collectors \
                           usually listen on port 4318";
            ensure!(protocol == "http/protobuf", "{name} is {protocol}, but {message}");
            break;
        }
    }
    let problem = Arc::new(Mutex::new(String::new()));
    let sender = SpanExporter::builder()
        .with_http()
        .with_http_client(Client::new(Arc::clone(&problem))?)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(&endpoint)
        .build()
        .context("cannot export traces")?;
    let limit = variable("OTEL_BSP_MAX_QUEUE_SIZE").and_then(|limit| limit.parse().ok());
    let counts = Arc::new(Counts::new(limit.filter(|&limit| limit > 0).unwrap_or(MAX_QUEUED)));
    let is_failing = AtomicBool::new(false);
    let exporter = Exporter { sender, counts: Arc::clone(&counts), endpoint, problem, is_failing };
    let config = BatchConfigBuilder::default().with_max_queue_size(counts.max_queued).build();
    let provider = SdkTracerProvider::builder()
        .with_span_processor(BatchSpanProcessor::new(exporter, config))
        .with_resource(resource())
        .build();
    let scope = InstrumentationScope::builder("stolon").with_version(env!("CARGO_PKG_VERSION"));
    let layer = SpanLayer::new(provider.tracer_with_scope(scope.build()), counts);
    Ok((layer, Export(provider)))
}

/// The address of a collector, with the usual path if it has none.
fn checked(endpoint: &str) -> anyhow::Result<String> {
    let expected = "expected an address such as http://localhost:4318/v1/traces (OTLP over HTTP)";
    let uri: Uri = endpoint.parse().ok().with_context(|| format!("{expected}, got {endpoint}"))?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    ensure!(is_http, "{expected}, got {endpoint}");
    Ok(match uri.path_and_query().map(|path| path.as_str()) {
        None | Some("" | "/") => format!("{}/v1/traces", endpoint.trim_end_matches('/')),
        Some(_) => endpoint.to_owned(),
    })
}

/// The attributes of this process in all traces.
fn resource() -> Resource {
    let found = Resource::builder().build();
    let name = found.get(&Key::new("service.name")).map(|name| name.to_string());
    match name {
        Some(name) if !name.starts_with("unknown_service") => found,
        _ => Resource::builder().with_service_name("stolon").build(),
    }
}

impl Export {
    /// Sends the spans that wait, for at most 5 seconds.
    pub fn finish(self) {
        // Failures have been reported, and the process ends.
        let _ = self.0.shutdown_with_timeout(FINISH_TIMEOUT);
    }
}

impl Counts {
    fn new(max_queued: usize) -> Self {
        let zero = AtomicU64::default;
        let (exported, queue_full, failed) = (zero(), zero(), zero());
        Self { max_queued, queued: AtomicUsize::new(0), exported, queue_full, failed }
    }

    /// Takes places in the queue. Returns false, and counts the spans as dropped, if there are too
    /// few.
    pub(super) fn enqueue(&self, spans: usize) -> bool {
        // The counts guard no other memory, so relaxed ordering suffices.
        let taken = self.queued.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |queued| {
            Some(queued + spans).filter(|&queued| queued <= self.max_queued)
        });
        if taken.is_err() {
            self.queue_full.fetch_add(spans as u64, Ordering::Relaxed);
        }
        taken.is_ok()
    }

    /// Returns places in the queue.
    pub(super) fn dequeue(&self, spans: usize) {
        self.queued.fetch_sub(spans, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> SpanCounts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (exported, queue_full) = (of(&self.exported), of(&self.queue_full));
        SpanCounts { exported, queue_full, failed: of(&self.failed) }
    }
}

/// Sends spans, counts them, and says in the log when the collector fails and when it works again.
#[derive(Debug)]
struct Exporter {
    sender: SpanExporter,
    counts: Arc<Counts>,
    endpoint: String,
    /// The error of the last request to the collector.
    problem: Arc<Mutex<String>>,
    is_failing: AtomicBool,
}

impl opentelemetry_sdk::trace::SpanExporter for Exporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len();
        let result = self.sender.export(batch).await;
        self.counts.dequeue(count);
        let counted = if result.is_ok() { &self.counts.exported } else { &self.counts.failed };
        counted.fetch_add(count as u64, Ordering::Relaxed);
        let was_failing = self.is_failing.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !was_failing => {
                let problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
                let endpoint = &self.endpoint;
                tracing::warn!("traces are lost, because {endpoint} fails: {error}: {problem}");
            }
            Ok(()) if was_failing => {
                let lost = self.counts.read();
                let (lost, endpoint) = (lost.failed + lost.queue_full, &self.endpoint);
                tracing::warn!("traces are exported to {endpoint} again; {lost} spans were lost");
            }
            _ => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.sender.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.sender.set_resource(resource);
    }
}

/// The HTTP client of the exporter. It blocks, which is right on the exporter's own thread.
#[derive(Debug)]
struct Client {
    agent: ureq::Agent,
    problem: Arc<Mutex<String>>,
}

impl Client {
    fn new(problem: Arc<Mutex<String>>) -> anyhow::Result<Self> {
        let names = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
        let timeout = names.into_iter().find_map(|name| variable(name)?.parse().ok());
        let mut config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_global(Some(timeout.map_or(SEND_TIMEOUT, Duration::from_millis)));
        let names = ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"];
        if let Some((name, path)) = names.into_iter().find_map(|name| Some((name, variable(name)?)))
        {
            let authorities = Authorities::read(Path::new(&path));
            let authorities = authorities.with_context(|| format!("{name} {path}"))?;
            config = config.tls_config(authorities.for_ureq());
        }
        Ok(Self { agent: ureq::Agent::new_with_config(config.build()), problem })
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, ureq::Error> {
        let (parts, body) = request.into_parts();
        let reply = self.agent.run(Request::from_parts(parts, &body[..]))?;
        let (parts, mut body) = reply.into_parts();
        let body = body.with_config().limit(MAX_REPLY_BYTES).read_to_vec()?;
        Ok(Response::from_parts(parts, body.into()))
    }
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let result = self.send(request);
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = match &result {
            Ok(reply) => format!("status {}", reply.status()),
            Err(error) => error.to_string(),
        };
        result.map_err(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an address of HTTP is completed by the usual path; anything else is refused with what
    /// was expected.
    #[test]
    fn addresses_are_checked() {
        for (given, used) in [
            ("http://localhost:4318", "http://localhost:4318/v1/traces"),
            ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
            ("https://a.example/otlp", "https://a.example/otlp"),
            ("https://a.example?key=1", "https://a.example?key=1"),
        ] {
            assert_eq!(checked(given).expect(given), used);
        }
        for bad in ["", "localhost:4317", "grpc://localhost:4317", "/v1/traces", "http://"] {
            let error = checked(bad).expect_err(bad).to_string();
            assert!(error.contains("expected an address"), "{bad}: {error}");
        }
    }

    /// Goal: no more spans than allowed wait, a request's spans are kept or dropped together, and
    /// the dropped ones are counted.
    #[test]
    fn the_queue_is_bounded() {
        let counts = Counts::new(10);
        assert!(counts.enqueue(4) && counts.enqueue(4));
        assert!(!counts.enqueue(4));
        assert!(counts.enqueue(2));
        counts.dequeue(4);
        assert!(counts.enqueue(4));
        assert_eq!(counts.read().queue_full, 4);
    }
}
