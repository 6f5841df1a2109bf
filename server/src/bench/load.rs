//! `stolon bench load`: what clients gain from each other's company, and what an engine does at
//! its capacity and past it. Open loop: requests come at their times, whatever became of others.

use std::time::{Duration, Instant};

use clap::Args;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde::Serialize;
use serde_json::json;
use stolon::{Engine, Error, Request};

use super::metrics::{RequestRecord, Spread};
use super::workload::{Arrivals, PlannedRequest, PrefixWorkload};
use super::{progress, runner};
use crate::args::EngineArgs;
use crate::terminal;

/// Requests that may wait where `--max-queued` does not say it: an engine for people who wait.
const MAX_QUEUED: usize = 32;

/// Arguments of `stolon bench load`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Clients that send at the same time where the capacity is measured
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    clients: u32,
    /// Requests that each of them sends, one after another
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    each: u32,
    /// Offered loads, as multiples of the capacity
    #[arg(long, value_delimiter = ',', default_values_t = [0.5, 1.0, 2.0])]
    loads: Vec<f64>,
    /// How long each load is offered, in seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Tokens that all prompts begin with
    #[arg(long, default_value_t = 256)]
    shared: usize,
    /// Fewest tokens of a prompt's own end
    #[arg(long, default_value_t = 32)]
    unique_min: usize,
    /// Most tokens of a prompt's own end
    #[arg(long, default_value_t = 128)]
    unique_max: usize,
    /// Tokens each request generates
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    output_tokens: u32,
    /// Determines the prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

/// What became of a request.
enum Outcome {
    Finished(RequestRecord),
    /// Turned away; how many milliseconds that took.
    Rejected(f64),
}

/// The figures of one offered load.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Level {
    /// Offered, as a multiple of the capacity.
    load: f64,
    /// Requests a second.
    rate: f64,
    sent: usize,
    finished: usize,
    rejected: usize,
    /// The longest that a refusal took.
    reject_ms_max: f64,
    /// Generated tokens a second of requests that finished.
    goodput_tok_s: f64,
    /// Of the requests let in, as all that follows.
    ttft_ms: Spread,
    latency_ms: Spread,
    latency_ms_max: f64,
}

impl LoadArgs {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.unique_min <= self.unique_max && self.shared + self.unique_min > 0,
            "expected 0 <= unique-min <= unique-max and a prompt of at least 1 token"
        );
        anyhow::ensure!(
            self.seconds > 0.0 && self.loads.iter().all(|&load| load.is_finite() && load > 0.0),
            "expected --seconds and --loads above 0"
        );
        let builder = self.engine.builder()?;
        let builder = match self.engine.max_queued {
            Some(_) => builder,
            None => builder.max_queued_requests(MAX_QUEUED.max(self.clients as usize)),
        };
        let engine = builder.build().await?;
        let count = (self.clients * self.each) as usize;
        let plan = self.plan(&engine, count, Arrivals::AtOnce);
        let alone = self.closed_loop(&engine, &plan, 1).await?;
        let together = self.closed_loop(&engine, &plan, self.clients as usize).await?;
        let capacity = count as f64 / together;
        let mut levels = Vec::new();
        for &load in &self.loads {
            let rate = load * capacity;
            let count = (rate * self.seconds).ceil() as usize;
            let plan = self.plan(&engine, count, Arrivals::PerSecond(rate));
            engine.flush().await?;
            let outcomes = self.open_loop(&engine, &plan, load).await?;
            levels.push(level(load, rate, &outcomes));
        }
        self.report(&engine, alone, together, &levels)?;
        engine.shutdown().await;
        Ok(())
    }

    fn plan(
        &self,
        engine: &Engine,
        request_count: usize,
        arrivals: Arrivals,
    ) -> Vec<PlannedRequest> {
        let info = engine.model_info();
        let workload = PrefixWorkload {
            request_count,
            shared_tokens: self.shared,
            unique_min: self.unique_min,
            unique_max: self.unique_max,
            arrivals,
            distinct: false,
            vocab_size: info.vocab_size,
            excluded: info.eos_token_ids.clone(),
            seed: self.seed,
        };
        workload.plan()
    }

    fn request(&self, planned: &PlannedRequest) -> Request {
        Request::tokens(planned.tokens.clone())
            .max_tokens(self.output_tokens as usize)
            .ignore_eos(true)
    }

    /// Seconds in which so many clients get all requests answered, each sending its next one when
    /// the last is answered. The cache is empty at the start.
    async fn closed_loop(
        &self,
        engine: &Engine,
        plan: &[PlannedRequest],
        clients: usize,
    ) -> anyhow::Result<f64> {
        engine.flush().await?;
        let bar = progress::bar(plan.len(), format!("{clients} at a time"));
        let begin = Instant::now();
        let answers = plan.iter().map(|planned| {
            let request = self.request(planned);
            async move { engine.generate(request)?.collect_text().await }
        });
        let mut answers = futures::stream::iter(answers).buffer_unordered(clients);
        while let Some(answer) = answers.next().await {
            answer?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(begin.elapsed().as_secs_f64())
    }

    async fn open_loop(
        &self,
        engine: &Engine,
        plan: &[PlannedRequest],
        load: f64,
    ) -> anyhow::Result<Vec<Outcome>> {
        let bar = progress::bar(plan.len(), format!("load {load}"));
        let begin = Instant::now();
        let seconds = move |at: Instant| at.duration_since(begin).as_secs_f64();
        let mut flying: FuturesUnordered<_> = plan
            .iter()
            .map(|planned| {
                let (engine, request, at) =
                    (engine.clone(), self.request(planned), planned.send_at);
                // A task for each, so that none waits for another's turn to be sent.
                tokio::spawn(async move {
                    let wait = at.saturating_sub(begin.elapsed());
                    if wait > Duration::ZERO {
                        tokio::time::sleep(wait).await;
                    }
                    let sent = Instant::now();
                    match engine.generate(request) {
                        Ok(stream) => {
                            let mut record = runner::observe(stream, seconds).await?;
                            record.sent_at = seconds(sent);
                            Ok(Outcome::Finished(record))
                        }
                        Err(Error::Overloaded { .. }) => {
                            Ok(Outcome::Rejected(sent.elapsed().as_secs_f64() * 1e3))
                        }
                        Err(other) => Err(other),
                    }
                })
            })
            .collect();
        let mut outcomes = Vec::with_capacity(plan.len());
        while let Some(outcome) = flying.next().await {
            outcomes.push(outcome??);
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(outcomes)
    }

    fn report(
        &self,
        engine: &Engine,
        alone: f64,
        together: f64,
        levels: &[Level],
    ) -> anyhow::Result<()> {
        let capacity = f64::from(self.clients * self.each) / together;
        let peak = levels.iter().map(|level| level.goodput_tok_s).fold(0.0, f64::max);
        if self.json {
            terminal::line(json!({
                "model": engine.model_info().id,
                "clients": self.clients,
                "one_after_another_s": alone,
                "together_s": together,
                "speedup": alone / together,
                "capacity_per_s": capacity,
                "levels": levels,
                "goodput_peak_tok_s": peak,
            }))?;
            return Ok(());
        }
        terminal::line(format!(
            "{}: {} requests of {} shared and {} to {} own tokens, {} generated: {alone:.2} s one \
             after another, {together:.2} s by {} clients, {:.2} times as fast; capacity \
             {capacity:.1} a second",
            engine.model_info().id,
            self.clients * self.each,
            self.shared,
            self.unique_min,
            self.unique_max,
            self.output_tokens,
            self.clients,
            alone / together,
        ))?;
        let heading = [
            "load",
            "a second",
            "sent",
            "rejected",
            "slowest refusal",
            "output tok/s",
            "of peak",
            "TTFT p50",
            "TTFT p99",
            "answer p50",
            "answer p99",
            "answer max",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        let ms = |value: f64| format!("{value:.1} ms");
        for level in levels {
            rows.push(vec![
                format!("{}", level.load),
                format!("{:.1}", level.rate),
                level.sent.to_string(),
                level.rejected.to_string(),
                format!("{:.2} ms", level.reject_ms_max),
                format!("{:.0}", level.goodput_tok_s),
                format!("{:.2}", level.goodput_tok_s / peak.max(f64::MIN_POSITIVE)),
                ms(level.ttft_ms.p50),
                ms(level.ttft_ms.p99),
                ms(level.latency_ms.p50),
                ms(level.latency_ms.p99),
                ms(level.latency_ms_max),
            ]);
        }
        terminal::stream(&terminal::table(&rows))?;
        Ok(())
    }
}

fn level(load: f64, rate: f64, outcomes: &[Outcome]) -> Level {
    let mut finished = Vec::new();
    let mut rejected = Vec::new();
    for outcome in outcomes {
        match outcome {
            Outcome::Finished(record) => finished.push(record),
            Outcome::Rejected(ms) => rejected.push(*ms),
        }
    }
    let latencies: Vec<f64> = finished.iter().filter_map(|record| record.latency_ms()).collect();
    let output: usize = finished.iter().map(|record| record.token_times.len()).sum();
    let begin = finished.iter().map(|record| record.sent_at).fold(f64::INFINITY, f64::min);
    let end = finished.iter().filter_map(|record| record.token_times.last().copied());
    let span = end.fold(0.0, f64::max) - begin;
    Level {
        load,
        rate,
        sent: outcomes.len(),
        finished: finished.len(),
        rejected: rejected.len(),
        reject_ms_max: rejected.iter().copied().fold(0.0, f64::max),
        goodput_tok_s: if span > 0.0 { output as f64 / span } else { 0.0 },
        ttft_ms: Spread::of(finished.iter().filter_map(|record| record.ttft_ms()).collect()),
        latency_ms_max: latencies.iter().copied().fold(0.0, f64::max),
        latency_ms: Spread::of(latencies),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what finished and what was turned away are told apart and summed up.
    #[test]
    fn a_level_is_summed_up() {
        let record = |sent_at: f64, token_times: Vec<f64>| {
            Outcome::Finished(RequestRecord {
                sent_at,
                token_times,
                prompt_tokens: 9,
                cached_tokens: 0,
            })
        };
        let outcomes = [
            record(1.0, vec![1.5, 2.0]),
            Outcome::Rejected(0.25),
            record(2.0, vec![4.0, 5.0]),
            Outcome::Rejected(0.5),
        ];
        let level = level(2.0, 7.0, &outcomes);
        assert_eq!((level.sent, level.finished, level.rejected), (4, 2, 2));
        assert_eq!((level.reject_ms_max, level.latency_ms_max), (0.5, 3000.0));
        assert_eq!((level.goodput_tok_s, level.ttft_ms.p50), (1.0, 1250.0));
        assert_eq!(super::level(1.0, 1.0, &[]).goodput_tok_s, 0.0);
    }
}
