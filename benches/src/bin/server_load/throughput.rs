//! Requests per second, and the time that the server adds to a request.

use serde_json::{Map, json};
use std::time::Duration;
use stolon_loadgen::drive::{Measured, Target, closed_loop};
use stolon_loadgen::http::{Api, HttpOptions, HttpTarget};
use stolon_loadgen::metrics::{Distribution, RequestRecord};
use stolon_loadgen::workload::{Arrivals, Conversation, PrefixWorkload};

use super::server::{Server, cpu_seconds, engine};

/// Requests before a measurement.
const WARM_UP: usize = 2_000;
/// Requests of the measurement of the server's overhead.
const ONE_BY_ONE: usize = 10_000;

fn plan(count: usize, output_tokens: usize) -> Vec<Conversation> {
    PrefixWorkload {
        request_count: count,
        shared_tokens: 64,
        unique_min: 16,
        unique_max: 16,
        output_tokens,
        arrivals: Arrivals::AtOnce,
        distinct: false,
        vocab_size: 200,
        excluded: (0..10).collect(),
        seed: 0,
    }
    .plan()
}

async fn target(server: &Server) -> anyhow::Result<HttpTarget> {
    let mut extra_body = Map::new();
    extra_body.insert("ignore_eos".to_owned(), json!(true));
    HttpTarget::new(HttpOptions {
        base_url: server.url(),
        endpoint: None,
        api: Api::Completions,
        model: Some("fake".to_owned()),
        api_key: None,
        headers: Vec::new(),
        extra_body,
        token_ids: true,
        timeout: Duration::from_secs(60),
        tls: None,
    })
    .await
}

/// Runs all requests; fails unless each is answered. An answer of only special tokens has no text
/// and is not counted in the times.
async fn answered<T: Target>(
    target: &T,
    plan: &[Conversation],
    clients: usize,
) -> anyhow::Result<Measured> {
    let measured = closed_loop(target, plan, clients, || {}).await?;
    let (count, all) = (measured.records.len(), plan.len());
    let (empty, failed): (Vec<_>, Vec<_>) =
        measured.failures.iter().partition(|(kind, _)| kind == "empty answer");
    let answered = count + empty.len();
    anyhow::ensure!(
        answered == all,
        "expected {all} answers, got {answered}: {:?}",
        failed.first()
    );
    anyhow::ensure!(count * 100 >= all * 99, "{} of {all} answers are empty", empty.len());
    Ok(measured)
}

fn latencies(measured: &Measured) -> Distribution {
    Distribution::of_ms(measured.records.iter().filter_map(RequestRecord::latency_ms))
}

/// Prints the time of a request of one token over HTTP, and in the client's own process.
pub(crate) async fn overhead() -> anyhow::Result<()> {
    let server = Server::start(&[])?;
    let http = target(&server).await?;
    let own = engine(0).await?;
    answered(&http, &plan(WARM_UP, 1), 1).await?;
    answered(&own, &plan(WARM_UP, 1), 1).await?;
    let plan = plan(ONE_BY_ONE, 1);
    let (http, own) = (answered(&http, &plan, 1).await?, answered(&own, &plan, 1).await?);
    let (http, own) = (latencies(&http), latencies(&own));
    let us = |times: &Distribution, percent| times.percentile_ms(percent) * 1e3;
    println!(
        "one client, one token: {:.0} us over HTTP (p99 {:.0}), {:.0} us in the engine's process \
         (p99 {:.0}): the server adds {:.0} us at the median",
        us(&http, 50.0),
        us(&http, 99.0),
        us(&own, 50.0),
        us(&own, 99.0),
        us(&http, 50.0) - us(&own, 50.0),
    );
    Ok(())
}

/// Prints how many streamed requests are served per second, and where processor time goes.
pub(crate) async fn throughput(requests: usize, clients: usize) -> anyhow::Result<()> {
    for output_tokens in [1, 16] {
        let server = Server::start(&[])?;
        let target = target(&server).await?;
        answered(&target, &plan(WARM_UP, output_tokens), clients).await?;
        let plan = plan(requests, output_tokens);
        let (server_before, own_before) = (server.cpu_seconds()?, cpu_seconds("self")?);
        let measured = answered(&target, &plan, clients).await?;
        let us = |seconds: f64| seconds * 1e6 / requests as f64;
        println!(
            "{clients} clients, {output_tokens} tokens: {:.0} streamed requests/s, answer p50 \
             {:.2} ms, p99 {:.2} ms; processor time per request: server {:.0} us, client {:.0} us",
            requests as f64 / measured.elapsed.as_secs_f64(),
            latencies(&measured).percentile_ms(50.0),
            latencies(&measured).percentile_ms(99.0),
            us(server.cpu_seconds()? - server_before),
            us(cpu_seconds("self")? - own_before),
        );
        server.check_idle().await?;
    }
    Ok(())
}
