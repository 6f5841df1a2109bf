//! `stolon bench prefix`: the shared-prefix workload without and with prefix caching.

use std::time::Instant;

use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use stolon::Engine;

use super::progress;
use super::workloads::{Shape, WorkloadName};
use crate::args::EngineArgs;
use crate::terminal;
use stolon_loadgen::drive::open_loop;
use stolon_loadgen::metrics::{RequestRecord, Summary, median, summarize, throughputs};
use stolon_loadgen::workload::{Arrivals, Conversation, PrefixWorkload};

/// Arguments of `stolon bench prefix`.
#[derive(Debug, Args)]
pub struct PrefixArgs {
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Run a workload by its name instead of one with the numbers below
    #[arg(long, value_name = "NAME")]
    #[arg(conflicts_with_all = [
        "requests", "shared", "unique_min", "unique_max", "output_tokens", "rate", "distinct",
    ])]
    workload: Option<WorkloadName>,
    /// Number of requests per run, at least 2. The first request fills the cache; it counts
    /// toward the throughput only
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u32).range(2..))]
    requests: u32,
    /// Length of the prefix that all prompts share, in tokens
    #[arg(long, default_value_t = 1_024, value_name = "TOKENS")]
    shared: usize,
    /// Smallest length of the suffix that a prompt does not share, in tokens
    #[arg(long, default_value_t = 32, value_name = "TOKENS")]
    unique_min: usize,
    /// Largest length of the suffix that a prompt does not share, in tokens. Lengths are drawn
    /// uniformly between the two
    #[arg(long, default_value_t = 128, value_name = "TOKENS")]
    unique_max: usize,
    /// Give each prompt a different prefix, as long as the shared one, so that nothing can be
    /// reused. This shows the cost of prefix caching when it does not help
    #[arg(long)]
    distinct: bool,
    /// Requests per second, evenly spaced, or `inf` to send all at once. If not given, the
    /// workload runs at 8 per second and then at `inf`
    #[arg(long)]
    rate: Option<Arrivals>,
    /// Wait for the first answer before sending the other requests, so that they find the whole
    /// prefix cached
    #[arg(long)]
    after_first: bool,
    /// Number of tokens to generate per request, at least 1
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(value_name = "TOKENS")]
    output_tokens: u32,
    /// Number of runs with each setting, at least 1. Runs without and with caching alternate
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Seed of the prompts: the same seed and lengths give the same prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The runs with one setting of prefix caching.
#[derive(Default)]
struct Side {
    runs: Vec<Vec<RequestRecord>>,
}

impl Side {
    fn summary(&self) -> Summary {
        summarize(&self.runs)
    }

    /// Median over the runs of the first request's time to first token, in milliseconds.
    fn first_ttft_ms(&self) -> f64 {
        let firsts = self.runs.iter().filter_map(|run| run.first());
        median(firsts.filter_map(RequestRecord::ttft_ms).collect())
    }
}

impl PrefixArgs {
    pub(super) async fn run(mut self) -> anyhow::Result<()> {
        if let Some(name) = self.workload {
            self.set_shape(name.shape());
        }
        anyhow::ensure!(
            self.unique_min <= self.unique_max && self.shared + self.unique_min > 0,
            "expected 0 <= unique-min <= unique-max and a prompt of at least 1 token, \
             got --shared {} --unique-min {} --unique-max {}",
            self.shared,
            self.unique_min,
            self.unique_max
        );
        anyhow::ensure!(
            !self.engine.no_prefix_caching,
            "--no-prefix-caching has no meaning here: the benchmark runs without and with caching"
        );
        let off = self.engine.builder()?.prefix_caching(false).build().await?;
        let on = self.engine.builder()?.prefix_caching(true).build().await?;
        let rates = match self.rate {
            Some(rate) => vec![rate],
            None => vec![Arrivals::PerSecond(8.0), Arrivals::AtOnce],
        };
        let mut results = Vec::new();
        for rate in rates {
            results.push((rate, self.compare(&off, &on, rate).await?));
        }
        if self.json {
            terminal::line(self.report(&on, &results))?;
        } else {
            self.print(&on, &results)?;
        }
        off.shutdown().await;
        on.shutdown().await;
        Ok(())
    }

    fn set_shape(&mut self, shape: Shape) {
        self.requests = shape.requests;
        self.shared = shape.shared;
        (self.unique_min, self.unique_max) = shape.unique;
        self.output_tokens = shape.output_tokens;
        self.rate = Some(shape.rate);
    }

    fn workload(&self, engine: &Engine, arrivals: Arrivals, repeat: u32) -> PrefixWorkload {
        let info = engine.model_info();
        PrefixWorkload {
            request_count: self.requests as usize,
            shared_tokens: self.shared,
            unique_min: self.unique_min,
            unique_max: self.unique_max,
            output_tokens: self.output_tokens as usize,
            arrivals,
            distinct: self.distinct,
            vocab_size: info.vocab_size,
            excluded: info.eos_token_ids.clone(),
            seed: self.seed.wrapping_add(u64::from(repeat)),
        }
    }

    /// Runs the workload alternately on both engines. Which of them goes first alternates, too.
    async fn compare(
        &self,
        off: &Engine,
        on: &Engine,
        arrivals: Arrivals,
    ) -> anyhow::Result<[Side; 2]> {
        let mut sides = [Side::default(), Side::default()];
        for repeat in 0..self.repeats {
            let plan = self.workload(on, arrivals, repeat).plan();
            let order = if repeat % 2 == 0 { [0, 1] } else { [1, 0] };
            for side in order {
                let engine = [off, on][side];
                engine.cache().flush().await?;
                let name = format!("{arrivals}, cache {}", ["off", "on"][side]);
                let bar = progress::bar(plan.len(), name);
                sides[side].runs.push(self.run_once(engine, &plan, &bar).await?);
                bar.finish_and_clear();
            }
        }
        Ok(sides)
    }

    async fn run_once(
        &self,
        engine: &Engine,
        plan: &[Conversation],
        bar: &ProgressBar,
    ) -> anyhow::Result<Vec<RequestRecord>> {
        // Each call counts times from its own start. The second call's times are shifted by the
        // duration of the first, so that the throughput covers both.
        let alone = if self.after_first { plan.len().min(1) } else { 0 };
        let (first, rest) = plan.split_at(alone);
        let begin = Instant::now();
        let first = open_loop(engine, first, || bar.inc(1)).await?;
        let shift = begin.elapsed().as_secs_f64();
        let rest = open_loop(engine, rest, || bar.inc(1)).await?;
        let refused = first.refusals.len() + rest.refusals.len();
        anyhow::ensure!(
            refused == 0,
            "the engine refused {refused} requests because its queue was full: raise --max-queued \
             or --max-queued-tokens"
        );
        let mut records = first.records;
        records.extend(rest.records.into_iter().map(|record| record.later_by(shift)));
        Ok(records)
    }

    fn report(&self, engine: &Engine, results: &[(Arrivals, [Side; 2])]) -> Value {
        let mut report = json!({
            "model": engine.model_info().id,
            "workload": {
                "requests": self.requests,
                "shared_tokens": self.shared,
                "unique_tokens": [self.unique_min, self.unique_max],
                "distinct": self.distinct,
                "after_first": self.after_first,
                "output_tokens": self.output_tokens,
                "repeats": self.repeats,
                "seed": self.seed,
            },
            "engine": engine.model_info(),
        });
        // The figures of the first rate are at the top level, those of a second one in an object.
        for (index, (rate, sides)) in results.iter().enumerate() {
            let figures = figures(*rate, sides);
            if index == 0 {
                if let (Value::Object(report), Value::Object(figures)) = (&mut report, figures) {
                    report.extend(figures);
                }
            } else {
                report["as_fast_as_possible"] = figures;
            }
        }
        report
    }

    fn print(&self, engine: &Engine, results: &[(Arrivals, [Side; 2])]) -> anyhow::Result<()> {
        let prefix = if self.distinct { "a separate prefix" } else { "the shared prefix" };
        terminal::line(format!(
            "{}: {} requests of {} tokens in {prefix} and {} to {} more, {} generated. The first \
             request counts towards the throughput only.",
            engine.model_info().id,
            self.requests,
            self.shared,
            self.unique_min,
            self.unique_max,
            self.output_tokens,
        ))?;
        for (rate, [off, on]) in results {
            terminal::line(format!("\n{}", terminal::bold(rate)))?;
            terminal::stream(&terminal::table(&rows(off, on)))?;
        }
        Ok(())
    }
}

/// The figures of one rate in the JSON report.
fn figures(rate: Arrivals, [off, on]: &[Side; 2]) -> Value {
    let (off_sum, on_sum) = (off.summary(), on.summary());
    json!({
        "rate": match rate {
            Arrivals::PerSecond(rate) | Arrivals::Poisson(rate) => json!(rate),
            Arrivals::AtOnce => json!("inf"),
        },
        "off": off_sum,
        "on": on_sum,
        "ratios": {
            "ttft_p50": ratio(on_sum.ttft_ms.p50, off_sum.ttft_ms.p50),
            "ttft_p99": ratio(on_sum.ttft_ms.p99, off_sum.ttft_ms.p99),
            "itl_p50": ratio(on_sum.itl_ms.p50, off_sum.itl_ms.p50),
            "throughput": throughput_ratio(off, on),
        },
        "first": {
            "off": {"ttft_ms": off.first_ttft_ms()},
            "on": {"ttft_ms": on.first_ttft_ms()},
        },
    })
}

/// The median over the repeats of the ratio of the throughputs with and without caching. The two
/// runs of a repeat are taken together because a slow phase of the machine affects both.
fn throughput_ratio(off: &Side, on: &Side) -> Option<f64> {
    let pairs = throughputs(&off.runs).into_iter().zip(throughputs(&on.runs));
    let ratios: Vec<f64> = pairs.filter_map(|(off, on)| ratio(on, off)).collect();
    (!ratios.is_empty()).then(|| median(ratios))
}

/// `on / off`; `None` if `off` is 0.
fn ratio(on: f64, off: f64) -> Option<f64> {
    (off > 0.0).then(|| on / off)
}

fn rows(off: &Side, on: &Side) -> Vec<Vec<String>> {
    let (a, b) = (off.summary(), on.summary());
    let row = |name: &str, off: f64, on: f64, unit: &str| {
        let ratio = ratio(on, off).map_or_else(String::new, |ratio| format!("{ratio:.3}"));
        vec![name.to_owned(), format!("{off:.1}{unit}"), format!("{on:.1}{unit}"), ratio]
    };
    let mut throughput =
        row("prompt and output tokens/s", a.throughput_tok_s, b.throughput_tok_s, "");
    if let (Some(cell), Some(ratio)) = (throughput.last_mut(), throughput_ratio(off, on)) {
        *cell = format!("{ratio:.3}");
    }
    vec![
        ["", "cache off", "cache on", "on / off"].map(str::to_owned).to_vec(),
        row("time to first token, p50", a.ttft_ms.p50, b.ttft_ms.p50, " ms"),
        row("time to first token, p99", a.ttft_ms.p99, b.ttft_ms.p99, " ms"),
        row("time between tokens, p50", a.itl_ms.p50, b.itl_ms.p50, " ms"),
        row("time between tokens, p99", a.itl_ms.p99, b.itl_ms.p99, " ms"),
        row("whole answer, p50", a.latency_ms.p50, b.latency_ms.p50, " ms"),
        throughput,
        row("output tokens/s", a.output_tok_s, b.output_tok_s, ""),
        row("requests with a cache hit", a.hit_rate * 100.0, b.hit_rate * 100.0, " %"),
        row("prompt tokens from the cache", a.saved_share * 100.0, b.saved_share * 100.0, " %"),
        row("first request, time to first token", off.first_ttft_ms(), on.first_ttft_ms(), " ms"),
    ]
}
