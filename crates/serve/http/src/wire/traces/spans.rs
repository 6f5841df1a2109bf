//! The spans of an HTTP request that has ended, with the names of OpenTelemetry's conventions for
//! HTTP servers and for generative AI. Names that the conventions lack begin with `stolon.`.

use std::borrow::Cow;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::{Span as _, SpanBuilder, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::SdkTracer;

use super::Asked;
use super::export::Counts;
use super::layer::{Answer, HttpCall};

/// The attributes of a request's options.
pub(super) fn asked(asked: Asked<'_>) -> Vec<KeyValue> {
    let sampling = asked.sampling;
    let float = |name: &'static str, value: f32| KeyValue::new(name, f64::from(value));
    let mut attributes = vec![
        KeyValue::new("gen_ai.provider.name", "stolon"),
        KeyValue::new("gen_ai.request.model", asked.requested_model.to_owned()),
        KeyValue::new("gen_ai.response.model", asked.model.to_owned()),
        KeyValue::new("gen_ai.request.max_tokens", int(asked.max_tokens as u64)),
        KeyValue::new("gen_ai.request.stream", asked.stream),
        float("gen_ai.request.temperature", sampling.temperature),
        float("gen_ai.request.top_p", sampling.top_p),
    ];
    if asked.choices != 1 {
        attributes.push(KeyValue::new("gen_ai.request.choice.count", int(asked.choices as u64)));
    }
    if let Some(k) = sampling.top_k {
        attributes.push(KeyValue::new("gen_ai.request.top_k", k as f64));
    }
    if let Some(seed) = sampling.seed {
        attributes.push(KeyValue::new("gen_ai.request.seed", int(seed)));
    }
    for (name, penalty) in [
        ("gen_ai.request.frequency_penalty", sampling.frequency_penalty),
        ("gen_ai.request.presence_penalty", sampling.presence_penalty),
    ] {
        if penalty != 0.0 {
            attributes.push(float(name, penalty));
        }
    }
    attributes
}

/// An attribute's number.
fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Hands the spans of a request over to the exporter, all or none of them.
pub(super) fn export(tracer: &SdkTracer, counts: &Counts, mut call: HttpCall, ended: Instant) {
    call.answers.sort_by_key(|answer| answer.id);
    let phases: Vec<Phase> = call.answers.iter().flat_map(phases).collect();
    let span_count = phases.len() + 1;
    if !counts.enqueue(span_count) {
        return;
    }
    let clock = Clock { arrived: call.arrived, ended };
    let (status, error) = outcome(&call);
    let mut attributes = std::mem::take(&mut call.attributes);
    if let Some(status) = call.status {
        attributes.push(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
    }
    if let Some(error) = error {
        attributes.push(KeyValue::new("error.type", error));
    }
    attributes.extend(usage(&call.answers));
    let builder = SpanBuilder::from_name(call.name)
        .with_kind(SpanKind::Server)
        .with_start_time(clock.at(call.arrived.1))
        .with_attributes(attributes);
    let mut server = tracer.build_with_context(builder, &call.parent);
    if !server.is_recording() {
        return counts.dequeue(span_count); // The sampler has decided against it.
    }
    let parent = Context::new().with_remote_span_context(server.span_context().clone());
    for phase in phases {
        let builder = SpanBuilder::from_name(phase.name)
            .with_kind(SpanKind::Internal)
            .with_start_time(clock.at(phase.begins))
            .with_attributes(phase.attributes);
        let mut span = tracer.build_with_context(builder, &parent);
        span.set_status(phase.status);
        span.end_with_timestamp(clock.at(phase.ends));
    }
    server.set_status(status);
    server.end_with_timestamp(clock.at(ended));
}

/// Turns the moments of a request into times of day.
struct Clock {
    arrived: (SystemTime, Instant),
    ended: Instant,
}

impl Clock {
    /// The time of a moment, limited to the time of the request.
    fn at(&self, moment: Instant) -> SystemTime {
        let since = moment.min(self.ended).saturating_duration_since(self.arrived.1);
        self.arrived.0 + since
    }
}

/// A phase of an answer.
struct Phase {
    name: &'static str,
    begins: Instant,
    ends: Instant,
    attributes: Vec<KeyValue>,
    status: Status,
}

/// The phases of an answer: in the queue, from there to the first token, and to the end.
fn phases(answer: &Answer) -> Vec<Phase> {
    let at = |time: Option<Duration>| {
        time.map_or(answer.ended, |time| (answer.submitted + time).min(answer.ended))
    };
    let (started, first) = (at(answer.queue), at(answer.first_token));
    let phase = |name, begins, ends: Instant| {
        let mut attributes = vec![KeyValue::new("stolon.request.id", int(answer.id))];
        if answer.choice > 0 {
            attributes.push(KeyValue::new("stolon.choice", int(answer.choice)));
        }
        Phase { name, begins, ends: ends.max(begins), attributes, status: Status::Unset }
    };
    let mut phases = vec![phase("queue", answer.submitted, started)];
    if answer.queue.is_some() {
        let mut prefill = phase("prefill", started, first);
        let computed = answer.prompt_tokens.saturating_sub(answer.cached_tokens);
        prefill.attributes.extend([
            KeyValue::new("stolon.prefill.cached_tokens", int(answer.cached_tokens)),
            KeyValue::new("stolon.prefill.computed_tokens", int(computed)),
        ]);
        phases.push(prefill);
    }
    if answer.first_token.is_some() {
        let mut decode = phase("decode", first, answer.ended);
        let tokens = int(answer.completion_tokens);
        decode.attributes.push(KeyValue::new("stolon.decode.tokens", tokens));
        phases.push(decode);
    }
    if let Some(last) = phases.last_mut() {
        last.attributes.push(KeyValue::new("stolon.finish_reason", finish_reason(answer)));
        if answer.outcome == "failed" {
            last.status = Status::error(answer.reason.clone());
        }
    }
    phases
}

/// The finish reason of an answer, in general words: the engine's own reason may quote a stop
/// string.
fn finish_reason(answer: &Answer) -> &'static str {
    match (answer.outcome.as_str(), answer.reason.as_str()) {
        ("finished", "Length") => "length",
        ("finished", _) => "stop",
        ("canceled", _) => "canceled",
        _ => "error",
    }
}

/// The status of the request's span, and its `error.type`. By the conventions for servers, a
/// request that was wrong is not an error of the server.
fn outcome(call: &HttpCall) -> (Status, Option<Cow<'static, str>>) {
    let code = |status: axum::http::StatusCode| match call.error {
        Some(code) => Cow::Borrowed(code),
        None => Cow::Owned(status.as_str().to_owned()),
    };
    if let Some(failed) = call.answers.iter().find(|answer| answer.outcome == "failed") {
        let code = call.status.filter(|status| !status.is_success()).map(code);
        let code = code.unwrap_or(Cow::Borrowed("generation_failed"));
        return (Status::error(failed.reason.clone()), Some(code));
    }
    let is_canceled = call.answers.iter().any(|answer| answer.outcome == "canceled");
    match call.status {
        Some(status) if status.is_server_error() => (Status::error(""), Some(code(status))),
        Some(status) if status.is_client_error() => (Status::Unset, Some(code(status))),
        Some(_) if !is_canceled => (Status::Unset, None),
        _ => (Status::Unset, Some(Cow::Borrowed("canceled"))),
    }
}

/// The token counts of the answers. A prompt counts once, however many answers it has.
fn usage(answers: &[Answer]) -> Vec<KeyValue> {
    let Some(first) = answers.first() else { return Vec::new() };
    let prompts = || answers.iter().filter(|answer| answer.choice == 0);
    let input = prompts().map(|answer| answer.prompt_tokens).sum();
    let cached = prompts().map(|answer| answer.cached_tokens).sum();
    let output = answers.iter().map(|answer| answer.completion_tokens).sum();
    let reasons: Vec<StringValue> =
        answers.iter().map(|answer| StringValue::from(finish_reason(answer))).collect();
    let mut attributes = vec![
        KeyValue::new("gen_ai.usage.input_tokens", int(input)),
        KeyValue::new("gen_ai.usage.cache_read.input_tokens", int(cached)),
        KeyValue::new("gen_ai.usage.output_tokens", int(output)),
        KeyValue::new("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons))),
    ];
    // vLLM's names of the times of its only answer, in seconds.
    for (name, time) in [
        ("gen_ai.latency.time_in_queue", first.queue),
        ("gen_ai.latency.time_to_first_token", first.first_token),
    ] {
        let is_only = answers.len() == 1;
        attributes
            .extend(time.filter(|_| is_only).map(|time| KeyValue::new(name, time.as_secs_f64())));
    }
    attributes
}
