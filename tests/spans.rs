//! Each request has a `tracing` span in the span of its caller, with the fields that are known at
//! its end. It is a program of its own: subscribers and the places of spans are registered for a
//! whole process, and the tests of other threads would register places at the same time.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake::builder;
use stolon::Request;
use stolon_backend::fake::FakeFault;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Instrument, Subscriber, info_span};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

#[path = "it/support/fake.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod fake;

/// The fields of a span.
#[derive(Clone, Debug, Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

/// Collects the engine's spans that have closed, each with the name of its parent.
#[derive(Clone, Debug, Default)]
struct Collector(Arc<Mutex<Vec<(String, Fields)>>>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collector {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        context.span(id).expect("a new span").extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).expect("an open span");
        values.record(span.extensions_mut().get_mut::<Fields>().expect("the fields of a span"));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).expect("a span that closes");
        if span.metadata().target() == "stolon" {
            let parent = span.parent().map(|parent| parent.name().to_owned());
            let fields = span.extensions().get::<Fields>().cloned().unwrap_or_default();
            self.0.lock().expect("no panic").push((parent.unwrap_or_default(), fields));
        }
    }
}

/// Goal: a request's span is a child of the caller's span and tells its tokens, times and end, for
/// a complete, a canceled and a failed request.
#[test]
fn a_request_has_a_span_in_the_span_of_its_caller() {
    let collector = Collector::default();
    let subscriber = tracing_subscriber::registry().with(collector.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let life = async {
        let (builder, handle) = builder(64);
        let engine = builder.build().await.expect("valid settings");
        let request = || Request::tokens([1; 40]).max_tokens(3);
        let generate = async || engine.generate(request()).await.expect("it fits");
        for _ in 0..2 {
            generate().await.collect_text().await.expect("it finishes");
        }
        handle.inject_next(FakeFault::Fail);
        generate().await.collect_text().await.expect_err("it fails");
        drop(generate().await);
        assert!(engine.drain(Duration::from_secs(20)).await);
    };
    tracing::subscriber::with_default(subscriber, || {
        runtime.block_on(life.instrument(info_span!("caller")));
    });
    let spans = collector.0.lock().expect("no panic");
    let field = |index: usize, name| {
        let (parent, fields): &(String, Fields) = &spans[index];
        assert_eq!(parent, "caller");
        fields.0.get(name).map(String::as_str)
    };
    assert_eq!(spans.len(), 4, "{spans:?}");
    for (index, cached) in [(0, "0"), (1, "32")] {
        assert_eq!(field(index, "prompt_tokens"), Some("40"));
        assert_eq!(field(index, "cached_tokens"), Some(cached));
        assert_eq!(field(index, "completion_tokens"), Some("3"));
        assert_eq!(field(index, "outcome"), Some("finished"));
        assert_eq!(field(index, "reason"), Some("Length"));
        for time in ["queue_ms", "ttft_ms"] {
            let time: f64 = field(index, time).expect("it ran").parse().expect("a number");
            assert!(time >= 0.0);
        }
    }
    assert_eq!(field(2, "outcome"), Some("failed"));
    assert!(field(2, "reason").is_some_and(|reason| reason.contains("injected")), "{spans:?}");
    assert_eq!(field(3, "outcome"), Some("canceled"), "{spans:?}");
}
