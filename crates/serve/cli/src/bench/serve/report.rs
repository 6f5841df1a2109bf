//! The figures of `stolon bench serve`, as a table and as JSON.

use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use super::BenchServeArgs;
use crate::terminal;
use stolon_loadgen::http::HttpTarget;
use stolon_loadgen::metrics::{Distribution, RequestRecord, share};
use stolon_loadgen::workload::Arrivals;

/// Statistics of one sort of times, in milliseconds.
#[derive(Debug)]
struct Times {
    /// Abbreviation in the JSON report.
    name: &'static str,
    title: &'static str,
    mean: f64,
    deviation: f64,
    median: f64,
    /// The requested percentiles, in the order of `--metric-percentiles`.
    percentiles: Vec<f64>,
    max: f64,
}

/// The figures of a run.
#[derive(Debug)]
pub(super) struct Report {
    percentiles: Vec<f64>,
    seconds: f64,
    completed: usize,
    prompt_tokens: usize,
    cached_tokens: usize,
    output_tokens: usize,
    /// Number and first message of the failures of each kind, in order of appearance.
    errors: IndexMap<String, (usize, String)>,
    times: Vec<Times>,
}

impl Report {
    pub(super) fn new(measured: &super::Measured, percentiles: &[f64]) -> Self {
        let records = &measured.records;
        let total = |part: fn(&RequestRecord) -> usize| records.iter().map(part).sum();
        let mut errors = IndexMap::new();
        if !measured.refusals.is_empty() {
            let message = "the server is overloaded".to_owned();
            errors.insert("status 429".to_owned(), (measured.refusals.len(), message));
        }
        for (kind, message) in &measured.failures {
            errors.entry(kind.clone()).or_insert_with(|| (0, message.clone())).0 += 1;
        }
        let times = |name, title, times: Vec<f64>| Times::new(name, title, times, percentiles);
        Self {
            percentiles: percentiles.to_vec(),
            seconds: measured.elapsed.as_secs_f64(),
            completed: records.len(),
            prompt_tokens: total(|record| record.prompt_tokens),
            cached_tokens: total(|record| record.cached_tokens),
            output_tokens: total(|record| record.output_tokens),
            errors,
            times: vec![
                times(
                    "ttft",
                    "time to first token",
                    records.iter().filter_map(RequestRecord::ttft_ms).collect(),
                ),
                times(
                    "tpot",
                    "time per output token",
                    records.iter().filter_map(RequestRecord::time_per_output_token_ms).collect(),
                ),
                times(
                    "itl",
                    "time between tokens",
                    records.iter().flat_map(RequestRecord::inter_token_ms).collect(),
                ),
                times(
                    "e2el",
                    "whole answer",
                    records.iter().filter_map(RequestRecord::latency_ms).collect(),
                ),
            ],
        }
    }

    fn failed(&self) -> usize {
        self.errors.values().map(|(count, _)| count).sum()
    }

    fn per_second(&self, count: usize) -> f64 {
        if self.seconds > 0.0 { count as f64 / self.seconds } else { 0.0 }
    }

    pub(super) fn json(&self, args: &BenchServeArgs, target: &HttpTarget) -> Value {
        let cached = target.reports_cached().then_some(self.cached_tokens);
        let errors = self.errors.iter().map(|(kind, (count, message))| {
            (kind.clone(), json!({"count": count, "first": message}))
        });
        let mut report = json!({
            "url": target.url().to_string(),
            "model_id": target.model(),
            "num_prompts": args.num_prompts,
            "request_rate": match args.request_rate {
                Arrivals::PerSecond(rate) | Arrivals::Poisson(rate) => json!(rate),
                Arrivals::AtOnce => json!("inf"),
            },
            "max_concurrency": args.max_concurrency,
            "prefix_len": args.random_prefix_len,
            "input_len": args.random_input_len,
            "output_len": args.random_output_len,
            "turns": args.turns,
            "seed": args.seed,
            "duration": self.seconds,
            "completed": self.completed,
            "failed": self.failed(),
            "errors": errors.collect::<Map<String, Value>>(),
            "total_input_tokens": self.prompt_tokens,
            "total_cached_tokens": cached,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.per_second(self.completed),
            "output_throughput": self.per_second(self.output_tokens),
            "total_token_throughput": self.per_second(self.prompt_tokens + self.output_tokens),
        });
        for times in &self.times {
            let name = times.name;
            report[format!("mean_{name}_ms")] = json!(times.mean);
            report[format!("median_{name}_ms")] = json!(times.median);
            report[format!("std_{name}_ms")] = json!(times.deviation);
            for (percent, value) in self.percentiles.iter().zip(&times.percentiles) {
                report[format!("p{percent}_{name}_ms")] = json!(value);
            }
            report[format!("max_{name}_ms")] = json!(times.max);
        }
        report
    }

    pub(super) fn text(&self, args: &BenchServeArgs, target: &HttpTarget) -> String {
        let load = match args.max_concurrency {
            Some(clients) => format!("{clients} clients"),
            None => args.arrivals().to_string(),
        };
        let mut text = format!(
            "{}, model {}: {} conversations, {load}: {} requests answered in {:.2} s, {} failed\n",
            target.url(),
            target.model(),
            args.num_prompts,
            self.completed,
            self.seconds,
            self.failed(),
        );
        for (kind, (count, message)) in &self.errors {
            text.push_str(&format!("  {count} x {kind}: {message}\n"));
        }
        text.push_str(&terminal::table(&self.rates(target)));
        text.push('\n');
        let mut head = vec![String::new(), "mean".to_owned(), "p50".to_owned()];
        head.extend(self.percentiles.iter().map(|percent| format!("p{percent}")));
        head.push("max".to_owned());
        let mut rows = vec![head];
        for times in &self.times {
            let values = [times.mean, times.median].into_iter();
            let values = values.chain(times.percentiles.iter().copied()).chain([times.max]);
            let mut row = vec![times.title.to_owned()];
            row.extend(values.map(|value| format!("{value:.2} ms")));
            rows.push(row);
        }
        text.push_str(&terminal::table(&rows));
        text
    }

    fn rates(&self, target: &HttpTarget) -> Vec<Vec<String>> {
        let row = |name: &str, count: usize| {
            let (count, rate) = (count.to_string(), format!("{:.1}/s", self.per_second(count)));
            vec![name.to_owned(), count, rate]
        };
        let mut rows = vec![row("requests", self.completed)];
        let estimate = if target.reports_usage() { "" } else { " (events, usage is not reported)" };
        rows.push(row(&format!("output tokens{estimate}"), self.output_tokens));
        if target.reports_usage() {
            rows.push(row("prompt tokens", self.prompt_tokens));
        }
        let cached = match target.reports_cached() {
            true => {
                let percent = share(self.cached_tokens, self.prompt_tokens) * 100.0;
                vec![self.cached_tokens.to_string(), format!("{percent:.1} %")]
            }
            false => vec!["not reported".to_owned()],
        };
        rows.push([vec!["prompt tokens from the cache".to_owned()], cached].concat());
        rows
    }
}

impl Times {
    fn new(name: &'static str, title: &'static str, times: Vec<f64>, percentiles: &[f64]) -> Self {
        let distribution = Distribution::of_ms(times);
        let at = |percent| distribution.percentile_ms(percent);
        Self {
            name,
            title,
            mean: distribution.mean_ms(),
            deviation: distribution.deviation_ms(),
            median: at(50.0),
            percentiles: percentiles.iter().map(|&percent| at(percent)).collect(),
            max: at(100.0),
        }
    }
}
