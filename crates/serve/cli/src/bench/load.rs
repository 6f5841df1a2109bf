//! `stolon bench load`: the gain of continuous batching over one request at a time, and the
//! behavior of the engine at and beyond its capacity.

use clap::Args;
use serde::Serialize;
use serde_json::json;
use stolon::Engine;

use super::progress;
use crate::args::EngineArgs;
use crate::terminal;
use stolon_loadgen::drive::{Measured, closed_loop, open_loop};
use stolon_loadgen::metrics::{RequestRecord, Spread, output_tokens, rate};
use stolon_loadgen::workload::{Arrivals, Conversation, PrefixWorkload};

/// Length of the admission queue if `--max-queued` is not given: short, as for interactive users.
const MAX_QUEUED: usize = 32;

/// Arguments of `stolon bench load`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Number of clients that measure the capacity. Each of them sends a request, waits for the
    /// answer, and sends the next
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    clients: u32,
    /// Number of requests per client
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(value_name = "REQUESTS")]
    each: u32,
    /// Arrival rates to test, as multiples of the measured capacity, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [0.5, 1.0, 2.0])]
    loads: Vec<f64>,
    /// How long requests arrive at each rate, in seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Length of the prefix that all prompts share, in tokens
    #[arg(long, default_value_t = 256, value_name = "TOKENS")]
    shared: usize,
    /// Smallest length of the suffix that a prompt does not share, in tokens
    #[arg(long, default_value_t = 32, value_name = "TOKENS")]
    unique_min: usize,
    /// Largest length of the suffix that a prompt does not share, in tokens
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    unique_max: usize,
    /// Number of tokens to generate per request
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(value_name = "TOKENS")]
    output_tokens: u32,
    /// Seed of the prompts: the same seed and lengths give the same prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The figures of one arrival rate.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Level {
    /// The rate as a multiple of the capacity.
    load: f64,
    /// Requests per second.
    rate: f64,
    sent: usize,
    finished: usize,
    rejected: usize,
    /// The longest time until a request was refused, in milliseconds.
    reject_ms_max: f64,
    /// Generated tokens per second of the requests that finished.
    goodput_tok_s: f64,
    /// Time to first token of the requests that were accepted.
    ttft_ms: Spread,
    /// Time to the last token of the requests that were accepted.
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
        let alone = seconds_of(&engine, &plan, 1).await?;
        let together = seconds_of(&engine, &plan, self.clients as usize).await?;
        let capacity = count as f64 / together;
        let mut levels = Vec::new();
        for &load in &self.loads {
            let rate = load * capacity;
            let count = (rate * self.seconds).ceil() as usize;
            let plan = self.plan(&engine, count, Arrivals::PerSecond(rate));
            engine.cache().flush().await?;
            let bar = progress::bar(plan.len(), format!("load {load}"));
            let measured = open_loop(&engine, &plan, || bar.inc(1)).await?;
            bar.finish_and_clear();
            levels.push(level(load, rate, &measured));
        }
        self.report(&engine, alone, together, &levels)?;
        engine.shutdown().await;
        Ok(())
    }

    fn plan(&self, engine: &Engine, request_count: usize, arrivals: Arrivals) -> Vec<Conversation> {
        let info = engine.model_info();
        let workload = PrefixWorkload {
            request_count,
            shared_tokens: self.shared,
            unique_min: self.unique_min,
            unique_max: self.unique_max,
            output_tokens: self.output_tokens as usize,
            arrivals,
            distinct: false,
            vocab_size: info.vocab_size,
            excluded: info.eos_token_ids.clone(),
            seed: self.seed,
        };
        workload.plan()
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
             at a time, {together:.2} s with {} clients, {:.2} times as fast; capacity \
             {capacity:.1} requests/s",
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
            "requests/s",
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

/// Seconds until `clients` clients have got answers to all requests. The cache is empty at the
/// start.
async fn seconds_of(engine: &Engine, plan: &[Conversation], clients: usize) -> anyhow::Result<f64> {
    engine.cache().flush().await?;
    let bar = progress::bar(plan.len(), format!("{clients} at a time"));
    let measured = closed_loop(engine, plan, clients, || bar.inc(1)).await?;
    bar.finish_and_clear();
    anyhow::ensure!(
        measured.refusals.is_empty(),
        "the engine refused {} of {clients} clients because its queue was full: raise --max-queued \
         or --max-queued-tokens",
        measured.refusals.len()
    );
    Ok(measured.elapsed.as_secs_f64())
}

fn level(load: f64, per_second: f64, measured: &Measured) -> Level {
    let Measured { records, refusals, .. } = measured;
    let latencies = || records.iter().filter_map(RequestRecord::latency_ms);
    let slowest_refusal = refusals.iter().max().copied().unwrap_or_default();
    Level {
        load,
        rate: per_second,
        sent: records.len() + refusals.len(),
        finished: records.len(),
        rejected: refusals.len(),
        reject_ms_max: slowest_refusal.as_secs_f64() * 1e3,
        goodput_tok_s: rate(records, output_tokens).unwrap_or(0.0),
        ttft_ms: Spread::of_ms(records.iter().filter_map(RequestRecord::ttft_ms)),
        latency_ms: Spread::of_ms(latencies()),
        latency_ms_max: latencies().fold(0.0, f64::max),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Goal: answered and refused requests are counted apart and summarized.
    #[test]
    fn a_level_counts_answers_and_refusals() {
        let record = |sent_at: f64, token_times: Vec<f64>| RequestRecord {
            sent_at,
            output_tokens: token_times.len(),
            token_times,
            prompt_tokens: 9,
            cached_tokens: 0,
        };
        let measured = Measured {
            records: vec![record(1.0, vec![1.5, 2.0]), record(2.0, vec![4.0, 5.0])],
            refusals: vec![Duration::from_micros(250), Duration::from_micros(500)],
            elapsed: Duration::from_secs(5),
            ..Measured::default()
        };
        let level = level(2.0, 7.0, &measured);
        assert_eq!((level.sent, level.finished, level.rejected), (4, 2, 2));
        assert_eq!((level.reject_ms_max, level.latency_ms_max), (0.5, 3000.0));
        assert_eq!(level.goodput_tok_s, 1.0);
        assert!((level.ttft_ms.p50 - 500.0).abs() < 0.005, "{}", level.ttft_ms.p50);
        assert!((level.ttft_ms.p99 - 2000.0).abs() < 0.02, "{}", level.ttft_ms.p99);
        assert_eq!(super::level(1.0, 1.0, &Measured::default()).goodput_tok_s, 0.0);
    }
}
