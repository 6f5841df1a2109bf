//! Sends a planned workload to an engine, open loop, and notes when each token came.

use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use stolon::{Engine, Error, Event, Request, TokenStream};

use super::metrics::RequestRecord;
use super::workload::PlannedRequest;

/// Runs all requests, each sent at its time whether or not earlier ones have been answered, and
/// returns their records in the plan's order. Every request generates `output_tokens` tokens,
/// greedily, going on past the end of the text. `on_finished` is called after each.
///
/// To warm the cache first, run a plan's first request by itself and the rest in a second call.
///
/// # Errors
/// The first error of any request; the others are cancelled.
pub async fn run(
    engine: &Engine,
    plan: &[PlannedRequest],
    output_tokens: usize,
    on_finished: impl Fn(),
) -> Result<Vec<RequestRecord>, Error> {
    let begin = Instant::now();
    let seconds = move |at: Instant| at.duration_since(begin).as_secs_f64();
    let mut flying = FuturesUnordered::new();
    for (index, planned) in plan.iter().enumerate() {
        let engine = engine.clone();
        flying.push(async move {
            let wait = planned.send_at.saturating_sub(begin.elapsed());
            if wait > Duration::ZERO {
                tokio::time::sleep(wait).await;
            }
            let request =
                Request::tokens(planned.tokens.clone()).max_tokens(output_tokens).ignore_eos(true);
            let sent_at = seconds(Instant::now());
            let mut record = observe(engine.generate(request)?, seconds).await?;
            record.sent_at = sent_at;
            Ok::<_, Error>((index, record))
        });
    }
    let mut records: Vec<Option<RequestRecord>> = plan.iter().map(|_| None).collect();
    while let Some(finished) = flying.next().await {
        let (index, record) = finished?;
        records[index] = Some(record);
        on_finished();
    }
    Ok(records.into_iter().flatten().collect())
}

/// Reads a stream to its end, noting the time of each token.
pub(super) async fn observe(
    mut stream: TokenStream,
    seconds: impl Fn(Instant) -> f64,
) -> Result<RequestRecord, Error> {
    let mut record =
        RequestRecord { sent_at: 0.0, token_times: Vec::new(), prompt_tokens: 0, cached_tokens: 0 };
    while let Some(event) = stream.next().await {
        match event? {
            Event::Token(token) if token.id.is_some() => {
                record.token_times.push(seconds(Instant::now()));
            }
            Event::Finished(finish) => {
                record.prompt_tokens = finish.usage.prompt_tokens;
                record.cached_tokens = finish.usage.cached_tokens;
            }
            _ => {}
        }
    }
    Ok(record)
}
