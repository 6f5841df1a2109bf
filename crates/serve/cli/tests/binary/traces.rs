//! Traces of requests, as a collector receives them by OTLP over HTTP.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use futures::StreamExt;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;
use serde_json::{Value, json};

use crate::support::{Server, TINY, fail};

/// The spans that a collector has received.
#[derive(Clone, Debug, Default)]
struct Received {
    spans: Vec<Span>,
    /// Attributes of the process that sent the last spans.
    resource: BTreeMap<String, Value>,
    headers: HeaderMap,
}

/// A collector of this process.
struct Collector {
    address: SocketAddr,
    received: Arc<Mutex<Received>>,
}

impl Collector {
    async fn start() -> Self {
        let received = Arc::new(Mutex::new(Received::default()));
        let state = Arc::clone(&received);
        let receive = async move |headers: HeaderMap, body: Bytes| {
            let Ok(request) = ExportTraceServiceRequest::decode(body) else {
                return StatusCode::BAD_REQUEST;
            };
            let mut received = state.lock().expect("no panic");
            received.headers = headers;
            for part in request.resource_spans {
                let resource = part.resource.expect("a resource");
                received.resource = attributes(&resource.attributes);
                received.spans.extend(part.scope_spans.into_iter().flat_map(|part| part.spans));
            }
            StatusCode::OK
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let app = Router::new().route("/v1/traces", post(receive));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { address, received }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Stops the server, which sends its last spans, and returns all spans.
    async fn all_of(self, server: Server) -> Received {
        server.terminate();
        let status = tokio::task::spawn_blocking(|| server.wait()).await.expect("waited");
        assert!(status.success(), "{status}");
        self.received.lock().expect("no panic").clone()
    }
}

/// Attributes by name.
fn attributes(list: &[KeyValue]) -> BTreeMap<String, Value> {
    let plain = |value: Option<AnyValue>| match value.expect("a value") {
        AnyValue::StringValue(text) => json!(text),
        AnyValue::IntValue(number) => json!(number),
        AnyValue::DoubleValue(number) => json!(number),
        AnyValue::BoolValue(is) => json!(is),
        other => panic!("{other:?}"),
    };
    let value = |value: Option<AnyValue>| match value {
        Some(AnyValue::ArrayValue(list)) => {
            list.values.into_iter().map(|value| plain(value.value)).collect()
        }
        value => plain(value),
    };
    let named = |item: &KeyValue| {
        (item.key.clone(), value(item.value.clone().and_then(|value| value.value)))
    };
    list.iter().map(named).collect()
}

/// The span of an HTTP request and those below it, checked for the attributes that all requests
/// have in common.
struct Trace<'a> {
    request: &'a Span,
    attributes: BTreeMap<String, Value>,
    phases: Vec<(&'a str, BTreeMap<String, Value>)>,
}

impl Received {
    fn trace(&self, request_id: &str) -> Trace<'_> {
        let is_it = |span: &&Span| {
            attributes(&span.attributes).get("gen_ai.request.id") == Some(&json!(request_id))
        };
        let mut found = self.spans.iter().filter(is_it);
        let request = found.next().unwrap_or_else(|| panic!("no {request_id}: {:#?}", self.spans));
        assert!(found.next().is_none(), "{request_id} twice");
        assert_eq!(request.kind, SpanKind::Server as i32);
        assert!(request.start_time_unix_nano <= request.end_time_unix_nano);
        let mut phases = Vec::new();
        for span in self.spans.iter().filter(|span| span.parent_span_id == request.span_id) {
            assert_eq!(span.trace_id, request.trace_id, "{}", span.name);
            assert_eq!(span.kind, SpanKind::Internal as i32, "{}", span.name);
            let (begin, end) = (span.start_time_unix_nano, span.end_time_unix_nano);
            assert!(begin <= end, "{}", span.name);
            assert!(request.start_time_unix_nano <= begin, "{}", span.name);
            assert!(end <= request.end_time_unix_nano, "{}", span.name);
            phases.push(span);
        }
        phases.sort_by_key(|span| {
            let order = ["queue", "prefill", "decode"].iter().position(|name| *name == span.name);
            (span.start_time_unix_nano, order)
        });
        let phases: Vec<_> = phases
            .into_iter()
            .map(|span| (span.name.as_str(), attributes(&span.attributes)))
            .collect();
        Trace { request, attributes: attributes(&request.attributes), phases }
    }
}

impl Trace<'_> {
    fn phases(&self) -> Vec<&str> {
        self.phases.iter().map(|(name, _)| *name).collect()
    }

    /// Checks that it has these attributes.
    fn check(&self, expected: &[(&str, Value)]) {
        for (name, value) in expected {
            assert_eq!(self.attributes.get(*name), Some(value), "{name}: {:#?}", self.attributes);
        }
    }
}

const COMPLETIONS: &str = "/v1/completions";

fn ask(max_tokens: i64) -> Value {
    json!({"prompt": "a secret of some twenty bytes", "max_tokens": max_tokens,
           "ignore_eos": true, "temperature": 0})
}

/// Starts a streamed answer, and returns the reply when its first bytes are there.
async fn begin_stream(server: &Server, id: &str, mut body: Value) -> reqwest::Response {
    body["stream"] = json!(true);
    let request = reqwest::Client::new().post(server.url(COMPLETIONS));
    let mut reply =
        request.header("x-request-id", id).json(&body).send().await.expect("a response");
    assert!(reply.chunk().await.expect("bytes").is_some());
    reply
}

/// Goal: each request is one span of kind server with the phases of its answers inside it, whole
/// and streamed, with the numbers of its reply; a canceled and a refused one say so. The spans
/// continue the client's trace, and no text is exported.
#[tokio::test]
async fn a_request_is_a_span_with_its_phases() {
    let collector = Collector::start().await;
    let url = collector.url();
    let server = Server::with_environment(
        TINY,
        &["--otlp-traces-endpoint", &url],
        &[("OTEL_SERVICE_NAME", "tested"), ("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret1")],
    );
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let request = reqwest::Client::new().post(server.url(COMPLETIONS)).json(&ask(3));
    let request = request.header("x-request-id", "whole").header("traceparent", parent);
    assert_eq!(request.send().await.expect("a response").status(), 200);
    let reply = begin_stream(&server, "streamed", ask(4)).await;
    reply.bytes_stream().map(drop).collect::<()>().await;
    let mut several = ask(2);
    several["n"] = json!(3);
    let (status, reply) = server.post_with(COMPLETIONS, ("x-request-id", "several"), several).await;
    assert_eq!(status, 200);
    drop(begin_stream(&server, "canceled", ask(4000)).await);
    let (status, _) = server.post_with(COMPLETIONS, ("x-request-id", "refused"), ask(-1)).await;
    assert_eq!(status, 400);
    let unsampled = parent.replace("-01", "-00");
    assert_eq!(server.post_with(COMPLETIONS, ("traceparent", &unsampled), ask(1)).await.0, 200);
    assert_eq!(server.get("/health").await.0, 200);
    server.settled_audit().await;
    let received = collector.all_of(server).await;

    assert_eq!(received.resource["service.name"], "tested");
    assert_eq!(received.headers["x-token"], "secret1");
    assert!(!format!("{:?}", received.spans).contains("secret"));
    let requests = received.spans.iter().filter(|span| span.kind == SpanKind::Server as i32);
    assert_eq!(requests.count(), 5, "unsampled requests and probes are not exported");

    let whole = received.trace("whole");
    assert_eq!(whole.request.name, "POST /v1/completions");
    let hex = |id: &[u8]| id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(&whole.request.trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(hex(&whole.request.parent_span_id), "b7ad6b7169203331");
    assert_eq!(whole.phases(), ["queue", "prefill", "decode"]);
    whole.check(&[
        ("http.request.method", json!("POST")),
        ("http.route", json!(COMPLETIONS)),
        ("http.response.status_code", json!(200)),
        ("gen_ai.operation.name", json!("text_completion")),
        ("gen_ai.request.model", json!(TINY)),
        ("gen_ai.request.max_tokens", json!(3)),
        ("gen_ai.request.stream", json!(false)),
        ("gen_ai.request.temperature", json!(0.0)),
        ("gen_ai.usage.input_tokens", json!(29)),
        ("gen_ai.usage.cache_read.input_tokens", json!(0)),
        ("gen_ai.usage.output_tokens", json!(3)),
        ("gen_ai.response.finish_reasons", json!(["length"])),
    ]);
    assert!(!whole.attributes.contains_key("error.type"));
    assert_eq!(whole.phases[1].1["stolon.prefill.computed_tokens"], 29);
    assert_eq!(whole.phases[2].1["stolon.decode.tokens"], 3);

    let streamed = received.trace("streamed");
    assert!(streamed.request.parent_span_id.is_empty(), "the beginning of a trace");
    assert_ne!(streamed.request.trace_id, whole.request.trace_id);
    assert_eq!(streamed.phases(), ["queue", "prefill", "decode"]);
    streamed.check(&[
        ("gen_ai.request.stream", json!(true)),
        ("gen_ai.usage.cache_read.input_tokens", json!(16)),
        ("gen_ai.usage.output_tokens", json!(4)),
    ]);

    let several = received.trace("several");
    assert_eq!(several.phases.len(), 9);
    several.check(&[
        ("gen_ai.request.choice.count", json!(3)),
        ("gen_ai.usage.input_tokens", reply["usage"]["prompt_tokens"].clone()),
        ("gen_ai.usage.output_tokens", reply["usage"]["completion_tokens"].clone()),
        ("gen_ai.response.finish_reasons", json!(["length", "length", "length"])),
    ]);

    let canceled = received.trace("canceled");
    canceled.check(&[
        ("error.type", json!("canceled")),
        ("gen_ai.response.finish_reasons", json!(["canceled"])),
    ]);
    assert_eq!(canceled.phases(), ["queue", "prefill", "decode"]);
    let generated = canceled.attributes["gen_ai.usage.output_tokens"].as_i64();
    assert!(generated.is_some_and(|generated| (1..4000).contains(&generated)), "{generated:?}");

    let refused = received.trace("refused");
    assert!(refused.phases.is_empty());
    refused.check(&[
        ("http.response.status_code", json!(400)),
        ("error.type", json!("invalid_value")),
    ]);
}

/// The value of the counter of spans with this outcome.
async fn spans(server: &Server, outcome: &str) -> u64 {
    let reply = reqwest::get(server.url("/metrics")).await.expect("a reply");
    let text = reply.text().await.expect("text");
    let is_it = |line: &&str| {
        line.starts_with("stolon:trace_spans_total")
            && line.contains(&format!("outcome=\"{outcome}\""))
    };
    let line = text.lines().find(is_it).unwrap_or_else(|| panic!("no counter in {text}"));
    line.rsplit(' ').next().and_then(|count| count.parse().ok()).expect("a number")
}

/// Waits until this many spans have this outcome.
async fn wait_for_spans(server: &Server, outcome: &str, least: u64) {
    while spans(server, outcome).await < least {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Goal: with a collector that accepts connections and never answers, or with none, all requests
/// are answered, spans beyond the queue are dropped and counted, the log says so once, and the
/// server stops in a bounded time.
#[tokio::test]
async fn a_collector_that_fails_hurts_no_request() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address");
    let url = format!("http://{address}");
    let slow = Server::with_environment(
        TINY,
        &["--otlp-traces-endpoint", &url],
        &[("OTEL_BSP_MAX_QUEUE_SIZE", "10"), ("OTEL_EXPORTER_OTLP_TIMEOUT", "600000")],
    );
    for _ in 0..5 {
        slow.ok(COMPLETIONS, ask(1)).await;
    }
    // Two requests of four spans each fit.
    wait_for_spans(&slow, "queue_full", 12).await;
    assert_eq!(spans(&slow, "queue_full").await, 12);
    slow.terminate();
    let status = tokio::task::spawn_blocking(|| slow.wait()).await.expect("waited");
    assert!(status.success(), "{status}");

    drop(silent);
    let refusing = Server::with_environment(
        TINY,
        &[],
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &url),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "100"),
            ("OTEL_BSP_SCHEDULE_DELAY", "20"),
        ],
    );
    for count in 1..=3 {
        refusing.ok(COMPLETIONS, ask(1)).await;
        wait_for_spans(&refusing, "failed", count * 4).await;
    }
    let log = refusing.stop_and_read_errors();
    assert_eq!(log.matches("traces are lost").count(), 1, "{log}");
    assert!(log.contains(&format!("{url}/v1/traces")), "{log}");
}

/// Goal: a wrong flag is refused with what was expected; variables that cannot be used are a
/// warning, and can turn traces off.
#[tokio::test]
async fn settings_are_checked() {
    for bad in ["localhost:4317", "grpc://localhost:4317"] {
        let error = fail(&["serve", "--model", TINY, "--otlp-traces-endpoint", bad]);
        assert!(error.contains("--otlp-traces-endpoint") && error.contains("4318"), "{error}");
    }
    let grpc = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
    ];
    let server = Server::with_environment(TINY, &[], &grpc);
    server.ok(COMPLETIONS, ask(1)).await;
    let log = server.stop_and_read_errors();
    assert!(log.contains("no traces") && log.contains("http/protobuf"), "{log}");
    let untrusted = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://localhost:4318"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/authority.pem"),
    ];
    let server = Server::with_environment(TINY, &[], &untrusted);
    let log = server.stop_and_read_errors();
    assert!(log.contains("no traces") && log.contains("/nowhere/authority.pem"), "{log}");
    let off = [("OTEL_EXPORTER_OTLP_ENDPOINT", "nonsense"), ("OTEL_SDK_DISABLED", "true")];
    let server = Server::with_environment(TINY, &[], &off);
    server.ok(COMPLETIONS, ask(1)).await;
    let text = reqwest::get(server.url("/metrics")).await.expect("a reply").text().await;
    assert!(!text.expect("text").contains("trace_spans"));
    assert_eq!(server.stop_and_read_errors(), "");
}
