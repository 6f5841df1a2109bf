//! The figures of a run, and Markdown tables of them.

use stolon_loadgen::metrics::{RequestRecord, Spread, output_tokens, rate, share};

use crate::simulation::Run;

/// The figures of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Requests that finished.
    pub requests: usize,
    /// Time to first token in milliseconds.
    pub ttft_ms: Spread,
    /// Time from submission to the last token in milliseconds.
    pub latency_ms: Spread,
    /// The longest time from submission to the last token in milliseconds.
    pub latency_ms_max: f64,
    /// Generated tokens per second, from the first submission to the last token.
    pub output_rate: f64,
    /// Number of running requests: the mean over the time in which other requests waited; 0 if
    /// none ever did.
    pub running_mean: f64,
    /// Largest number of requests that ran at the same time.
    pub running_max: usize,
    /// Fraction of prompt tokens that were read from the prefix cache, 0 to 1.
    pub hit_rate: f64,
    /// Uncached prompt tokens of later requests that were admitted before an earlier one: the
    /// largest number for any request.
    pub overtaken_max: usize,
    /// Number of preemptions.
    pub preemptions: u64,
}

impl Summary {
    /// Summarizes a simulated run.
    #[must_use]
    pub fn of(run: &Run) -> Summary {
        let contended = || run.running.windows(2).filter(|change| change[0].2);
        let contended_for: f64 = contended().map(|change| change[1].0 - change[0].0).sum();
        let area: f64 =
            contended().map(|change| (change[1].0 - change[0].0) * change[0].1 as f64).sum();
        Summary {
            running_mean: if contended_for > 0.0 { area / contended_for } else { 0.0 },
            running_max: run.running.iter().map(|&(_, running, _)| running).max().unwrap_or(0),
            overtaken_max: run.stats.most_overtaken_tokens,
            preemptions: run.stats.preemptions,
            ..Summary::of_records(&run.records)
        }
    }

    /// The figures that follow from the records of requests alone; the others are 0.
    #[must_use]
    pub fn of_records(records: &[RequestRecord]) -> Summary {
        let latencies = || records.iter().filter_map(RequestRecord::latency_ms);
        let total = |part: fn(&RequestRecord) -> usize| records.iter().map(part).sum::<usize>();
        Summary {
            requests: records.len(),
            ttft_ms: Spread::of_ms(records.iter().filter_map(RequestRecord::ttft_ms)),
            latency_ms: Spread::of_ms(latencies()),
            latency_ms_max: latencies().fold(0.0, f64::max),
            output_rate: rate(records, output_tokens).unwrap_or(0.0),
            hit_rate: share(
                total(|record| record.cached_tokens),
                total(|record| record.prompt_tokens),
            ),
            ..Summary::default()
        }
    }

    /// The head of a Markdown table of summaries.
    pub const TABLE_HEAD: &str = "| | TTFT p50, ms | TTFT p99, ms | output, tokens/s | \
         mean running while others wait | max. running | hit rate | max. overtaken, tokens | \
         preemptions |\n|---|---|---|---|---|---|---|---|---|";

    /// A row of the table with the head [`Self::TABLE_HEAD`].
    #[must_use]
    pub fn row(&self, name: &str) -> String {
        format!(
            "| {name} | {:.0} | {:.0} | {:.0} | {:.1} | {} | {:.1} % | {} | {} |",
            self.ttft_ms.p50,
            self.ttft_ms.p99,
            self.output_rate,
            self.running_mean,
            self.running_max,
            self.hit_rate * 100.0,
            self.overtaken_max,
            self.preemptions,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the figures of a small run equal the ones computed by hand; an empty run gives zeros.
    #[test]
    fn a_run_is_summarized() {
        let record = |sent_at: f64, first: f64, last: f64| {
            let mut token_times = vec![first; 9];
            token_times.push(last);
            let (prompt_tokens, cached_tokens, output_tokens) = (100, 25, token_times.len());
            RequestRecord { sent_at, token_times, output_tokens, prompt_tokens, cached_tokens }
        };
        let run = Run {
            records: vec![record(1.0, 1.5, 2.0), record(1.0, 2.5, 5.0)],
            running: vec![(1.0, 2, true), (2.0, 1, true), (5.0, 0, false)],
            ..Run::default()
        };
        let summary = Summary::of(&run);
        let close = |got: f64, expected: f64| {
            assert!((got - expected).abs() <= expected * 1e-5, "{got} {expected}");
        };
        close(summary.ttft_ms.p50, 500.0);
        close(summary.ttft_ms.p99, 1500.0);
        close(summary.latency_ms.p50, 1000.0);
        close(summary.latency_ms.p99, 4000.0);
        assert_eq!(summary.latency_ms_max, 4000.0);
        assert_eq!((summary.output_rate, summary.hit_rate), (5.0, 0.25));
        assert_eq!((summary.running_mean, summary.running_max), (1.25, 2));
        assert_eq!(Summary::of(&Run::default()).requests, 0);
    }
}
